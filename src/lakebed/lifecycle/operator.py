"""Operator actions: status, pause, scan, reseed, and decisions on blockers. Nothing is ever skipped automatically.

Every change is one write of a register that workers read on their next round; a pause also asks for that round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from lakebed.core.auth import Shows, every_name
from lakebed.core.errors import Conflict, Invalid, NotFound
from lakebed.lifecycle import blockers
from lakebed.lifecycle.engine import ActionRef, CompiledAction, PolicySnapshot
from lakebed.lifecycle.model import (
    ActionKey,
    ActionKind,
    Degraded,
    Mode,
    StreamKind,
    StreamResolution,
)
from lakebed.lifecycle.modes import least_scan_every, stream_lag
from lakebed.lifecycle.pending import PendingStore
from lakebed.lifecycle.resolver import Resolver, WorkItem
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.state import (
    ActionState,
    Blocker,
    BlockerState,
    BucketLifecycle,
    IsolatedItem,
    LifecycleState,
    ReaderState,
    Stream,
    WakeRequest,
    changed,
    scan_place,
    slowest,
)

SKIPS_MAX = 1000  # keys of one bucket that scans skip
STATUS_ROWS = 500  # of one response


class Operator:
    """`settings` are the workers' own: they decide what is due, and so the lag."""

    def __init__(self, state: LifecycleState, settings: LifecycleSettings = LifecycleSettings()) -> None:
        self._state, self._settings = state, settings
        self._pending = PendingStore(state.runtime)

    # Looking.

    async def status(
        self, bucket: str = "", *, limit: int = STATUS_ROWS, shows: Shows = every_name
    ) -> list[dict[str, Any]]:
        """One row per action: mode, degraded reason, bootstrap, the next scan, lag, exceptions, blockers; and when a
        worker last completed a round, 0 for never. At most `limit` actions are read and returned, of the buckets that
        it `shows`.
        """
        rows: list[dict[str, Any]] = []
        reader, held = slowest((await self._state.cursors()).values()), (await self._state.blockers.read()).value
        tick_ns, index = await self.last_round_ns(), (await self._state.pending.read()).value
        for name in filter(shows, [bucket] if bucket else await self._state.buckets()):
            if len(rows) >= limit:
                break
            state = (await self._state.bucket(name).read()).value
            if state.problem:
                rows.append({"bucket": name, "action": "", "mode": "invalid policy", "why": state.problem})
            for key, action in sorted(state.actions.items())[: limit - len(rows)]:
                ref = _ref(name, key)
                waits = not index.version or str(ref) in index.refs
                pending = len((await self._pending.load(ref)).items) if waits else 0
                row = _row(name, key, action, state)
                row |= {"pending": pending, "blockers": _blocked(held, name, key, action), "last_tick_ns": tick_ns}
                rows.append(row | {"lag_s": _lag_s(reader, action, self._state.clock.now_ns(), self._settings)})
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

    async def isolated(self, *, bucket: str = "") -> list[IsolatedItem]:
        """What could not be processed and was passed, with the reason, oldest first."""
        found = (await self._state.blockers.read()).value.isolated.values()
        return sorted((one for one in found if bucket in ("", one.bucket)), key=lambda one: one.first_seen_ns)

    # Blockers.

    async def chosen(self, ident: str = "", *, every: bool = False, bucket: str = "", cause: str = "") -> list[Blocker]:
        """The blockers that are meant: one by id, or all, or those of a bucket or a cause. Raises NotFound, Invalid."""
        held = (await self._state.blockers.read()).value
        if ident:
            return [blockers.find(held, ident)]
        return blockers.chosen(held, every=every, bucket=bucket, cause=cause)

    async def retry(self, ident: str, resolver: Resolver, snapshot: PolicySnapshot) -> StreamResolution:
        """Tries what is blocked now, against what is live. When all of it is resolved the blocker goes and its stream
        continues from where it stands: nothing before it is passed. Otherwise the blocker stays, with one more try on
        record.
        """
        blocker = blockers.find((await self._state.blockers.read()).value, ident)
        answers = await resolver.settle(
            [_again(blocker, item, snapshot) for item in blocker.items or (blocker.stream,)]
        )
        stuck = [answer for answer in answers if not answer.resolved]
        if stuck:
            return stuck[0]
        await self._forget(blocker)
        await self._lift(blocker)
        return StreamResolution.DONE if StreamResolution.DONE in answers else StreamResolution.NOOP_RESOLVED

    async def resume(self, ident: str) -> Blocker:
        """Removes the blocker and leaves the cursor: the next round retries with a new retry budget."""
        return await self._state.blockers.change(lambda known: blockers.lift(known, ident))

    async def quarantine(self, ident: str, *, reason: str, who: str) -> Blocker:
        """Skips what the blocker names, and nothing else: its stream continues. Needs a reason; counted and recorded.

        Scans skip its keys from now on, until `rebootstrap`.
        """
        blocker = blockers.find((await self._state.blockers.read()).value, ident)
        if not reason.strip():
            raise Invalid("a quarantine needs a reason", hint="give --reason: why this delete is skipped")
        if blocker.stream.kind is StreamKind.BOOTSTRAP:
            await self._skip(blocker, reason)
        await self._forget(blocker)
        now_ns = self._state.clock.now_ns()
        lifted = await self._state.blockers.change(
            lambda known: blockers.quarantine(known, blocker.blocker_id, reason, who, now_ns)
        )
        counter = self._state.metrics.counter("lakebed_lifecycle_quarantined_total")
        counter.labels(stream_kind=blocker.stream.kind.value, bucket=blocker.bucket).inc()
        return lifted

    async def _forget(self, blocker: Blocker) -> None:
        """Exceptions that were resolved, or given up, wait no longer."""
        stream = blocker.stream
        if stream.kind is StreamKind.PENDING:
            items = blocker.items or (stream,)
            places = [f"{one.upload_id}\x00{one.version_id}\x00{one.key}" for one in items]
            await self._pending.remove(_ref(stream.bucket, stream.action), places)

    async def _skip(self, blocker: Blocker, reason: str) -> None:
        if not blocker.key:
            raise Conflict(
                "the listing cannot be read: there is no key to skip",
                hint="repair what the reason names, then run: lakebed lifecycle blockers resume",
            )
        items = blocker.items or (blocker.stream,)
        places = {scan_place(one.key, one.upload_id): reason for one in items}

        def skip(state: BucketLifecycle) -> BucketLifecycle:
            after = {**state.skips, **places}
            if len(after) > SKIPS_MAX and len(after) > len(state.skips):
                raise Conflict(f"{len(state.skips)} keys of {blocker.bucket} are skipped already, which is the limit")
            return msgspec.structs.replace(state, skips=after)

        await self._state.bucket(blocker.bucket).change(changed(skip))

    async def _lift(self, blocker: Blocker) -> None:
        def lift(known: BlockerState) -> BlockerState:
            return blockers.lift(known, blocker.blocker_id)[0] if blocker.blocker_id in known.blockers else known

        await self._state.blockers.change(changed(lift))

    # Actions.

    async def pause(self, bucket: str, action: str = "", *, paused: bool = True) -> list[str]:
        """Pauses actions of a bucket, all or by name prefix; or resumes them with a new scan, since they missed events.
        Returns their names. Workers are woken: their sweeps use what they compiled before for up to two polls.
        """

        def change(known: ActionState, _: ActionKind) -> ActionState:
            if known.paused == paused:
                return known
            fresh = known.bootstrap_complete and paused
            return msgspec.structs.replace(known, paused=paused, bootstrap_complete=fresh)

        names = await self._each(bucket, action, change)
        await self.wake()
        return names

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
        """Sets the interval of safety scans; 0 restores the default of the kind.

        The default depends on the rule, which is known to the next scan: that comes as soon as the kind has any. The
        scan at the date of a rule is none of these, and is not put off.
        """
        if every_ns < 0:
            raise Invalid("a cadence cannot be negative")

        def change(known: ActionState, kind: ActionKind) -> ActionState:
            least_ns = least_scan_every(kind, known.mode, self._settings.calendar)
            next_ns = known.last_scan_ns + (every_ns or least_ns)
            if not every_ns or kind is ActionKind.EXPIRATION_DATE:
                next_ns = min(next_ns, known.next_scan_ns)
            return msgspec.structs.replace(known, cadence_ns=every_ns, next_scan_ns=next_ns)

        return await self._each(bucket, action, change)

    async def _each(
        self, bucket: str, action: str, change: Callable[[ActionState, ActionKind], ActionState]
    ) -> list[str]:
        def apply(state: BucketLifecycle) -> tuple[BucketLifecycle, list[str]]:
            names = [name for name in state.actions if name.startswith(action)]
            if not names:
                raise NotFound(f"{bucket} has no action {action!r}", hint=f"lakebed lifecycle status {bucket}")
            after = {
                name: change(one, _ref(bucket, name).key.kind) if name in names else one
                for name, one in state.actions.items()
            }
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
        return await self._force(affected, predicate=predicate or any(one.predicate_sensitive for one in affected))

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


