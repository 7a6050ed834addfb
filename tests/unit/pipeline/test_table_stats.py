"""Statistics in the log: every engine skips files by them, and none loses a row."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from lakebed.delta.log import Commit, encode, log_key, overlapping
from lakebed.delta.model import DataFile, Snapshot, TableSpec
from lakebed.delta.plain import schema_json
from lakebed.delta.predicate import parse_predicate
from lakebed.delta.stats import LAST_CHARACTER, moments
from lakebed.pipeline.tables import files
from lakebed.pipeline.tables.scan import scan
from support.delta_tables import Folder

NOON = datetime(2026, 11, 16, 12, 0, 0, 123456, tzinfo=UTC)
FIRST = datetime(1, 1, 1, tzinfo=UTC)
LONG = "k" * 300


def table_of(folder: Path, *parts: pa.Table, spec: TableSpec | None = None) -> list[DataFile]:
    """A table with one file for each part, as our tasks write it."""
    schema = deltalake.Schema.from_arrow(parts[0].schema).to_json()
    spec = spec or TableSpec("t", schema, keys=(parts[0].column_names[0],))
    location = Folder.at(folder)
    made = [files.write_files(part, spec, location, location.filesystem())[0] for part in parts]
    log = folder / log_key(spec.root, 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(encode(Commit("WRITE", tuple(made), spec=spec, table_id="i"), attempt_id="a", now_ms=0))
    return made


def rows(at: int, **columns: Any) -> pa.Table:
    return pa.table({"id": pa.array([at, at + 1], pa.int64()), **columns})


def theirs(folder: Path) -> deltalake.DeltaTable:
    return deltalake.DeltaTable(str(folder / "tables/t"))


KINDS = {
    "text": (["a" * 40, "b" * 40], "b" * 40),
    "longer": ([LONG + "a", LONG + "b"], LONG + "b"),
    "double": ([1.5, -2.0], -2.0),
    "infinite": ([float("inf"), 1.0], 1.0),
    "flag": ([True, True], True),
    "day": ([date(2026, 1, 1), date(2026, 1, 2)], date(2026, 1, 2)),
    "moment": (pa.array([NOON, None], pa.timestamp("us", tz="UTC")), NOON),
    "first moment": (pa.array([FIRST, NOON], pa.timestamp("us", tz="UTC")), FIRST),
    "first day": ([date(1, 1, 1), date(2026, 1, 2)], date(1, 1, 1)),
    "decimal": (pa.array([Decimal("12345678901234567890123456.789"), None]), Decimal("12345678901234567890123456.789")),
    "bytes": ([b"x", b"y"], b"y"),
    "nothing": (pa.nulls(2, pa.int64()), None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_engine_loses_a_row_by_a_range(tmp_path: Path, kind: str) -> None:
    """A value is found by delta-rs's dataset, Polars and DuckDB, whatever its column's type and other columns are."""
    values, wanted = KINDS[kind]
    table_of(tmp_path, rows(0, c=values, other=["n", None]), rows(10, c=values, other=[None, None]))
    dataset = theirs(tmp_path).to_pyarrow_dataset()
    condition = (
        ds.field("c").is_null()
        if wanted is None
        else ds.field("c") == pa.scalar(wanted, dataset.schema.field("c").type)
    )

    expected = sum(value == wanted for value in pa.table({"c": values}).column("c").to_pylist()) * 2
    assert expected == dataset.to_table(filter=condition).num_rows
    assert 1 == dataset.to_table(filter=ds.field("other") == "n").num_rows
    polars = pl.scan_delta(str(tmp_path / "tables/t"))
    assert (
        expected == polars.filter(pl.col("c").is_null() if wanted is None else pl.col("c") == wanted).collect().height
    )
    found = duckdb.sql("select count(*) from dataset where c is not distinct from $1", params=[wanted]).fetchall()
    assert [(expected,)] == found


def test_files_are_skipped_by_their_ranges(tmp_path: Path) -> None:
    """delta-rs opens only files that can hold the value; the ranges are those of the rows."""
    table_of(tmp_path, rows(0, name=["a", "b"]), rows(10, name=["c", "d"]))

    dataset = theirs(tmp_path).to_pyarrow_dataset()

    assert 1 == len(list(dataset.get_fragments(filter=ds.field("id") == 11)))
    assert 1 == len(list(dataset.get_fragments(filter=ds.field("name") == "a")))
    assert 0 == len(list(dataset.get_fragments(filter=ds.field("id") == 5)))


def test_a_file_with_nan_has_no_ranges_for_others_and_keeps_its_keys_for_us(tmp_path: Path) -> None:
    """NaN is above everything in Spark and beside everything in Arrow: no range is right for both."""
    (file,) = table_of(tmp_path, rows(0, f=[1.0, float("nan")]))
    log = (tmp_path / log_key("tables/t", 0)).read_text().splitlines()
    add = json.loads(log[-1])["add"]

    assert "minValues" not in json.loads(add["stats"])
    assert {"id": 0, "f": 0} == json.loads(add["stats"])["nullCount"]
    assert 0 == json.loads(add["tags"]["lakebed.bounds"])["minValues"]["id"]
    dataset = theirs(tmp_path).to_pyarrow_dataset()
    assert 1 == dataset.to_table(filter=ds.field("f") == 1.0).num_rows
    assert [] == overlapping([file], "id", 5, 9)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("timestamp", pa.array([253_402_300_800_000_000, 5], pa.timestamp("us", tz="UTC"))),  # the year 10000
        ("timestamp", pa.array([-70_000_000_000_000_000, 5], pa.timestamp("us", tz="UTC"))),
        ("date", pa.array([2_932_897, 5], pa.date32())),
    ],
)
def test_a_moment_that_python_cannot_hold_is_written_and_found(tmp_path: Path, kind: str, values: pa.Array) -> None:
    """Spark has such moments. The file has no ranges for others then, and those of other columns for us."""
    (file,) = table_of(tmp_path, rows(0, c=values))
    state = Snapshot(0, schema_json((("id", "long"), ("c", kind))), files=(file,))
    location = Folder.at(tmp_path)

    found = scan(location, "tables/t", state, predicate=parse_predicate("c >= '1970-01-01'"))
    lost = scan(location, "tables/t", state, predicate=parse_predicate("id = 5"))

    assert "minValues" not in json.loads(file.stats)
    assert (sum(value.value >= 0 for value in values), 0) == (found.num_rows, lost.num_rows)
    assert [] == overlapping([file], "id", 5, 9)


def test_the_first_32_columns_are_measured_and_the_others_are_found_all_the_same(tmp_path: Path) -> None:
    """Fields of structs count one by one, as in Delta; a key is measured in any place."""
    inner = pa.array([{"a": 1, "b": "x"}, None])
    wide = {f"c{n}": pa.array([n, n], pa.int64()) for n in range(40)}
    table = pa.table({"s": inner, **wide, "id": pa.array([7, 8], pa.int64())})
    spec = TableSpec("t", deltalake.Schema.from_arrow(table.schema).to_json(), keys=("id",))
    (file,) = table_of(tmp_path, table, spec=spec)
    stats = json.loads(file.stats)
    dataset = theirs(tmp_path).to_pyarrow_dataset()

    assert ["s", *(f"c{n}" for n in range(30)), "id"] == list(stats["minValues"])
    assert ({"a": 1, "b": "x"}, {"a": 1, "b": 1}) == (stats["minValues"]["s"], stats["nullCount"]["s"])
    for column, value in (("c29", 29), ("c30", 30), ("c39", 39), ("id", 8)):
        assert 0 < dataset.to_table(filter=ds.field(column) == value).num_rows
    assert 1 == dataset.to_table(filter=ds.field("s", "a") == 1).num_rows


def test_a_range_of_texts_holds_every_text_with_its_prefix(tmp_path: Path) -> None:
    """Also where the text goes on with the last character of all."""
    texts = ["a" * 32 + LAST_CHARACTER * 2 + "z", "a" * 40]
    (file,) = table_of(tmp_path, rows(0, name=texts))

    assert file.low["name"] == "a" * 32
    assert all(file.low["name"] <= text <= file.high["name"] for text in texts)
    assert file.high["name"].startswith("a" * 32 + LAST_CHARACTER * 2)


def test_moments_that_others_cut_are_raised_by_what_may_be_missing() -> None:
    """delta-spark writes milliseconds: the row may be up to a millisecond later."""
    file = DataFile("f", 1, 1, low={"t": "2026-11-16T12:00:00.123Z"}, high={"t": "2026-11-16T12:00:00.123Z"})

    assert ("2026-11-16T12:00:00.123000Z", "2026-11-16T12:00:00.123999Z") == moments(file, "t")
    assert (None, None) == moments(DataFile("f", 1, 1, low={"t": "soon"}), "t")
