"""Enforces policies: sweeps of events, scans of buckets and drains of exceptions run beside each other.

Any number may run. Shards and leases only save duplicate work. Safety does not depend on them: deletes are guarded,
cursors change by compare-and-swap under a generation, and a scan ends in a fixed order of writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

import msgspec

from lakebed.core.errors import Corrupt, Fenced, Invalid, LakebedError, Unavailable
from lakebed.core.logs import logger
from lakebed.core.runs import RunLog
from lakebed.core.traces import traced
from lakebed.lifecycle import blockers, ledger, paths
from lakebed.lifecycle.compiler import PolicyCompiler, require_scan, together
from lakebed.lifecycle.counters import CountRecorder
from lakebed.lifecycle.drainer import Drainer
from lakebed.lifecycle.engine import PolicySnapshot
from lakebed.lifecycle.gauges import Gauges
from lakebed.lifecycle.leases import OngoingWork, ShardClaim, hold
from lakebed.lifecycle.ledger import LedgerMover, Publish
from lakebed.lifecycle.modes import LagMonitor
from lakebed.lifecycle.policy_watch import watch_policies
from lakebed.lifecycle.reader import LifecycleReader
from lakebed.lifecycle.reserved import ReservedKeys
from lakebed.lifecycle.resolver import Resolver, Seams
from lakebed.lifecycle.scan_plan import BucketScan, is_joining, needs_scan, next_scans
from lakebed.lifecycle.scanner import BucketScanner
from lakebed.lifecycle.seams import EventSource, LostLog
from lakebed.lifecycle.settings import LifecycleSettings, ns
from lakebed.lifecycle.state import BucketLifecycle, LastRound, LifecycleState, ScanProgress, changed
from lakebed.lifecycle.streams import Sweep
from lakebed.store.lease import HeldByAnother

log = logger("lifecycle")

SCAN = "lifecycle scan"  # as a run
NAP_S = 5.0  # how soon a sleeping worker notices a requested round
NOTE_S = 10.0  # shortest time between two records of a completed round: rounds may follow each other closely
RETRY_S = 60.0  # after a transport error, unless the policy poll comes first
SOON_S = 0.05  # shortest time between two rounds
SCANS = 4  # of buckets at the same time: a large one delays no small one, and the store answers while we decode
JOIN_S = 1.0  # scans that end within this time let their actions join the sweeps together


class Round(msgspec.Struct, frozen=True):
    """What one round did, and when the next has something to do."""

    wake_ns: int
    scans: tuple[BucketScan, ...] = msgspec.field(name="walks", default=())  # `walks` in JSON
    sweeps: tuple[Sweep, ...] = ()


class Enforcer:
    def __init__(
        self,
        source: EventSource,
        seams: Seams,
        state: LifecycleState,
        settings: LifecycleSettings,
        *,
        node: str,
        reserved: ReservedKeys,
        publish: Publish | None = None,
    ) -> None:
        """`publish` gets the expiration events of what is deleted."""
        self._source, self._seams, self._state, self._settings, self._node = source, seams, state, settings, node
        self._shards = ShardClaim(state, f"{node}-{state.runtime.ids.token()[:8]}", settings.lease_s)
        self.resolver = Resolver(seams, state, settings, run=node, reserved=reserved)
        self._runs = RunLog(state.runtime, "lifecycle", node=node)
        self._gauges = Gauges(state.metrics)
        self._monitor = LagMonitor(source, self.resolver, state, settings, self._gauges)
        self._compiler = PolicyCompiler(seams, self.resolver, state, settings, self._monitor, self._gauges)
        self._reader = LifecycleReader(source, self.resolver, state, settings)
        self._scanner = BucketScanner(seams.lister, self.resolver, state, settings, self._monitor)
        self._drainer = Drainer(self.resolver, state, settings)
        self._mover = LedgerMover(state, publish=publish, keep_ns=ns(settings.ledger_retention_s))
        self._alarms = {name: asyncio.Event() for name in ("read", "scan", "join", "drain")}
        self._ended: dict[str, PolicySnapshot] = {}  # buckets whose actions wait to join, by what they were scanned for
        self._scans = OngoingWork(SCANS)
        self._scanned: dict[str, BucketLifecycle] = {}  # of buckets whose scan ended since the last round
        self._wakes = -1
        self.counts = CountRecorder(state)
        self._folded_ns = state.clock.now_ns()
        self._noted_ns = self._compiled_ns = 0

    # The loops.

    async def run(self) -> None:
        """Reads, scans, drains and keeps the books until cancelled, each in its own time: none waits for another.

        What fails is logged and retried; it leaves a valid state.
        """
        rounds = {
            "read": self._read_round,
            "scan": self._scan_round,
            "join": self._join_round,
            "drain": self._drain_round,
        }
        watch = watch_policies(self._seams.policies, self._state.clock, self.wake)
        # A list: a TaskGroup cancels in no order, and a simulation could not be replayed.
        work = [*(self._repeat(name, each) for name, each in rounds.items()), self._upkeep(), watch]
        loops = [asyncio.ensure_future(each) for each in work]
        try:
            await asyncio.gather(*loops)
        finally:
            scans = self._scans.cancel()
            for loop in loops:
                loop.cancel()
            await asyncio.gather(*loops, *scans, return_exceptions=True)
            self._ended = {}
            await self._shards.leave()

    async def _repeat(self, name: str, work: Callable[[], Awaitable[int]]) -> None:
        """One loop: works, then rests until the instant it returned, or the poll, or an alarm."""
        while True:
            wait_s = self._settings.poll_s
            self._alarms[name].clear()
            try:
                closed_s = self._settings.hours_closed_s(self._state.clock.now_ns())
                if not closed_s:
                    wait_s = min(wait_s, (await work() - self._state.clock.now_ns()) / 1e9)
            except LakebedError as error:
                log.warning("round failed", loop=name, error=error.message, kind=error.code)
                wait_s = min(wait_s, RETRY_S)
            await self._rest(name, max(wait_s, SOON_S))

    async def _rest(self, name: str, wait_s: float) -> None:
        rest = asyncio.create_task(self._state.clock.sleep(wait_s))
        alarm = asyncio.create_task(self._alarms[name].wait())
        try:
            await asyncio.wait((rest, alarm), return_when=asyncio.FIRST_COMPLETED)
        finally:
            rest.cancel()
            alarm.cancel()

    def wake(self, *names: str) -> None:
        """Ends the rest of these loops; of all when none is named. Sweeps compile the policies again."""
        self._compiler.forget()
        for name in names or tuple(self._alarms):
            self._alarms[name].set()

    async def _upkeep(self) -> None:
        """Renews the hold on shards, notices requested rounds, moves the ledger, shows the gauges."""
        while True:
            try:
                await self._shards.claim()
                count = (await self._state.wake.read()).value.count
                if self._wakes not in (-1, count):
                    self._reader.retry_now()
                    self.wake()
                self._wakes = count
                await self._books()
            except LakebedError as error:
                log.warning("round failed", loop="maintenance", error=error.message, kind=error.code)
            await self._state.clock.sleep(min(NAP_S, self._settings.poll_s, self._settings.lease_s / 3))

    async def _read_round(self) -> int:
        sweeps = await self._read(hold=True)
        return min([self._state.clock.now_ns() + self._pause_ns(sweeps), *_dues(sweeps)])

    async def _scan_round(self) -> int:
        """Starts the scans that are due. One that outlasts a poll, or a change of a policy, goes on beside the next."""
        began_ns = self._state.clock.now_ns()
        self._latest = snapshot = await self.compile()
        states = self._compiler.states
        self._scans.start({bucket: partial(self._scan_bucket, bucket) for bucket in snapshot.buckets})
        await self._scans.wait(self._rest("scan", self._settings.poll_s))
        ended, self._scanned = self._scanned, {}
        again_ns = self._state.clock.now_ns() + self._retry_ns  # what was due when the round began could not go on
        wakes = [at_ns if at_ns > began_ns else again_ns for at_ns in next_scans(states | ended, snapshot)]
        return min([self._state.clock.now_ns() + ns(self._settings.poll_s), *wakes])

    async def _scan_bucket(self, bucket: str) -> None:
        snapshot = self._latest
        async with self._runs.record(SCAN, bucket, {"bucket": bucket}) as run:
            found = await self.scan(bucket, snapshot)
            run.idle = found is None
            if found is not None:
                found.report_to(run)
        if found is not None and found.complete:
            self._scanned[bucket] = (await self._state.bucket(bucket).read()).value
            self._ended[bucket] = snapshot
            self._alarms["join"].set()
            if snapshot is not self._latest:  # a change since was left to its end
                self._alarms["scan"].set()

    async def _join_round(self) -> int:
        """Every join ends the sweeps under way and makes the next one compile, so scans that end together join once."""
        if self._ended:
            await self._state.clock.sleep(JOIN_S)
            ended, self._ended = self._ended, {}
            for snapshot in {id(one): one for one in ended.values()}.values():
                await self._scanner.join([bucket for bucket, one in ended.items() if one is snapshot], snapshot)
            self.wake("read", "drain")
        return self._state.clock.now_ns() + ns(self._settings.poll_s)

    async def _drain_round(self) -> int:
        if await self._drainer.nothing_waits():
            return self._state.clock.now_ns() + ns(self._settings.poll_s)
        snapshot = self._compiler.kept() or await self.compile()
        now_ns = self._state.clock.now_ns()
        return min([now_ns + ns(self._settings.poll_s), *await self._drain(snapshot)])

    def _pause_ns(self, sweeps: list[Sweep]) -> int:
        if any(one.superseded for one in sweeps):
            return ns(SOON_S)
        return self._retry_ns if any(one.halted for one in sweeps) else ns(self._settings.poll_s)

    @property
    def _retry_ns(self) -> int:
        return ns(min(RETRY_S, self._settings.poll_s))

    # One round.

    @traced("lifecycle round")
    async def run_round(self) -> Round:
        """One round of everything, one after the other."""
        await self._monitor.observe()
        snapshot = await self.compile()
        found = await together([partial(self.scan, bucket, snapshot) for bucket in snapshot.buckets], SCANS)
        scans = [scan for scan in found if scan is not None]
        if ended := [scan.bucket for scan in scans if scan.complete]:
            await self._scanner.join(ended, snapshot)
        sweeps = await self._read()
        snapshot = await self.compile() if ended else snapshot
        wakes = [*await self._drain(snapshot), *_dues(sweeps), *next_scans(self._compiler.states, snapshot)]
        await self._books()
        now_ns = self._state.clock.now_ns()
        stuck = any(not scan.complete and not scan.blocked for scan in scans)
        wakes += [now_ns + min(self._pause_ns(sweeps), ns(RETRY_S if stuck else self._settings.poll_s))]
        return Round(min(wakes), tuple(scans), tuple(sweeps))

    async def compile(self) -> PolicySnapshot:
        """The policies and states as they are now. Actions whose cursors were not moved back for them get that done."""
        self._compiled_ns = self._state.clock.now_ns()
        snapshot = await self._compiler.run(await self._state.cursors())
        joining = [
            bucket
            for bucket, state in self._compiler.states.items()
            if bucket not in self._ended and any(is_joining(known) for known in state.actions.values())
        ]
        if joining:
            await self._scanner.join(joining, snapshot)
        return snapshot

    # Reading.

    async def _read(self, *, hold: bool = False) -> list[Sweep]:
        """One pass over the event stream. The cursors are read before the policies are compiled: a sweep that leaves
        out an action which joined since is refused by the generation.
        """
        log_state = await self._monitor.observe()
        shards = await self._shards.claim()
        try:
            cursors = await self._state.cursors()
            snapshot = (self._compiler.kept_for(cursors, log_state) if hold else None) or await self.compile()
            pause_ns = self._retry_ns if hold else 0
            found = await self._reader.run(snapshot, self._shards.alive, cursors, shards, pause_ns=pause_ns)
            if found.unserved:
                await require_scan(self._state, found.unserved, "its cursor is missing or older than it")
                self.wake("scan")
            await self._monitor.judge(snapshot, self._compiler.states)
            return list(found.sweeps)
        except LostLog as error:
            await self._monitor.lose(error.message)
            self.wake("scan")
            return []
        except Unavailable as error:
            log.warning("event log not read", error=error.message)
            return [Sweep(None, halted=True)]
        finally:
            if not hold:
                await self._shards.leave()

    # Scanning.

    async def scan(self, bucket: str, snapshot: PolicySnapshot) -> BucketScan | None:
        """Scans the parts of the bucket that are due and that no other worker has; None when there is nothing to do."""
        actions = snapshot.of_bucket(bucket)
        compiled = self._compiler.states.get(bucket)  # what it shows not to need a scan is not read again
        if compiled is not None and not needs_scan(compiled, actions, self._state.clock.now_ns()):
            return None
        state = (await self._state.bucket(bucket).read()).value
        if not needs_scan(state, actions, self._state.clock.now_ns()):
            return None
        report: BucketScan | None = None
        try:
            progress = await self._scanner.begin(bucket, snapshot)
            for part, found in enumerate(progress.ranges):
                scanned = None if found.done else await self._scan_part(bucket, part, progress, snapshot)
                if scanned is not None:
                    report = scanned if report is None else report.plus(scanned)
                    if not scanned.complete and scanned.blocked:
                        break
            if report is None and await self._scanner.complete(bucket, snapshot):
                report = BucketScan(bucket, complete=True)
        except (Corrupt, Invalid) as error:  # this bucket gets a blocker; the others continue
            why, now_ns = error.message, self._state.clock.now_ns()
            await self._state.blockers.change(changed(lambda known: blockers.block_listing(known, bucket, why, now_ns)))
            return BucketScan(bucket, blocked=True, problem=why)
        except LakebedError as error:
            log.warning("bucket scan failed", bucket=bucket, error=error.message)
            return BucketScan(bucket, problem=error.message)
        return report

    async def _scan_part(
        self, bucket: str, part: int, progress: ScanProgress, snapshot: PolicySnapshot
    ) -> BucketScan | None:
        async with AsyncExitStack() as stack:
            try:
                alive = await self._hold(paths.scan_lease(bucket, part), stack)
                return await self._scanner.run(bucket, part, progress, snapshot, alive)
            except (HeldByAnother, Fenced):
                return None

    # Draining.

    async def _drain(self, snapshot: PolicySnapshot) -> list[int]:
        wakes: list[int] = []
        for action in await self._drainer.waiting(snapshot):
            next_ns, now_ns = await self._drainer.next_due(action), self._state.clock.now_ns()
            if next_ns is not None and next_ns <= now_ns and not await self._shards.is_preferred(str(action.ref)):
                next_ns += ns(self._settings.lease_s)  # ours when the preferred worker did not come
            if next_ns is not None and next_ns <= now_ns:
                async with AsyncExitStack() as stack:
                    try:
                        await self._hold(paths.drain_lease(action.ref), stack)
                        await self._drainer.run(action)
                    except (HeldByAnother, Fenced):
                        continue
                next_ns = await self._drainer.next_due(action)
                next_ns = None if next_ns is None else max(next_ns, self._state.clock.now_ns() + ns(1.0))
            wakes += [next_ns] if next_ns is not None else []
        return wakes

    # The books.

    async def _books(self) -> None:
        await self._fold()
        await self._show()
        await self._note()
        await self.counts.record()

    async def _show(self) -> None:
        """Sets the gauges from the stored state; those of actions from the state that was compiled last."""
        held = (await self._state.blockers.read()).value
        if held.skips:
            cursors = await self._state.cursors()
            await self._state.blockers.change(changed(lambda known: blockers.without_passed(known, cursors)))
        self._gauges.blockers(held)
        self._gauges.isolated(held)
        self._gauges.actions_of(self._compiler.states)

    async def _note(self) -> None:
        """Records that a round was completed. A failure is logged and delays nothing."""
        now_ns = self._state.clock.now_ns()
        if now_ns - self._noted_ns < ns(NOTE_S):
            return

        def later(known: LastRound) -> LastRound:
            mine = LastRound(at_ns=now_ns, who=self._node, compiled_at_ns=self._compiled_ns)
            return known if known.at_ns >= now_ns else mine

        try:
            await self._state.last_round.change(changed(later))
        except LakebedError as error:
            log.warning("round not recorded", error=error.message)
            return
        self._noted_ns = now_ns

    async def _fold(self) -> None:
        """Moves the ledger into its table every `fold_s`, or at once behind a full move. A failed one is retried."""
        now_ns = self._state.clock.now_ns()
        if not self._settings.fold_s or now_ns - self._folded_ns < ns(self._settings.fold_s):
            return
        self._folded_ns = now_ns
        async with AsyncExitStack() as stack:
            try:
                await self._hold(paths.FOLD_LEASE, stack)
                if await self._mover.run() == ledger.SEGMENTS_MAX:
                    self._folded_ns = 0  # more wait
            except (HeldByAnother, Fenced):
                return
            except LakebedError as error:
                log.warning("ledger move failed", error=error.message)

    async def _hold(self, key: str, stack: AsyncExitStack) -> Callable[[], Awaitable[None]]:
        return await hold(self._state, key, self._node, self._settings.lease_s, stack)


def _dues(sweeps: list[Sweep]) -> list[int]:
    return [sweep.next_due_ns for sweep in sweeps if sweep.next_due_ns is not None]
