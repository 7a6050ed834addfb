"""The tick manifest: what is understood, and the word for each thing that is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakebed.ticks.codec import read_manifest, type_of
from lakebed.ticks.model import BadManifest


def table(**changed: Any) -> dict[str, Any]:
    return {
        "name": "dbo.Orders",
        "mode": "delta",
        "schema": [{"name": "id", "type": "long"}, {"name": "price", "type": "decimal(12,2)"}],
        "primary_keys": ["id"],
        "row_count": 3,
        "parquets": [part(0, rows=1), part(1, rows=2)],
    } | changed


def part(file_seq: int, **changed: Any) -> dict[str, Any]:
    return {"file_seq": file_seq, "sha256": "0a" * 32, "rows": 1, "bytes": 10} | changed


def manifest(*tables: dict[str, Any], **changed: Any) -> bytes:
    return msgspec.json.encode({"tables": list(tables)} | changed)


def test_a_good_manifest_is_understood() -> None:
    """Every word of it comes back as a value, and the tick can be described in one word."""
    given_ = manifest(
        table(), table(name="stock", mode="full", primary_keys=[], row_count=0, parquets=[]), dt="20261115"
    )

    read = read_manifest(given_)

    assert [0, 1] == [part.file_seq for part in read.parts]
    assert ("mixed", 3) == (read.mode, read.row_count)
    assert read_manifest(manifest(table())).mode == "delta"
    (laid_out,) = read_manifest(manifest(table(partition_by=["id"], cluster_by=["price"]))).tables
    assert (("id",), ("price",)) == (laid_out.partition_by, laid_out.cluster_by)


REFUSED: list[tuple[str, bytes]] = [
    ("manifest_not_json", b"{"),
    ("manifest_invalid", b'{"tables":' + b"[" * 100_000),
    ("manifest_not_json", b"\xff\xfe"),
    ("manifest_invalid", b"[]"),
    ("manifest_invalid", manifest(table(row_count="3"))),
    ("manifest_invalid", manifest(table(colour="red"))),
    ("manifest_invalid", manifest(table(), tabels=[])),
    ("manifest_too_large", b" " * (8 * 1024 * 1024 + 1)),
    ("unknown_version", manifest(table(), schema_version="9.0")),
    ("no_tables", manifest()),
    ("bad_day", manifest(table(), dt="15.11.2026")),
    ("too_many_tables", manifest(*[table(name=f"t{n}") for n in range(257)])),
    *[
        ("bad_table_name", manifest(table(name=name)))
        for name in ("", "..", "a/b", "../../other", "a\\b", "/etc", "a\n", ".hidden", "a..b", "x" * 129)
    ],
    ("duplicate_table", manifest(table(), table(name="DBO.orders"))),
    ("unknown_mode", manifest(table(mode="append"))),
    ("duplicate_part", manifest(table(parquets=[part(0), part(0, rows=2)]))),
    ("duplicate_part", manifest(table(), table(name="other"))),
    ("bad_schema", manifest(table(schema=[]))),
    ("unknown_type", manifest(table(schema=[{"name": "id", "type": "uuid"}]))),
    ("unknown_type", manifest(table(schema=[{"name": "id", "type": "decimal(40,2)"}]))),
    ("unknown_type", manifest(table(schema=[{"name": "id", "type": "decimal(4,5)"}]))),
    ("bad_column_name", manifest(table(schema=[{"name": "a b", "type": "long"}]))),
    ("bad_column_name", manifest(table(schema=[{"name": "a`b", "type": "long"}]))),
    ("reserved_column", manifest(table(schema=[{"name": "_tick_id", "type": "string"}]))),
    ("duplicate_column", manifest(table(schema=[{"name": "id", "type": "long"}, {"name": "ID", "type": "long"}]))),
    ("key_not_a_column", manifest(table(primary_keys=["nr"]))),
    ("duplicate_key", manifest(table(primary_keys=["id", "id"]))),
    ("unfit_key", manifest(table(schema=[{"name": "id", "type": "double"}]))),
    ("unfit_key", manifest(table(schema=[{"name": "id", "type": "array<long>"}]))),
    ("unknown_type", manifest(table(schema=[{"name": "id", "type": "array<uuid>"}]))),
    ("layout_not_a_column", manifest(table(partition_by=["day"]))),
    ("layout_not_a_column", manifest(table(cluster_by=["day"]))),
    ("duplicate_layout", manifest(table(cluster_by=["id", "id"]))),
    (
        "unfit_layout",
        manifest(table(schema=[{"name": "id", "type": "long"}, {"name": "x", "type": "double"}], partition_by=["x"])),
    ),
    ("keys_missing", manifest(table(primary_keys=[]))),
    ("row_count_mismatch", manifest(table(row_count=4))),
    ("bad_sha256", manifest(table(parquets=[part(0, rows=3, sha256="0A" * 32)]))),
    ("bad_file_seq", manifest(table(parquets=[part(-1, rows=3)]))),
    ("negative_count", manifest(table(parquets=[part(0, rows=4), part(1, rows=-1)]))),
]


@pytest.mark.parametrize(("error_class", "data"), REFUSED)
def test_what_cannot_be_true_is_refused_by_its_name(error_class: str, data: bytes) -> None:
    """Each kind of wrong has its own error_class, and a sentence."""
    with pytest.raises(BadManifest) as refused:
        read_manifest(data)

    assert error_class == refused.value.detail["error_class"]
    assert refused.value.message


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    """Nothing but BadManifest ever comes out of reading."""
    with pytest.raises(BadManifest):
        read_manifest(data)


@given(st.data())
def test_a_damaged_manifest_is_read_or_refused(data: st.DataObject) -> None:
    """One changed byte of a good manifest never breaks the reader."""
    good = bytearray(manifest(table()))
    good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))

    try:
        read_manifest(bytes(good))
    except BadManifest as refused:
        assert refused.detail["error_class"]


def test_arrow_types_have_words() -> None:
    """Representations of one thing have one word; what cannot be kept has none."""
    words = {
        "string": [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())],
        "timestamp": [pa.timestamp("ns"), pa.timestamp("ms", "UTC")],
        "long": [pa.int64(), pa.uint32()],
        "decimal(20,0)": [pa.uint64()],
        "decimal(12,2)": [pa.decimal128(12, 2)],
        "null": [pa.null()],
        "array<long>": [pa.list_(pa.int64()), pa.large_list(pa.int64())],
        "map<string,array<double>>": [pa.map_(pa.string(), pa.list_(pa.float64()))],
        "struct<a:long,b:timestamp>": [pa.struct([("a", pa.int64()), ("b", pa.timestamp("ns"))])],
        None: [pa.list_(pa.time64("us")), pa.time64("us"), pa.decimal256(50, 2), pa.struct([])],
    }

    assert all(word == type_of(arrow) for word, arrows in words.items() for arrow in arrows)
