"""A bucket and an inventory report become the same DataFrame: every object once, with and without versions."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc
from pyspark.sql import SparkSession

from lakebed.core.clock import SystemClock
from lakebed.core.errors import LakebedError, NotFound
from lakebed.core.ids import Ids
from lakebed.embedded.endpoints import BucketEndpoints
from lakebed.spark.inventory import DamagedInventory, ReportLocation, inventory
from lakebed.spark.listing import list_bucket
from lakebed.spark.location import Location
from lakebed.store import admin
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings

KEYS = ["top", *(f"a/{n % 5}/{n:04d}" for n in range(1200)), "b c/ü+1%.json", "deep/1/2/3/4/x"]


async def fill(store: Store, keys: list[str]) -> None:
    gate = asyncio.Semaphore(16)

    async def put(key: str) -> None:
        async with gate:
            await store.create(key, key.encode())

    await asyncio.gather(*map(put, keys))


def test_a_listing_has_every_object_once_with_what_the_store_says_of_it(
    spark: SparkSession, bucket: Store, bucket_settings: StoreSettings
) -> None:
    """Keys below the prefix, sizes, times and etags as the store itself lists them; nothing twice."""

    async def wanted() -> dict[str, tuple[int, str, int]]:
        await fill(bucket, KEYS)
        return {info.key: (info.size, info.etag, info.modified_ms) async for info in bucket.list("")}

    output = asyncio.run(wanted())

    found = list_bucket(spark, bucket_settings, clock=SystemClock())

    rows = found.rows.collect()
    assert (found.source, found.objects, len(rows)) == ("list", len(KEYS), len(KEYS))
    assert output == {row["key"]: (row["size_bytes"], row["etag"], row["modified_ns"] // 1_000_000) for row in rows}
    assert {(True, False, None)} == {(row["is_latest"], row["is_delete_marker"], row["version_id"]) for row in rows}
    assert found.rows.filter("key like 'a/%'").count() == 1200
    found.close()


def test_a_listing_of_one_folder_has_that_folder_alone(
    spark: SparkSession, bucket: Store, bucket_settings: StoreSettings
) -> None:
    """Other folders are not even queried about."""
    asyncio.run(fill(bucket, ["a/1", "a/b/2", "ab/3"]))

    found = list_bucket(spark, bucket_settings, clock=SystemClock(), prefix="a/")

    assert ["a/1", "a/b/2"] == sorted(row["key"] for row in found.rows.collect())


def test_a_versioned_bucket_is_listed_with_every_version_and_marker(spark: SparkSession, weed: BucketEndpoints) -> None:
    """Old versions, the latest and delete markers each have a row, and report which they are."""
    settings = StoreSettings.of(
        {name.removeprefix("store."): value for name, value in weed.store_settings(prefix="").as_layer().items()}
        | {"url": f"s3://versioned-{Ids().token()[:8]}"}
    )
    bucket = settings.url.removeprefix("s3://")
    s3 = admin.client(settings)
    s3.create_bucket(Bucket=bucket)
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    for body in (b"one", b"three"):
        s3.put_object(Bucket=bucket, Key="x/kept", Body=body)
    s3.put_object(Bucket=bucket, Key="x/gone", Body=b"gone")
    s3.delete_object(Bucket=bucket, Key="x/gone")

    found = list_bucket(spark, settings, clock=SystemClock())

    assert found.source == "versions"
    rows = [(row["key"], row["size_bytes"], row["is_latest"], row["is_delete_marker"]) for row in found.rows.collect()]
    assert [
        ("x/gone", 4, False, False),
        ("x/gone", None, True, True),
        ("x/kept", 3, False, False),
        ("x/kept", 5, True, False),
    ] == sorted(rows, key=lambda row: (row[0], row[1] or 99))
    assert all(row["version_id"] for row in found.rows.collect())


def test_a_bucket_that_cannot_be_listed_is_told(spark: SparkSession, bucket_settings: StoreSettings) -> None:
    """No bucket: typed, before any task runs."""
    nowhere = StoreSettings.of(
        {name.removeprefix("store."): value for name, value in bucket_settings.as_layer().items()}
        | {"url": "s3://there-is-none"}
    )
    with pytest.raises(LakebedError):
        list_bucket(spark, nowhere, clock=SystemClock(), versions=False)


ROWS = [
    ("lake", "a/plain", "v2", True, False, 10, "2026-11-15T01:02:03.004Z", "e1"),
    ("lake", "a/plain", "v1", False, False, 9, "2026-11-14T01:02:03.000Z", "e0"),
    ("lake", "a/b c+ü=%.json", "v3", True, True, None, "2026-11-15T00:00:00.000Z", None),
    ("lake", "a", "v5", True, False, 1, "2026-11-15T00:00:00.000Z", "e5"),
    ("lake", "a-before/plain", "v6", True, False, 1, "2026-11-15T00:00:00.000Z", "e6"),  # a neighbour is not below it
    ("lake", "other/x", "v4", True, False, 1, "2026-11-15T00:00:00.000Z", "e4"),
]
NAMES = ["bucket", "key", "version_id", "is_latest", "is_delete_marker", "size", "last_modified_date", "e_tag"]
FIELDS = ["Bucket", "Key", "VersionId", "IsLatest", "IsDeleteMarker", "Size", "LastModifiedDate", "ETag"]


def table() -> Any:
    columns = dict(zip(NAMES, map(list, zip(*ROWS, strict=True)), strict=True))
    moments = pa.array(columns["last_modified_date"]).cast(pa.timestamp("ms", "UTC"))
    return pa.table(columns | {"last_modified_date": moments})


def csv_bytes(fields: list[int]) -> bytes:
    def cell(value: Any, field: int) -> str:
        from urllib.parse import quote_plus

        if value is None:
            return '""'
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return f'"{quote_plus(text, safe="/") if field == 1 else text}"'

    lines = [",".join(cell(row[field], field) for field in fields) for row in ROWS]
    return gzip.compress(("\n".join(lines) + "\n").encode())


def report(folder: Path, kind: str, fields: list[int] | None = None) -> Path:
    fields = fields or list(range(len(FIELDS)))
    data, schema = folder / f"data.{kind.lower()}", ""
    if kind == "CSV":
        data = folder / "data.csv.gz"
        data.write_bytes(csv_bytes(fields))
        schema = ", ".join(FIELDS[field] for field in fields)
    elif kind == "Parquet":
        pq.write_table(table(), data)
        schema = "message s3.inventory { " + " ".join(f"required binary {name};" for name in NAMES) + " }"
    else:
        orc.write_table(table(), data)
        schema = "struct<" + ",".join(f"{name}:string" for name in NAMES) + ">"
    listed = {"key": data.name, "size": data.stat().st_size, "MD5checksum": hashlib.md5(data.read_bytes()).hexdigest()}
    (folder / "manifest.json").write_text(
        json.dumps(
            {
                "sourceBucket": "lake",
                "destinationBucket": "arn:aws:s3:::lake",
                "version": "2016-11-30",
                "creationTimestamp": "1763164800000",
                "fileFormat": kind,
                "fileSchema": schema,
                "files": [listed],
            }
        )
    )
    return data


@pytest.mark.parametrize("kind", ["CSV", "Parquet", "ORC"])
def test_an_inventory_report_has_the_columns_of_a_listing(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    """The three formats report the same; keys come back decoded, times in nanoseconds, keys below the prefix alone."""
    report(tmp_path, kind)

    found = inventory(spark, ReportLocation(folder=str(tmp_path)), "manifest.json", prefix="a")

    assert (found.source, found.began_ns, found.objects) == ("inventory", 1_763_164_800_000_000_000, 3)
    assert [
        ("b c+ü=%.json", None, 1_794_700_800_000_000_000, None, "v3", True, True),
        ("plain", 9, 1_794_618_123_000_000_000, "e0", "v1", False, False),
        ("plain", 10, 1_794_704_523_004_000_000, "e1", "v2", True, False),
    ] == sorted((tuple(row) for row in found.rows.collect()), key=lambda row: (row[0], row[1] or 0))


def test_an_inventory_may_leave_out_every_optional_field(spark: SparkSession, tmp_path: Path) -> None:
    """What is not reported is null; without versions each row is the latest and no marker."""
    report(tmp_path, "CSV", [0, 1])

    rows = inventory(spark, ReportLocation(folder=str(tmp_path)), "manifest.json").rows.collect()

    assert ("other/x", None, None, None, None, True, False) in {tuple(row) for row in rows}
    assert len(rows) == len(ROWS)


def test_an_inventory_in_the_bucket_is_read_from_there(
    spark: SparkSession, bucket: Store, bucket_settings: StoreSettings, tmp_path: Path
) -> None:
    """Manifest and data files come from the bucket itself, by executors."""
    data = report(tmp_path, "Parquet")
    asyncio.run(bucket.create("inv/manifest.json", (tmp_path / "manifest.json").read_bytes().replace(
        data.name.encode(), f"{bucket_settings.prefix}/inv/{data.name}".encode())))  # fmt: skip
    asyncio.run(bucket.create(f"inv/{data.name}", data.read_bytes()))

    disk_queue = ReportLocation(location=Location.of(bucket_settings))
    found = inventory(spark, disk_queue, f"{bucket_settings.prefix}/inv/manifest.json")

    assert found.objects == len(ROWS)


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_data_file_is_named_and_nothing_of_the_report_is_used(
    spark: SparkSession, tmp_path: Path, damage: str
) -> None:
    """An audit of a part of a bucket would call the rest lost: the report is refused whole."""
    data = report(tmp_path, "CSV")
    whole = data.read_bytes()
    if damage == "gone":
        data.unlink()
    else:
        data.write_bytes(whole[:-5] if damage == "cut" else whole[:-1] + bytes([whole[-1] ^ 1]))

    with pytest.raises(DamagedInventory, match=r"data\.csv\.gz"):
        inventory(spark, ReportLocation(folder=str(tmp_path)), "manifest.json")


def test_a_missing_manifest_is_not_found(spark: SparkSession, tmp_path: Path) -> None:
    """Typed, with the place in its words."""
    with pytest.raises(NotFound, match=r"manifest\.json"):
        inventory(spark, ReportLocation(folder=str(tmp_path)), "manifest.json")
