"""Walks a bucket once for all its actions and deletes what is due on the way; then lets its actions join the sweeps.

The order at the end is the whole of its safety: target modes are decided, cursors are seeded durably, and only then one
write says that the bootstrap is complete and in which mode. A crash anywhere before leaves the actions waiting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from itertools import takewhile

import msgspec

from lakebed.lifecycle import cursors, troubles
from lakebed.lifecycle.decide import decide
from lakebed.lifecycle.engine import CompiledAction, Snapshot
from lakebed.lifecycle.model import ActionKind, Degraded, Mode, Resolution, StreamKind
from lakebed.lifecycle.modes import decide_mode, safety_scan_every
from lakebed.lifecycle.resolver import Resolver, Work, stands_alone
from lakebed.lifecycle.seams import Family, Lister
from lakebed.lifecycle.settings import LifecycleSettings, ns
from lakebed.lifecycle.shelf import Shelf, changed
from lakebed.lifecycle.state import ActionState, BucketState, Stream, WalkProgress, walk_place
from lakebed.logs import logger

log = logger("lifecycle")


class Walk(msgspec.Struct, frozen=True):
    """What a walk did. `complete` is False when it stopped and will go on from its checkpoint."""

    bucket: str
    scanned: int = 0
    worked: int = 0
    complete: bool = False
    blocked: bool = False


class Walker:
    def __init__(self, lister: Lister, resolver: Resolver, shelf: Shelf, settings: LifecycleSettings) -> None:
        self._lister, self._resolver, self._shelf, self._settings = lister, resolver, shelf, settings
        self._scanned = shelf.metrics.counter("lakebed_lifecycle_scanned_total")

    async def run(
        self, bucket: str, snapshot: Snapshot, alive: Callable[[], Awaitable[None]], retention_ns: int | None = None
    ) -> Walk:
        """Walks the bucket, from where an earlier walk for the same actions stopped. Stands still at a blocker.

        `retention_ns` is how long the event log keeps events: it decides the modes at the end.
        """
        held = (await self._shelf.troubles.read()).value
        if troubles.blocks(held, StreamKind.BOOTSTRAP, bucket=bucket):
            return Walk(bucket, blocked=True)
        progress, skips = await self._begin(bucket, snapshot)
        scanned = worked = 0
        batch: list[tuple[str, Work | None]] = []
        async with aclosing(self._lister.walk(bucket, progress.after)) as families:
            async for family in families:
                scanned += 1
                work = None if walk_place(family.key, family.upload_id) in skips else self._work(snapshot, family)
                worked += work is not None
                batch.append((family.token, work))
                if len(batch) >= self._settings.batch:
                    await alive()
                    if (stuck := await self._settle(bucket, progress, batch)) is not None:
                        return Walk(bucket, scanned, worked, blocked=stuck is Resolution.BLOCKED)
                    batch = []
        await alive()
        if batch and (stuck := await self._settle(bucket, progress, batch)) is not None:
            return Walk(bucket, scanned, worked, blocked=stuck is Resolution.BLOCKED)
        self._scanned.labels(bucket=bucket).inc(scanned)
        await self._complete(bucket, snapshot, retention_ns)
        return Walk(bucket, scanned, worked, complete=True)

    async def _begin(self, bucket: str, snapshot: Snapshot) -> tuple[WalkProgress, dict[str, str]]:
        wanted, now_ns = snapshot_digest(snapshot, bucket), self._shelf.clock.now_ns()

        def begin(state: BucketState) -> tuple[BucketState, tuple[WalkProgress, dict[str, str]]]:
            if state.walk is not None and state.walk.snapshot == wanted and not state.rescan:
                return state, (state.walk, state.skips)
            earlier = state.walk or WalkProgress("", 0)
            progress = WalkProgress(
                snapshot=wanted,
                started_at_ns=now_ns,
                force_delays_ns=tuple(sorted({*state.force_delays_ns, *earlier.force_delays_ns})),
                force_predicate=state.force_predicate or earlier.force_predicate,
            )
            after = msgspec.structs.replace(
                state, walk=progress, rescan=False, force_delays_ns=(), force_predicate=False
            )
            return after, (progress, state.skips)

        return await self._shelf.bucket(bucket).change(begin)

    def _work(self, snapshot: Snapshot, family: Family) -> Work | None:
        now_ns = self._shelf.clock.now_ns()
        stream = Stream(StreamKind.BOOTSTRAP, bucket=family.bucket, key=family.key, upload_id=family.upload_id)
        if family.unreadable and snapshot.match_path(family.bucket, family.key):
            return Work(stream, family.bucket, family.key, (), family.upload_id, unreadable=family.unreadable)
        actions = tuple(
            action
            for action in snapshot.match_path(family.bucket, family.key)
            if action.kind is not ActionKind.EXPIRATION_DATE or (action.rule.expiration_date_ns or 0) <= now_ns
        )
        if not actions or not self._may_be_due(snapshot, actions, family, now_ns):
            return None
        listed = family if all(stands_alone(entry) for entry in family.entries) else None
        return Work(stream, family.bucket, family.key, actions, family.upload_id, family=listed)

    def _may_be_due(self, snapshot: Snapshot, actions: tuple[CompiledAction, ...], family: Family, now_ns: int) -> bool:
        """Saves the live look for what the listing already shows to be not due."""
        return bool(decide(StreamKind.BOOTSTRAP, actions, family, now_ns, snapshot.calendar).deletions)

    async def _settle(
        self, bucket: str, progress: WalkProgress, batch: list[tuple[str, Work | None]]
    ) -> Resolution | None:
        works = [work for _, work in batch if work is not None]
        answers = iter(await self._resolver.settle(works)) if works else iter(())
        judged = [(token, next(answers) if work is not None else Resolution.NOOP_RESOLVED) for token, work in batch]
        passed = [token for token, _ in takewhile(lambda one: one[1].resolved, judged)]
        if passed:
            await self._checkpoint(bucket, progress, passed[-1], len(passed))
        return next((answer for _, answer in judged if not answer.resolved), None)

    async def _checkpoint(self, bucket: str, progress: WalkProgress, after: str, passed: int) -> None:
        def move(state: BucketState) -> BucketState:
            walk = state.walk
            if walk is None or (walk.snapshot, walk.started_at_ns) != (progress.snapshot, progress.started_at_ns):
                return state  # another walk has begun: this one's progress is not its
            moved = msgspec.structs.replace(walk, after=after, scanned=walk.scanned + passed)
            return msgspec.structs.replace(state, walk=moved)

        await self._shelf.bucket(bucket).change(changed(move))

    async def _complete(self, bucket: str, snapshot: Snapshot, retention_ns: int | None) -> None:
        state = (await self._shelf.bucket(bucket).read()).value
        walk = state.walk
        if walk is None or walk.snapshot != snapshot_digest(snapshot, bucket):
            return  # somebody else completed it, or began another
        lost = (await self._shelf.reader.read()).value.lost_log_since_ns > 0
        actions = snapshot.of_bucket(bucket)
        targets = {action.ref: self._target(action, state, lost, retention_ns) for action in actions}
        fresh = [
            action.ref
            for action in actions
            if not (known := state.action(action.ref.key)) or not known.bootstrap_complete
        ]
        modes = {ref: mode for ref, (mode, _) in targets.items()}
        if fresh or walk.force_delays_ns or walk.force_predicate:
            await self._shelf.reader.change(
                changed(
                    lambda known: cursors.seed(
                        known,
                        snapshot,
                        fresh,
                        modes,
                        walk.started_at_ns,
                        lookback_ns=ns(self._settings.lookback_s),
                        force_delays_ns=walk.force_delays_ns,
                        force_predicate=walk.force_predicate,
                    )
                )
            )
        now_ns = self._shelf.clock.now_ns()

        def finish(state: BucketState) -> BucketState:
            if state.walk is None or state.walk.started_at_ns != walk.started_at_ns:
                return state
            for action in actions:
                known = state.action(action.ref.key) or ActionState()
                state = state.having(action.ref.key, self._finished(action, known, targets[action.ref], walk, now_ns))
            return msgspec.structs.replace(state, walk=None)

        await self._shelf.bucket(bucket).change(changed(finish))
        log.info("lifecycle_walked", bucket=bucket, activated=[str(ref.key) for ref in fresh])

    def _target(
        self, action: CompiledAction, state: BucketState, lost: bool, retention_ns: int | None
    ) -> tuple[Mode, Degraded]:
        known = state.action(action.ref.key) or ActionState()
        mode, why = decide_mode(
            action.rule,
            action.kind,
            self._settings.calendar,
            retention_ns=retention_ns,
            lookback_ns=ns(self._settings.lookback_s),
            paused=known.paused,
            lost_log=lost,
        )
        demoted = known.mode is Mode.SCAN_ONLY and known.bootstrap_complete
        if demoted and mode is Mode.EVENT_DRIVEN and not self._reseeded(action, state):
            return known.mode, known.degraded  # only a reseed brings a demoted action back
        return mode, why

    def _reseeded(self, action: CompiledAction, state: BucketState) -> bool:
        walk = state.walk
        if walk is None:
            return False
        by_delay = bool(set(action.delays_ns) & set(walk.force_delays_ns))
        return by_delay or (walk.force_predicate and action.predicate_sensitive)

    def _finished(
        self,
        action: CompiledAction,
        known: ActionState,
        target: tuple[Mode, Degraded],
        walk: WalkProgress,
        now_ns: int,
    ) -> ActionState:
        mode, why = target
        every_ns = known.cadence_ns or safety_scan_every(action.rule, action.kind, self._settings.calendar)
        next_ns = walk.started_at_ns + every_ns
        date_ns = action.rule.expiration_date_ns
        if action.kind is ActionKind.EXPIRATION_DATE and date_ns is not None and walk.started_at_ns < date_ns:
            next_ns = date_ns
        return msgspec.structs.replace(
            known,
            rule_id=action.rule.rule_id,
            mode=mode,
            degraded=why,
            degraded_since_ns=(known.degraded_since_ns or now_ns) if why is not Degraded.NONE else 0,
            bootstrap_complete=True,
            bootstrap_started_at_ns=walk.started_at_ns,
            bootstrap_completed_at_ns=now_ns,
            last_scan_ns=walk.started_at_ns,
            next_scan_ns=next_ns,
            delays_ns=action.delays_ns,
            predicate=action.predicate_sensitive,
            gone_since_ns=0,
        )


def snapshot_digest(snapshot: Snapshot, bucket: str) -> str:
    """Names the set of actions a walk is for, the same in every process."""
    keys = sorted(str(action.ref.key) for action in snapshot.of_bucket(bucket))
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16]
