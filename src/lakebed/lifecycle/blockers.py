"""Blockers, retry budgets and what was isolated: pure changes of one value, so that a promotion is one write.

A failure for now is retried; beyond the budget of its stream it becomes a blocker, one for each stream and cause. A
thing that can never be processed is isolated with its reason and its stream goes on, unless there are too many. A
blocker goes when its retry succeeds, when an operator resumes it, or when an operator quarantines it with a reason,
which skips the positions that it names and no other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from lakebed.core.errors import Conflict, Invalid, NotFound
from lakebed.lifecycle.model import DeleteOutcome, StreamKind, StreamResolution
from lakebed.lifecycle.state import Blocker, BlockerState, IsolatedItem, ReaderState, RetryBudget, Stream

T = TypeVar("T")

RETRIES_MAX = 30  # about half an hour of passes, one a minute
RETRY_AGE_MAX_NS = 4 * 3600 * 1_000_000_000
FATAL_TRIES = 5
QUARANTINED_MAX = 1000  # last decisions kept in the register; all of them are in the ledger
ITEMS_MAX = 256  # positions that one blocker names: a batch
ISOLATED_MAX = 100  # of one stream; more of them are no odd keys but a fault
SKIPS_MAX = 1000  # positions of sweeps that are skipped and not passed yet
SUSTAINED = "sustained RETRY_LATER"
TOO_MANY = "too many isolated"


class Failure(msgspec.Struct, frozen=True):
    """One position that was not resolved, and why. `cause` is the outcome."""

    stream: Stream
    bucket: str
    key: str
    cause: str
    error: str
    rule_hash: str = ""


class Limits(msgspec.Struct, frozen=True):
    retries_max: int = RETRIES_MAX
    age_max_ns: int = RETRY_AGE_MAX_NS


def blocker_id(lane: str, cause: str) -> str:
    return hashlib.sha256(f"{lane} {cause}".encode()).hexdigest()[:12]


def item_id(stream: Stream) -> str:
    return hashlib.sha256(stream.id.encode()).hexdigest()[:12]


def recorded(
    state: BlockerState, failures: Sequence[Failure], now_ns: int, limits: Limits = Limits()
) -> tuple[BlockerState, dict[str, StreamResolution]]:
    """The state after these failures of one batch, and what each means for its stream, by position."""
    answers: dict[str, StreamResolution] = {}
    groups: dict[tuple[str, str], list[Failure]] = {}
    for failure in failures:
        groups.setdefault((failure.stream.lane, failure.cause), []).append(failure)
    for (_, cause), some in groups.items():
        if cause == DeleteOutcome.FATAL_EVENT_ERROR:
            state, answer = _isolated(state, some, now_ns)
        else:
            state, answer = _retried(state, some, now_ns, limits)
        answers |= {failure.stream.id: answer for failure in some}
    return state, answers


def _isolated(state: BlockerState, some: list[Failure], now_ns: int) -> tuple[BlockerState, StreamResolution]:
    lane = some[0].stream.lane
    items = dict(state.isolated)
    for one in some:
        known = items.get(item_id(one.stream))
        items[item_id(one.stream)] = IsolatedItem(
            one.stream,
            one.bucket,
            one.key,
            one.error[:500],
            known.first_seen_ns if known else now_ns,
            now_ns,
            (known.times if known else 0) + 1,
            one.rule_hash,
        )
    if sum(item.stream.lane == lane for item in items.values()) > ISOLATED_MAX:
        return block(state, some, now_ns, reason=TOO_MANY, retries=FATAL_TRIES), StreamResolution.BLOCKED
    places = {one.stream.id for one in some}
    budgets = {name: one for name, one in state.budgets.items() if one.at not in places}
    return msgspec.structs.replace(state, isolated=items, budgets=budgets), StreamResolution.NOOP_RESOLVED


def _retried(
    state: BlockerState, some: list[Failure], now_ns: int, limits: Limits
) -> tuple[BlockerState, StreamResolution]:
    """One more RETRY_LATER at this position of the stream; beyond its budget it becomes a blocker."""
    first = some[0]
    name = f"{first.stream.lane} {first.cause}"
    known = state.budgets.get(name)
    if known is not None and known.at != first.stream.id:
        known = None  # the stream has moved on since
    budget = RetryBudget(
        (known.retries if known else 0) + 1, known.first_ns if known else now_ns, now_ns, first.stream.id
    )
    if budget.retries < limits.retries_max and now_ns - budget.first_ns < limits.age_max_ns:
        return msgspec.structs.replace(state, budgets={**state.budgets, name: budget}), StreamResolution.RETRY_LATER
    blocked = block(state, some, now_ns, reason=SUSTAINED, retries=budget.retries, first_ns=budget.first_ns)
    return blocked, StreamResolution.BLOCKED


def block(
    state: BlockerState, some: Sequence[Failure], now_ns: int, *, reason: str, retries: int = 1, first_ns: int = 0
) -> BlockerState:
    """Writes the blocker of a stream for one cause, and removes its retry budget. Again, it keeps `first_seen_ns`."""
    first = some[0]
    ident = blocker_id(first.stream.lane, first.cause)
    known = state.blockers.get(ident)
    made = Blocker(
        blocker_id=ident,
        stream=first.stream,
        bucket=first.bucket,
        key=first.key,
        reason=f"{reason}: {first.cause}",
        last_error=first.error[:500],
        first_seen_ns=known.first_seen_ns if known else (first_ns or now_ns),
        last_retry_ns=now_ns,
        retries=(known.retries if known else 0) + retries,
        rule_hash=first.rule_hash,
        version_id=first.stream.version_id,
        items=tuple(one.stream for one in some[:ITEMS_MAX]),
    )
    budgets = _without(state.budgets, f"{first.stream.lane} {first.cause}")
    return msgspec.structs.replace(state, blockers={**state.blockers, ident: made}, budgets=budgets)


def block_listing(state: BlockerState, bucket: str, error: str, now_ns: int) -> BlockerState:
    """Blocks the scan of a bucket whose listing cannot be read: there is no key to isolate."""
    stream = Stream(StreamKind.BOOTSTRAP, bucket=bucket)
    failure = Failure(stream, bucket, "", DeleteOutcome.FATAL_EVENT_ERROR.value, error)
    return block(state, [failure], now_ns, reason="the listing cannot be read")


def cleared(state: BlockerState, resolved: Iterable[Stream]) -> BlockerState:
    """Without the budgets of positions that were resolved, and without those among what was isolated."""
    streams = list(resolved)
    places = {stream.id for stream in streams}
    budgets = {name: one for name, one in state.budgets.items() if one.at not in places}
    aside = _without(state.isolated, *(item_id(stream) for stream in streams)) if state.isolated else state.isolated
    if len(budgets) == len(state.budgets) and len(aside) == len(state.isolated):
        return state
    return msgspec.structs.replace(state, budgets=budgets, isolated=aside)


def lift(state: BlockerState, ident: str) -> tuple[BlockerState, Blocker]:
    """Removes a blocker: after a retry that worked, a resume or a quarantine. Raises NotFound."""
    known = find(state, ident)
    budgets = {name: one for name, one in state.budgets.items() if not name.startswith(f"{known.stream.lane} ")}
    blockers = _without(state.blockers, known.blocker_id)
    return msgspec.structs.replace(state, blockers=blockers, budgets=budgets), known


def quarantine(state: BlockerState, ident: str, reason: str, who: str, now_ns: int) -> tuple[BlockerState, Blocker]:
    """Removes the blocker, and lets sweeps pass the positions it names."""
    if not reason.strip():
        raise Invalid("a quarantine needs a reason", hint="give --reason: why this delete is skipped")
    after, known = lift(state, ident)
    items = known.items or (known.stream,)
    note = f"{now_ns} {who} {known.stream.id} {reason}" + (f" (and {len(items) - 1} more)" if len(items) > 1 else "")
    skips = dict(after.skips)
    if known.stream.kind in (StreamKind.ORIGINAL, StreamKind.PREDICATE):
        skips |= {item.id: item for item in items}
    if len(skips) > SKIPS_MAX:
        raise Conflict(f"{len(after.skips)} positions are skipped already, which is the limit")
    quarantined = (*after.quarantined, note)[-QUARANTINED_MAX:]
    return msgspec.structs.replace(after, quarantined=quarantined, skips=skips), known


def without_passed(state: BlockerState, cursors: Mapping[int, ReaderState]) -> BlockerState:
    """Without the skips that the cursors have passed, or that no cursor will meet any more."""

    def ahead(item: Stream) -> bool:
        at = cursors[item.shard].cursor(item.delay_ns if item.kind is StreamKind.ORIGINAL else None)
        return at is not None and at < item.position

    kept = {name: item for name, item in state.skips.items() if ahead(item)}
    return state if len(kept) == len(state.skips) else msgspec.structs.replace(state, skips=kept)


def find(state: BlockerState, ident: str) -> Blocker:
    found = [one for name, one in state.blockers.items() if name.startswith(ident)] if ident else []
    if len(found) != 1:
        raise NotFound(f"there is no blocker {ident!r}", hint="lakebed lifecycle blockers list")
    return found[0]


def chosen(state: BlockerState, *, every: bool = False, bucket: str = "", cause: str = "") -> list[Blocker]:
    """The blockers that an operator means: all, or those of a bucket, or of a cause, or of both. Raises Invalid."""
    if not (every or bucket or cause):
        raise Invalid("no blocker is named", hint="give an id, --bucket, --cause or --all")
    return [
        one
        for one in sorted(state.blockers.values(), key=lambda one: one.first_seen_ns)
        if bucket in ("", one.bucket) and cause.lower() in one.reason.lower()
    ]


def blocks(state: BlockerState, lane: str) -> bool:
    """Whether this stream is blocked: a delay group or the predicates of a shard, a scan, an action's drain."""
    return any(one.stream.lane == lane for one in state.blockers.values())


def _without(some: dict[str, T], *keys: str) -> dict[str, T]:
    return {name: value for name, value in some.items() if name not in keys}
