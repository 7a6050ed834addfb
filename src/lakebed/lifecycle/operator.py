"""What an operator can do: look, pause, scan again, reseed, and decide about blockers. Never an automatic skip.

Every change is one write of a register that workers read on their next round.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from lakebed.errors import Conflict, Invalid, NotFound
from lakebed.lifecycle import cursors, troubles
from lakebed.lifecycle.engine import ActionRef, CompiledAction, Snapshot
from lakebed.lifecycle.model import ActionKey, ActionKind, Calendar, Degraded, Mode, Position, Resolution, StreamKind
from lakebed.lifecycle.pending import Pending
from lakebed.lifecycle.resolver import Resolver, Work
from lakebed.lifecycle.shelf import Shelf, changed
from lakebed.lifecycle.state import ActionState, Blocker, BucketState, ReaderState, Troubles, Wake, walk_place

SKIPS_MAX = 1000  # keys of one bucket that walks pass by
STATUS_ROWS = 500  # of one answer: each row reads its action's exceptions


class Operator:
    """`calendar` is the workers' own: it says what is due, and so what is late."""

    def __init__(self, shelf: Shelf, calendar: Calendar = Calendar()) -> None:
        self._shelf, self._calendar = shelf, calendar
        self._pending = Pending(shelf.store, shelf.ids)

    # Looking.

    async def status(self, bucket: str = "", *, limit: int = STATUS_ROWS) -> list[dict[str, Any]]:
        """One row per action: mode, degraded reason, bootstrap, the next scan, lag, exceptions, blockers; and when a
        worker last completed a round, 0 for never. Of the first actions, at most `limit`: what is not told is not read.
        """
        rows: list[dict[str, Any]] = []
        reader, held = (await self._shelf.reader.read()).value, (await self._shelf.troubles.read()).value
        tick_ns = await self.last_tick_ns()
        for name in [bucket] if bucket else await self._shelf.buckets():
            if len(rows) >= limit:
                break
            state = (await self._shelf.bucket(name).read()).value
            if state.problem:
                rows.append({"bucket": name, "action": "", "mode": "invalid policy", "why": state.problem})
            for key, action in sorted(state.actions.items())[: limit - len(rows)]:
                pending = len((await self._pending.load(_ref(name, key))).items)
                row = _row(name, key, action, state)
                row |= {"pending": pending, "blockers": _blocked(held, name, key, action), "last_tick_ns": tick_ns}
                rows.append(row | {"lag_s": _lag_s(reader, action, self._shelf.clock.now_ns(), self._calendar)})
        return rows

    async def last_tick_ns(self) -> int:
        """When a worker last completed a round over every bucket, on record within seconds; 0 before the first."""
        return (await self._shelf.tick.read()).value.at_ns

    async def blockers(self, *, stream: str = "", bucket: str = "") -> list[Blocker]:
        found = (await self._shelf.troubles.read()).value.blockers.values()
        return sorted(
            (one for one in found if stream in ("", one.stream.kind.value) and bucket in ("", one.bucket)),
            key=lambda one: one.first_seen_ns,
        )

    # Blockers.

    async def retry(self, ident: str, resolver: Resolver, snapshot: Snapshot) -> Resolution:
        """Tries the blocked thing now, against what is live. When it is resolved the blocker goes and its cursor
        passes it; otherwise the blocker stays, with one more try on record.
        """
        blocker = troubles.find((await self._shelf.troubles.read()).value, ident)
        (answer,) = await resolver.settle([_again(blocker, snapshot)])
        if answer.resolved:
            await self._pass(blocker)
            await self._lift(blocker)
        return answer

    async def resume(self, ident: str) -> Blocker:
        """Takes the blocker away and leaves the cursor: the next round tries again with a fresh budget."""
        return await self._shelf.troubles.change(lambda known: troubles.lift(known, ident))

    async def quarantine(self, ident: str, *, reason: str, who: str) -> Blocker:
        """Gives the delete decision up: its stream passes it. Needs a reason; counted and kept on record.

        A walk passes the key by from now on, until the bucket is bootstrapped anew.
        """
        blocker = troubles.find((await self._shelf.troubles.read()).value, ident)
        if not reason.strip():
            raise Invalid("a quarantine needs a reason", hint="--reason says why this delete decision is given up")
        if blocker.stream.kind is StreamKind.BOOTSTRAP:
            await self._skip(blocker, reason)
        await self._pass(blocker)
        now_ns = self._shelf.clock.now_ns()
        lifted = await self._shelf.troubles.change(
            lambda known: troubles.quarantine(known, blocker.blocker_id, reason, who, now_ns)
        )
        counter = self._shelf.metrics.counter("lakebed_lifecycle_quarantined_total")
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
            return cursors.advanced(state, delay_ns, known, stream.position)

        await self._shelf.reader.change(changed(past))

    async def _skip(self, blocker: Blocker, reason: str) -> None:
        if not blocker.key:
            raise Conflict(
                "the whole listing cannot be read: there is no key to pass by",
                hint="mend what the reason names, then blockers resume",
            )
        place = walk_place(blocker.key, blocker.stream.upload_id)

        def skip(state: BucketState) -> BucketState:
            if len(state.skips) >= SKIPS_MAX and place not in state.skips:
                raise Conflict(f"{len(state.skips)} keys of {blocker.bucket} are passed by already, the most allowed")
            return msgspec.structs.replace(state, skips={**state.skips, place: reason})

        await self._shelf.bucket(blocker.bucket).change(changed(skip))

    async def _lift(self, blocker: Blocker) -> None:
        def lift(known: Troubles) -> Troubles:
            return troubles.lift(known, blocker.blocker_id)[0] if blocker.blocker_id in known.blockers else known

        await self._shelf.troubles.change(changed(lift))

    # Actions.

    async def pause(self, bucket: str, action: str = "", *, paused: bool = True) -> list[str]:
        """Pauses actions of a bucket, all or those whose name begins so; or lets them go on, from a new walk, since
        events passed them by. Returns their names.
        """

        def change(known: ActionState) -> ActionState:
            if known.paused == paused:
                return known
            fresh = known.bootstrap_complete and paused
            return msgspec.structs.replace(known, paused=paused, bootstrap_complete=fresh)

        return await self._each(bucket, action, change)

    async def rebootstrap(self, bucket: str, action: str = "") -> None:
        """A walk of the bucket as soon as a worker has time, from which its actions (all, or those whose name begins
        so) begin anew: cursors are seeded again, and nothing is passed by any more. A demoted action stays demoted.
        """

        def anew(state: BucketState) -> BucketState:
            actions = {
                name: msgspec.structs.replace(one, bootstrap_complete=False)
                if name.startswith(action) and one.mode is not Mode.SCAN_ONLY
                else one
                for name, one in state.actions.items()
            }
            return msgspec.structs.replace(state, rescan=True, actions=actions, skips={})

        await self._shelf.bucket(bucket).change(changed(anew))

    async def wake(self, who: str = "") -> int:
        """Asks every worker for a round now. Gives the count it set."""

        def more(known: Wake) -> Wake:
            return Wake(count=known.count + 1, who=who)

        return (await self._shelf.wake.change(changed(more))).count

    async def cadence(self, bucket: str, action: str, every_ns: int) -> list[str]:
        """An own cadence of safety scans; 0 gives the kind's back."""
        if every_ns < 0:
            raise Invalid("a cadence cannot be negative")

        def change(known: ActionState) -> ActionState:
            next_ns = known.last_scan_ns + every_ns if every_ns else known.next_scan_ns
            return msgspec.structs.replace(known, cadence_ns=every_ns, next_scan_ns=next_ns)

        return await self._each(bucket, action, change)

    async def _each(self, bucket: str, action: str, change: Any) -> list[str]:
        def apply(state: BucketState) -> tuple[BucketState, list[str]]:
            names = [name for name in state.actions if name.startswith(action)]
            if not names:
                raise NotFound(f"{bucket} has no action {action!r}", hint=f"lakebed lifecycle status {bucket}")
            after = {name: change(one) if name in names else one for name, one in state.actions.items()}
            return msgspec.structs.replace(state, actions=after), names

        return await self._shelf.bucket(bucket).change(apply)

    # Reseeding.

    async def reseed(self, snapshot: Snapshot, *, delay_ns: int | None = None, predicate: bool = False) -> list[str]:
        """Brings demoted actions of a delay group, or of the predicate stream, back to events: by a walk of each of
        their buckets that seeds the cursors again. Siblings replay the same window, harmlessly. Returns the buckets.
        """
        if (delay_ns is None) == (not predicate):
            raise Invalid("reseed a delay or the predicates", hint="--delay-days N, or --predicate")
        affected = [
            action
            for action in snapshot.actions.values()
            if (predicate and action.predicate_sensitive) or (delay_ns is not None and delay_ns in action.delays_ns)
        ]
        if not affected:
            raise NotFound("no action has this delay" if delay_ns is not None else "no action looks at predicates")
        return await self._force(affected, predicate=predicate)

    async def acknowledge_lost_log(self, snapshot: Snapshot, *, reason: str) -> list[str]:
        """Admits that events are missing: forgets the cursors and seeds all of them by walks of every bucket.

        Allowed only while the log is lost; actions whose horizon the log cannot hold stay on scans.
        """
        if not reason.strip():
            raise Invalid("acknowledging a lost log needs a reason", hint="--reason")
        if not (await self._shelf.reader.read()).value.lost_log_since_ns:
            raise Conflict("no log is lost: there is nothing to acknowledge")
        driven = [action for action in snapshot.actions.values() if action.delays_ns]
        buckets = await self._force(driven, predicate=any(action.predicate_sensitive for action in driven))
        await self._shelf.reader.change(changed(lambda _: ReaderState()))
        return buckets

    async def _force(self, actions: Iterable[CompiledAction], *, predicate: bool) -> list[str]:
        wanted: dict[str, set[int]] = {}
        for action in actions:
            wanted.setdefault(action.ref.bucket, set()).update(action.delays_ns)
        for bucket, delays in sorted(wanted.items()):
            await self._shelf.bucket(bucket).change(changed(_forcing(delays, predicate)))
        return sorted(wanted)


