"""Streams of events while they are read, what their sweeps did, and which of them share a pass over the log."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from lakebed.lifecycle.model import Position, StreamKind, StreamResolution
from lakebed.lifecycle.resolver import WorkItem
from lakebed.lifecycle.seams import ChangeEvent
from lakebed.lifecycle.state import ReaderState, Stream

OFFSET_END = 1 << 62  # behind every event of its instant
PASSES_MAX = 16  # over the log in one round


class Sweep(msgspec.Struct, frozen=True):
    """What the sweeps of one delay group did. `next_due_ns` is when the next event they know of is due."""

    delay_ns: int | None
    read: int = 0
    worked: int = 0
    next_due_ns: int | None = None
    halted: bool = False
    blocked: bool = False
    superseded: bool = False  # a cursor was moved back meanwhile: the next sweep begins from there

    def plus(self, other: Sweep) -> Sweep:
        dues = [due for due in (self.next_due_ns, other.next_due_ns) if due is not None]
        return Sweep(
            self.delay_ns,
            self.read + other.read,
            self.worked + other.worked,
            min(dues, default=None),
            self.halted or other.halted,
            self.blocked or other.blocked,
            self.superseded or other.superseded,
        )


class OpenStream:
    """A stream while it is read: where it is, what waits to be resolved, and what ended it."""

    def __init__(self, shard: int, delay_ns: int | None, state: ReaderState, rules: str, cutoff_ns: int) -> None:
        cursor = state.cursor(delay_ns)
        assert cursor is not None
        self.shard, self.delay_ns, self.cutoff_ns = shard, delay_ns, cutoff_ns
        self.cursor, self.generation = cursor, state.generation
        self.rules, self.stored_rules = rules, state.rules_of(delay_ns)
        self.batch: list[tuple[Position, WorkItem]] = []
        self.read = self.worked = 0
        self.next_due_ns: int | None = None
        self.next_work_ns: int | None = None  # of the first work behind the cutoff
        self.stuck: StreamResolution | None = None
        self.superseded = False

    @property
    def ended(self) -> bool:
        return self.stuck is not None or self.superseded

    @property
    def end(self) -> Position:
        return Position(self.cutoff_ns, OFFSET_END)

    @property
    def lane(self) -> str:
        return self.stream(ChangeEvent(Position(), "")).lane

    def stream(self, event: ChangeEvent) -> Stream:
        kind = StreamKind.PREDICATE if self.delay_ns is None else StreamKind.ORIGINAL
        return Stream(
            kind,
            self.delay_ns or 0,
            event.position,
            bucket=event.bucket,
            key=event.key,
            upload_id=event.upload_id,
            shard=self.shard,
        )

    def sweep(self) -> Sweep:
        return Sweep(
            self.delay_ns,
            self.read,
            self.worked,
            self.next_due_ns,
            self.stuck is StreamResolution.RETRY_LATER,
            self.stuck is StreamResolution.BLOCKED,
            self.superseded,
        )


def plan_passes(streams: Iterable[OpenStream], passes_max: int = PASSES_MAX) -> list[list[OpenStream]]:
    """Streams whose ranges of the log overlap share a pass: an event is read once for all of them.

    With many different delays, those that are nearest to each other share one too, so that there are at most
    `passes_max`: it reads what lies between them, which costs less than another pass for each.
    """
    passes: list[list[OpenStream]] = []
    until_ns = -1
    gaps: list[int] = []  # before each pass but the first
    for stream in sorted(streams, key=lambda one: one.cursor):
        if not passes or stream.cursor.ts_ns > until_ns:
            if passes:
                gaps.append(stream.cursor.ts_ns - until_ns)
            passes.append([])
            until_ns = -1
        passes[-1].append(stream)
        until_ns = max(until_ns, stream.cutoff_ns)
    while len(passes) > passes_max:
        nearest = gaps.index(min(gaps))
        passes[nearest : nearest + 2] = [[*passes[nearest], *passes[nearest + 1]]]
        del gaps[nearest]
    return passes
