"""What a table demands of its readers and writers: protocol versions, features and properties.

A table that Lakebed cannot read, or may not write, is refused by name (Invalid); other tables go on. A feature that
nothing in the table uses (a writer version that allows constraints, and no constraint) changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from lakebed.core.errors import Invalid
from lakebed.delta.model import Snapshot, TableProtocol

READER_VERSION_MAX, WRITER_VERSION_MAX = 3, 7
PLAIN = TableProtocol(1, 2)
NTZ = "timestampNtz"
READABLE = frozenset(
    {
        "columnMapping",
        "deletionVectors",
        NTZ,
        "typeWidening",
        "typeWidening-preview",
        "v2Checkpoint",
        "vacuumProtocolCheck",
    }
)
# Writer versions before 7 name their features by number; what each of them adds:
WRITER_VERSIONS = {
    2: ("appendOnly", "invariants"),
    3: ("checkConstraints",),
    4: ("changeDataFeed", "generatedColumns"),
    5: ("columnMapping",),
    6: ("identityColumns",),
}
# These are obeyed: by what is checked below, or because every version that Lakebed writes is in order with them.
WRITABLE = frozenset(
    {
        "appendOnly",
        "invariants",
        "checkConstraints",
        "changeDataFeed",
        "generatedColumns",
        "columnMapping",
        "identityColumns",
        NTZ,
        "v2Checkpoint",
        "vacuumProtocolCheck",
    }
)
# In the metadata of a column: values that only an engine which knows the expression can write.
BY_EXPRESSION = {
    "delta.invariants": "an invariant",
    "delta.generationExpression": "a generation expression",
    "delta.identity.start": "an identity",
}
DAY_S = 86_400.0
LOG_RETENTION_S = 30 * DAY_S  # Delta's default
_UNITS = {"week": 7 * DAY_S, "day": DAY_S, "hour": 3600.0, "minute": 60.0, "second": 1.0, "millisecond": 0.001}
_INTERVAL = re.compile(r"(\d+)\s+(week|day|hour|minute|second|millisecond)s?")


def protocol_of(action: dict[str, Any]) -> TableProtocol:
    return TableProtocol(
        action.get("minReaderVersion", 1),
        action.get("minWriterVersion", 1),
        tuple(action.get("readerFeatures") or ()),
        tuple(action.get("writerFeatures") or ()),
    )


def action_of(protocol: TableProtocol) -> dict[str, Any]:
    action: dict[str, Any] = {"minReaderVersion": protocol.reader, "minWriterVersion": protocol.writer}
    if protocol.reader >= READER_VERSION_MAX:
        action["readerFeatures"] = list(protocol.reader_features)
    if protocol.writer >= WRITER_VERSION_MAX:
        action["writerFeatures"] = list(protocol.writer_features)
    return action


def needed(now: TableProtocol, schema_json: str) -> TableProtocol:
    """The table's protocol, raised by what this schema needs."""
    if '"timestamp_ntz"' not in schema_json or NTZ in now.writer_features:
        return now
    named = tuple(feature for version, some in WRITER_VERSIONS.items() if version <= now.writer for feature in some)
    writes = now.writer_features if now.writer >= WRITER_VERSION_MAX else named
    reads = ("columnMapping",) if now.reader < READER_VERSION_MAX and "columnMapping" in writes else ()
    return TableProtocol(READER_VERSION_MAX, WRITER_VERSION_MAX, (*now.reader_features, *reads, NTZ), (*writes, NTZ))


def check_readable(protocol: TableProtocol, where: str) -> None:
    """Raises Invalid when rows of this table could be read wrongly."""
    unknown = [feature for feature in protocol.reader_features if feature not in READABLE]
    if protocol.reader > READER_VERSION_MAX or unknown:
        what = f"the features {', '.join(unknown)}" if unknown else f"reader version {protocol.reader}"
        raise Invalid(
            f"{where!r} needs {what} of Delta, which Lakebed cannot read",
            hint="drop the feature with the engine that added it, or read the table there",
        )


def check_writable(state: Snapshot, where: str, *, removes: bool = False, rewrites: bool = False) -> None:
    """Raises Invalid when a version of ours would break what the table promises.

    `removes`: the version takes rows away; `rewrites`: it takes rows out of a file and copies the others.
    """
    protocol = state.protocol
    unknown = [feature for feature in protocol.writer_features if feature not in WRITABLE]
    if protocol.writer > WRITER_VERSION_MAX or unknown:
        what = f"the features {', '.join(unknown)}" if unknown else f"writer version {protocol.writer}"
        raise _refused(where, f"it needs {what} of Delta")
    if mapping(state) != "none":
        raise _refused(where, "it maps column names (delta.columnMapping.mode)")
    if any(file.vector for file in state.files):
        raise _refused(where, "its files have deletion vectors")
    properties = state.properties
    constraints = [name for name in properties if name.startswith("delta.constraints.")]
    if constraints:
        raise _refused(where, f"it has the constraint {constraints[0].removeprefix('delta.constraints.')}")
    schema = msgspec.json.decode(state.schema_json) if state.schema_json else None
    for name, metadata in _described(schema, ()):
        for key, what in BY_EXPRESSION.items():
            if key in metadata:
                raise _refused(where, f"its column {name} has {what}")
    if removes and is_on(properties, "delta.appendOnly"):
        raise _refused(where, "it is append-only (delta.appendOnly)")
    if rewrites and is_on(properties, "delta.enableChangeDataFeed"):
        raise _refused(where, "its change data feed needs a record of changed rows, which Lakebed does not write")


def mapping(state: Snapshot) -> str:
    """How columns are found in files: by name as they are called (`none`), by a physical `name`, or by `id`."""
    return state.properties.get("delta.columnMapping.mode", "none")


def is_on(properties: dict[str, str], name: str, default: bool = False) -> bool:
    return properties.get(name, str(default)).strip().lower() == "true"


def seconds(properties: dict[str, str], name: str, default: float) -> float:
    """A property of Delta's that is an interval: `interval 30 days`. One that is not understood keeps more: never less
    than the default, so that nothing is deleted too early.
    """
    text = properties.get(name, "").strip().lower()
    if not text:
        return default
    parts = _INTERVAL.findall(text)
    left = _INTERVAL.sub("", text.removeprefix("interval")).strip()
    return float("inf") if not parts or left else sum(int(count) * _UNITS[unit] for count, unit in parts)


def _refused(where: str, why: str) -> Invalid:
    return Invalid(
        f"Lakebed does not write to {where!r}: {why}",
        hint="write it with the engine that set this, or drop the property or feature there",
    )


def _described(kind: Any, path: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each column, and each field inside one, with its metadata."""
    if not isinstance(kind, dict):
        return
    for field in kind.get("fields") or ():
        yield ".".join((*path, field["name"])), field.get("metadata") or {}
        yield from _described(field["type"], (*path, field["name"]))
    for inner in ("element", "key", "value"):
        yield from _described(kind.get(f"{inner}Type"), (*path, inner))