def _forcing(delays: set[int], predicate: bool) -> Any:
    def ask(state: BucketState) -> BucketState:
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


def _blocked(held: Troubles, bucket: str, name: str, action: ActionState) -> int:
    """Blockers that keep this action from going on."""
    return sum(
        (one.stream.kind is StreamKind.BOOTSTRAP and one.bucket == bucket)
        or (one.stream.kind is StreamKind.PENDING and (one.stream.bucket, one.stream.action) == (bucket, name))
        or (one.stream.kind is StreamKind.ORIGINAL and one.stream.delay_ns in action.delays_ns)
        or (one.stream.kind is StreamKind.PREDICATE and action.predicate)
        for one in held.blockers.values()
    )


def _again(blocker: Blocker, snapshot: Snapshot) -> Work:
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
    return Work(stream, blocker.bucket, blocker.key, tuple(actions), stream.upload_id)


def _row(bucket: str, key: str, action: ActionState, state: BucketState) -> dict[str, Any]:
    mode = Mode.DISABLED if action.paused else action.mode
    why = Degraded.OPERATOR_PAUSED if action.paused else action.degraded
    return {
        "bucket": bucket,
        "action": key,
        "rule": action.rule_id,
        "mode": mode.value,
        "degraded": why.value,
        "bootstrap": "complete" if action.bootstrap_complete else ("walking" if state.walk else "waiting"),
        "scanned": state.walk.scanned if state.walk else 0,
        "last_scan_ns": action.last_scan_ns,
        "next_scan_ns": action.next_scan_ns,
        "gone": bool(action.gone_since_ns),
    }
