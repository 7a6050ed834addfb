"""What lifecycle keeps between runs: frozen values of three kinds of registers.

One register per bucket holds the state of all its actions and its walk, so that completing a walk is one write.
One holds the reader's cursors, one the blockers with the retry budgets they grow from.
"""

from __future__ import annotations

import msgspec

from lakebed.lifecycle.model import ActionKey, ActionKind, Degraded, Identity, Mode, Position, StreamKind


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
    delays_ns: tuple[int, ...] = ()  # the sweeps that reach it, as compiled when it was last walked
    predicate: bool = False
    gone_since_ns: int = 0  # left the policy; forgotten after a grace, so that edit and revert keep progress


class WalkProgress(msgspec.Struct, frozen=True):
    """A walk under way. It goes on only for the same set of actions; for another it begins again."""

    snapshot: str
    started_at_ns: int
    after: str = ""
    scanned: int = 0
    force_delays_ns: tuple[int, ...] = ()
    force_predicate: bool = False


class BucketState(msgspec.Struct, frozen=True):
    version: int = 1
    actions: dict[str, ActionState] = {}  # by "rule_hash/KIND"
    walk: WalkProgress | None = None
    rescan: bool = False  # asked for: a walk as soon as possible
    force_delays_ns: tuple[int, ...] = ()
    force_predicate: bool = False
    problem: str = ""  # why the bucket's policy could not be compiled
    skips: dict[str, str] = {}  # what walks pass by, quarantined by an operator, and why

    def action(self, key: ActionKey) -> ActionState | None:
        return self.actions.get(str(key))

    def having(self, key: ActionKey, state: ActionState) -> BucketState:
        return msgspec.structs.replace(self, actions={**self.actions, str(key): state})


class Wake(msgspec.Struct, frozen=True):
    """Asks workers for a round now: each that sees another count than it knew begins one."""

    version: int = 1
    count: int = 0
    who: str = ""


class LastTick(msgspec.Struct, frozen=True):
    """When a worker last completed a round, and which."""

    version: int = 1
    at_ns: int = 0
    who: str = ""


def walk_place(key: str, upload_id: str) -> str:
    """How a walk's key, or an upload, is named among what it passes by."""
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
    """Which place of which stream: the key of blockers and retry budgets."""

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


class Budget(msgspec.Struct, frozen=True):
    """Consecutive retries of one place."""

    retries: int
    first_ns: int
    last_ns: int


class Blocker(msgspec.Struct, frozen=True):
    """A stream that stands still until an operator decides. `rule_hash` is empty when nothing was evaluated yet."""

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


class Troubles(msgspec.Struct, frozen=True):
    version: int = 1
    blockers: dict[str, Blocker] = {}
    budgets: dict[str, Budget] = {}
    quarantined: tuple[str, ...] = ()


class PendingItem(msgspec.Struct, frozen=True):
    """One late change of predicates on something not due yet."""

    key: str
    version_id: str
    due_at_ns: int
    identity: Identity
    upload_id: str = ""

    @property
    def id(self) -> str:
        return f"{self.upload_id}\x00{self.version_id}\x00{self.key}"


class Fold(msgspec.Struct, frozen=True):
    """Ledger segments that are being moved into the table. `number` names the move: it is committed once.

    The plan stands until its segments are gone, so a move that was cut off is finished, never begun a second time.
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
    identity: Identity
    stream: str
    rule_id: str = ""
    version_id: str = ""
    upload_id: str = ""
    due_at_ns: int = 0
    outcome: str = ""
    reason: str = ""
