"""What lifecycle keeps between runs: frozen values of three kinds of registers.

One register per bucket holds the state of all its actions and its scan, so that completing a scan is one write.
One holds the reader's cursors, one the blockers with the retry budgets they grow from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from lakebed.lifecycle import paths
from lakebed.lifecycle.model import ActionKey, ActionKind, Degraded, Mode, ObjectIdentity, Position, StreamKind
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime

R = TypeVar("R")


class ActionState(msgspec.Struct, frozen=True):
    """One action of one bucket. `mode` and `bootstrap_complete` change in one write, after cursors were seeded."""

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


class ScanProgress(msgspec.Struct, frozen=True):
    """A scan in progress. It continues only for the same set of actions; for another set it starts over."""

    snapshot: str
    started_at_ns: int
    after: str = ""
    scanned: int = 0
    force_delays_ns: tuple[int, ...] = ()
    force_predicate: bool = False


class BucketLifecycle(msgspec.Struct, frozen=True):
    version: int = 1
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


def scan_place(key: str, upload_id: str) -> str:
    """The name of a key or an upload among those that scans skip."""
    return f"{upload_id}\x00{key}" if upload_id else key


class ReaderState(msgspec.Struct, frozen=True):
    """One cursor per delay group, one for predicates, each on the last resolved event."""

    version: int = 1
    originals: dict[str, Position] = {}  # by the delay in nanoseconds
    predicate: Position | None = None
    lost_log_since_ns: int = 0
    lost_log: str = ""

    def cursor(self, delay_ns: int | None) -> Position | None:
        return self.predicate if delay_ns is None else self.originals.get(str(delay_ns))

    def at(self, delay_ns: int | None, position: Position) -> ReaderState:
        if delay_ns is None:
            return msgspec.structs.replace(self, predicate=position)
        return msgspec.structs.replace(self, originals={**self.originals, str(delay_ns): position})


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

    @property
    def id(self) -> str:
        if self.kind is StreamKind.ORIGINAL:
            return f"ORIGINAL:{self.delay_ns}:{self.position.ts_ns}.{self.position.offset}"
        if self.kind is StreamKind.PREDICATE:
            return f"PREDICATE:{self.position.ts_ns}.{self.position.offset}"
        return ":".join((self.kind.value, self.bucket, self.action, self.upload_id, self.version_id, self.key))


class RetryBudget(msgspec.Struct, frozen=True):
    """Consecutive retries of one position."""

    retries: int
    first_ns: int
    last_ns: int


class Blocker(msgspec.Struct, frozen=True):
    """A position that stops its stream until an operator decides. `rule_hash` is empty when nothing was evaluated."""

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


class BlockerState(msgspec.Struct, frozen=True):
    version: int = 1
    blockers: dict[str, Blocker] = {}
    budgets: dict[str, RetryBudget] = {}
    quarantined: tuple[str, ...] = ()


class PendingItem(msgspec.Struct, frozen=True):
    """One late change of predicates on something not due yet."""

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
        self.reader: Register[ReaderState] = self._open(paths.READER, ReaderState, ReaderState(), "lifecycle_reader")
        self.blockers: Register[BlockerState] = self._open(
            paths.BLOCKERS, BlockerState, BlockerState(), "lifecycle_troubles"
        )
        self.fold: Register[Fold] = self._open(paths.FOLD, Fold, Fold(), "lifecycle_fold")
        self.wake: Register[WakeRequest] = self._open(paths.WAKE, WakeRequest, WakeRequest(), "lifecycle_wake")
        self.last_round: Register[LastRound] = self._open(paths.LAST_ROUND, LastRound, LastRound(), "lifecycle_tick")
        self._buckets: dict[str, Register[BucketLifecycle]] = {}

    def bucket(self, name: str) -> Register[BucketLifecycle]:
        if name not in self._buckets:
            key = paths.bucket_state(name)
            self._buckets[name] = self._open(key, BucketLifecycle, BucketLifecycle(), "lifecycle_bucket")
        return self._buckets[name]

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
