"""Blockers and retry budgets: pure changes of one value, so that a promotion is one write.

Nothing here ever skips an event. A blocker goes when its retry succeeds, when an operator resumes it (to be tried
again), or when an operator quarantines it with a reason (the only way to skip a delete).
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

from lakebed.core.errors import Invalid, NotFound
from lakebed.lifecycle.model import StreamKind, StreamResolution
from lakebed.lifecycle.state import Blocker, BlockerState, RetryBudget, Stream

T = TypeVar("T")

RETRIES_MAX = 30  # about half an hour of passes, one a minute
RETRY_AGE_MAX_NS = 4 * 3600 * 1_000_000_000
FATAL_TRIES = 5
QUARANTINED_MAX = 1000  # last decisions kept in the register; all of them are in the ledger


def blocker_id(stream: Stream) -> str:
    return hashlib.sha256(stream.id.encode()).hexdigest()[:12]


def record_retry(
    state: BlockerState,
    stream: Stream,
    *,
    bucket: str,
    key: str,
    now_ns: int,
    error: str,
    rule_hash: str = "",
    retries_max: int = RETRIES_MAX,
    age_max_ns: int = RETRY_AGE_MAX_NS,
) -> tuple[BlockerState, StreamResolution]:
    """One more RETRY_LATER at this position; beyond its budget it becomes a blocker."""
    known = state.budgets.get(stream.id)
    budget = RetryBudget((known.retries if known else 0) + 1, known.first_ns if known else now_ns, now_ns)
    if budget.retries < retries_max and now_ns - budget.first_ns < age_max_ns:
        budgets = {**state.budgets, stream.id: budget}
        return msgspec.structs.replace(state, budgets=budgets), StreamResolution.RETRY_LATER
    blocked = block(
        state,
        stream,
        bucket=bucket,
        key=key,
        now_ns=now_ns,
        reason="sustained RETRY_LATER",
        error=error,
        rule_hash=rule_hash,
        retries=budget.retries,
        first_ns=budget.first_ns,
    )
    return blocked, StreamResolution.BLOCKED


def clear_budget(state: BlockerState, stream: Stream) -> BlockerState:
    if stream.id not in state.budgets:
        return state
    return msgspec.structs.replace(state, budgets=_without(state.budgets, stream.id))


def block(
    state: BlockerState,
    stream: Stream,
    *,
    bucket: str,
    key: str,
    now_ns: int,
    reason: str,
    error: str,
    rule_hash: str = "",
    retries: int = 1,
    first_ns: int = 0,
) -> BlockerState:
    """Writes the blocker and removes its retry budget. Blocking the same position again keeps `first_seen_ns`."""
    ident = blocker_id(stream)
    known = state.blockers.get(ident)
    made = Blocker(
        blocker_id=ident,
        stream=stream,
        bucket=bucket,
        key=key,
        reason=reason,
        last_error=error[:500],
        first_seen_ns=known.first_seen_ns if known else (first_ns or now_ns),
        last_retry_ns=now_ns,
        retries=(known.retries if known else 0) + retries,
        rule_hash=rule_hash,
        version_id=stream.version_id,
    )
    blockers = {**state.blockers, ident: made}
    return msgspec.structs.replace(state, blockers=blockers, budgets=_without(state.budgets, stream.id))


def lift(state: BlockerState, ident: str) -> tuple[BlockerState, Blocker]:
    """Removes a blocker and its retry budget: after a retry that worked, a resume or a quarantine. Raises NotFound."""
    known = find(state, ident)
    blockers, budgets = _without(state.blockers, known.blocker_id), _without(state.budgets, known.stream.id)
    return msgspec.structs.replace(state, blockers=blockers, budgets=budgets), known


def quarantine(state: BlockerState, ident: str, reason: str, who: str, now_ns: int) -> tuple[BlockerState, Blocker]:
    if not reason.strip():
        raise Invalid("a quarantine needs a reason", hint="--reason says why this delete is skipped")
    after, known = lift(state, ident)
    note = f"{now_ns} {who} {known.stream.id} {reason}"
    return msgspec.structs.replace(after, quarantined=(*after.quarantined, note)[-QUARANTINED_MAX:]), known


def find(state: BlockerState, ident: str) -> Blocker:
    found = [one for name, one in state.blockers.items() if name.startswith(ident)] if ident else []
    if len(found) != 1:
        raise NotFound(f"there is no blocker {ident!r}", hint="lakebed lifecycle blockers list")
    return found[0]


def blocks(state: BlockerState, kind: StreamKind, *, delay_ns: int = 0, bucket: str = "", action: str = "") -> bool:
    """Whether this stream is blocked: a delay group, the predicates, a bucket's scan, an action's drain."""
    return any(
        one.stream.kind is kind
        and (kind is not StreamKind.ORIGINAL or one.stream.delay_ns == delay_ns)
        and (kind not in (StreamKind.BOOTSTRAP, StreamKind.PENDING) or one.stream.bucket == bucket)
        and (kind is not StreamKind.PENDING or one.stream.action == action)
        for one in state.blockers.values()
    )


def _without(some: dict[str, T], key: str) -> dict[str, T]:
    return {name: value for name, value in some.items() if name != key}
