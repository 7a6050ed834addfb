"""The Delta log: one JSON-lines object per version, created only if absent. That create is the commit.

Tables that Lakebed creates have reader version 1 and writer version 2, or the features that their columns need. Any
writer that also commits by conditional PUT (delta-rs does) may write beside us.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from lakebed.core.errors import Corrupt
from lakebed.delta.model import (
    CLUSTER,
    ONCE,
    ONCE_WINDOW,
    DataFile,
    Snapshot,
    TableProtocol,
    TableSpec,
    VersionChange,
    WriteBatch,
    identity_of,
)
from lakebed.delta.protocol import PLAIN, action_of, check_readable, check_writable, needed, protocol_of

LOG_FOLDER = "_delta_log"
BOUNDS = "lakebed.bounds"  # a file's tag that holds what is known of its columns' ranges
COPIED = "lakebed.copied"  # a file's tag: an upsert wrote it with rows that it did not change
NOTE = "lakebedNote"  # in a commitInfo without a note of its own: the one before it, which no checkpoint keeps
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
    before: Snapshot | None = None  # the table whose schema is changed: what it says besides stays
    data_change: bool = True
    overwrites: bool = False
    note: str = ""  # where the rows come from, for operators and for the next run
    rows_inserted: int = 0
    rows_replaced: int = 0

    def check(self, state: Snapshot, where: str) -> None:
        """Raises Invalid when this version would break what the table promises."""
        removes = bool(self.removes) and self.data_change
        check_writable(state, where, removes=removes, rewrites=removes and bool(self.adds) and not self.overwrites)


def log_key(root: str, version: int) -> str:
    return f"{root}/{LOG_FOLDER}/{version:020d}.json"


def encode(commit: Commit, *, attempt_id: str, now_ms: int, version: int = 0, note: str | None = None) -> bytes:
    """The log entry of this version. `attempt_id` makes the bytes ours alone; `note` is the table's until now."""
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
    if commit.note or note is not None:
        info |= {"userMetadata": commit.note} if commit.note else {NOTE: note}
    lines: list[dict[str, Any]] = [{"commitInfo": info}]
    if commit.spec is not None:
        lines += _schema_lines(commit.spec, commit.table_id, commit.before, now_ms, overwrites=commit.overwrites)
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
    """The table after this version. Raises Invalid for a table that Lakebed cannot read."""
    return apply_all(before, [(version, actions)], where)


def apply_all(before: Snapshot, entries: Iterable[tuple[int, Iterable[dict[str, Any]]]], where: str) -> Snapshot:
    """The table after these versions, each with its actions, in order. Raises Invalid as `apply` does."""
    files = {identity_of(file.path, file.vector): file for file in before.files}
    applied = dict(before.applied)
    metadata, protocol, note = before.metadata, before.protocol, before.note
    version = before.version
    for version, actions in entries:
        for action in actions:
            if demanded := action.get("protocol"):
                check_readable(protocol := protocol_of(demanded), where)
            metadata = action.get("metaData") or metadata
            if info := action.get("commitInfo"):
                said = note_of(info)
                note = note if said is None else said
            if txn := action.get("txn"):
                applied[txn["appId"]] = txn["version"]
            if remove := action.get("remove"):
                files.pop(identity_of(remove["path"], remove.get("deletionVector")), None)
            if add := action.get("add"):
                files[identity_of(add["path"], add.get("deletionVector"))] = file_of(add)
        if version % ONCE_SWEEP == 0:
            applied = remembered(applied, version)
    return _snapshot(version, tuple(files.values()), applied, metadata, protocol, note, before)


def note_of(info: dict[str, Any]) -> str | None:
    """The table's note after a version with this commitInfo; None when it says nothing about it."""
    return info.get("userMetadata") or info.get(NOTE)


def remembered(applied: dict[str, int], version: int) -> dict[str, int]:
    """Without the applications that wrote once, long ago."""
    return {app: at for app, at in applied.items() if not app.startswith(ONCE) or at > version - ONCE_WINDOW}


def _snapshot(
    version: int,
    files: tuple[DataFile, ...],
    applied: dict[str, int],
    metadata: dict[str, Any],
    protocol: TableProtocol,
    note: str,
    before: Snapshot,
) -> Snapshot:
    return Snapshot(
        version,
        metadata.get("schemaString", ""),
        tuple(metadata.get("partitionColumns") or ()),
        files,
        applied,
        metadata.get("id", ""),
        tuple(filter(None, (metadata.get("configuration") or {}).get(KEYS, "").split(","))),
        note,
        protocol,
        metadata,
        before.checkpoint,
        before.tail_bytes,
    )


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


def same_columns(old_json: str, new_json: str) -> bool:
    """Whether both have the same columns, with type and nullability; comments aside."""

    def columns(text: str) -> list[tuple[str, Any, bool]]:
        fields = msgspec.json.decode(text)["fields"] if text else []
        return [(field["name"], field["type"], field.get("nullable", True)) for field in fields]

    return columns(old_json) == columns(new_json)


