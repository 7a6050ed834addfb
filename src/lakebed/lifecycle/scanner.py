"""Scans a bucket once for all its actions and deletes what is due; then its actions join the event sweeps.

The first scan of an action is its bootstrap scan, later ones are safety scans. The order at the end keeps it safe: the
modes are decided, the cursors are seeded durably, and only then one write stores that the bootstrap is complete and in
which mode. After a crash before that write the actions keep waiting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from itertools import takewhile

import msgspec

from lakebed.core.logs import logger
from lakebed.lifecycle import blockers
from lakebed.lifecycle.decide import decide
from lakebed.lifecycle.engine import CompiledAction, PolicySnapshot
from lakebed.lifecycle.model import ActionKind, Degraded, Mode, StreamKind, StreamResolution
from lakebed.lifecycle.modes import decide_mode, safety_scan_every
from lakebed.lifecycle.reader import seed_cursors
from lakebed.lifecycle.resolver import Resolver, WorkItem, is_unversioned
from lakebed.lifecycle.seams import Family, Lister
from lakebed.lifecycle.settings import LifecycleSettings, ns
from lakebed.lifecycle.state import (
    ActionState,
    BucketLifecycle,
    LifecycleState,
    ScanProgress,
    Stream,
    changed,
    scan_place,
)

log = logger("lifecycle")


class BucketScan(msgspec.Struct, frozen=True):
    """What a scan did. `complete` is False when it stopped; the next one continues from its checkpoint."""

    bucket: str
    scanned: int = 0
    worked: int = 0
    complete: bool = False
    blocked: bool = False


class BucketScanner:
    def __init__(self, lister: Lister, resolver: Resolver, state: LifecycleState, settings: LifecycleSettings) -> None:
        self._lister, self._resolver, self._state, self._settings = lister, resolver, state, settings
        self._scanned = state.metrics.counter("lakebed_lifecycle_scanned_total")

    async def run(
        self,
        bucket: str,
        snapshot: PolicySnapshot,
        alive: Callable[[], Awaitable[None]],
        retention_ns: int | None = None,
    ) -> BucketScan:
        """Scans the bucket, from where an earlier scan for the same actions stopped. Stops at a blocker.

        `retention_ns` is how long the event log keeps events: it decides the modes at the end.
        """
        held = (await self._state.blockers.read()).value
        if blockers.blocks(held, StreamKind.BOOTSTRAP, bucket=bucket):
            return BucketScan(bucket, blocked=True)
        progress, skips = await self._begin(bucket, snapshot)
        scanned = worked = 0
        batch: list[tuple[str, WorkItem | None]] = []
        async with aclosing(self._lister.scan(bucket, progress.after)) as families:
            async for family in families:
                scanned += 1
                work = None if scan_place(family.key, family.upload_id) in skips else self._work(snapshot, family)
                worked += work is not None
                batch.append((family.token, work))
                if len(batch) >= self._settings.batch:
                    await alive()
                    if (stuck := await self._settle(bucket, progress, batch)) is not None:
                        return BucketScan(bucket, scanned, worked, blocked=stuck is StreamResolution.BLOCKED)
                    batch = []
        await alive()
        if batch and (stuck := await self._settle(bucket, progress, batch)) is not None:
            return BucketScan(bucket, scanned, worked, blocked=stuck is StreamResolution.BLOCKED)
        self._scanned.labels(bucket=bucket).inc(scanned)
        await self._complete(bucket, snapshot, retention_ns)
        return BucketScan(bucket, scanned, worked, complete=True)

    async def _begin(self, bucket: str, snapshot: PolicySnapshot) -> tuple[ScanProgress, dict[str, str]]:
        wanted, now_ns = snapshot_digest(snapshot, bucket), self._state.clock.now_ns()

        def begin(state: BucketLifecycle) -> tuple[BucketLifecycle, tuple[ScanProgress, dict[str, str]]]:
            if state.scan is not None and state.scan.snapshot == wanted and not state.rescan:
                return state, (state.scan, state.skips)
            earlier = state.scan or ScanProgress("", 0)
            progress = ScanProgress(
                snapshot=wanted,
                started_at_ns=now_ns,
                force_delays_ns=tuple(sorted({*state.force_delays_ns, *earlier.force_delays_ns})),
                force_predicate=state.force_predicate or earlier.force_predicate,
            )
            after = msgspec.structs.replace(
                state, scan=progress, rescan=False, force_delays_ns=(), force_predicate=False
            )
            return after, (progress, state.skips)

        return await self._state.bucket(bucket).change(begin)

    def _work(self, snapshot: PolicySnapshot, family: Family) -> WorkItem | None:
        now_ns = self._state.clock.now_ns()
        stream = Stream(StreamKind.BOOTSTRAP, bucket=family.bucket, key=family.key, upload_id=family.upload_id)
        if family.unreadable and snapshot.match_path(family.bucket, family.key):
            return WorkItem(stream, family.bucket, family.key, (), family.upload_id, unreadable=family.unreadable)
        actions = tuple(
            action
            for action in snapshot.match_path(family.bucket, family.key)
            if action.kind is not ActionKind.EXPIRATION_DATE or (action.rule.expiration_date_ns or 0) <= now_ns
        )
        if not actions or not self._may_be_due(snapshot, actions, family, now_ns):
            return None
        listed = family if all(is_unversioned(entry) for entry in family.entries) else None
        return WorkItem(stream, family.bucket, family.key, actions, family.upload_id, family=listed)

    def _may_be_due(
        self, snapshot: PolicySnapshot, actions: tuple[CompiledAction, ...], family: Family, now_ns: int
    ) -> bool:
        """Saves the lookup of keys that the listing already shows not to be due."""
        return bool(decide(StreamKind.BOOTSTRAP, actions, family, now_ns, snapshot.calendar).deletions)

    async def _settle(
        self, bucket: str, progress: ScanProgress, batch: list[tuple[str, WorkItem | None]]
    ) -> StreamResolution | None:
        works = [work for _, work in batch if work is not None]
        answers = iter(await self._resolver.settle(works)) if works else iter(())
        judged = [
            (token, next(answers) if work is not None else StreamResolution.NOOP_RESOLVED) for token, work in batch
        ]
        passed = [token for token, _ in takewhile(lambda one: one[1].resolved, judged)]
        if passed:
            await self._checkpoint(bucket, progress, passed[-1], len(passed))
        return next((answer for _, answer in judged if not answer.resolved), None)

    async def _checkpoint(self, bucket: str, progress: ScanProgress, after: str, passed: int) -> None:
        def move(state: BucketLifecycle) -> BucketLifecycle:
            scan = state.scan
            if scan is None or (scan.snapshot, scan.started_at_ns) != (progress.snapshot, progress.started_at_ns):
                return state  # another scan has begun: do not overwrite its progress
            moved = msgspec.structs.replace(scan, after=after, scanned=scan.scanned + passed)
            return msgspec.structs.replace(state, scan=moved)

        await self._state.bucket(bucket).change(changed(move))

    async def _complete(self, bucket: str, snapshot: PolicySnapshot, retention_ns: int | None) -> None:
        state = (await self._state.bucket(bucket).read()).value
        scan = state.scan
        if scan is None or scan.snapshot != snapshot_digest(snapshot, bucket):
            return  # another worker completed it, or began another
        lost = (await self._state.reader.read()).value.lost_log_since_ns > 0
        actions = snapshot.of_bucket(bucket)
        targets = {action.ref: self._target(action, state, lost, retention_ns) for action in actions}
        fresh = [
            action.ref
            for action in actions
            if not (known := state.action(action.ref.key)) or not known.bootstrap_complete
        ]
        modes = {ref: mode for ref, (mode, _) in targets.items()}
        if fresh or scan.force_delays_ns or scan.force_predicate:
            await self._state.reader.change(
                changed(
                    lambda known: seed_cursors(
                        known,
                        snapshot,
                        fresh,
                        modes,
                        scan.started_at_ns,
                        lookback_ns=ns(self._settings.lookback_s),
                        force_delays_ns=scan.force_delays_ns,
                        force_predicate=scan.force_predicate,
                    )
                )
            )
        now_ns = self._state.clock.now_ns()

        def finish(state: BucketLifecycle) -> BucketLifecycle:
            if state.scan is None or state.scan.started_at_ns != scan.started_at_ns:
                return state
            for action in actions:
                known = state.action(action.ref.key) or ActionState()
                state = state.having(action.ref.key, self._finished(action, known, targets[action.ref], scan, now_ns))
            return msgspec.structs.replace(state, scan=None)

        await self._state.bucket(bucket).change(changed(finish))
        log.info("bucket scanned", bucket=bucket, activated=[str(ref.key) for ref in fresh])

    def _target(
        self, action: CompiledAction, state: BucketLifecycle, lost: bool, retention_ns: int | None
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
            return known.mode, known.degraded  # only a reseed returns a demoted action to events
        return mode, why

    def _reseeded(self, action: CompiledAction, state: BucketLifecycle) -> bool:
        scan = state.scan
        if scan is None:
            return False
        by_delay = bool(set(action.delays_ns) & set(scan.force_delays_ns))
        return by_delay or (scan.force_predicate and action.predicate_sensitive)

    def _finished(
        self,
        action: CompiledAction,
        known: ActionState,
        target: tuple[Mode, Degraded],
        scan: ScanProgress,
        now_ns: int,
    ) -> ActionState:
        mode, why = target
        every_ns = known.cadence_ns or safety_scan_every(action.rule, action.kind, self._settings.calendar)
        next_ns = scan.started_at_ns + every_ns
        date_ns = action.rule.expiration_date_ns
        if action.kind is ActionKind.EXPIRATION_DATE and date_ns is not None and scan.started_at_ns < date_ns:
            next_ns = date_ns
        return msgspec.structs.replace(
            known,
            rule_id=action.rule.rule_id,
            mode=mode,
            degraded=why,
            degraded_since_ns=(known.degraded_since_ns or now_ns) if why is not Degraded.NONE else 0,
            bootstrap_complete=True,
            bootstrap_started_at_ns=scan.started_at_ns,
            bootstrap_completed_at_ns=now_ns,
            last_scan_ns=scan.started_at_ns,
            next_scan_ns=next_ns,
            delays_ns=action.delays_ns,
            predicate=action.predicate_sensitive,
            gone_since_ns=0,
        )


def snapshot_digest(snapshot: PolicySnapshot, bucket: str) -> str:
    """Names the set of actions of a scan, the same in every process."""
    keys = sorted(str(action.ref.key) for action in snapshot.of_bucket(bucket))
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()[:16]
