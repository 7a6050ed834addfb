"""The same evaluation over a listing: Arrow batches in, what would be deleted out. For buckets too large to walk.

Whoever has a listing (Spark, an inventory report) maps its batches through `judging`; the rules are decided by the one
engine. A listing shows neither tags nor locks, and a report may leave out times and sizes: where one of them decides,
the candidate is not `certain`. Applying looks at everything anew, by the same guarded delete as any other stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec

from lakebed.lifecycle.engine import Activation, CompiledAction, Snapshot, compile_policies
from lakebed.lifecycle.evaluate import due_at, verb_of
from lakebed.lifecycle.home import Home
from lakebed.lifecycle.model import Calendar, Entry, Identity, Mode, Rule

if TYPE_CHECKING:
    import pyarrow as pa

NULL = "null"
CANDIDATES = (
    ("key", "string"),
    ("version_id", "string"),
    ("verb", "string"),
    ("kind", "string"),
    ("rule_id", "string"),
    ("rule_hash", "string"),
    ("size", "long"),
    ("mtime_ns", "long"),
    ("due_at_ns", "long"),
    ("certain", "boolean"),
)
SCHEMA = ", ".join(f"{name} {'bigint' if kind == 'long' else kind}" for name, kind in CANDIDATES)
VERSIONS_MAX = 100_000  # versions of one key held at once


class Candidate(msgspec.Struct, frozen=True):
    """One thing that a policy would delete, as far as a listing can tell."""

    key: str
    version_id: str
    verb: str
    kind: str
    rule_id: str
    rule_hash: str
    size: int
    mtime_ns: int
    due_at_ns: int
    certain: bool


class Listed(msgspec.Struct, frozen=True):
    """A row of a listing. A key's rows come together, the current version first, then newest first."""

    key: str
    size_bytes: int | None
    modified_ns: int | None
    etag: str | None = None
    version_id: str | None = None
    is_latest: bool | None = True
    is_delete_marker: bool | None = False


def ready(bucket: str, rules: Sequence[Rule], calendar: Calendar) -> Snapshot:
    """The policy as if it were in force and everything walked."""
    active = Activation(Mode.EVENT_DRIVEN, True)
    return compile_policies({bucket: tuple(rules)}, lambda _: active, calendar)


def judge(rows: Iterable[Listed], snapshot: Snapshot, bucket: str, now_ns: int, home: Home) -> Iterator[Candidate]:
    """What of these rows would go at `now_ns`. At most one candidate a row, by a certain action where there is one."""
    for key, versions in groupby(rows, key=lambda row: row.key):
        actions = sorted(snapshot.match_path(bucket, key), key=lambda action: action.ref)
        if not actions or home.holds(bucket, key):
            continue
        for row, entry in _family(bucket, list(versions)[:VERSIONS_MAX]):
            found = [one for action in actions if (one := _candidate(action, row, entry, now_ns, snapshot.calendar))]
            yield from sorted(found, key=lambda one: not one.certain)[:1]


def judging(
    bucket: str, rules: Sequence[Rule], now_ns: int, calendar: Calendar, home: Home
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """`judge` as a function from Arrow batches to Arrow batches, which travels to where the listing is."""

    def judged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        snapshot = ready(bucket, rules, calendar)
        kinds = {"string": pa.string(), "long": pa.int64(), "boolean": pa.bool_()}
        schema = pa.schema([(name, kinds[kind]) for name, kind in CANDIDATES])
        rows = (msgspec.convert(row, Listed) for batch in batches for row in batch.to_pylist())
        for some in _chunks(judge(rows, snapshot, bucket, now_ns, home)):
            yield pa.RecordBatch.from_pylist([msgspec.structs.asdict(one) for one in some], schema=schema)

    return judged


def _family(bucket: str, rows: Sequence[Listed]) -> Iterator[tuple[Listed, Entry]]:
    for place, row in enumerate(rows):
        latest = bool(row.is_latest) if row.is_latest is not None else place == 0
        yield (
            row,
            Entry(
                bucket=bucket,
                key=row.key,
                identity=Identity(row.modified_ns or 0, row.size_bytes or 0, "", row.etag or ""),
                version_id=row.version_id or "",
                latest=latest,
                marker=bool(row.is_delete_marker),
                alone=len(rows) == 1,
                noncurrent_since_ns=None if latest or not place else rows[place - 1].modified_ns or 0,
                newer_noncurrent=max(0, place - 1),
            ),
        )


def _candidate(action: CompiledAction, row: Listed, entry: Entry, now_ns: int, calendar: Calendar) -> Candidate | None:
    """The candidate by this action, taking what the listing does not show as if it spoke for deleting."""
    rule = action.rule
    shown = msgspec.structs.replace(entry, tags=rule.tags)
    certain = not (rule.tags and not entry.marker) and row.modified_ns is not None
    if row.size_bytes is None and (rule.size_greater_than, rule.size_less_than) != (None, None):
        rule, certain = msgspec.structs.replace(rule, size_greater_than=None, size_less_than=None), False
    due_ns = due_at(rule, action.kind, shown, calendar)
    if due_ns is None or due_ns > now_ns:
        return None
    return Candidate(
        key=entry.key,
        version_id=entry.version_id,
        verb=verb_of(action.kind, entry).value,
        kind=action.kind.value,
        rule_id=rule.rule_id,
        rule_hash=action.ref.key.rule_hash,
        size=entry.size,
        mtime_ns=entry.mtime_ns,
        due_at_ns=due_ns,
        certain=certain,
    )


def _chunks(found: Iterator[Candidate], size: int = 4096) -> Iterator[list[Any]]:
    held: list[Any] = []
    for one in found:
        held.append(one)
        if len(held) >= size:
            yield held
            held = []
    if held:
        yield held
