"""Operator actions: status, pause, scan, reseed, and decisions on blockers. Nothing is ever skipped automatically.

Every change is one write of a register that workers read on their next round.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from lakebed.core.errors import Conflict, Invalid, NotFound
from lakebed.lifecycle import blockers
from lakebed.lifecycle.engine import ActionRef, CompiledAction, PolicySnapshot
from lakebed.lifecycle.model import (
    ActionKey,
    ActionKind,
    Calendar,
    Degraded,
    Mode,
    Position,
    StreamKind,
    StreamResolution,
)
from lakebed.lifecycle.pending import PendingStore
from lakebed.lifecycle.reader import advance_cursor
from lakebed.lifecycle.resolver import Resolver, WorkItem
from lakebed.lifecycle.state import (
    ActionState,
    Blocker,
    BlockerState,
    BucketLifecycle,
    LifecycleState,
    ReaderState,
    WakeRequest,
    changed,
    scan_place,
)

SKIPS_MAX = 1000  # keys of one bucket that scans skip
STATUS_ROWS = 500  # of one response: each row reads its action's exceptions


class Operator:
    """`calendar` is the workers' own: it decides what is due, and so the lag."""

    def __init__(self, state: LifecycleState, calendar: Calendar = Calendar()) -> None:
        self._state, self._calendar = state, calendar
        self._pending = PendingStore(state.runtime)

    # Looking.

    async def status(self, bucket: str = "", *, limit: int = STATUS_ROWS) -> list[dict[str, Any]]:
        """One row per action: mode, degraded reason, bootstrap, the next scan, lag, exceptions, blockers; and when a
        worker last completed a round, 0 for never. At most `limit` actions are read and returned.
        """
        rows: list[dict[str, Any]] = []
        reader, held = (await self._state.reader.read()).value, (await self._state.blockers.read()).value
        tick_ns = await self.last_round_ns()
        for name in [bucket] if bucket else await self._state.buckets():
            if len(rows) >= limit:
                break
            state = (await self._state.bucket(name).read()).value
            if state.problem:
                rows.append({"bucket": name, "action": "", "mode": "invalid policy", "why": state.problem})
            for key, action in sorted(state.actions.items())[: limit - len(rows)]:
                pending = len((await self._pending.load(_ref(name, key))).items)
                row = _row(name, key, action, state)
                row |= {"pending": pending, "blockers": _blocked(held, name, key, action), "last_tick_ns": tick_ns}
                rows.append(row | {"lag_s": _lag_s(reader, action, self._state.clock.now_ns(), self._calendar)})
        return rows

    async def last_round_ns(self) -> int:
        """When a worker last completed a round over every bucket, on record within seconds; 0 before the first."""
        return (await self._state.last_round.read()).value.at_ns

    async def blockers(self, *, stream: str = "", bucket: str = "") -> list[Blocker]:
        found = (await self._state.blockers.read()).value.blockers.values()
        return sorted(
            (one for one in found if stream in ("", one.stream.kind.value) and bucket in ("", one.bucket)),
            key=lambda one: one.first_seen_ns,
        )

    # Blockers.

    async def retry(self, ident: str, resolver: Resolver, snapshot: PolicySnapshot) -> StreamResolution:
        """Tries the blocked thing now, against what is live. When it is resolved the blocker goes and its cursor
        passes it; otherwise the blocker stays, with one more try on record.
        """
        blocker = blockers.find((await self._state.blockers.read()).value, ident)
        (answer,) = await resolver.settle([_again(blocker, snapshot)])
        if answer.resolved:
            await self._pass(blocker)
            await self._lift(blocker)
        return answer

    async def resume(self, ident: str) -> Blocker:
        """Removes the blocker and leaves the cursor: the next round retries with a new retry budget."""
        return await self._state.blockers.change(lambda known: blockers.lift(known, ident))

    async def quarantine(self, ident: str, *, reason: str, who: str) -> Blocker:
        """Skips this delete: its stream continues. Needs a reason; counted and recorded.

        Scans skip the key from now on, until `rebootstrap`.
        """
        blocker = blockers.find((await self._state.blockers.read()).value, ident)
        if not reason.strip():
            raise Invalid("a quarantine needs a reason", hint="--reason says why this delete is skipped")
        if blocker.stream.kind is StreamKind.BOOTSTRAP:
            await self._skip(blocker, reason)
        await self._pass(blocker)
        now_ns = self._state.clock.now_ns()
        lifted = await self._state.blockers.change(
            lambda known: blockers.quarantine(known, blocker.blocker_id, reason, who, now_ns)
        )
        counter = self._state.metrics.counter("lakebed_lifecycle_quarantined_total")
        counter.labels(stream_kind=blocker.stream.kind.value, bucket=blocker.bucket).inc()
        return lifted

    async def _pass(self, blocker: Blocker) -> None:
        stream = blocker.stream
        if stream.kind is StreamKind.PENDING:
            place = f"{stream.upload_id}\x00{stream.version_id}\x00{stream.key}"
            await self._pending.remove(_ref(stream.bucket, stream.action), [place])
        if stream.kind not in (StreamKind.ORIGINAL, StreamKind.PREDICATE):
            return
        delay_ns = stream.delay_ns if stream.kind is StreamKind.ORIGINAL else None

        def past(state: ReaderState) -> ReaderState:
            known = state.cursor(delay_ns) or Position()
            return advance_cursor(state, delay_ns, known, stream.position)

        await self._state.reader.change(changed(past))

    async def _skip(self, blocker: Blocker, reason: str) -> None:
        if not blocker.key:
            raise Conflict(
                "the listing cannot be read: there is no key to skip",
                hint="repair what the reason names, then run: lakebed lifecycle blockers resume",
            )
        place = scan_place(blocker.key, blocker.stream.upload_id)

        def skip(state: BucketLifecycle) -> BucketLifecycle:
            if len(state.skips) >= SKIPS_MAX and place not in state.skips:
                raise Conflict(f"{len(state.skips)} keys of {blocker.bucket} are skipped already, which is the limit")
            return msgspec.structs.replace(state, skips={**state.skips, place: reason})

        await self._state.bucket(blocker.bucket).change(changed(skip))

    async def _lift(self, blocker: Blocker) -> None:
        def lift(known: BlockerState) -> BlockerState:
            return blockers.lift(known, blocker.blocker_id)[0] if blocker.blocker_id in known.blockers else known

        await self._state.blockers.change(changed(lift))

    # Actions.

    async def pause(self, bucket: str, action: str = "", *, paused: bool = True) -> list[str]:
        """Pauses actions of a bucket, all or by name prefix; or resumes them with a new scan, since they missed events.
        Returns their names.
        """

        def change(known: ActionState) -> ActionState:
            if known.paused == paused:
                return known
            fresh = known.bootstrap_complete and paused
            return msgspec.structs.replace(known, paused=paused, bootstrap_complete=fresh)

        return await self._each(bucket, action, change)

    async def rebootstrap(self, bucket: str, action: str = "") -> None:
        """Requests a bootstrap scan of the bucket: its actions (all, or by name prefix) start over, cursors are seeded
        again, and no key is skipped any more. A demoted action stays demoted.
        """

        def anew(state: BucketLifecycle) -> BucketLifecycle:
            actions = {
                name: msgspec.structs.replace(one, bootstrap_complete=False)
                if name.startswith(action) and one.mode is not Mode.SCAN_ONLY
                else one
                for name, one in state.actions.items()
            }
            return msgspec.structs.replace(state, rescan=True, actions=actions, skips={})

        await self._state.bucket(bucket).change(changed(anew))

    async def wake(self, who: str = "") -> int:
        """Requests a round of every worker. Returns the count it set."""

        def more(known: WakeRequest) -> WakeRequest:
            return WakeRequest(count=known.count + 1, who=who)

        return (await self._state.wake.change(changed(more))).count

    async def cadence(self, bucket: str, action: str, every_ns: int) -> list[str]:
        """Sets the interval of safety scans; 0 restores the default of the kind."""
        if every_ns < 0:
            raise Invalid("a cadence cannot be negative")

        def change(known: ActionState) -> ActionState:
            next_ns = known.last_scan_ns + every_ns if every_ns else known.next_scan_ns
            return msgspec.structs.replace(known, cadence_ns=every_ns, next_scan_ns=next_ns)

        return await self._each(bucket, action, change)

    async def _each(self, bucket: str, action: str, change: Any) -> list[str]:
        def apply(state: BucketLifecycle) -> tuple[BucketLifecycle, list[str]]:
            names = [name for name in state.actions if name.startswith(action)]
            if not names:
                raise NotFound(f"{bucket} has no action {action!r}", hint=f"lakebed lifecycle status {bucket}")
            after = {name: change(one) if name in names else one for name, one in state.actions.items()}
            return msgspec.structs.replace(state, actions=after), names

        return await self._state.bucket(bucket).change(apply)

    # Reseeding.

    async def reseed(
        self, snapshot: PolicySnapshot, *, delay_ns: int | None = None, predicate: bool = False
    ) -> list[str]:
        """Brings demoted actions of a delay group, or of the predicate stream, back to events, by a scan of each of
        their buckets that seeds the cursors again. Siblings replay the same window, which is safe. Returns the buckets.
        """
        if (delay_ns is None) == (not predicate):
            raise Invalid("reseed needs a delay or the predicates", hint="--delay-days N, or --predicate")
        affected = [
            action
            for action in snapshot.actions.values()
            if (predicate and action.predicate_sensitive) or (delay_ns is not None and delay_ns in action.delays_ns)
        ]
        if not affected:
            raise NotFound("no action has this delay" if delay_ns is not None else "no action depends on predicates")
        return await self._force(affected, predicate=predicate)

    async def acknowledge_lost_log(self, snapshot: PolicySnapshot, *, reason: str) -> list[str]:
        """Acknowledges that events are missing: drops the cursors and seeds all of them by a scan of every bucket.

        Allowed only while the log is lost; actions whose horizon the log cannot hold stay on scans.
        """
        if not reason.strip():
            raise Invalid("acknowledging a lost log needs a reason", hint="--reason")
        if not (await self._state.reader.read()).value.lost_log_since_ns:
            raise Conflict("no event log is lost: there is nothing to acknowledge")
        driven = [action for action in snapshot.actions.values() if action.delays_ns]
        buckets = await self._force(driven, predicate=any(action.predicate_sensitive for action in driven))
        await self._state.reader.change(changed(lambda _: ReaderState()))
        return buckets

    async def _force(self, actions: Iterable[CompiledAction], *, predicate: bool) -> list[str]:
        wanted: dict[str, set[int]] = {}
        for action in actions:
            wanted.setdefault(action.ref.bucket, set()).update(action.delays_ns)
        for bucket, delays in sorted(wanted.items()):
            await self._state.bucket(bucket).change(changed(_forcing(delays, predicate)))
        return sorted(wanted)


