"""What lifecycle keeps between runs: frozen values of its registers.

One register per bucket holds the state of all its actions and its scan, so that completing a scan is one write. One per
shard holds the reader's cursors. One holds what is known of the event log, one the blockers with their retry budgets,
one which worker has which shard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from lakebed.lifecycle import paths
from lakebed.lifecycle.cluster import SHARDS, LogDay, LogGap, LogState, RateState, WorkerShards
from lakebed.lifecycle.model import ActionKey, ActionKind, Degraded, Mode, ObjectIdentity, Position, StreamKind
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime

R = TypeVar("R")
STATE_VERSION = 2


class ActionState(msgspec.Struct, frozen=True):
    """One action of one bucket. `mode` and `bootstrap_complete` change in one write.

    An action takes part in sweeps from then on; the cursors are pulled back after it, under a new generation, which is
    `joined` when all of them were. 0 means that this is still to be done.
    """

    rule_id: str = ""
    mode: Mode = Mode.EVENT_DRIVEN
    degraded: Degraded = Degraded.NONE
    degraded_since_ns: int = 0
    bootstrap_complete: bool = False
    bootstrap_started_at_ns: int = 0
    bootstrap_completed_at_ns: int = 0
    last_scan_ns: int = 0
    next_scan_ns: int = 0
    cadence_ns: int = 0  # an operator's own cadence; 0 is the kind's
    paused: bool = False
    delays_ns: tuple[int, ...] = ()  # the sweeps that reach it, as compiled at its last scan
    predicate: bool = False
    gone_since_ns: int = 0  # left the policy; dropped after `grace_s`, so that an edit and its revert keep progress
    joined: int = 0  # generation of the cursors that serve it
    log_generation: int = 0  # what was known of the log when its last scan began
    why_scan: str = ""  # why it waits for a scan, when it had one before


class ScanRange(msgspec.Struct, frozen=True):
    """A part of a scan, for one worker at a time: what is under `prefix`, behind `start`, not behind `until`."""

    prefix: str = ""
    start: str = ""
    until: str = ""
    after: str = ""  # the token behind which it continues
    scanned: int = 0
    done: bool = False
    next_due_ns: int = 0  # the earliest instant at which something it kept is due; 0 when there is none
    took_ns: int = 0  # time spent on it, up to its checkpoint; not the time it waited for a worker


class ScanProgress(msgspec.Struct, frozen=True):
    """A scan in progress. It continues only for the same set of actions; for another set it starts over."""

    snapshot: str
    started_at_ns: int
    ranges: tuple[ScanRange, ...] = (ScanRange(),)
    force_delays_ns: tuple[int, ...] = ()
    force_predicate: bool = False
    log_generation: int = 0
    gaps: tuple[LogGap, ...] = ()

    @property
    def scanned(self) -> int:
        return sum(one.scanned for one in self.ranges)

    @property
    def done(self) -> bool:
        return all(one.done for one in self.ranges)

    @property
    def next_due_ns(self) -> int:
        return min((one.next_due_ns for one in self.ranges if one.next_due_ns), default=0)

    def took_ns(self, now_ns: int) -> int:
        """How long it was worked on until now. Less than its age when it waited: for a worker, a lease, an operator."""
        return min(now_ns - self.started_at_ns, sum(one.took_ns for one in self.ranges))


class BucketLifecycle(msgspec.Struct, frozen=True):
    version: int = 0  # 2; an older one lacks what the cursors need, so its actions are scanned again
    incarnation: str = ""  # which bucket of this name it is: a bucket made again has another
    objects: int = 0  # keys and uploads of the last complete scan
    actions: dict[str, ActionState] = {}  # by "rule_hash/KIND"
    scan: ScanProgress | None = msgspec.field(name="walk", default=None)  # `walk` in the stored object
    rescan: bool = False  # a scan is requested as soon as possible
    force_delays_ns: tuple[int, ...] = ()
    force_predicate: bool = False
    problem: str = ""  # why the bucket's policy could not be compiled
    skips: dict[str, str] = {}  # keys that scans skip because an operator quarantined them, and why

    def action(self, key: ActionKey) -> ActionState | None:
        return self.actions.get(str(key))

    def having(self, key: ActionKey, state: ActionState) -> BucketLifecycle:
        return msgspec.structs.replace(self, actions={**self.actions, str(key): state})


class WakeRequest(msgspec.Struct, frozen=True):
    """Requests a round now: a worker that reads a new count starts one."""

    version: int = 1
    count: int = 0
    who: str = ""


class LastRound(msgspec.Struct, frozen=True):
    """When a worker last completed a round, and which."""

    version: int = 1
    at_ns: int = 0
    who: str = ""
    compiled_at_ns: int = 0  # when that worker last compiled the policies


def scan_place(key: str, upload_id: str) -> str:
    """The name of a key or an upload among those that scans skip."""
    return f"{upload_id}\x00{key}" if upload_id else key


class ReaderState(msgspec.Struct, frozen=True):
    """The cursors of one shard: one per delay group, one for predicates, each on the last resolved event.

    `generation` grows whenever a cursor is moved back, so that a sweep which began before it cannot undo that. `rules`
    is the hash of the set of actions that each cursor was last moved for, `reach` that of the log it was read from.
    """

    version: int = 2
    generation: int = 0
    originals: dict[str, Position] = {}  # by the delay in nanoseconds
    predicate: Position | None = None
    rules: dict[str, str] = {}  # by the delay in nanoseconds, or "predicate"
    reach: str = ""

    def cursor(self, delay_ns: int | None) -> Position | None:
        return self.predicate if delay_ns is None else self.originals.get(str(delay_ns))

    def at(self, delay_ns: int | None, position: Position) -> ReaderState:
        if delay_ns is None:
            return msgspec.structs.replace(self, predicate=position)
        return msgspec.structs.replace(self, originals={**self.originals, str(delay_ns): position})

    def rules_of(self, delay_ns: int | None) -> str:
        return self.rules.get(_cursor_name(delay_ns), "")

    def for_rules(self, delay_ns: int | None, rules: str) -> ReaderState:
        return msgspec.structs.replace(self, rules={**self.rules, _cursor_name(delay_ns): rules})


def _cursor_name(delay_ns: int | None) -> str:
    return "predicate" if delay_ns is None else str(delay_ns)


def slowest(states: Iterable[ReaderState]) -> ReaderState:
    """The cursors of all shards as one: of each stream the one that is furthest behind."""
    merged = ReaderState()
    for state in states:
        for delay, at in state.originals.items():
            known = merged.originals.get(delay)
            merged = merged.at(int(delay), at if known is None else min(known, at))
        if state.predicate is not None:
            known = merged.predicate
            merged = merged.at(None, state.predicate if known is None else min(known, state.predicate))
    return merged


class Stream(msgspec.Struct, frozen=True):
    """A position of a stream: the key of blockers and retry budgets."""

    kind: StreamKind
    delay_ns: int = 0
    position: Position = Position()
    bucket: str = ""
    action: str = ""  # of PENDING
    key: str = ""
    version_id: str = ""
    upload_id: str = ""
    shard: int = 0

    @property
    def lane(self) -> str:
        """The stream itself, without the position: what stands still while something in it is not resolved."""
        if self.kind is StreamKind.ORIGINAL:
            return f"ORIGINAL:{self.shard}:{self.delay_ns}"
        if self.kind is StreamKind.PREDICATE:
            return f"PREDICATE:{self.shard}"
        return f"{self.kind.value}:{self.bucket}:{self.action}"

    @property
    def id(self) -> str:
        if self.kind is StreamKind.ORIGINAL:
            return f"ORIGINAL:{self.delay_ns}:{self.position.ts_ns}.{self.position.offset}"
        if self.kind is StreamKind.PREDICATE:
            return f"PREDICATE:{self.position.ts_ns}.{self.position.offset}"
        return ":".join((self.kind.value, self.bucket, self.action, self.upload_id, self.version_id, self.key))


class RetryBudget(msgspec.Struct, frozen=True):
    """Consecutive retries of one stream for one cause, at the same first position."""

    retries: int
    first_ns: int
    last_ns: int
    at: str = ""


class Blocker(msgspec.Struct, frozen=True):
    """A stream that stands still for one cause until an operator decides; `stream` is the first position, `items` are
    all that failed with it. `rule_hash` is empty when nothing was evaluated.
    """

    blocker_id: str
    stream: Stream
    bucket: str
    key: str
    reason: str
    last_error: str
    first_seen_ns: int
    last_retry_ns: int
    retries: int
    rule_hash: str = ""
    version_id: str = ""
    items: tuple[Stream, ...] = ()


class IsolatedItem(msgspec.Struct, frozen=True):
    """One key or event that cannot be processed. Its stream went on; scans try it again."""

    stream: Stream
    bucket: str
    key: str
    error: str
    first_seen_ns: int
    last_seen_ns: int
    times: int = 1
    rule_hash: str = ""


class BlockerState(msgspec.Struct, frozen=True):
    version: int = 2
    blockers: dict[str, Blocker] = {}
    budgets: dict[str, RetryBudget] = {}
    quarantined: tuple[str, ...] = ()
    isolated: dict[str, IsolatedItem] = {}  # by id, like blockers
    skips: dict[str, Stream] = {}  # positions that an operator skipped, until their cursor has passed them


class PendingIndex(msgspec.Struct, frozen=True):
    """The actions that may have exceptions, so that the others are not looked at. An older version has none."""

    version: int = 0
    refs: tuple[str, ...] = ()


class PendingItem(msgspec.Struct, frozen=True):
    """Something not due yet that no event will bring."""

    key: str
    version_id: str
    due_at_ns: int
    identity: ObjectIdentity
    upload_id: str = ""

    @property
    def id(self) -> str:
        return f"{self.upload_id}\x00{self.version_id}\x00{self.key}"


class Fold(msgspec.Struct, frozen=True):
    """Ledger segments that are being moved into the table. `number` names the move: it is committed once.

    The plan stays until its segments are deleted, so an interrupted move is finished, never started twice.
    """

    version: int = 1
    number: int = 0
    segments: tuple[str, ...] = ()


class LedgerRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One verdict, or the intent written before it (outcome empty)."""

    at_ns: int
    run: str
    bucket: str
    key: str
    rule_hash: str
    kind: ActionKind
    verb: str
    identity: ObjectIdentity
    stream: str
    rule_id: str = ""
    version_id: str = ""
    upload_id: str = ""
    due_at_ns: int = 0
    outcome: str = ""
    reason: str = ""


