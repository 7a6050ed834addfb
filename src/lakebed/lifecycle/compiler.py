"""Compiles the policies and the stored states of all buckets into a snapshot, and puts on record what changed.

Before a snapshot leaves an action out, the action's state says durably that it was left out: a rule that comes back, in
whichever worker, starts with a scan, since it missed events. So does one whose bucket was made again, whose cursors are
other ones now (versioning switched on, another small delay), or whose log lost events since its last scan.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from lakebed.core.logs import logger
from lakebed.lifecycle.cluster import LogState, reach_hash
from lakebed.lifecycle.eligibility import delays
from lakebed.lifecycle.engine import (
    ActionRef,
    Activation,
    PolicySnapshot,
    action_keys,
    compile_policies,
    needs_predicate,
)
from lakebed.lifecycle.gauges import Gauges
from lakebed.lifecycle.model import ActionKey, ActionKind, Calendar, Degraded, Mode, Rule
from lakebed.lifecycle.modes import LagMonitor, decide_mode
from lakebed.lifecycle.resolver import Resolver, Seams
from lakebed.lifecycle.seams import Policy
from lakebed.lifecycle.settings import LifecycleSettings, ns
from lakebed.lifecycle.state import (
    STATE_VERSION,
    ActionState,
    BucketLifecycle,
    LifecycleState,
    ReaderState,
    changed,
)
from lakebed.lifecycle.stored_policy import StoredPolicy, stored_policy

log = logger("lifecycle")

TOGETHER = 32  # states read at the same time
KEPT_POLLS = 2  # how long a snapshot is used, unless something is known to have changed
TRIES = 3  # a log that is lost while policies are compiled is seen by the next try
T = TypeVar("T")


class _Kept(msgspec.Struct, frozen=True):
    snapshot: PolicySnapshot
    generations: tuple[int, ...]
    at_s: float


def _generations(cursors: Mapping[int, ReaderState]) -> tuple[int, ...]:
    return tuple(cursors[shard].generation for shard in sorted(cursors))


class PolicyCompiler:
    def __init__(
        self,
        seams: Seams,
        resolver: Resolver,
        state: LifecycleState,
        settings: LifecycleSettings,
        monitor: LagMonitor,
        gauges: Gauges,
    ) -> None:
        self._seams, self._resolver, self._state, self._settings = seams, resolver, state, settings
        self._monitor, self._gauges = monitor, gauges
        self._snapshots = 0
        # Buckets without a policy and without actions on record, and when they were last seen so: not read again.
        self._gone: dict[str, int] = {}
        self._problems: dict[str, str] = {}
        self.states: dict[str, BucketLifecycle] = {}
        self._kept: _Kept | None = None
        self._changes = 0

    async def run(self, cursors: Mapping[int, ReaderState]) -> PolicySnapshot:
        """Reads every policy and every bucket's state. A rule that cannot be read takes out itself only.

        `cursors` were read before: sweeps from cursors of the same generations may use the snapshot for a while.
        """
        changes = self._changes
        for _ in range(TRIES):
            known = (await self._state.log.read()).value
            found = await self._compile(known)
            if (await self._state.log.read()).value.generation == known.generation:
                break
        if changes == self._changes:
            self._kept = _Kept(found, _generations(cursors), self._state.clock.monotonic_s())
        return found

    def forget(self) -> None:
        """Something changed: what was compiled, or began to be compiled, before is not used again."""
        self._changes += 1
        self._kept = None

    def kept(self) -> PolicySnapshot | None:
        """The last snapshot, if it is recent: the scans compile one with every poll."""
        kept = self._kept
        fresh = kept is not None and self._state.clock.monotonic_s() - kept.at_s < KEPT_POLLS * self._settings.poll_s
        return kept.snapshot if kept is not None and fresh else None

    def kept_for(self, cursors: Mapping[int, ReaderState], log_state: LogState) -> PolicySnapshot | None:
        """The same, while a sweep from these cursors may use it: with the same log, and while no cursor has another
        generation. An action that joined since raised the generation, so a sweep that leaves it out is refused as
        with a new snapshot; a deletion reads its policy again.
        """
        kept, snapshot = self._kept, self.kept()
        if kept is None or snapshot is None or kept.generations != _generations(cursors):
            return None
        return snapshot if snapshot.reach == reach_hash(log_state) else None

    async def _compile(self, known: LogState) -> PolicySnapshot:
        policies = list(await self._seams.policies.all())
        read = {one.bucket: stored_policy(one.text, one.bucket, self._resolver.reserved) for one in policies}
        found = await together([partial(self._reconcile, one, read[one.bucket], known) for one in policies])
        # Not `self.states`: the loops compile beside each other, and this snapshot is of what was read for it.
        states = {policy.bucket: state for policy, state in zip(policies, found, strict=True)}
        await self._without_policy(set(states))
        self.states = states
        self._show(read)
        rules = {bucket: policy.rules for bucket, policy in read.items() if policy.rules}
        by_ref = {
            ActionRef(bucket, key): rule
            for bucket, some in rules.items()
            for rule in some
            for key in action_keys((rule,))
        }
        retention_ns = self._monitor.retention_ns(known)

        def activation(ref: ActionRef) -> Activation:
            state = states[ref.bucket].action(ref.key) or ActionState()
            if state.paused:
                return Activation(Mode.DISABLED, state.bootstrap_complete)
            if state.bootstrap_complete:
                return Activation(state.mode, True, state.joined)
            mode, _ = decide_mode(
                by_ref[ref],
                ref.key.kind,
                self._settings.calendar,
                retention_ns=retention_ns,
                lookback_ns=ns(self._settings.lookback_s),
            )
            return Activation(mode, False)

        self._snapshots += 1
        versioned = {policy.bucket for policy in policies if policy.versioned}
        return compile_policies(
            rules,
            activation,
            self._settings.calendar,
            snapshot_id=self._snapshots,
            versioned=versioned.__contains__,
            log=known,
        )

    async def _reconcile(self, policy: Policy, read: StoredPolicy, log_state: LogState) -> BucketLifecycle:
        problem, now_ns = "; ".join(read.problems)[:1000], self._state.clock.now_ns()
        wanted = {key: rule for rule in read.rules if rule.enabled for key in action_keys((rule,))}

        def reconcile(state: BucketLifecycle) -> BucketLifecycle:
            return reconciled(
                state,
                wanted,
                self._settings,
                now_ns,
                versioned=policy.versioned,
                incarnation=policy.incarnation,
                log_generation=log_state.generation,
                away_ns=self._gone.get(policy.bucket, 0),
                problem=problem,
            )

        after = await self._change(policy.bucket, reconcile)
        self._gone.pop(policy.bucket, None)
        return after

    async def _without_policy(self, present: set[str]) -> None:
        """Buckets that had a policy: all their actions are gone, until it is back."""
        now_ns = self._state.clock.now_ns()
        without = [name for name in await self._state.buckets() if name not in present]
        self._gone |= {name: now_ns for name in without if name in self._gone}
        others = [name for name in without if name not in self._gone]

        def leave(state: BucketLifecycle) -> BucketLifecycle:
            return reconciled(state, {}, self._settings, now_ns)

        for bucket, state in zip(
            others, await together([partial(self._change, one, leave) for one in others]), strict=True
        ):
            if not state.actions and state.scan is None:
                self._gone[bucket] = now_ns

    async def _change(self, bucket: str, change: Callable[[BucketLifecycle], BucketLifecycle]) -> BucketLifecycle:
        register = self._state.bucket(bucket)
        known = (await register.read()).value
        decide = changed(change)
        after = known if decide(known)[0] is known else await register.change(decide)
        for name in known.actions.keys() - after.actions.keys():
            rule_hash, _, kind = name.partition("/")
            await self._resolver.pending.clear(ActionRef(bucket, ActionKey(rule_hash, ActionKind(kind))))
        return after

    def _show(self, read: dict[str, StoredPolicy]) -> None:
        problems = {bucket: "; ".join(policy.problems) for bucket, policy in read.items() if policy.problems}
        for bucket, problem in problems.items():
            if self._problems.get(bucket) != problem:
                log.warning("policy has rules that cannot be run", bucket=bucket, error=problem)
        self._problems = problems
        self._gauges.problems({bucket: len(read[bucket].problems) for bucket in problems})


def reconciled(
    state: BucketLifecycle,
    wanted: dict[ActionKey, Rule],
    settings: LifecycleSettings,
    now_ns: int,
    *,
    versioned: bool = False,
    incarnation: str | None = None,
    log_generation: int = 0,
    away_ns: int = 0,
    problem: str = "",
) -> BucketLifecycle:
    """The state of a bucket under this set of rules; the same object when nothing changes. Pure.

    Actions that left are marked, and forgotten after the grace. Every action that missed events waits for a scan, with
    the reason. `away_ns` is when this worker last compiled without the bucket: a scan by another one that began before
    did not see what this one passed.
    """
    remade = incarnation is not None and bool(state.incarnation) and state.incarnation != incarnation
    names = {str(key): (key, rule) for key, rule in wanted.items()}
    actions: dict[str, ActionState] = {}
    for name, known in state.actions.items():
        if name not in names:
            since_ns = known.gone_since_ns or now_ns
            if now_ns - since_ns < ns(settings.grace_s):
                actions[name] = msgspec.structs.replace(known, gone_since_ns=since_ns, bootstrap_complete=False)
            continue
        key, rule = names[name]
        why = _missed(known, rule, key.kind, settings.calendar, versioned, log_generation)
        why = "its rule was away" if known.bootstrap_complete and known.bootstrap_started_at_ns < away_ns else why
        why = "the bucket was made again" if remade else why
        why = "its state is of an older version" if state.version < STATE_VERSION and known.bootstrap_complete else why
        actions[name] = _waiting(known, why, now_ns) if why else known
    for name, (key, rule) in names.items():
        if name not in actions and key.kind is ActionKind.EXPIRATION_DATE and (rule.expiration_date_ns or 0) > now_ns:
            # No scan comes before the date; status shows it all the same.
            date_ns = rule.expiration_date_ns or 0
            actions[name] = ActionState(rule_id=rule.rule_id, mode=Mode.SCAN_AT_DATE, next_scan_ns=date_ns)
    after = msgspec.structs.replace(
        state,
        version=STATE_VERSION,
        actions=actions,
        problem=problem,
        incarnation=state.incarnation if incarnation is None else incarnation,
        scan=None if remade else state.scan,
        skips={} if remade else state.skips,
    )
    return state if after == state or (not state.actions and not wanted and after.problem == state.problem) else after


def _missed(
    known: ActionState, rule: Rule, kind: ActionKind, calendar: Calendar, versioned: bool, log_generation: int
) -> str:
    """Why the action missed events since its scan; empty when it did not."""
    if known.gone_since_ns:
        return "its rule was away"
    if not known.bootstrap_complete or known.mode is not Mode.EVENT_DRIVEN:
        return ""
    if set(delays(rule, kind, calendar)) - set(known.delays_ns):
        return "its delay is another one now"
    if needs_predicate(rule, kind, versioned) and not known.predicate:
        return "it depends on predicates now"
    return "the event log lost events" if known.log_generation < log_generation else ""


def _waiting(known: ActionState, why: str, now_ns: int) -> ActionState:
    lost = why == "the event log lost events"
    return msgspec.structs.replace(
        known,
        bootstrap_complete=False,
        joined=0,
        gone_since_ns=0,
        why_scan=why,
        degraded=Degraded.LOST_LOG if lost else known.degraded,
        degraded_since_ns=now_ns if lost else known.degraded_since_ns,
    )


async def require_scan(state: LifecycleState, refs: Iterable[ActionRef], why: str) -> None:
    """Makes these actions wait for a scan: nothing serves them."""
    by_bucket: dict[str, list[ActionRef]] = {}
    for ref in refs:
        by_bucket.setdefault(ref.bucket, []).append(ref)
    now_ns = state.clock.now_ns()
    for bucket, some in by_bucket.items():

        def wait(known: BucketLifecycle, some: Sequence[ActionRef] = some) -> BucketLifecycle:
            for ref in some:
                action = known.action(ref.key)
                if action is not None and action.bootstrap_complete:
                    known = known.having(ref.key, _waiting(action, why, now_ns))
            return known

        await state.bucket(bucket).change(changed(wait))
        log.warning("actions need a scan", bucket=bucket, actions=[str(ref.key) for ref in some], error=why)


async def together(work: Sequence[Callable[[], Awaitable[T]]], limit: int = TOGETHER) -> list[T]:
    """The results in order; `limit` at the same time."""
    slots = asyncio.Semaphore(limit)

    async def one(some: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            return await some()

    return list(await asyncio.gather(*(one(some) for some in work)))
