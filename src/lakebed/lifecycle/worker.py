"""Keeps policies enforced: compiles them, walks what must be walked, sweeps, drains, and sleeps until something is due.

Any number may run. Leases keep them from doing the same work; that nothing wrong happens does not rest on them, but on
guarded deletes, on cursors that only move from where they were known to be, and on the order in which a walk ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import msgspec

from lakebed.errors import Conflict, Corrupt, Fenced, Invalid, LakebedError, Unavailable
from lakebed.lifecycle import paths, troubles
from lakebed.lifecycle.drainer import Drainer
from lakebed.lifecycle.engine import ActionRef, Activation, Snapshot, action_keys, compile_policies
from lakebed.lifecycle.gauges import Gauges
from lakebed.lifecycle.home import Home
from lakebed.lifecycle.ledger_table import Mover
from lakebed.lifecycle.model import ActionKind, Degraded, Mode, Rule, StreamKind
from lakebed.lifecycle.modes import decide_mode
from lakebed.lifecycle.policies import rules_of
from lakebed.lifecycle.reader import Reader, Sweep
from lakebed.lifecycle.resolver import Resolver, Seams
from lakebed.lifecycle.seams import EventSource, LostLog, Policy
from lakebed.lifecycle.settings import LifecycleSettings, ns
from lakebed.lifecycle.shelf import Shelf, changed
from lakebed.lifecycle.state import ActionState, BucketState, LastTick, Stream
from lakebed.lifecycle.walker import Walk, Walker
from lakebed.lifecycle.watch import Watch
from lakebed.logs import logger
from lakebed.store.lease import HeldByAnother, Lease
from lakebed.traces import traced

log = logger("lifecycle")

NAP_S = 5.0  # how soon a worker at rest notices that a round is asked for
NOTE_S = 10.0  # how often at most a completed round is put on record: rounds may follow each other closely
RETRY_S = 60.0  # after a transport error, unless the policy poll comes first


class Tick(msgspec.Struct, frozen=True):
    """What one round did, and when the next has something to do."""

    wake_ns: int
    walks: tuple[Walk, ...] = ()
    sweeps: tuple[Sweep, ...] = ()


class LifecycleWorker:
    def __init__(
        self, source: EventSource, seams: Seams, shelf: Shelf, settings: LifecycleSettings, *, node: str, home: Home
    ) -> None:
        self._source, self._seams, self._shelf, self._settings, self._node = source, seams, shelf, settings, node
        self.resolver = Resolver(seams, shelf, settings, run=node, home=home)
        self._reader = Reader(source, self.resolver, shelf, settings)
        self._walker = Walker(seams.lister, self.resolver, shelf, settings)
        self._drainer = Drainer(self.resolver, shelf, settings)
        self._mover = Mover(shelf)
        self._gauges = Gauges(shelf.metrics)
        self._watch = Watch(source, self.resolver, shelf, settings, self._gauges)
        self._states: dict[str, BucketState] = {}
        self._snapshots = 0
        self._wakes = 0
        self._folded_ns = shelf.clock.now_ns()
        self._noted_ns = 0

    async def run(self) -> None:
        """Ticks until cancelled. What fails is logged and tried again: the state it left is always good."""
        while True:
            wait_s = self._settings.poll_s
            try:
                tick = await self.tick()
                wait_s = min(wait_s, max(0.0, (tick.wake_ns - self._shelf.clock.now_ns()) / 1e9))
            except LakebedError as error:
                log.warning("lifecycle_tick_failed", error=error.message, kind=error.code)
            await self._rest(max(wait_s, 0.05))

    async def _rest(self, wait_s: float) -> None:
        """Sleeps, in naps, so that a round an operator asks for does not wait for the next due instant."""
        until_s = self._shelf.clock.monotonic_s() + wait_s
        while (left_s := until_s - self._shelf.clock.monotonic_s()) > 0:
            await self._shelf.clock.sleep(min(left_s, NAP_S))
            if left_s <= NAP_S:
                return
            try:
                count = (await self._shelf.wake.read()).value.count
            except LakebedError:
                continue
            if count != self._wakes:
                self._wakes = count
                return

    @traced("lifecycle tick")
    async def tick(self) -> Tick:
        """One round of everything."""
        await self._watch.probe()
        snapshot = await self.compile()
        walks = [walk for bucket in snapshot.buckets if (walk := await self.walk(bucket, snapshot)) is not None]
        if any(walk.complete for walk in walks):
            snapshot = await self.compile()
        sweeps = await self._sweep(snapshot)
        wakes = await self._drain(snapshot)
        wakes += [sweep.next_due_ns for sweep in sweeps if sweep.next_due_ns is not None]
        wakes += await self._next_scans(snapshot)
        await self._fold()
        await self._show()
        await self._note()
        now_ns = self._shelf.clock.now_ns()
        stuck = any(not walk.complete and not walk.blocked for walk in walks) or any(s.halted for s in sweeps)
        wakes += [now_ns + ns(min(RETRY_S, self._settings.poll_s) if stuck else self._settings.poll_s)]
        # an event is due when its instant has come and it can no longer be followed by an earlier one
        return Tick(min(wakes), tuple(walks), tuple(sweeps))

    async def compile(self) -> Snapshot:
        """Reads every policy and every bucket's state. A policy that does not parse takes only its own bucket out."""
        rules: dict[str, tuple[Rule, ...]] = {}
        versioned: set[str] = set()
        states: dict[str, BucketState] = {}
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
        lost = (await self._shelf.reader.read()).value.lost_log_since_ns > 0

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
                retention_ns=self._watch.retention_ns,
                lookback_ns=ns(self._settings.lookback_s),
                lost_log=lost,
            )
            return Activation(mode, known.bootstrap_complete)

        self._snapshots += 1
        return compile_policies(
            rules, activation, self._settings.calendar, snapshot_id=self._snapshots, versioned=versioned.__contains__
        )

    async def _reconcile(self, policy: Policy) -> BucketState:
        """Marks actions that left the policy, forgets them after the grace, and notes a policy that is wrong."""
        problem = ""
        wanted: set[str] = set()
        try:
            rules = rules_of(policy.text)
            self.resolver.home.check(policy.bucket, rules)
            wanted = {str(key) for key in action_keys(rules)}
        except Invalid as error:
            problem = error.message
        now_ns, grace_ns = self._shelf.clock.now_ns(), ns(self._settings.grace_s)

        def reconcile(state: BucketState) -> BucketState:
            if problem:
                return state if state.problem == problem else msgspec.structs.replace(state, problem=problem)
            actions = {
                name: msgspec.structs.replace(
                    known, gone_since_ns=0 if name in wanted else (known.gone_since_ns or now_ns)
                )
                for name, known in state.actions.items()
                if name in wanted or not known.gone_since_ns or now_ns - known.gone_since_ns < grace_ns
            }
            # back after it was gone: events passed it by meanwhile, so it begins again with a walk
            actions = {
                name: msgspec.structs.replace(known, bootstrap_complete=False)
                if name in wanted and state.actions[name].gone_since_ns
                else known
                for name, known in actions.items()
            }
            if actions == state.actions and not state.problem:
                return state
            return msgspec.structs.replace(state, actions=actions, problem="")

        register = self._shelf.bucket(policy.bucket)
        known = (await register.read()).value
        return known if reconcile(known) is known else await register.change(changed(reconcile))

    async def walk(self, bucket: str, snapshot: Snapshot) -> Walk | None:
        """Walks the bucket when it needs it and nobody else does; None otherwise."""
        state = (await self._shelf.bucket(bucket).read()).value
        if not self._needs_walk(state, snapshot, bucket):
            return None
        async with AsyncExitStack() as stack:
            try:
                alive = await self._hold(paths.walk_lease(bucket), stack)
                return await self._walker.run(bucket, snapshot, alive, self._watch.retention_ns)
            except (HeldByAnother, Fenced):
                return None
            except (Corrupt, Invalid) as error:  # this bucket stands still and says so; the others go on
                await self._block_walk(bucket, error)
                return Walk(bucket, blocked=True)
            except LakebedError as error:
                log.warning("lifecycle_walk_failed", bucket=bucket, error=error.message)
                return Walk(bucket)

    async def _block_walk(self, bucket: str, error: LakebedError) -> None:
        stream, now_ns = Stream(StreamKind.BOOTSTRAP, bucket=bucket), self._shelf.clock.now_ns()
        await self._shelf.troubles.change(
            changed(
                lambda known: troubles.block(
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

    def _needs_walk(self, state: BucketState, snapshot: Snapshot, bucket: str) -> bool:
        now_ns = self._shelf.clock.now_ns()
        actions = [action for action in snapshot.of_bucket(bucket) if action.mode is not Mode.DISABLED]
        known = [state.action(action.ref.key) or ActionState() for action in actions]
        new = any(not one.bootstrap_complete for one in known)
        due = any(one.next_scan_ns <= now_ns for one in known)
        return bool(actions) and (new or due or state.rescan or state.walk is not None)

    async def _next_scans(self, snapshot: Snapshot) -> list[int]:
        wakes: list[int] = []
        for bucket in snapshot.buckets:
            state = (await self._shelf.bucket(bucket).read()).value
            live = {str(action.ref.key) for action in snapshot.of_bucket(bucket) if action.mode is not Mode.DISABLED}
            wakes += [one.next_scan_ns for name, one in state.actions.items() if name in live and one.next_scan_ns]
        return wakes

    async def _sweep(self, snapshot: Snapshot) -> list[Sweep]:
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
                log.warning("lifecycle_read_failed", error=error.message)
                return [Sweep(None, halted=True)]
            await self._watch.judge(snapshot)
            return sweeps

    async def _lose_log(self, snapshot: Snapshot, error: LostLog) -> None:
        """Every reader-driven action goes on by scans, and says so, until an operator acknowledges."""
        self._shelf.metrics.counter("lakebed_lifecycle_lost_log_total").inc()
        log.warning("lifecycle_lost_log", error=error.message)
        for action in snapshot.actions.values():
            if action.kind is not ActionKind.EXPIRATION_DATE:
                await self.resolver.demote(action.ref, Degraded.LOST_LOG, error.message)

    async def _drain(self, snapshot: Snapshot) -> list[int]:
        wakes: list[int] = []
        for action in snapshot.actions.values():
            if action.mode is Mode.DISABLED or action.kind is ActionKind.EXPIRATION_DATE:
                continue
            next_ns = await self._drainer.next_due(action)
            if next_ns is not None and next_ns <= self._shelf.clock.now_ns():
                async with AsyncExitStack() as stack:
                    try:
                        await self._hold(paths.drain_lease(action.ref), stack)
                        await self._drainer.run(action)
                    except (HeldByAnother, Fenced):
                        continue
                next_ns = await self._drainer.next_due(action)
                next_ns = None if next_ns is None else max(next_ns, self._shelf.clock.now_ns() + ns(1.0))
            wakes += [next_ns] if next_ns is not None else []
        return wakes

    async def _show(self) -> None:
        """Sets the gauges to what is durable, as any worker would; of actions, to what this round was compiled from."""
        self._gauges.blockers((await self._shelf.troubles.read()).value)
        for bucket, state in self._states.items():
            self._gauges.actions(bucket, state)

    async def _note(self) -> None:
        """Puts on record that a round was completed; that this fails holds nothing up."""
        now_ns = self._shelf.clock.now_ns()
        if now_ns - self._noted_ns < ns(NOTE_S):
            return

        def later(known: LastTick) -> LastTick:
            return known if known.at_ns >= now_ns else LastTick(at_ns=now_ns, who=self._node)

        try:
            await self._shelf.tick.change(changed(later))
        except LakebedError as error:
            log.warning("lifecycle_tick_not_noted", error=error.message)
            return
        self._noted_ns = now_ns

    async def _fold(self) -> None:
        """Moves the ledger into its table, now and then; what fails is logged and tried again, and hides no row."""
        now_ns = self._shelf.clock.now_ns()
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
                log.warning("lifecycle_fold_failed", error=error.message)

    async def _hold(self, key: str, stack: AsyncExitStack) -> Callable[[], Awaitable[None]]:
        """Takes the lease until the stack closes; gives what keeps it while working."""
        lease = Lease(
            self._shelf.store,
            key,
            owner=self._node,
            lease_s=self._settings.lease_s,
            clock=self._shelf.clock,
            ids=self._shelf.ids,
            metrics=self._shelf.metrics,
        )
        held = await lease.acquire()

        async def release() -> None:
            try:
                await lease.release(held)
            except (Conflict, LakebedError):
                log.info("lifecycle_lease_not_released", key=key)

        stack.push_async_callback(release)

        async def alive() -> None:
            nonlocal held
            if held.expires_at_ms * 1_000_000 - self._shelf.clock.now_ns() < ns(self._settings.lease_s * 2 / 3):
                held = await lease.renew(held)

        return alive
