"""What to delete, and whether a delete may go ahead: pure, the same for every stream.

`decide` chooses one verb per entry of a key. An entry that is not due is left to its own event, which looks at the live
object: tags and versions that changed meanwhile need no other. Only where no event will come it waits as an exception:
an entry whose time is later than its event, and one written while the log lost events. `guard` checks a delete with
what was read last before it: reserved keys, identity, policy, eligibility, lock, in this order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from lakebed.core.errors import Corrupt, Denied, Invalid, LakebedError, NotFound, Stale, Unavailable
from lakebed.lifecycle.cluster import LogGap
from lakebed.lifecycle.eligibility import due_at, evaluate, origin_ns, verb_of
from lakebed.lifecycle.engine import ActionRef, CompiledAction, action_keys
from lakebed.lifecycle.model import (
    ActionKey,
    Calendar,
    DeleteOutcome,
    Mode,
    ObjectEntry,
    Rule,
    StreamResolution,
    Verb,
)
from lakebed.lifecycle.reserved import ReservedKeys
from lakebed.lifecycle.seams import ChangeEvent, Family
from lakebed.lifecycle.state import PendingItem

NULL_VERSION = "null"  # S3's id of a version that was written without one


class Deletion(msgspec.Struct, frozen=True):
    entry: ObjectEntry
    verb: Verb
    action: CompiledAction
    due_ns: int


class Decision(msgspec.Struct, frozen=True):
    deletions: tuple[Deletion, ...] = ()
    waits: tuple[tuple[ActionRef, PendingItem], ...] = ()
    next_due_ns: int = 0  # the first instant at which an action that no event drives is due; 0 when there is none


def decide(
    actions: Iterable[CompiledAction],
    family: Family,
    now_ns: int,
    calendar: Calendar,
    event: ChangeEvent | None = None,
    gaps: Sequence[LogGap] = (),
) -> Decision:
    ordered = sorted(actions, key=lambda action: action.ref)
    deletions: list[Deletion] = []
    waits: list[tuple[ActionRef, PendingItem]] = []
    dues: list[int] = []
    for entry in sorted(family.entries, key=lambda entry: entry.latest):  # noncurrent ones first
        later: list[tuple[ActionRef, PendingItem]] = []
        for action in ordered:
            due_ns = due_at(action.rule, action.kind, entry, calendar)
            if due_ns is None:
                continue
            if due_ns <= now_ns:
                deletions.append(Deletion(entry, verb_of(action.kind, entry), action, due_ns))
                later = []
                break
            if action.mode is Mode.SCAN_ONLY:
                dues.append(due_ns)
            elif _no_event_to_come(event, entry) or any(gap.holds(origin_ns(action.kind, entry)) for gap in gaps):
                item = PendingItem(entry.key, entry.version_id, due_ns, entry.identity, entry.upload_id)
                later.append((action.ref, item))
        waits += later
    return Decision(tuple(deletions), tuple(waits), min(dues, default=0))


def _no_event_to_come(event: ChangeEvent | None, entry: ObjectEntry) -> bool:
    if event is None or event.new is None:
        return False
    brought = (event.new.mtime_ns, event.new.size) == (entry.mtime_ns, entry.size)
    return brought and entry.mtime_ns > event.position.ts_ns


class EventMeaning(StrEnum):
    AGE_ORIGIN = "age_origin"
    PREDICATE_CHANGE = "predicate_change"
    REMOVAL = "removal"
    NOTHING = "nothing"


def meaning(event: ChangeEvent, *, versioned: bool = False) -> EventMeaning:
    old, new = event.old, event.new
    if new is None:
        version = event.version_id or (versioned and not event.upload_id)
        return EventMeaning.REMOVAL if old is not None and version else EventMeaning.NOTHING
    if old is None or (old.mtime_ns, old.size, old.fids) != (new.mtime_ns, new.size, new.fids):
        return EventMeaning.AGE_ORIGIN
    return EventMeaning.PREDICATE_CHANGE if old.extended_hash != new.extended_hash else EventMeaning.NOTHING


def sweeps_original(event: ChangeEvent, *, versioned: bool) -> bool:
    return meaning(event, versioned=versioned) in (EventMeaning.AGE_ORIGIN, EventMeaning.REMOVAL)


def sweeps_predicate(event: ChangeEvent, *, versioned: bool) -> bool:
    return meaning(event, versioned=versioned) in (EventMeaning.PREDICATE_CHANGE, EventMeaning.REMOVAL)


def same_entry(one: ObjectEntry, other: ObjectEntry) -> bool:
    return (one.version_id, one.upload_id) == (other.version_id, other.upload_id)


def guard(
    wanted: ObjectEntry,
    verb: Verb,
    key: ActionKey,
    rule: Rule,
    *,
    live: Iterable[ObjectEntry],
    policy: tuple[Rule, ...],
    reserved: ReservedKeys,
    now_ns: int,
    calendar: Calendar,
) -> DeleteOutcome | None:
    """None when the delete may go ahead; otherwise its outcome."""
    if reserved.holds(wanted.bucket, wanted.key):
        return DeleteOutcome.SKIPPED_RESERVED
    current = next((entry for entry in live if same_entry(entry, wanted)), None)
    if current is None:
        return DeleteOutcome.NOT_FOUND
    if current.identity != wanted.identity:
        return DeleteOutcome.STALE_IDENTITY
    if key not in action_keys(policy):
        return DeleteOutcome.STALE_POLICY
    if evaluate(rule, key.kind, current, now_ns, calendar) is not verb:
        return DeleteOutcome.NO_LONGER_ELIGIBLE
    return DeleteOutcome.SKIPPED_OBJECT_LOCK if lock_forbids(current, verb) else None


def lock_forbids(entry: ObjectEntry, verb: Verb) -> bool:
    """Whether object lock forbids this. A delete marker above a locked version removes nothing, so AWS creates it; the
    null version may be replaced by its marker, so its lock counts.
    """
    marks = verb is Verb.CURRENT and entry.version_id not in ("", NULL_VERSION)
    return entry.locked and not marks


def outcome_of(error: LakebedError) -> DeleteOutcome:
    """The outcome of a delete that the store refused."""
    if isinstance(error, NotFound):
        return DeleteOutcome.NOT_FOUND
    if isinstance(error, Stale):
        return DeleteOutcome.STALE_IDENTITY
    if isinstance(error, Denied):
        return DeleteOutcome.SKIPPED_OBJECT_LOCK
    if isinstance(error, (Corrupt, Invalid)) and not isinstance(error, Unavailable):
        return DeleteOutcome.FATAL_EVENT_ERROR
    return DeleteOutcome.TRANSPORT_ERROR


_RESOLUTIONS = {
    DeleteOutcome.DELETED: StreamResolution.DONE,
    DeleteOutcome.NOT_FOUND: StreamResolution.NOOP_RESOLVED,
    DeleteOutcome.STALE_IDENTITY: StreamResolution.NOOP_RESOLVED,
    DeleteOutcome.STALE_POLICY: StreamResolution.NOOP_RESOLVED,
    DeleteOutcome.NO_LONGER_ELIGIBLE: StreamResolution.NOOP_RESOLVED,
    DeleteOutcome.SKIPPED_OBJECT_LOCK: StreamResolution.NOOP_RESOLVED,
    DeleteOutcome.SKIPPED_RESERVED: StreamResolution.NOOP_RESOLVED,
    DeleteOutcome.TRANSPORT_ERROR: StreamResolution.RETRY_LATER,
    DeleteOutcome.FATAL_EVENT_ERROR: StreamResolution.BLOCKED,
}


def resolution_of(outcome: DeleteOutcome) -> StreamResolution:
    """The seed's table, one row each."""
    return _RESOLUTIONS[outcome]
