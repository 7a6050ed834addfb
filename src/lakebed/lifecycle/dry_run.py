"""What a policy would delete, before it is enabled: `dry_run` scans the bucket, `judging` evaluates a listing.

Both use the engine that workers use, and change nothing. A listing (of Spark, or an inventory report) comes as Arrow
batches. It shows neither tags nor locks, and a report may leave out times and sizes: where one of them decides, the
candidate is not `certain`. Applying candidates checks each again, by the same guarded delete as any other stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from itertools import groupby
from typing import TYPE_CHECKING, Any

import msgspec

from lakebed.lifecycle.delete_decision import decide, lock_forbids
from lakebed.lifecycle.eligibility import due_at, verb_of
from lakebed.lifecycle.engine import Activation, CompiledAction, PolicySnapshot, compile_policies
from lakebed.lifecycle.model import Calendar, Mode, ObjectEntry, ObjectIdentity, Rule
from lakebed.lifecycle.reserved import ReservedKeys
from lakebed.lifecycle.seams import Lister

if TYPE_CHECKING:
    import pyarrow as pa

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
SAMPLE_MAX = 20


class Candidate(msgspec.Struct, frozen=True):
    """One thing that a policy would delete, as far as a listing shows."""

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


class ListedObject(msgspec.Struct, frozen=True):
    """A row of a listing. A key's rows come together, the current version first, then newest first."""

    key: str
    size_bytes: int | None
    modified_ns: int | None
    etag: str | None = None
    version_id: str | None = None
    is_latest: bool | None = True
    is_delete_marker: bool | None = False


def ready(bucket: str, rules: Sequence[Rule], calendar: Calendar) -> PolicySnapshot:
    """The policy as if it were in force and its bootstrap scans complete."""
    active = Activation(Mode.EVENT_DRIVEN, True)
    return compile_policies({bucket: tuple(rules)}, lambda _: active, calendar)


def judge(
    rows: Iterable[ListedObject], snapshot: PolicySnapshot, bucket: str, now_ns: int, reserved: ReservedKeys
) -> Iterator[Candidate]:
    """What of these rows would go at `now_ns`. At most one candidate a row, by a certain action where there is one."""
    for key, versions in groupby(rows, key=lambda row: row.key):
        actions = sorted(snapshot.match_path(bucket, key), key=lambda action: action.ref)
        if not actions or reserved.holds(bucket, key):
            continue
        for row, entry in _family(bucket, list(versions)[:VERSIONS_MAX]):
            found = [one for action in actions if (one := _candidate(action, row, entry, now_ns, snapshot.calendar))]
            yield from sorted(found, key=lambda one: not one.certain)[:1]


def judging(
    bucket: str, rules: Sequence[Rule], now_ns: int, calendar: Calendar, reserved: ReservedKeys
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """`judge` as a function from Arrow batches to Arrow batches, which travels to where the listing is."""

    def judged(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        snapshot = ready(bucket, rules, calendar)
        kinds = {"string": pa.string(), "long": pa.int64(), "boolean": pa.bool_()}
        schema = pa.schema([(name, kinds[kind]) for name, kind in CANDIDATES])
        rows = (msgspec.convert(row, ListedObject) for batch in batches for row in batch.to_pylist())
        for some in _chunks(judge(rows, snapshot, bucket, now_ns, reserved)):
            yield pa.RecordBatch.from_pylist([msgspec.structs.asdict(one) for one in some], schema=schema)

    return judged


def _family(bucket: str, rows: Sequence[ListedObject]) -> Iterator[tuple[ListedObject, ObjectEntry]]:
    for place, row in enumerate(rows):
        latest = bool(row.is_latest) if row.is_latest is not None else place == 0
        yield (
            row,
            ObjectEntry(
                bucket=bucket,
                key=row.key,
                identity=ObjectIdentity(row.modified_ns or 0, row.size_bytes or 0, "", row.etag or ""),
                version_id=row.version_id or "",
                latest=latest,
                marker=bool(row.is_delete_marker),
                alone=len(rows) == 1,
                noncurrent_since_ns=None if latest or not place else rows[place - 1].modified_ns or 0,
                newer_noncurrent=max(0, place - 1),
            ),
        )


def _candidate(
    action: CompiledAction, row: ListedObject, entry: ObjectEntry, now_ns: int, calendar: Calendar
) -> Candidate | None:
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


class PlannedDelete(msgspec.Struct, frozen=True):
    """One object that would be deleted."""

    key: str
    verb: str
    kind: str
    rule: str
    size: int
    due_at_ns: int
    version_id: str = ""
    upload_id: str = ""


class DryRun(msgspec.Struct, frozen=True):
    """How many and how much. `undecided` may go too: what they depend on (tags) the source does not show.

    `complete` is False when the scan stopped at its limit: a larger bucket is evaluated over a listing, by Spark.
    """

    bucket: str
    scanned: int
    count: int
    bytes: int
    locked: int
    by_action: dict[str, int]
    sample: list[PlannedDelete]
    reserved: int = 0
    undecided: int = 0
    undecided_bytes: int = 0
    complete: bool = True
    source: str = "walk"


async def dry_run(
    lister: Lister,
    bucket: str,
    rules: tuple[Rule, ...],
    now_ns: int,
    calendar: Calendar,
    *,
    sample: int = SAMPLE_MAX,
    reserved: ReservedKeys | None = None,
    keys_max: int = 0,
) -> DryRun:
    """What would be deleted at `now_ns`, which may be in the future; the bucket is evaluated as it is now.

    `keys_max` limits the keys of the scan; 0 is no limit.
    """
    snapshot = ready(bucket, rules, calendar)
    scanned = count = size = locked = reserved_count = 0
    complete = True
    by_action: dict[str, int] = {}
    shown: list[PlannedDelete] = []
    async with aclosing(lister.scan(bucket)) as families:
        async for family in families:
            if keys_max and scanned >= keys_max:
                complete = False
                break
            scanned += 1
            actions = snapshot.match_path(bucket, family.key)
            for one in decide(actions, family, now_ns, calendar).deletions:
                if reserved is not None and reserved.holds(bucket, one.entry.key):
                    reserved_count += 1
                    continue
                if lock_forbids(one.entry, one.verb):
                    locked += 1
                    continue
                count += 1
                size += one.entry.size
                name = f"{one.action.rule.rule_id or one.action.ref.key.rule_hash}/{one.action.kind.value}"
                by_action[name] = by_action.get(name, 0) + 1
                if len(shown) < sample:
                    shown.append(
                        PlannedDelete(
                            one.entry.key,
                            one.verb.value,
                            one.action.kind.value,
                            one.action.rule.rule_id,
                            one.entry.size,
                            one.due_ns,
                            one.entry.version_id,
                            one.entry.upload_id,
                        )
                    )
    return DryRun(bucket, scanned, count, size, locked, by_action, shown, reserved_count, complete=complete)
