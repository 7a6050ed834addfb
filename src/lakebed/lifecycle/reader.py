"""Sweeps the event stream: once per delay group, once for predicates. A cursor passes only what is resolved.

A sweep that meets RETRY_LATER ends the pass, one that meets BLOCKED ends itself; the others go on. What a crash loses
is one batch of progress, and replaying it is harmless: every delete is guarded by identity.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from itertools import takewhile

import msgspec

from lakebed.lifecycle import cursors, troubles
from lakebed.lifecycle.engine import CompiledAction, Snapshot
from lakebed.lifecycle.events import sweeps_original, sweeps_predicate
from lakebed.lifecycle.gauges import stream_name
from lakebed.lifecycle.model import Calendar, Position, Resolution, StreamKind
from lakebed.lifecycle.resolver import Resolver, Work
from lakebed.lifecycle.seams import Event, EventSource, LostLog
from lakebed.lifecycle.settings import LifecycleSettings, ns
from lakebed.lifecycle.shelf import Shelf, changed
from lakebed.lifecycle.state import ReaderState, Stream
from lakebed.logs import logger

log = logger("lifecycle")

OFFSET_END = 1 << 62  # behind every event of its instant
CHECKPOINT_EVENTS = 1000
CHECKPOINT_NS = 5_000_000_000
PEEK_EVENTS = 1000  # events behind the cutoff that are looked through for the next due instant


class Sweep(msgspec.Struct, frozen=True):
    """What one sweep did. `next_due_ns` is when the next event it knows of is due."""

    delay_ns: int | None
    read: int = 0
    worked: int = 0
    next_due_ns: int | None = None
    halted: bool = False
    blocked: bool = False


def _due(ts_ns: int, delay_ns: int | None, calendar: Calendar) -> int:
    return ts_ns + calendar.small_delay_ns if delay_ns is None else calendar.due(ts_ns, delay_ns)


class Reader:
    """`alive` is asked between batches: it renews the lease, and raises when it was lost."""

    def __init__(self, source: EventSource, resolver: Resolver, shelf: Shelf, settings: LifecycleSettings) -> None:
        self._source, self._resolver, self._shelf, self._settings = source, resolver, shelf, settings
        self._events = shelf.metrics.counter("lakebed_lifecycle_events_total")

    async def run(self, snapshot: Snapshot, alive: Callable[[], Awaitable[None]]) -> list[Sweep]:
        """One pass over all streams. Raises LostLog when the log no longer reaches back to a cursor."""
        held = (await self._shelf.troubles.read()).value
        sweeps: list[Sweep] = []
        groups: list[int | None] = list(snapshot.original_delay_groups)
        for delay_ns in groups + ([None] if snapshot.predicate_actions else []):
            kind = StreamKind.ORIGINAL if delay_ns is not None else StreamKind.PREDICATE
            if troubles.blocks(held, kind, delay_ns=delay_ns or 0):
                sweeps.append(Sweep(delay_ns, blocked=True))
                continue
            sweep = await self._sweep(snapshot, delay_ns, alive)
            self._events.labels(stream=stream_name(delay_ns)).inc(sweep.read)
            sweeps.append(sweep)
            if sweep.halted:
                break
        return sweeps

    async def _sweep(self, snapshot: Snapshot, delay_ns: int | None, alive: Callable[[], Awaitable[None]]) -> Sweep:
        cursor = (await self._shelf.reader.read()).value.cursor(delay_ns)
        if cursor is None:  # no walk has seeded it yet
            return Sweep(delay_ns)
        now_ns, calendar = self._shelf.clock.now_ns(), snapshot.calendar
        safe_ns = now_ns - ns(self._settings.flush_lag_s)
        wanted_ns = now_ns - calendar.small_delay_ns if delay_ns is None else calendar.cutoff(now_ns, delay_ns)
        cutoff_ns = min(wanted_ns, safe_ns)
        read = worked = waiting = peeked = 0
        batch: list[tuple[Position, Work | None]] = []
        next_due_ns: int | None = None
        try:
            async with aclosing(self._source.read(cursor, safe_ns)) as events:
                async for event in events:
                    if event.position <= cursor:
                        continue
                    work = self._work(snapshot, delay_ns, event)
                    if event.position.ts_ns > cutoff_ns:
                        peeked += 1
                        if work is not None or peeked >= PEEK_EVENTS:
                            next_due_ns = _due(event.position.ts_ns, delay_ns, calendar)
                            break
                        continue
                    read += 1
                    batch.append((event.position, work))
                    worked, waiting = worked + (work is not None), waiting + (work is not None)
                    if waiting >= self._settings.batch or len(batch) >= CHECKPOINT_EVENTS:
                        await alive()
                        cursor, answer = await self._settle(delay_ns, cursor, batch)
                        batch, waiting = [], 0
                        if answer is not None:
                            return self._ended(delay_ns, read, worked, answer)
        except LostLog as error:
            await self._lost(error)
            raise
        if batch:
            await alive()
            cursor, answer = await self._settle(delay_ns, cursor, batch)
            if answer is not None:
                return self._ended(delay_ns, read, worked, answer)
        end = Position(cutoff_ns, OFFSET_END)
        if end > cursor and (end.ts_ns - cursor.ts_ns >= CHECKPOINT_NS):
            await self._advance(delay_ns, cursor, end)
        return Sweep(delay_ns, read, worked, next_due_ns)

    def _work(self, snapshot: Snapshot, delay_ns: int | None, event: Event) -> Work | None:
        actions: list[CompiledAction]
        versioned = event.bucket in snapshot.versioned
        if delay_ns is None:
            stream = Stream(StreamKind.PREDICATE, position=event.position)
            actions = snapshot.match_predicate(event.bucket, event.key)
            wanted = sweeps_predicate(event, versioned=versioned)
        else:
            stream = Stream(StreamKind.ORIGINAL, delay_ns, event.position)
            actions = snapshot.match_original(event.bucket, event.key, delay_ns)
            wanted = sweeps_original(event, versioned=versioned)
        if event.unreadable:
            known = event.bucket in snapshot.buckets or not event.bucket
            return Work(stream, event.bucket, event.key, (), unreadable=event.unreadable) if known else None
        if not wanted or not actions:
            return None
        return Work(stream, event.bucket, event.key, tuple(actions), event.upload_id, event)

    async def _settle(
        self, delay_ns: int | None, cursor: Position, batch: list[tuple[Position, Work | None]]
    ) -> tuple[Position, Resolution | None]:
        """Resolves a batch and advances to the last event before the first unresolved one."""
        works = [work for _, work in batch if work is not None]
        answers = iter(await self._resolver.settle(works)) if works else iter(())
        judged = [(place, next(answers) if work is not None else Resolution.NOOP_RESOLVED) for place, work in batch]
        passed = [place for place, answer in takewhile(lambda one: one[1].resolved, judged)]
        stuck = next((answer for _, answer in judged if not answer.resolved), None)
        if passed:
            cursor = await self._advance(delay_ns, cursor, passed[-1])
        return cursor, stuck

    async def _advance(self, delay_ns: int | None, seen: Position, to: Position) -> Position:
        state = await self._shelf.reader.change(changed(lambda known: cursors.advanced(known, delay_ns, seen, to)))
        return state.cursor(delay_ns) or to

    async def _lost(self, error: LostLog) -> None:
        now_ns = self._shelf.clock.now_ns()

        def mark(state: ReaderState) -> ReaderState:
            if state.lost_log_since_ns:
                return state
            return msgspec.structs.replace(state, lost_log_since_ns=now_ns, lost_log=error.message)

        await self._shelf.reader.change(changed(mark))

    def _ended(self, delay_ns: int | None, read: int, worked: int, answer: Resolution) -> Sweep:
        halted = answer is Resolution.RETRY_LATER
        return Sweep(delay_ns, read, worked, halted=halted, blocked=not halted)