def grows(old_json: str, new_json: str) -> bool:
    """Whether the new schema is the old one, with columns added at most. Names that differ only in case clash."""
    old, new = fields_of(old_json), fields_of(new_json)
    distinct = len({name.casefold() for name in new}) == len(new)
    return distinct and all(new.get(name) == kind for name, kind in old.items())


class _Stats(msgspec.Struct, gc=False):
    """A file's statistics. Other writers may say null, or nothing."""

    numRecords: int = -1
    minValues: dict[str, Any] | None = None
    maxValues: dict[str, Any] | None = None
    nullCount: dict[str, Any] | None = None


_STATS = msgspec.json.Decoder(_Stats)


def file_of(add: dict[str, Any]) -> DataFile:
    vector = add.get("deletionVector") or {}
    return file_with(
        add["path"], add["size"], add.get("stats"), add.get("partitionValues") or {}, add.get("tags") or {}, vector
    )


def file_with(
    path: str,
    size: int,
    stats: str | None,
    partition: dict[str, str | None],
    tags: dict[str, str],
    vector: dict[str, Any],
) -> DataFile:
    """A file as its `add` describes it."""
    said = _STATS.decode(stats) if stats else _Stats()
    known = _STATS.decode(tags[BOUNDS]) if BOUNDS in tags else said
    rows = said.numRecords
    return DataFile(
        path,
        size,
        rows - vector.get("cardinality", 0) if rows >= 0 else -1,
        {name: value or None for name, value in partition.items()},  # Delta's rule: an empty text is no value
        known.minValues or {},
        known.maxValues or {},
        known.nullCount or {},
        vector=vector,
        copied=COPIED in tags,
    )


def overlapping(files: Sequence[DataFile], column: str, low: Any, high: Any) -> list[DataFile]:
    """The files that may hold a value of `column` between low and high; those without bounds always may."""
    return [
        file
        for file in files
        if column not in file.low or column not in file.high or not (file.high[column] < low or file.low[column] > high)
    ]


def _schema_lines(
    spec: TableSpec, table_id: str, before: Snapshot | None, now_ms: int, *, overwrites: bool
) -> list[dict[str, Any]]:
    """A table's schema, and its protocol where the schema needs another. Everything else that it says stays."""
    had = before.metadata if before is not None else {}
    protocol = needed(before.protocol if before is not None else PLAIN, spec.schema_json)
    ours = {KEYS: ",".join(spec.keys), CLUSTER: ",".join(spec.cluster_by)}
    if not overwrites:  # a writer that knows of none leaves those of the table
        ours = {name: value for name, value in ours.items() if value}
    configuration = {name: value for name, value in (had.get("configuration") or {}).items() if name not in ours}
    metadata = {"name": spec.name, "format": {"provider": "parquet", "options": {}}, "createdTime": now_ms} | had
    metadata |= {
        "id": table_id,
        "schemaString": _described(spec.schema_json, had.get("schemaString", "")),
        "partitionColumns": list(spec.partition_by),
        "configuration": configuration | {name: value for name, value in ours.items() if value},
    }
    raised = before is None or protocol != before.protocol
    return [*([{"protocol": action_of(protocol)}] if raised else []), {"metaData": metadata}]


def _described(schema_json: str, had: str) -> str:
    """The schema, with what the table's columns say of themselves (comments, defaults) where ours says nothing."""
    if not had:
        return schema_json
    known = {field["name"]: field.get("metadata") or {} for field in msgspec.json.decode(had)["fields"]}
    schema = msgspec.json.decode(schema_json)
    for field in schema["fields"]:
        field["metadata"] = known.get(field["name"], {}) | (field.get("metadata") or {})
    return msgspec.json.encode(schema).decode()


def _add(file: DataFile, now_ms: int, data_change: bool) -> dict[str, Any]:
    """Where `stats` has no ranges, those that we know go into a tag of ours: a dataset of delta-rs takes a column
    without a range, beside others that have one, for a column without values, and then finds nothing in it.
    """
    bounds = {"minValues": file.low, "maxValues": file.high, "nullCount": file.nulls}
    stats = file.stats or msgspec.json.encode({"numRecords": file.rows}).decode()
    tags = {COPIED: "true"} if file.copied else {}
    if any(bounds.values()) and "minValues" not in stats:
        tags[BOUNDS] = msgspec.json.encode(bounds).decode()
    return {
        "path": file.path,
        "partitionValues": file.partition,
        "size": file.size,
        "modificationTime": now_ms,
        "dataChange": data_change,
        "stats": stats,
    } | ({"tags": tags} if tags else {})


def _remove(file: DataFile, now_ms: int, data_change: bool) -> dict[str, Any]:
    return {
        "path": file.path,
        "deletionTimestamp": now_ms,
        "dataChange": data_change,
        "extendedFileMetadata": True,
        "partitionValues": file.partition,
        "size": file.size,
    }