def _forcing(delays: set[int], predicate: bool) -> Any:
    def ask(state: BucketLifecycle) -> BucketLifecycle:
        return msgspec.structs.replace(
            state,
            rescan=True,
            force_delays_ns=tuple(sorted({*state.force_delays_ns, *delays})),
            force_predicate=state.force_predicate or predicate,
        )

    return ask


def _ref(bucket: str, action: str) -> ActionRef:
    rule_hash, _, kind = action.partition("/")
    return ActionRef(bucket, ActionKey(rule_hash, ActionKind(kind)))


def _lag_s(reader: ReaderState, action: ActionState, now_ns: int, calendar: Calendar) -> float:
    """How far the slowest of the action's sweeps is behind what is due for it; 0 for one that no sweep reaches."""
    if action.mode is not Mode.EVENT_DRIVEN or not action.bootstrap_complete:
        return 0.0
    places = [(delay, reader.cursor(delay)) for delay in action.delays_ns]
    behind = [calendar.cutoff(now_ns, delay) - at.ts_ns for delay, at in places if at is not None]
    if action.predicate and reader.predicate is not None:
        behind.append(now_ns - reader.predicate.ts_ns)
    return round(max(0, *behind, 0) / 1e9, 3)


def _blocked(held: BlockerState, bucket: str, name: str, action: ActionState) -> int:
    """Blockers that keep this action from going on."""
    return sum(
        (one.stream.kind is StreamKind.BOOTSTRAP and one.bucket == bucket)
        or (one.stream.kind is StreamKind.PENDING and (one.stream.bucket, one.stream.action) == (bucket, name))
        or (one.stream.kind is StreamKind.ORIGINAL and one.stream.delay_ns in action.delays_ns)
        or (one.stream.kind is StreamKind.PREDICATE and action.predicate)
        for one in held.blockers.values()
    )


