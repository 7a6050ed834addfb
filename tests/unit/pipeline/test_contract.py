"""Contracts: what is understood, and what is reported about each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lakebed.pipeline.settings import PipelineSettings
from lakebed.pipeline.silver.contract import BadContract, read_contract, read_contracts

GOOD = """
table: orders
keys: [id]
order_by: [at]
columns:
  id: {type: long, required: true}
  total: {type: "decimal(12,2)", from: amount}
  at: timestamp
checks:
  total_not_negative: total >= 0
"""


def test_a_good_contract_is_understood() -> None:
    """Short and long forms of a column mean the same; what is not reported has its default."""
    contract = read_contract(GOOD, "orders.yaml")

    assert ("orders", "discard", ("id",)) == (contract.bronze, contract.drift, contract.keys)
    assert ("amount", "at") == (contract.source_of("total"), contract.source_of("at"))
    assert contract.columns["id"].required and not contract.columns["at"].required


@pytest.mark.parametrize(
    ("old", "new", "reported"),
    [
        ("table: orders", "table: ../orders", "no table name"),
        ("keys: [id]", "keys: []", "at least one column"),
        ("keys: [id]", "keys: [id]\npartition_by: [day]", "partition_by: 'day' is none of its columns"),
        ("keys: [id]", "keys: [id]\ncluster_by: [a, b]", "cluster_by: 'a' is none of its columns"),
        ("keys: [id]", "keys: [nr]", "'nr' is none of its columns"),
        ("keys: [id]", "keys: [at]", "must be required"),
        ("keys: [id]", "keys: [id]\nkeys: [at]", "comes twice"),
        ("order_by: [at]", "order_by: [when]", "order_by: 'when'"),
        ("order_by: [at]", "drift: ignore", "Invalid enum value"),
        ("order_by: [at]", "colour: red", "unknown field `colour`"),
        ("at: timestamp", "at: moment", "there is no type 'moment'"),
        ("at: timestamp", "_at: timestamp", "no column name"),
        ("at: timestamp", "at: timestamp\n  AT: date", "differ only in case"),
        ("at: timestamp", "at: {type: date, require: true}", "unknown field `require`"),
        ("total_not_negative", "Total > 0", "no name for a check"),
        ("total >= 0", "''", "is empty"),
        ("table: orders", "table: [", "not YAML"),
        ("table: orders", "table: !!python/object/apply:os.system [ls]", "not YAML"),
    ],
)
def test_a_mistake_is_told_with_its_file_and_place(old: str, new: str, reported: str) -> None:
    """Nothing is guessed: each mistake is named."""
    with pytest.raises(BadContract) as refused:
        read_contract(GOOD.replace(old, new), "orders.yaml")

    assert refused.value.message.startswith("orders.yaml")
    assert reported in refused.value.message


@given(st.text(max_size=200))
@example("{{}}")
@example("? [a]\n: b")
@example("!!map [a]")
def test_any_text_is_read_or_refused(text: str) -> None:
    """Nothing but BadContract ever comes out of reading."""
    with pytest.raises(BadContract):
        read_contract(text, "x.yaml")


def test_two_contracts_of_one_table_are_refused(tmp_path: Path) -> None:
    """A table has one truth about its rows."""
    (tmp_path / "a.yaml").write_text(GOOD)
    (tmp_path / "b.yaml").write_text(GOOD)

    with pytest.raises(BadContract, match=r"b\.yaml: another contract"):
        read_contracts(tmp_path)


def test_the_examples_are_good() -> None:
    """What Lakebed ships can be read."""
    folder = PipelineSettings(contracts="examples").contracts_folder
    assert folder is not None

    assert ["customers", "orders"] == [contract.table for contract in read_contracts(folder)]


def test_a_contract_without_a_layout_is_the_same_as_before_there_were_layouts() -> None:
    """Silver is rebuilt when its contract changes: a new version of Lakebed is no reason."""
    text = "table: orders\nkeys: [id]\ncolumns:\n  id: {type: long, required: true, from: x}\n  note: string\n"
    known = "contract 208f14a585761063b8be4b7e6b477d62bab017939e0d16e80e3574e5807314d6"

    assert known == read_contract(text, "c").digest
    assert known != read_contract(f"{text}cluster_by: [note]\n", "c").digest


def test_a_contract_may_have_nested_types() -> None:
    """Arrays, maps and structs; not as something that has an order."""
    text = "table: t\nkeys: [id]\ncolumns:\n  id: {type: long, required: true}\n  tags: 'array<struct<a:long>>'\n"

    assert "array<struct<a:long>>" == read_contract(text, "c").columns["tags"].type
    with pytest.raises(BadContract, match="'tags' is nested"):
        read_contract(f"{text}cluster_by: [tags]\n", "c")
