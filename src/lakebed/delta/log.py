"""The Delta log: one JSON-lines object per version, created only if absent. That create is the commit.

Reader version 1, writer version 2: every Delta reader can read these tables, and any writer that also commits by
conditional PUT (delta-rs does) may write beside us.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from lakebed.core.errors import Corrupt, Invalid
from lakebed.delta.model import ONCE, ONCE_WINDOW, DataFile, Snapshot, TableSpec, VersionChange, WriteBatch, name_of

READER_VERSION, WRITER_VERSION = 1, 2
LOG_FOLDER = "_delta_log"
BOUNDS = "lakebed.bounds"  # a file's tag that holds what is known of its columns' ranges
KEYS = "lakebed.keys"  # in the table's configuration: the columns that make its rows unique
ONCE_SWEEP = 256  # versions between two sweeps of applications that wrote once


class Raced(Exception):
    """Another version was committed on the snapshot that this one was planned on."""


class Commit(msgspec.Struct, frozen=True):
    """What one version changes."""

    operation: str
    adds: tuple[DataFile, ...] = ()
    removes: tuple[DataFile, ...] = ()
    batch: WriteBatch | None = None
    spec: TableSpec | None = None  # given when the version sets (creates or changes) the table's schema
    table_id: str = ""
    data_change: bool = True
    overwrites: bool = False
    note: str = ""  # where the rows come from, for operators and for the next run
    rows_inserted: int = 0
    rows_replaced: int = 0


def log_key(root: str, version: int) -> str:
    return f"{root}/{LOG_FOLDER}/{version:020d}.json"


def encode(commit: Commit, *, attempt_id: str, now_ms: int, version: int = 0) -> bytes:
    """The log entry of this version. `attempt_id` makes the bytes ours alone."""
    info: dict[str, Any] = {
        "timestamp": now_ms,
        "operation": commit.operation,
        "operationParameters": {"mode": "Overwrite"} if commit.overwrites else {},
        "operationMetrics": {
            "numTargetRowsInserted": str(commit.rows_inserted),
            "numTargetRowsUpdated": str(commit.rows_replaced),
        },
        "engineInfo": "lakebed",
        "txnId": attempt_id,
    }
    lines: list[dict[str, Any]] = [{"commitInfo": info | ({"userMetadata": commit.note} if commit.note else {})}]
    if commit.spec is not None:
        lines.append({"protocol": {"minReaderVersion": READER_VERSION, "minWriterVersion": WRITER_VERSION}})
        lines.append({"metaData": _metadata(commit.spec, commit.table_id, now_ms)})
    if commit.batch is not None:
        number = version if commit.batch.number is None else commit.batch.number
        lines.append({"txn": {"appId": commit.batch.application, "version": number, "lastUpdated": now_ms}})
    lines += [{"remove": _remove(file, now_ms, commit.data_change)} for file in commit.removes]
    lines += [{"add": _add(file, now_ms, commit.data_change)} for file in commit.adds]
    return b"\n".join(msgspec.json.encode(line) for line in lines) + b"\n"


def decode(data: bytes, where: str) -> list[dict[str, Any]]:
    """The actions of a log entry. Raises Corrupt, naming the object."""
    try:
        return [msgspec.json.decode(line, type=dict[str, Any]) for line in data.splitlines() if line.strip()]
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Corrupt(f"{where!r} is no Delta log entry: {error}", key=where) from error


def apply(before: Snapshot, version: int, actions: Iterable[dict[str, Any]], where: str) -> Snapshot:
    """The table after this version. Raises Invalid for a protocol that Lakebed does not support."""
    files = {name_of(file.path): file for file in before.files}
    applied = dict(before.applied)
    schema_json, partition_by, table_id = before.schema_json, before.partition_by, before.table_id
    keys, note = before.keys, before.note
    for action in actions:
        if protocol := action.get("protocol"):
            check_protocol(protocol, where)
        if metadata := action.get("metaData"):
            schema_json = metadata["schemaString"]
            partition_by = tuple(metadata.get("partitionColumns", ()))
            table_id = metadata["id"]
            keys = tuple(filter(None, metadata.get("configuration", {}).get(KEYS, "").split(",")))
        if info := action.get("commitInfo"):
            note = info.get("userMetadata") or note
        if txn := action.get("txn"):
            applied[txn["appId"]] = txn["version"]
        if remove := action.get("remove"):
            files.pop(name_of(remove["path"]), None)
        if add := action.get("add"):
            files[name_of(add["path"])] = file_of(add)
    if version % ONCE_SWEEP == 0:
        applied = {app: at for app, at in applied.items() if not app.startswith(ONCE) or at > version - ONCE_WINDOW}
    return Snapshot(version, schema_json, partition_by, tuple(files.values()), applied, table_id, keys, note)


def change_of(version: int, actions: Iterable[dict[str, Any]]) -> VersionChange:
    """The change that a log entry records. Entries of other writers may record less."""
    info: dict[str, Any] = {}
    applications = []
    for action in actions:
        info = action.get("commitInfo", info)
        if txn := action.get("txn"):
            applications.append(txn["appId"])
    metrics = info.get("operationMetrics") or {}
    return VersionChange(
        version,
        info.get("operation", ""),
        (info.get("operationParameters") or {}).get("mode") == "Overwrite",
        tuple(applications),
        int(metrics.get("numTargetRowsInserted", 0)),
        int(metrics.get("numTargetRowsUpdated", 0)),
    )


def fields_of(schema_json: str) -> dict[str, Any]:
    """Each column's type, in order; nullability and comments aside."""
    return {field["name"]: field["type"] for field in msgspec.json.decode(schema_json)["fields"]} if schema_json else {}


