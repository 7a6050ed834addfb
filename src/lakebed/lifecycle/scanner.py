"""Scans a bucket for all its actions and deletes what is due; then its actions join the event sweeps.

The first scan of an action is its bootstrap scan, later ones are safety scans, or recover what the log lost. A scan is
divided by prefix and key range; each part is one worker's at a time. The order at the end keeps it safe with any number
of workers: one write makes the actions take part in sweeps, then every cursor they need is moved back under a new
generation, then one write says that they joined. A sweep that began without them is refused by the generation; after a
crash in between, whoever compiles next moves the cursors back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial
from itertools import takewhile

import msgspec

from lakebed.core.logs import logger
from lakebed.lifecycle import blockers
from lakebed.lifecycle.cluster import begins_ns, reach_hash
from lakebed.lifecycle.cursors import rewound
from lakebed.lifecycle.delete_decision import decide
from lakebed.lifecycle.engine import CompiledAction, PolicySnapshot
from lakebed.lifecycle.model import ActionKind, Degraded, Mode, StreamKind, StreamResolution
from lakebed.lifecycle.modes import LagMonitor, decide_mode, next_scan_ns
from lakebed.lifecycle.resolver import Resolver, WorkItem
from lakebed.lifecycle.scan_plan import (
    BucketScan,
    is_joining,
    newest_wanted_ns,
    reseeded,
    same_scan,
    scan_prefixes,
    snapshot_digest,
)
from lakebed.lifecycle.seams import Family, Lister
from lakebed.lifecycle.settings import LifecycleSettings, ns
from lakebed.lifecycle.state import (
    STATE_VERSION,
    ActionState,
    BlockerState,
    BucketLifecycle,
    LifecycleState,
    ReaderState,
    ScanProgress,
    ScanRange,
    Stream,
    changed,
    scan_place,
)

log = logger("lifecycle")

CHECKPOINT_S = 5.0  # what a crash loses of a scan
RANGES_MAX = 64
JOINS_SHOWN = 20  # names in a log line
SCAN_ONLY_BY_OPERATOR = (Degraded.LAG_HIGH, Degraded.PENDING_FULL)  # only a reseed returns these to events


class BucketScanner:
    def __init__(
        self,
        lister: Lister,
        resolver: Resolver,
        state: LifecycleState,
        settings: LifecycleSettings,
        monitor: LagMonitor,
    ) -> None:
        self._lister, self._resolver, self._state, self._settings = lister, resolver, state, settings
        self._monitor = monitor
        self._scanned = state.metrics.counter("lakebed_lifecycle_scanned_total")

    # Parts.

    async def begin(self, bucket: str, snapshot: PolicySnapshot) -> ScanProgress:
        """The scan of the bucket for these actions: the one in progress, or a new one."""
        wanted, now_ns = snapshot_digest(snapshot, bucket), self._state.clock.now_ns()
        register = self._state.bucket(bucket)
        known = (await register.read()).value
        if known.scan is not None and known.scan.snapshot == wanted and not known.rescan:
            return known.scan
        ranges = await self._plan(bucket, snapshot)

        def begin(state: BucketLifecycle) -> tuple[BucketLifecycle, ScanProgress]:
            if state.scan is not None and state.scan.snapshot == wanted and not state.rescan:
                return state, state.scan
            earlier = state.scan or ScanProgress("", 0)
            progress = ScanProgress(
                snapshot=wanted,
                started_at_ns=now_ns,
                ranges=ranges,
                force_delays_ns=tuple(sorted({*state.force_delays_ns, *earlier.force_delays_ns})),
                force_predicate=state.force_predicate or earlier.force_predicate,
                log_generation=snapshot.log.generation,
                gaps=snapshot.log.gaps,
            )
            after = msgspec.structs.replace(
                state, scan=progress, rescan=False, force_delays_ns=(), force_predicate=False
            )
            return after, progress

        return await register.change(begin)

    async def _plan(self, bucket: str, snapshot: PolicySnapshot) -> tuple[ScanRange, ...]:
        live = [action for action in snapshot.of_bucket(bucket) if action.mode is not Mode.DISABLED]
        ranges: list[ScanRange] = []
        for prefix in scan_prefixes(live):
            borders = list(await self._lister.split(bucket, prefix)) if len(ranges) < RANGES_MAX else []
            starts, ends = ["", *borders], [*borders, ""]
            ranges += [ScanRange(prefix, a, b, after=a) for a, b in zip(starts, ends, strict=True)]
        return tuple(ranges)

    async def run(
        self,
        bucket: str,
        part: int,
        progress: ScanProgress,
        snapshot: PolicySnapshot,
        alive: Callable[[], Awaitable[None]],
    ) -> BucketScan:
        """Scans one part, from where an earlier scan for the same actions stopped. Stops at a blocker.

        `complete` when the whole bucket was scanned with it.
        """
        held = (await self._state.blockers.read()).value
        if blockers.blocks(held, Stream(StreamKind.BOOTSTRAP, bucket=bucket).lane):
            return BucketScan(bucket, blocked=True)
        state = (await self._state.bucket(bucket).read()).value
        if state.scan is None or state.scan.started_at_ns != progress.started_at_ns or state.scan.ranges[part].done:
            return BucketScan(bucket)
        walk = _RangeWalk(bucket, part, progress, state.scan.ranges[part], self._state.clock.monotonic_s())
        async with aclosing(self._families(bucket, walk, snapshot)) as families:
            async for family in families:
                walk.scanned += family.skipped or 1
                skipped = family.skipped or (state.skips and scan_place(family.key, family.upload_id) in state.skips)
                work = None if skipped else self._work(snapshot, family, walk)
                walk.worked += work is not None
                walk.batch.append((family.token, family.skipped or 1, work))
                if len(walk.batch) >= self._settings.batch:
                    await alive()
                    if not await self._settle(walk):
                        return walk.report()
        await alive()
        if not await self._settle(walk, end=True):
            return walk.report()
        self._scanned.labels(bucket=bucket).inc(walk.scanned)
        done = await self.complete(bucket, snapshot)
        return msgspec.structs.replace(walk.report(), complete=done)

    def _families(self, bucket: str, walk: _RangeWalk, snapshot: PolicySnapshot) -> AsyncGenerator[Family, None]:
        live = [action for action in snapshot.of_bucket(bucket) if action.mode is not Mode.DISABLED]
        newest_ns = newest_wanted_ns(live, self._state.clock.now_ns(), snapshot.calendar, walk.progress.gaps)
        part = walk.range
        return self._lister.scan(bucket, part.after, prefix=part.prefix, until=part.until, newest_ns=newest_ns)

    def _work(self, snapshot: PolicySnapshot, family: Family, walk: _RangeWalk) -> WorkItem | None:
        matched = snapshot.match_path(family.bucket, family.key)
        if not matched:
            return None
        now_ns = self._state.clock.now_ns()
        stream = Stream(StreamKind.BOOTSTRAP, bucket=family.bucket, key=family.key, upload_id=family.upload_id)
        if family.unreadable:
            return WorkItem(stream, family.bucket, family.key, (), family.upload_id, unreadable=family.unreadable)
        actions = tuple(
            action
            for action in matched
            if action.kind is not ActionKind.EXPIRATION_DATE or (action.rule.expiration_date_ns or 0) <= now_ns
        )
        gaps = walk.progress.gaps
        # What the listing shows not to be due needs no lookup.
        found = decide(actions, family, now_ns, snapshot.calendar, None, gaps)
        if found.next_due_ns:
            walk.next_due_ns = min(walk.next_due_ns or found.next_due_ns, found.next_due_ns)
        if not found.deletions and not found.waits:
            return None
        return WorkItem(stream, family.bucket, family.key, actions, family.upload_id, family=family, gaps=gaps)

    async def _settle(self, walk: _RangeWalk, *, end: bool = False) -> bool:
        """Resolves the batch; False when the scan must stop. The checkpoint passes only what is resolved."""
        batch, walk.batch = walk.batch, []
        works = [work for _, _, work in batch if work is not None]
        answers = iter(await self._resolver.settle(works)) if works else iter(())
        judged = [
            (token, keys, next(answers) if work is not None else StreamResolution.NOOP_RESOLVED)
            for token, keys, work in batch
        ]
        passed = [(token, keys) for token, keys, _ in takewhile(lambda one: one[2].resolved, judged)]
        if passed:
            walk.after, walk.passed = passed[-1][0], walk.passed + sum(keys for _, keys in passed)
        walk.stuck = next((answer for _, _, answer in judged if not answer.resolved), None)
        now_s = self._state.clock.monotonic_s()
        if walk.stuck is not None or end or now_s - walk.noted_s >= CHECKPOINT_S:
            walk.took_ns, walk.noted_s = ns(now_s - walk.noted_s), now_s
            return await self._checkpoint(walk, done=end and walk.stuck is None) and walk.stuck is None
        return True

    async def _checkpoint(self, walk: _RangeWalk, *, done: bool = False) -> bool:
        """Stores the progress; False when another scan has begun, whose progress it is not."""
        passed, walk.passed = walk.passed, 0

        def move(state: BucketLifecycle) -> tuple[BucketLifecycle, bool]:
            scan = state.scan
            if scan is None or (scan.snapshot, scan.started_at_ns) != (
                walk.progress.snapshot, walk.progress.started_at_ns
            ):  # fmt: skip
                return state, False
            known = scan.ranges[walk.part]
            moved = msgspec.structs.replace(
                known,
                after=walk.after or known.after,
                scanned=known.scanned + passed,
                done=known.done or done,
                next_due_ns=min(filter(None, (known.next_due_ns, walk.next_due_ns)), default=0),
            )
            if moved == known:
                return state, True
            moved = msgspec.structs.replace(moved, took_ns=known.took_ns + walk.took_ns)
            ranges = (*scan.ranges[: walk.part], moved, *scan.ranges[walk.part + 1 :])
            return msgspec.structs.replace(state, scan=msgspec.structs.replace(scan, ranges=ranges)), True

        return await self._state.bucket(walk.bucket).change(move)

    # The end.

    async def complete(self, bucket: str, snapshot: PolicySnapshot) -> bool:
        """Ends the scan when all its parts are done: the actions take part in sweeps, and wait to join. False when
        another part is still under way, or another worker ended it.
        """
        state = (await self._state.bucket(bucket).read()).value
        scan = state.scan
        if scan is None or not scan.done or scan.snapshot != snapshot_digest(snapshot, bucket):
            return False
        actions = snapshot.of_bucket(bucket)
        retention_ns, now_ns = self._monitor.retention_ns(snapshot.log), self._state.clock.now_ns()

        def finish(state: BucketLifecycle) -> tuple[BucketLifecycle, bool]:
            if state.scan is None or state.scan.started_at_ns != scan.started_at_ns:
                return state, False
            for action in actions:
                known = state.action(action.ref.key) or ActionState()
                target = self._target(action, known, scan, retention_ns)
                state = state.having(action.ref.key, self._finished(action, known, target, scan, now_ns))
            return msgspec.structs.replace(state, version=STATE_VERSION, scan=None, objects=scan.scanned), True

        if not await self._state.bucket(bucket).change(finish):
            return False
        log.info("bucket scanned", bucket=bucket, keys=scan.scanned)
        await self._isolated_gone(bucket, scan.started_at_ns)
        return True

    async def join(self, buckets: Iterable[str], snapshot: PolicySnapshot) -> None:
        """Moves the cursors back, once for all actions of these buckets that wait for it, and then says that they
        joined. Idempotent.

        The floor is what was due at the start of their scan, so that all that it left is replayed: with rounding to
        midnight that is up to a day before the start less the delay.
        """
        waiting: list[tuple[CompiledAction, ActionState]] = []
        for bucket in buckets:
            state = (await self._state.bucket(bucket).read()).value
            for action in snapshot.of_bucket(bucket):
                known = state.action(action.ref.key)
                waiting += [(action, known)] if known is not None and is_joining(known) else []
        if not waiting:
            return
        floors: list[tuple[int | None, int]] = []
        lookback_ns = ns(self._settings.lookback_s)
        for action, known in waiting:
            started_ns = known.bootstrap_started_at_ns
            cutoffs = {delay: self._settings.calendar.cutoff(started_ns, delay) for delay in action.delays_ns}
            floors += [(delay, min(cutoff_ns, started_ns - lookback_ns)) for delay, cutoff_ns in cutoffs.items()]
            floors += [(None, started_ns - lookback_ns)] if action.predicate_sensitive else []
        latest = max(one.generation for one in (await self._state.cursors()).values())
        generation = max(self._state.clock.now_ns(), latest + 1)
        reach, begins = reach_hash(snapshot.log), begins_ns(snapshot.log)

        def back(state: ReaderState) -> ReaderState:
            return rewound(state, floors, generation=generation, reach=reach, begins_ns=begins)

        await asyncio.gather(*(register.change(changed(back)) for register in self._state.readers))

        def joined(state: BucketLifecycle, bucket: str) -> BucketLifecycle:
            for action, known in waiting:
                now = state.action(action.ref.key) if action.ref.bucket == bucket else None
                if now is not None and is_joining(now) and same_scan(now, known):
                    state = state.having(action.ref.key, msgspec.structs.replace(now, joined=generation))
            return state

        for bucket in dict.fromkeys(action.ref.bucket for action, _ in waiting):
            await self._state.bucket(bucket).change(changed(partial(joined, bucket=bucket)))
        names = sorted(str(action.ref) for action, _ in waiting)
        log.info("actions joined the sweeps", actions=names[:JOINS_SHOWN], count=len(names), generation=generation)

    async def _isolated_gone(self, bucket: str, started_ns: int) -> None:
        """What the scan did not meet again is no longer there, or can be read now."""
        held = (await self._state.blockers.read()).value
        if not any(one.bucket == bucket and one.last_seen_ns < started_ns for one in held.isolated.values()):
            return

        def drop(state: BlockerState) -> BlockerState:
            kept = {
                name: one
                for name, one in state.isolated.items()
                if one.bucket != bucket or one.last_seen_ns >= started_ns
            }
            return msgspec.structs.replace(state, isolated=kept)

        await self._state.blockers.change(changed(drop))

    def _target(
        self, action: CompiledAction, known: ActionState, scan: ScanProgress, retention_ns: int | None
    ) -> tuple[Mode, Degraded]:
        mode, why = decide_mode(
            action.rule,
            action.kind,
            self._settings.calendar,
            retention_ns=retention_ns,
            lookback_ns=ns(self._settings.lookback_s),
            paused=known.paused,
        )
        demoted = known.mode is Mode.SCAN_ONLY and known.degraded in SCAN_ONLY_BY_OPERATOR
        lately = known.bootstrap_complete or known.degraded_since_ns >= scan.started_at_ns
        if demoted and lately and mode is Mode.EVENT_DRIVEN and not reseeded(action, scan):
            return known.mode, known.degraded
        return mode, why

    def _finished(
        self,
        action: CompiledAction,
        known: ActionState,
        target: tuple[Mode, Degraded],
        scan: ScanProgress,
        now_ns: int,
    ) -> ActionState:
        mode, why = target
        fresh = not known.bootstrap_complete or known.mode is not mode or reseeded(action, scan)
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
            next_scan_ns=next_scan_ns(
                action.rule,
                action.kind,
                self._settings.calendar,
                scan,
                now_ns,
                mode=mode,
                cadence_ns=known.cadence_ns,
            ),
            delays_ns=action.delays_ns,
            predicate=action.predicate_sensitive,
            gone_since_ns=0,
            joined=0 if fresh else known.joined,
            log_generation=scan.log_generation,
            why_scan="",
        )


class _RangeWalk:
    """One part of a scan under way."""

    def __init__(self, bucket: str, part: int, progress: ScanProgress, found: ScanRange, now_s: float) -> None:
        self.bucket, self.part, self.progress, self.range = bucket, part, progress, found
        self.batch: list[tuple[str, int, WorkItem | None]] = []  # token, keys up to it, work
        self.scanned = self.worked = self.passed = self.next_due_ns = self.took_ns = 0
        self.after, self.noted_s = "", now_s
        self.stuck: StreamResolution | None = None

    def report(self) -> BucketScan:
        return BucketScan(self.bucket, self.scanned, self.worked, blocked=self.stuck is StreamResolution.BLOCKED)
