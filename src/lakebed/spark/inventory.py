"""An S3 Inventory report as a listing: manifest.json names data files in CSV (gzip), Parquet or ORC.

    found = inventory(spark, location, "reports/2026-11-15T01-00Z/manifest.json")

The same columns as `listing.py` gives. A report may leave out every field but bucket and key: a size, time or etag that
it does not have is null, and without versions each row is the latest one and no delete marker. Keys in CSV are
URL-encoded. The manifest is checked before a file is opened, and every file against its MD5 before a row is used:
a report that lacks a file would make everything in it look lost.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from lakebed.core.errors import Corrupt, Invalid, NotFound, Unavailable
from lakebed.spark.listing import LISTING, Listing, kept
from lakebed.spark.location import Location
from lakebed.spark.tasks import in_arrow

FILES_MAX = 100_000  # data files of one report; AWS writes some 100 MB each
MANIFEST_BYTES_MAX = 64 * 1024 * 1024
ROWS = 65_536  # of one record batch

# Our column, and the report's field; Parquet and ORC write the same fields in snake case.
FIELDS = {
    "key": "Key",
    "size_bytes": "Size",
    "modified_ns": "LastModifiedDate",
    "etag": "ETag",
    "version_id": "VersionId",
    "is_latest": "IsLatest",
    "is_delete_marker": "IsDeleteMarker",
}

Batches = Iterator[Any]


class BadInventory(Invalid):
    """The manifest of an inventory report is not one."""

    code = "bad_inventory"


class DamagedInventory(Corrupt):
    """A data file of an inventory report is missing, or not what its manifest says."""

    code = "damaged_inventory"


class InventoryFile(msgspec.Struct, frozen=True):
    key: str
    size: int
    md5: str = msgspec.field(default="", name="MD5checksum")


class InventoryManifest(msgspec.Struct, frozen=True):
    """manifest.json, as far as it is needed. `creationTimestamp` is when the report was begun, in milliseconds."""

    source: str = msgspec.field(name="sourceBucket")
    destination: str = msgspec.field(name="destinationBucket")
    version: str
    created_ms: str = msgspec.field(name="creationTimestamp")
    format: Literal["CSV", "Parquet", "ORC"] = msgspec.field(name="fileFormat")
    schema: str = msgspec.field(name="fileSchema")
    files: tuple[InventoryFile, ...]


class ReportLocation(msgspec.Struct, frozen=True):
    """Where a report is stored: a bucket, or a folder of this machine that every executor sees."""

    location: Location | None = None
    folder: str = ""

    def filesystem(self) -> Any:
        if self.location is not None:
            return self.location.filesystem()
        from pyarrow.fs import LocalFileSystem

        return LocalFileSystem()

    def path(self, key: str) -> str:
        return f"{self.location.bucket}/{key}" if self.location is not None else str(Path(self.folder) / key)


def inventory(spark: SparkSession, location: ReportLocation, manifest_key: str, *, prefix: str = "") -> Listing:
    """The rows of a report whose keys are under `prefix`, which is cut off. Keys of the report are whole keys.

    Raises NotFound without a manifest, BadInventory for one that is wrong, DamagedInventory when a file of it is.
    """
    manifest = read_manifest(_read(location, manifest_key))
    files = spark.createDataFrame(
        [(file.key, file.size, file.md5) for file in manifest.files], "file string, size bigint, md5 string"
    ).repartition(max(1, min(len(manifest.files), 1024)))
    _check(in_arrow(files, checking(location), "file string, problem string"))
    rows = in_arrow(files, reading(location, manifest.format, columns_of(manifest)), LISTING)
    if manifest.format == "CSV":
        rows = rows.withColumn("key", F.coalesce(F.try_url_decode("key"), F.col("key")))
    return kept(_below(rows, prefix), int(manifest.created_ms) * 1_000_000, "inventory")


def read_manifest(data: bytes) -> InventoryManifest:
    """The manifest in these bytes. Raises BadInventory saying what is wrong with it."""
    try:
        manifest = msgspec.json.decode(data, type=InventoryManifest)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise BadInventory(f"an inventory's manifest does not decode: {error}") from error
    if not manifest.created_ms.isdigit():
        raise BadInventory(f"an inventory's creationTimestamp is {manifest.created_ms!r}, not milliseconds")
    if len(manifest.files) > FILES_MAX:
        raise BadInventory(f"an inventory of {len(manifest.files)} files: at most {FILES_MAX} are read")
    if "key" not in columns_of(manifest):
        raise BadInventory("an inventory's fileSchema has no key", found=manifest.schema[:200])
    for file in manifest.files:
        if not file.key or file.key.startswith("/") or ".." in file.key.split("/") or file.size < 0:
            raise BadInventory(f"an inventory names a file {file.key[:80]!r} of {file.size} bytes")
    return manifest


def columns_of(manifest: InventoryManifest) -> dict[str, str | int]:
    """Where each of our columns is in the report: a place in CSV, a name in Parquet and ORC."""
    if manifest.format == "CSV":
        names = [name.strip() for name in manifest.schema.split(",")]
        return {ours: names.index(field) for ours, field in FIELDS.items() if field in names}
    names_in_schema = set(re.findall(r"[a-z][a-z0-9_]*", manifest.schema))
    return {ours: _snake(field) for ours, field in FIELDS.items() if _snake(field) in names_in_schema}


def checking(location: ReportLocation) -> Callable[[Batches], Batches]:
    """The task that compares files with what the manifest says of them: one row a file, with its problem or none."""

    def check(batches: Batches) -> Batches:
        import pyarrow as pa

        filesystem = location.filesystem()
        for batch in batches:
            listed = list(zip(*(batch[name].to_pylist() for name in ("file", "size", "md5")), strict=True))
            problems = [_problem(filesystem, location.path(file), size, md5) for file, size, md5 in listed]
            yield pa.record_batch([batch["file"], pa.array(problems, pa.string())], names=["file", "problem"])

    return check


def reading(location: ReportLocation, kind: str, columns: dict[str, str | int]) -> Callable[[Batches], Batches]:
    """The task that reads data files as the columns of LISTING."""

    def read(batches: Batches) -> Batches:
        filesystem = location.filesystem()
        for batch in batches:
            for file in batch["file"].to_pylist():
                for rows in _OPENERS[kind](filesystem, location.path(file), columns):
                    yield _listing(rows)

    return read


def _csv(filesystem: Any, path: str, columns: dict[str, str | int]) -> Batches:
    import pyarrow as pa
    from pyarrow import csv

    with filesystem.open_input_stream(path, compression="gzip" if path.endswith(".gz") else None) as stream:
        try:
            first = csv.open_csv(
                stream,
                read_options=csv.ReadOptions(autogenerate_column_names=True, block_size=4 * 1024 * 1024),
                convert_options=csv.ConvertOptions(
                    column_types={f"f{place}": pa.string() for place in columns.values()},
                    include_columns=[f"f{place}" for place in columns.values()],
                    strings_can_be_null=True,
                    null_values=[""],
                    quoted_strings_can_be_null=True,
                ),
            )
        except pa.ArrowInvalid as error:
            if "Empty CSV" in str(error):
                return
            raise
        for rows in first:
            yield {ours: rows[f"f{place}"] for ours, place in columns.items()}


def _parquet(filesystem: Any, path: str, columns: dict[str, str | int]) -> Batches:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, filesystem=filesystem) as file:
        have = {ours: name for ours, name in columns.items() if name in file.schema_arrow.names}
        for rows in file.iter_batches(batch_size=ROWS, columns=list(have.values())):
            yield {ours: rows[name] for ours, name in have.items()}


def _orc(filesystem: Any, path: str, columns: dict[str, str | int]) -> Batches:
    from pyarrow import orc

    with filesystem.open_input_file(path) as source:
        file = orc.ORCFile(source)
        have = {ours: name for ours, name in columns.items() if name in file.schema.names}
        for stripe in range(file.nstripes):
            rows = file.read_stripe(stripe, columns=list(have.values()))
            yield {ours: rows[name] for ours, name in have.items()}


_OPENERS: dict[str, Callable[[Any, str, dict[str, str | int]], Batches]] = {
    "CSV": _csv,
    "Parquet": _parquet,
    "ORC": _orc,
}


def _listing(found: dict[str, Any]) -> Any:
    """The report's columns as ours: what is missing is null, or true of a bucket without versions."""
    import pyarrow as pa
    import pyarrow.compute as pc

    key = found["key"].cast(pa.string())
    count = len(key)

    def column(name: str, kind: Any) -> Any:
        return found[name].cast(kind) if name in found else pa.nulls(count, kind)

    def flag(name: str, otherwise: bool) -> Any:
        if name not in found:
            return pa.repeat(otherwise, count)
        values = found[name]
        if pa.types.is_string(values.type):
            values = pc.equal(pc.ascii_lower(values), "true")
        return pc.fill_null(values, otherwise)

    moment = column("modified_ns", pa.timestamp("ns", "UTC"))
    return pa.record_batch(
        [
            key,
            column("size_bytes", pa.int64()),
            moment.cast(pa.int64()),
            column("etag", pa.string()),
            column("version_id", pa.string()),
            flag("is_latest", True),
            flag("is_delete_marker", False),
        ],
        names=list(FIELDS),
    )