def grows(old_json: str, new_json: str) -> bool:
    """Whether the new schema is the old one, with columns added at most. Names that differ only in case clash."""
    old, new = fields_of(old_json), fields_of(new_json)
    distinct = len({name.casefold() for name in new}) == len(new)
    return distinct and all(new.get(name) == kind for name, kind in old.items())


def check_protocol(protocol: dict[str, Any], where: str) -> None:
    reader, writer = protocol.get("minReaderVersion", 0), protocol.get("minWriterVersion", 0)
    if reader > READER_VERSION or writer > WRITER_VERSION:
        raise Invalid(
            f"{where!r} needs Delta reader {reader} and writer {writer}; Lakebed supports {READER_VERSION} "
            f"and {WRITER_VERSION}",
            hint="drop the table features it was upgraded with, or write it with the engine that upgraded it",
        )


def file_of(add: dict[str, Any]) -> DataFile:
    stats = msgspec.json.decode(add["stats"]) if add.get("stats") else {}
    ours = (add.get("tags") or {}).get(BOUNDS)
    stats |= msgspec.json.decode(ours) if ours else {}
    return DataFile(
        path=add["path"],
        size=add["size"],
        rows=stats.get("numRecords", -1),
        partition=dict(add.get("partitionValues", {})),
        low=stats.get("minValues", {}),
        high=stats.get("maxValues", {}),
        nulls=stats.get("nullCount", {}),
    )


def overlapping(files: Sequence[DataFile], column: str, low: Any, high: Any) -> list[DataFile]:
    """The files that may hold a value of `column` between low and high; those without bounds always may."""
    return [
        file
        for file in files
        if column not in file.low or column not in file.high or not (file.high[column] < low or file.low[column] > high)
    ]


def _metadata(spec: TableSpec, table_id: str, now_ms: int) -> dict[str, Any]:
    return {
        "id": table_id,
        "name": spec.name,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": spec.schema_json,
        "partitionColumns": list(spec.partition_by),
        "configuration": {KEYS: ",".join(spec.keys)} if spec.keys else {},
        "createdTime": now_ms,
    }


def _add(file: DataFile, now_ms: int, data_change: bool) -> dict[str, Any]:
    """Ranges of some columns go into a tag of ours: a dataset of delta-rs takes a column without a range, beside others
    that have one, for a column without values, and then finds nothing in it.
    """
    bounds = {"minValues": file.low, "maxValues": file.high, "nullCount": file.nulls}
    return {
        "path": file.path,
        "partitionValues": file.partition,
        "size": file.size,
        "modificationTime": now_ms,
        "dataChange": data_change,
        "stats": msgspec.json.encode({"numRecords": file.rows}).decode(),
    } | ({"tags": {BOUNDS: msgspec.json.encode(bounds).decode()}} if any(bounds.values()) else {})


def _remove(file: DataFile, now_ms: int, data_change: bool) -> dict[str, Any]:
    return {
        "path": file.path,
        "deletionTimestamp": now_ms,
        "dataChange": data_change,
        "extendedFileMetadata": True,
        "partitionValues": file.partition,
        "size": file.size,
    }