class LifecycleState:
    """The registers of lifecycle in a bucket: the reader, the blockers, the ledger move, rounds, and one per bucket."""

    def __init__(self, runtime: StoreRuntime) -> None:
        self.runtime = runtime
        self.store, self.clock, self.metrics = runtime.store, runtime.clock, runtime.metrics
        self.readers: tuple[Register[ReaderState], ...] = tuple(
            self._open(paths.reader(shard), ReaderState, ReaderState(), "lifecycle_reader") for shard in range(SHARDS)
        )
        self.log: Register[LogState] = self._open(paths.LOG_STATE, LogState, LogState(), "lifecycle_log")
        self.shards: Register[WorkerShards] = self._open(
            paths.WORKER_SHARDS, WorkerShards, WorkerShards(), "lifecycle_shards"
        )
        self.rate: Register[RateState] = self._open(paths.RATE, RateState, RateState(), "lifecycle_rate")
        self.blockers: Register[BlockerState] = self._open(
            paths.BLOCKERS, BlockerState, BlockerState(), "lifecycle_troubles"
        )
        self.fold: Register[Fold] = self._open(paths.FOLD, Fold, Fold(), "lifecycle_fold")
        self.wake: Register[WakeRequest] = self._open(paths.WAKE, WakeRequest, WakeRequest(), "lifecycle_wake")
        self.last_round: Register[LastRound] = self._open(paths.LAST_ROUND, LastRound, LastRound(), "lifecycle_tick")
        self.pending: Register[PendingIndex] = self._open(
            paths.PENDING, PendingIndex, PendingIndex(), "lifecycle_pending"
        )
        self._buckets: dict[str, Register[BucketLifecycle]] = {}

    def bucket(self, name: str) -> Register[BucketLifecycle]:
        if name not in self._buckets:
            key = paths.bucket_state(name)
            self._buckets[name] = self._open(key, BucketLifecycle, BucketLifecycle(), "lifecycle_bucket")
        return self._buckets[name]

    def log_day(self, day: str) -> Register[LogDay]:
        return self._open(paths.log_day(day), LogDay, LogDay(), "lifecycle_log_day")

    async def cursors(self) -> dict[int, ReaderState]:
        """The cursors of every shard, as they are now."""
        found = await asyncio.gather(*(register.read() for register in self.readers))
        return {shard: one.value for shard, one in enumerate(found)}

    async def buckets(self) -> list[str]:
        """Buckets that lifecycle has state of, whether or not they still have a policy."""
        return list(await self.store.children(paths.BUCKETS))

    def _open(self, key: str, kind: type[R], initial: R, name: str) -> Register[R]:
        runtime = self.runtime
        return Register(runtime, key, kind, initial, name=name)


def changed(change: Callable[[R], R]) -> Callable[[R], tuple[R, R]]:
    """A change without a result of its own gives the new value."""

    def decide(value: R) -> tuple[R, R]:
        after = change(value)
        return after, after

    return decide