def _lag_s(reader: ReaderState, action: ActionState, now_ns: int, settings: LifecycleSettings) -> float:
    """How far the slowest of the action's sweeps is behind what is due for it; 0 for one that no sweep reaches."""
    if action.mode is not Mode.EVENT_DRIVEN or not action.bootstrap_complete:
        return 0.0
    groups: list[int | None] = [*action.delays_ns, *([None] if action.predicate else [])]
    found = [(delay, at) for delay in groups if (at := reader.cursor(delay)) is not None]
    return round(max((stream_lag(settings, now_ns, delay, at) for delay, at in found), default=0) / 1e9, 3)


def _blocked(held: BlockerState, bucket: str, name: str, action: ActionState) -> int:
    """Blockers that keep this action from going on."""
    return sum(
        (one.stream.kind is StreamKind.BOOTSTRAP and one.bucket == bucket)
        or (one.stream.kind is StreamKind.PENDING and (one.stream.bucket, one.stream.action) == (bucket, name))
        or (one.stream.kind is StreamKind.ORIGINAL and one.stream.delay_ns in action.delays_ns)
        or (one.stream.kind is StreamKind.PREDICATE and action.predicate)
        for one in held.blockers.values()
    )


def _again(blocker: Blocker, stream: Stream, snapshot: PolicySnapshot) -> WorkItem:
    """One blocked thing as work, for the actions that concern it now."""
    bucket, key = stream.bucket or blocker.bucket, stream.key or blocker.key
    if stream.kind is StreamKind.ORIGINAL:
        actions = snapshot.match_original(bucket, key, stream.delay_ns)
    elif stream.kind is StreamKind.PREDICATE:
        actions = snapshot.match_predicate(bucket, key)
    else:
        actions = snapshot.match_path(bucket, key)
    if stream.kind is StreamKind.PENDING:
        actions = [action for action in actions if str(action.ref.key) == stream.action]
    return WorkItem(stream, bucket, key, tuple(actions), stream.upload_id)


def _percent(action: ActionState, state: BucketLifecycle) -> float | None:
    """How far the scan in progress is, by the objects of the last complete one; None before there was one."""
    if state.scan is None:
        return 100.0 if action.last_scan_ns else 0.0
    return round(min(99.9, 100 * state.scan.scanned / state.objects), 1) if state.objects else None


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
        "scanned_percent": _percent(action, state),
        "last_scan_ns": action.last_scan_ns,
        "next_scan_ns": action.next_scan_ns,
        "gone": bool(action.gone_since_ns),
        "why_scan": action.why_scan,
    }
