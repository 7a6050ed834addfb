"""Enforces policies in rounds: compile, scan buckets, sweep events, drain exceptions, sleep until something is due.

Any number may run. Leases only save duplicate work. Safety does not depend on them: deletes are guarded, a cursor moves
only from the position it was read at, and a scan completes in a fixed order of writes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import msgspec

from lakebed.core.errors import Corrupt, Fenced, Invalid, LakebedError, Unavailable
from lakebed.core.logs import logger
from lakebed.core.traces import traced
from lakebed.lifecycle import blockers, paths
from lakebed.lifecycle.drainer import Drainer
from lakebed.lifecycle.engine import ActionRef, Activation, PolicySnapshot, action_keys, compile_policies
from lakebed.lifecycle.gauges import Gauges
from lakebed.lifecycle.ledger import LedgerMover
from lakebed.lifecycle.model import ActionKind, Degraded, Mode, Rule, StreamKind
from lakebed.lifecycle.modes import LagMonitor, decide_mode
from lakebed.lifecycle.policy import rules_of
from lakebed.lifecycle.reader import LifecycleReader, Sweep
from lakebed.lifecycle.reserved import ReservedKeys
from lakebed.lifecycle.resolver import Resolver, Seams
from lakebed.lifecycle.scanner import BucketScan, BucketScanner
from lakebed.lifecycle.seams import EventSource, LostLog, Policy
from lakebed.lifecycle.settings import LifecycleSettings, ns
from lakebed.lifecycle.state import ActionState, BucketLifecycle, LastRound, LifecycleState, Stream, changed
from lakebed.store.lease import HeldByAnother, Lease

log = logger("lifecycle")

NAP_S = 5.0  # how soon a sleeping worker notices a requested round
NOTE_S = 10.0  # shortest time between two records of a completed round: rounds may follow each other closely
RETRY_S = 60.0  # after a transport error, unless the policy poll comes first


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
    ) -> None:
        self._source, self._seams, self._state, self._settings, self._node = source, seams, state, settings, node
        self.resolver = Resolver(seams, state, settings, run=node, reserved=reserved)
        self._reader = LifecycleReader(source, self.resolver, state, settings)
        self._scanner = BucketScanner(seams.lister, self.resolver, state, settings)
        self._drainer = Drainer(self.resolver, state, settings)
        self._mover = LedgerMover(state)
        self._gauges = Gauges(state.metrics)
        self._lag_monitor = LagMonitor(source, self.resolver, state, settings, self._gauges)
        self._states: dict[str, BucketLifecycle] = {}
        self._snapshots = 0
        self._wakes = 0
        self._folded_ns = state.clock.now_ns()
        self._noted_ns = 0

    async def run(self) -> None:
        """Runs rounds until cancelled. A failed round is logged and retried; it leaves a valid state."""
        while True:
            wait_s = self._settings.poll_s
            try:
                done = await self.run_round()
                wait_s = min(wait_s, max(0.0, (done.wake_ns - self._state.clock.now_ns()) / 1e9))
            except LakebedError as error:
                log.warning("round failed", error=error.message, kind=error.code)
            await self._rest(max(wait_s, 0.05))

    async def _rest(self, wait_s: float) -> None:
        """Sleeps in short steps, so that a round requested by an operator does not wait for the next due time."""
        until_s = self._state.clock.monotonic_s() + wait_s
        while (left_s := until_s - self._state.clock.monotonic_s()) > 0:
            await self._state.clock.sleep(min(left_s, NAP_S))
            if left_s <= NAP_S:
                return
            try:
                count = (await self._state.wake.read()).value.count
            except LakebedError:
                continue
            if count != self._wakes:
                self._wakes = count
                return

    @traced("lifecycle round")
    async def run_round(self) -> Round:
        """One round of everything."""
        await self._lag_monitor.probe()
        snapshot = await self.compile()
        scans = [scan for bucket in snapshot.buckets if (scan := await self.scan(bucket, snapshot)) is not None]
        if any(scan.complete for scan in scans):
            snapshot = await self.compile()
        sweeps = await self._sweep(snapshot)
        wakes = await self._drain(snapshot)
        wakes += [sweep.next_due_ns for sweep in sweeps if sweep.next_due_ns is not None]
        wakes += await self._next_scans(snapshot)
        await self._fold()
        await self._show()
        await self._note()
        now_ns = self._state.clock.now_ns()
        stuck = any(not scan.complete and not scan.blocked for scan in scans) or any(s.halted for s in sweeps)
        wakes += [now_ns + ns(min(RETRY_S, self._settings.poll_s) if stuck else self._settings.poll_s)]
        # an event is due when its instant has come and it can no longer be followed by an earlier one
        return Round(min(wakes), tuple(scans), tuple(sweeps))

    async def compile(self) -> PolicySnapshot:
        """Reads every policy and every bucket's state. A policy that does not parse takes only its own bucket out."""
        rules: dict[str, tuple[Rule, ...]] = {}
        versioned: set[str] = set()
        states: dict[str, BucketLifecycle] = {}
        for policy in await self._seams.policies.all():
            states[policy.bucket] = await self._reconcile(policy)
            if not states[policy.bucket].problem:
                rules[policy.bucket] = rules_of(policy.text)
            if policy.versioned:
                versioned.add(policy.bucket)
        by_ref = {
            ActionRef(bucket, key): rule
            for bucket, some in rules.items()
            for rule in some
            for key in action_keys((rule,))
        }
        self._states = states
        lost = (await self._state.reader.read()).value.lost_log_since_ns > 0

        def activation(ref: ActionRef) -> Activation:
            known = states[ref.bucket].action(ref.key) or ActionState()
            if known.paused:
                return Activation(Mode.DISABLED, known.bootstrap_complete)
            if known.bootstrap_complete and not (lost and known.mode is Mode.EVENT_DRIVEN):
                return Activation(known.mode, True)
            mode, _ = decide_mode(
                by_ref[ref],
                ref.key.kind,
                self._settings.calendar,
                retention_ns=self._lag_monitor.retention_ns,
                lookback_ns=ns(self._settings.lookback_s),
                lost_log=lost,
            )
            return Activation(mode, known.bootstrap_complete)

        self._snapshots += 1
        return compile_policies(
            rules, activation, self._settings.calendar, snapshot_id=self._snapshots, versioned=versioned.__contains__
        )

    async def _reconcile(self, policy: Policy) -> BucketLifecycle:
        """Marks actions that left the policy, forgets them after the grace, and notes a policy that is wrong."""
        problem = ""
        wanted: set[str] = set()
        try:
            rules = rules_of(policy.text)
            self.resolver.reserved.check(policy.bucket, rules)
            wanted = {str(key) for key in action_keys(rules)}
        except Invalid as error:
            problem = error.message
        now_ns, grace_ns = self._state.clock.now_ns(), ns(self._settings.grace_s)

        def reconcile(state: BucketLifecycle) -> BucketLifecycle:
            if problem:
                return state if state.problem == problem else msgspec.structs.replace(state, problem=problem)
            actions = {
                name: msgspec.structs.replace(
                    known, gone_since_ns=0 if name in wanted else (known.gone_since_ns or now_ns)
                )
                for name, known in state.actions.items()
                if name in wanted or not known.gone_since_ns or now_ns - known.gone_since_ns < grace_ns
            }
            # It was out of the policy and missed events meanwhile, so it starts again with a bootstrap scan.
            actions = {
                name: msgspec.structs.replace(known, bootstrap_complete=False)
                if name in wanted and state.actions[name].gone_since_ns
                else known
                for name, known in actions.items()
            }
            if actions == state.actions and not state.problem:
                return state
            return msgspec.structs.replace(state, actions=actions, problem="")

        register = self._state.bucket(policy.bucket)
        known = (await register.read()).value
        return known if reconcile(known) is known else await register.change(changed(reconcile))

    async def scan(self, bucket: str, snapshot: PolicySnapshot) -> BucketScan | None:
        """Scans the bucket when it is due and no other worker does; None otherwise."""
        state = (await self._state.bucket(bucket).read()).value
        if not self._needs_scan(state, snapshot, bucket):
            return None
        async with AsyncExitStack() as stack:
            try:
                alive = await self._hold(paths.scan_lease(bucket), stack)
                return await self._scanner.run(bucket, snapshot, alive, self._lag_monitor.retention_ns)
            except (HeldByAnother, Fenced):
                return None
            except (Corrupt, Invalid) as error:  # this bucket gets a blocker; the others continue
                await self._block_scan(bucket, error)
                return BucketScan(bucket, blocked=True)
            except LakebedError as error:
                log.warning("bucket scan failed", bucket=bucket, error=error.message)
                return BucketScan(bucket)

    async def _block_scan(self, bucket: str, error: LakebedError) -> None:
        stream, now_ns = Stream(StreamKind.BOOTSTRAP, bucket=bucket), self._state.clock.now_ns()
        await self._state.blockers.change(
            changed(
                lambda known: blockers.block(
                    known,
                    stream,
                    bucket=bucket,
                    key="",
                    now_ns=now_ns,
                    reason="the listing cannot be read",
                    error=error.message,
                )
            )
        )

    def _needs_scan(self, state: BucketLifecycle, snapshot: PolicySnapshot, bucket: str) -> bool:
        now_ns = self._state.clock.now_ns()
        actions = [action for action in snapshot.of_bucket(bucket) if action.mode is not Mode.DISABLED]
        known = [state.action(action.ref.key) or ActionState() for action in actions]
        new = any(not one.bootstrap_complete for one in known)
        due = any(one.next_scan_ns <= now_ns for one in known)
        return bool(actions) and (new or due or state.rescan or state.scan is not None)

    async def _next_scans(self, snapshot: PolicySnapshot) -> list[int]:
        wakes: list[int] = []
        for bucket in snapshot.buckets:
            state = (await self._state.bucket(bucket).read()).value
            live = {str(action.ref.key) for action in snapshot.of_bucket(bucket) if action.mode is not Mode.DISABLED}
            wakes += [one.next_scan_ns for name, one in state.actions.items() if name in live and one.next_scan_ns]
        return wakes

    async def _sweep(self, snapshot: PolicySnapshot) -> list[Sweep]:
        async with AsyncExitStack() as stack:
            try:
                alive = await self._hold(paths.READER_LEASE, stack)
                sweeps = await self._reader.run(snapshot, alive)
            except (HeldByAnother, Fenced):
                return []
            except LostLog as error:
                await self._lose_log(snapshot, error)
                return []
            except Unavailable as error:
                log.warning("event log not read", error=error.message)
                return [Sweep(None, halted=True)]
            await self._lag_monitor.judge(snapshot)
            return sweeps

    async def _lose_log(self, snapshot: PolicySnapshot, error: LostLog) -> None:
        """Demotes every event-driven action to scans, until an operator acknowledges the lost log."""
        self._state.metrics.counter("lakebed_lifecycle_lost_log_total").inc()
        log.warning("event log lost", error=error.message)
        for action in snapshot.actions.values():
            if action.kind is not ActionKind.EXPIRATION_DATE:
                await self.resolver.demote(action.ref, Degraded.LOST_LOG, error.message)

    async def _drain(self, snapshot: PolicySnapshot) -> list[int]:
        wakes: list[int] = []
        for action in snapshot.actions.values():
            if action.mode is Mode.DISABLED or action.kind is ActionKind.EXPIRATION_DATE:
                continue
            next_ns = await self._drainer.next_due(action)
            if next_ns is not None and next_ns <= self._state.clock.now_ns():
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

    async def _show(self) -> None:
        """Sets the gauges from the stored state; those of actions from the state this round was compiled from."""
        self._gauges.blockers((await self._state.blockers.read()).value)
        for bucket, state in self._states.items():
            self._gauges.actions(bucket, state)

    async def _note(self) -> None:
        """Records that a round was completed. A failure is logged and delays nothing."""
        now_ns = self._state.clock.now_ns()
        if now_ns - self._noted_ns < ns(NOTE_S):
            return

        def later(known: LastRound) -> LastRound:
            return known if known.at_ns >= now_ns else LastRound(at_ns=now_ns, who=self._node)

        try:
            await self._state.last_round.change(changed(later))
        except LakebedError as error:
            log.warning("round not recorded", error=error.message)
            return
        self._noted_ns = now_ns

    async def _fold(self) -> None:
        """Moves the ledger into its table every `fold_s`. A failed move is logged and retried, and hides no row."""
        now_ns = self._state.clock.now_ns()
        if not self._settings.fold_s or now_ns - self._folded_ns < ns(self._settings.fold_s):
            return
        self._folded_ns = now_ns
        async with AsyncExitStack() as stack:
            try:
                await self._hold(paths.FOLD_LEASE, stack)
                await self._mover.run()
            except (HeldByAnother, Fenced):
                return
            except LakebedError as error:
                log.warning("ledger move failed", error=error.message)

    async def _hold(self, key: str, stack: AsyncExitStack) -> Callable[[], Awaitable[None]]:
        """Takes the lease until the stack closes. Returns the function that renews it while the work goes on."""
        lease = Lease(self._state.runtime, key, owner=self._node, lease_s=self._settings.lease_s)
        held = await lease.acquire()

        async def release() -> None:
            try:
                await lease.release(held)
            except LakebedError as error:
                log.info("lease not released", key=key, error=error.message)

        stack.push_async_callback(release)

        async def alive() -> None:
            nonlocal held
            if held.expires_at_ms * 1_000_000 - self._state.clock.now_ns() < ns(self._settings.lease_s * 2 / 3):
                held = await lease.renew(held)

        return alive