def _problem(filesystem: Any, path: str, size: int, md5: str) -> str | None:
    digest, size_read = hashlib.md5(usedforsecurity=False), 0
    try:
        with filesystem.open_input_stream(path, compression=None) as stream:
            while chunk := stream.read(1024 * 1024):
                digest.update(chunk)
                size_read += len(chunk)
    except OSError as error:
        return f"cannot be read: {str(error)[:120]}"
    if size_read != size:
        return f"has {size_read} bytes, not {size}"
    return f"has the MD5 {digest.hexdigest()}, not {md5}" if md5 and digest.hexdigest() != md5.lower() else None


def _check(checked: DataFrame) -> None:
    bad = checked.filter(F.col("problem").isNotNull()).orderBy("file").limit(5).collect()
    if bad:
        raise DamagedInventory(
            "; ".join(f"{row['file']!r} {row['problem']}" for row in bad),
            hint="use another report: an audit of an incomplete report would report the rest as lost",
            keys=[row["file"] for row in bad],
        )


def _below(rows: DataFrame, prefix: str) -> DataFrame:
    if not prefix:
        return rows
    folder = prefix.rstrip("/") + "/"
    return rows.filter(F.col("key").startswith(folder)).withColumn("key", F.substring("key", len(folder) + 1, 2048))


def _read(location: ReportLocation, key: str) -> bytes:
    try:
        with location.filesystem().open_input_stream(location.path(key)) as stream:
            data = bytes(stream.read(MANIFEST_BYTES_MAX + 1))
    except FileNotFoundError as error:
        raise NotFound(f"there is no inventory manifest at {location.path(key)!r}") from error
    except OSError as error:
        raise Unavailable(f"the inventory manifest at {location.path(key)!r} cannot be read: {error}") from error
    if len(data) > MANIFEST_BYTES_MAX:
        raise BadInventory(f"an inventory's manifest has more than {MANIFEST_BYTES_MAX} bytes")
    return data


def _snake(field: str) -> str:
    return "e_tag" if field == "ETag" else re.sub(r"(?<=[a-z])(?=[A-Z])", "_", field).lower()
