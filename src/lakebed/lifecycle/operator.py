"""What an operator can do: look, pause, scan again, reseed, and decide about blockers. Never an automatic skip.

Every change is one write of a register that workers read on their next round.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from lakebed.errors import Conflict, Invalid, NotFound
from lakebed.lifecycle import cursors, troubles
from lakebed.lifecycle.engine import CompiledAction, Snapshot
from lakebed.lifecycle.model import Degraded, Mode, Position, Resolution, StreamKind
from lakebed.lifecycle.resolver import Resolver, Work
from lakebed.lifecycle.shelf import Shelf, changed
from lakebed.lifecycle.state import ActionState, Blocker, BucketState, ReaderState, Troubles


class Operator:
    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    # Looking.

    async def status(self, bucket: str = "") -> list[dict[str, Any]]:
        """One row per action: mode, degraded reason, bootstrap, the next scan."""
        rows: list[dict[str, Any]] = []
        for name in [bucket] if bucket else await self._shelf.buckets():
            state = (await self._shelf.bucket(name).read()).value
            if state.problem:
                rows.append({"bucket": name, "action": "", "mode": "invalid policy", "why": state.problem})
            rows += [_row(name, key, action, state) for key, action in sorted(state.actions.items())]
        return rows

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
            if blocker.stream.kind is StreamKind.PENDING:
                await self._tombstone(blocker, resolver, snapshot)
            await self._lift(blocker)
        return answer

    async def resume(self, ident: str) -> Blocker:
        """Takes the blocker away and leaves the cursor: the next round tries again with a fresh budget."""
        return await self._shelf.troubles.change(lambda known: troubles.lift(known, ident))

    async def quarantine(self, ident: str, *, reason: str, who: str) -> Blocker:
        """Gives the delete decision up: the cursor passes it. Needs a reason; counted and kept on record."""
        blocker = troubles.find((await self._shelf.troubles.read()).value, ident)
        if not reason.strip():
            raise Invalid("a quarantine needs a reason", hint="--reason says why this delete decision is given up")
        if blocker.stream.kind is StreamKind.BOOTSTRAP:
            raise Conflict(
                "a walk has no cursor to pass a key with", hint="mend the object or its rule, then blockers resume"
            )
        await self._pass(blocker)
        now_ns = self._shelf.clock.now_ns()
        lifted = await self._shelf.troubles.change(
            lambda known: troubles.quarantine(known, blocker.blocker_id, reason, who, now_ns)
        )
        counter = self._shelf.metrics.counter("lakebed_lifecycle_quarantined_total")
        counter.labels(stream_kind=blocker.stream.kind.value).inc()
        return lifted

    async def _pass(self, blocker: Blocker) -> None:
        stream = blocker.stream
        if stream.kind not in (StreamKind.ORIGINAL, StreamKind.PREDICATE):
            return
        delay_ns = stream.delay_ns if stream.kind is StreamKind.ORIGINAL else None

        def past(state: ReaderState) -> ReaderState:
            known = state.cursor(delay_ns) or Position()
            return cursors.advanced(state, delay_ns, known, stream.position)

        await self._shelf.reader.change(changed(past))

    async def _tombstone(self, blocker: Blocker, resolver: Resolver, snapshot: Snapshot) -> None:
        for ref in snapshot.actions:
            if ref.bucket == blocker.bucket and str(ref.key) == blocker.stream.action:
                stream = blocker.stream
                await resolver.pending.remove(ref, [f"{stream.upload_id}\x00{stream.version_id}\x00{stream.key}"])

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

    async def rebootstrap(self, bucket: str) -> None:
        """A walk of the bucket as soon as a worker has time."""
        await self._shelf.bucket(bucket).change(changed(lambda state: msgspec.structs.replace(state, rescan=True)))

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
        "last_scan_ns": action.last_scan_ns,
        "next_scan_ns": action.next_scan_ns,
        "gone": bool(action.gone_since_ns),
    }
