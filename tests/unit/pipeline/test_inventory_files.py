"""Reports of an inventory and pages of a listing as batches of one form."""

from __future__ import annotations

import gzip
import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakebed.core.errors import NotFound
from lakebed.delta.model import TableSpec
from lakebed.delta.plain import schema_json
from lakebed.spark import inventory, listing
from lakebed.store.reader import ObjectPage

SPEC = TableSpec("t", schema_json((("seq", "long"),)), stats=("seq",))


# Inventories and pages.


def manifest(**said: Any) -> bytes:
    base = {
        "sourceBucket": "s", "destinationBucket": "d", "version": "1", "creationTimestamp": "5", "fileFormat": "CSV",
        "fileSchema": "Bucket, Key, Size, LastModifiedDate, IsLatest", "files": [],
    }  # fmt: skip
    return msgspec.json.encode(base | said)


def read_inventory(folder: Path, kind: str, columns: dict[str, str | int], name: str) -> list[dict[str, Any]]:
    task = inventory.reading(inventory.ReportLocation(folder=str(folder)), kind, columns)
    requested = pa.RecordBatch.from_pydict({"file": [name]})
    return [row for batch in task(iter([requested])) for row in batch.to_pylist()]


def test_a_report_in_csv_is_read_by_its_places(tmp_path: Path) -> None:
    """Packed or not; what it leaves out is null, or true of a bucket without versions; an empty file has no rows."""
    columns = inventory.columns_of(inventory.read_manifest(manifest()))
    text = b'"s","a%20b","7","2026-11-16T00:00:01.000Z","false"\n"s","c","","",""\n'
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(text))
    (tmp_path / "x.csv").write_bytes(text)
    (tmp_path / "empty.csv").write_bytes(b"")
    first, second = read_inventory(tmp_path, "CSV", columns, "x.csv.gz")

    at_ns = int(datetime(2026, 11, 16, 0, 0, 1, tzinfo=UTC).timestamp()) * 10**9
    assert {
        "key": "a%20b",
        "size_bytes": 7,
        "modified_ns": at_ns,
        "etag": None,
        "version_id": None,
        "is_latest": False,
        "is_delete_marker": False,
    } == first
    assert (None, None, True) == (second["size_bytes"], second["modified_ns"], second["is_latest"])
    assert [first, second] == read_inventory(tmp_path, "CSV", columns, "x.csv")
    assert [] == read_inventory(tmp_path, "CSV", columns, "empty.csv")


def test_a_report_in_parquet_is_read_by_its_names(tmp_path: Path) -> None:
    """In snake case; flags are flags there."""
    schema = "message s3.inventory { required binary bucket; required binary key; optional int64 size; "
    schema += "optional binary e_tag; optional boolean is_delete_marker; }"
    columns = inventory.columns_of(inventory.read_manifest(manifest(fileFormat="Parquet", fileSchema=schema)))
    found = pa.table({"key": ["k"], "size": [3], "e_tag": ["e"], "is_delete_marker": [True]})
    pq.write_table(found, tmp_path / "x.parquet")
    (row,) = read_inventory(tmp_path, "Parquet", columns, "x.parquet")

    assert ("k", 3, "e", True, True) == (
        row["key"],
        row["size_bytes"],
        row["etag"],
        row["is_delete_marker"],
        row["is_latest"],
    )


def test_a_reports_file_is_compared_with_its_manifest(tmp_path: Path) -> None:
    """Size, then MD5 in either case, where the manifest gives one; a missing file is a problem and no error."""
    data = b"rows"
    (tmp_path / "x").write_bytes(data)
    md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
    requested = [("x", 4, md5.upper()), ("x", 4, ""), ("x", 5, md5), ("x", 4, "0" * 32), ("gone", 4, "")]
    files, sizes, sums = zip(*requested, strict=True)
    batch = pa.RecordBatch.from_pydict({"file": list(files), "size": list(sizes), "md5": list(sums)})
    (reported,) = inventory.checking(inventory.ReportLocation(folder=str(tmp_path)))(iter([batch]))

    problems = reported["problem"].to_pylist()
    assert [None, None, "has 4 bytes, not 5"] == problems[:3]
    assert f"has the MD5 {md5}, not {'0' * 32}" == problems[3] and "cannot be read" in problems[4]
    assert list(files) == reported["file"].to_pylist()


def test_a_manifest_is_read_up_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing one is NotFound; one byte more than the limit is refused."""
    disk_queue = inventory.ReportLocation(folder=str(tmp_path))
    (tmp_path / "m").write_bytes(b"1234")
    monkeypatch.setattr(inventory, "MANIFEST_BYTES_MAX", 4)
    assert b"1234" == inventory._read(disk_queue, "m")
    monkeypatch.setattr(inventory, "MANIFEST_BYTES_MAX", 3)
    with pytest.raises(inventory.BadInventory):
        inventory._read(disk_queue, "m")
    with pytest.raises(NotFound):
        inventory._read(disk_queue, "gone")


def test_a_page_is_a_batch_of_the_listings_columns() -> None:
    """In their order, with the listing's own names."""
    page = ObjectPage(key=["a"], size_bytes=[1], modified_ns=[2], etag=["e"], version_id=[None], is_latest=[True],
                is_delete_marker=[False])  # fmt: skip
    batch = listing.arrow(page)

    assert [part.split()[0] for part in listing.LISTING.split(", ")] == batch.schema.names
    assert [("a", 1, 2, "e", None, True, False)] == [tuple(row.values()) for row in batch.to_pylist()]


def test_the_cause_of_a_listing_that_failed_is_the_tasks_own_words() -> None:
    """The last line that names an error of ours, else the first line; bounded."""
    error: Any = RuntimeError("top\n  lakebed.core.errors.Denied: no\n  lakebed.core.errors.Unavailable: away\nrest")
    assert "lakebed.core.errors.Unavailable: away" == listing.cause(error)
    assert "plain" == listing.cause(RuntimeError("plain\nmore"))  # type: ignore[arg-type]
    assert 300 == len(listing.cause(RuntimeError("x" * 400)))  # type: ignore[arg-type]


def test_a_listing_adds_up_its_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that are not reported count as nothing; so many folders are named at most, in order."""
    monkeypatch.setattr(listing, "TOPS_MAX", 2)
    rows = [("b", 2, 10), ("a", 1, None), ("c", 4, 5)]
    counted = iter([{"top": top, "objects": objects, "size_bytes": size} for top, objects, size in rows])
    found = listing._listing(None, 9, "list", counted)  # type: ignore[arg-type]

    assert (7, 15, {"a": 1, "b": 2}, 9, "list") == (
        found.objects,
        found.size_bytes,
        found.tops,
        found.began_ns,
        found.source,
    )