def _again(blocker: Blocker, snapshot: PolicySnapshot) -> WorkItem:
    """The blocked thing as work, for the actions that concern it now."""
    stream = blocker.stream
    if stream.kind is StreamKind.ORIGINAL:
        actions = snapshot.match_original(blocker.bucket, blocker.key, stream.delay_ns)
    elif stream.kind is StreamKind.PREDICATE:
        actions = snapshot.match_predicate(blocker.bucket, blocker.key)
    else:
        actions = snapshot.match_path(blocker.bucket, blocker.key)
    if stream.kind is StreamKind.PENDING:
        actions = [action for action in actions if str(action.ref.key) == stream.action]
    return WorkItem(stream, blocker.bucket, blocker.key, tuple(actions), stream.upload_id)


def _row(bucket: str, key: str, action: ActionState, state: BucketLifecycle) -> dict[str, Any]:
    mode = Mode.DISABLED if action.paused else action.mode
    why = Degraded.OPERATOR_PAUSED if action.paused else action.degraded
    return {
        "bucket": bucket,
        "action": key,
        "rule": action.rule_id,
        "mode": mode.value,
        "degraded": why.value,
        "bootstrap": "complete" if action.bootstrap_complete else ("walking" if state.scan else "waiting"),
        "scanned": state.scan.scanned if state.scan else 0,
        "last_scan_ns": action.last_scan_ns,
        "next_scan_ns": action.next_scan_ns,
        "gone": bool(action.gone_since_ns),
    }
