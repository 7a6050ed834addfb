"""Sweeps the event stream: once per delay group, once for predicates. A cursor passes only what is resolved.

A sweep that meets RETRY_LATER ends the pass, one that meets BLOCKED ends itself; the others go on. What a crash loses
is one batch of progress, and replaying it is harmless: every delete is guarded by identity.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from itertools import takewhile

import msgspec

from lakebed.core.logs import logger
from lakebed.lifecycle import blockers
from lakebed.lifecycle.decide import sweeps_original, sweeps_predicate
from lakebed.lifecycle.engine import ActionRef, CompiledAction, PolicySnapshot
from lakebed.lifecycle.gauges import stream_name
from lakebed.lifecycle.model import BEFORE_FIRST, Calendar, Mode, Position, StreamKind, StreamResolution
from lakebed.lifecycle.resolver import Resolver, WorkItem
from lakebed.lifecycle.seams import ChangeEvent, EventSource, LostLog
from lakebed.lifecycle.settings import LifecycleSettings, ns
from lakebed.lifecycle.state import LifecycleState, ReaderState, Stream, changed

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


class LifecycleReader:
    """`alive` is called between batches: it renews the lease, and raises when the lease was lost."""

    def __init__(
        self, source: EventSource, resolver: Resolver, state: LifecycleState, settings: LifecycleSettings
    ) -> None:
        self._source, self._resolver, self._state, self._settings = source, resolver, state, settings
        self._events = state.metrics.counter("lakebed_lifecycle_events_total")

    async def run(self, snapshot: PolicySnapshot, alive: Callable[[], Awaitable[None]]) -> list[Sweep]:
        """One pass over all streams. Raises LostLog when the log no longer reaches back to a cursor."""
        held = (await self._state.blockers.read()).value
        sweeps: list[Sweep] = []
        groups: list[int | None] = list(snapshot.original_delay_groups)
        for delay_ns in groups + ([None] if snapshot.predicate_actions else []):
            kind = StreamKind.ORIGINAL if delay_ns is not None else StreamKind.PREDICATE
            if blockers.blocks(held, kind, delay_ns=delay_ns or 0):
                sweeps.append(Sweep(delay_ns, blocked=True))
                continue
            sweep = await self._sweep(snapshot, delay_ns, alive)
            self._events.labels(stream=stream_name(delay_ns)).inc(sweep.read)
            sweeps.append(sweep)
            if sweep.halted:
                break
        return sweeps

    async def _sweep(
        self, snapshot: PolicySnapshot, delay_ns: int | None, alive: Callable[[], Awaitable[None]]
    ) -> Sweep:
        cursor = (await self._state.reader.read()).value.cursor(delay_ns)
        if cursor is None:  # no scan has seeded it yet
            return Sweep(delay_ns)
        now_ns, calendar = self._state.clock.now_ns(), snapshot.calendar
        safe_ns = now_ns - ns(self._settings.flush_lag_s)
        wanted_ns = now_ns - calendar.small_delay_ns if delay_ns is None else calendar.cutoff(now_ns, delay_ns)
        cutoff_ns = min(wanted_ns, safe_ns)
        read = worked = waiting = peeked = 0
        batch: list[tuple[Position, WorkItem | None]] = []
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

    def _work(self, snapshot: PolicySnapshot, delay_ns: int | None, event: ChangeEvent) -> WorkItem | None:
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
            return WorkItem(stream, event.bucket, event.key, (), unreadable=event.unreadable) if known else None
        if not wanted or not actions:
            return None
        return WorkItem(stream, event.bucket, event.key, tuple(actions), event.upload_id, event)

    async def _settle(
        self, delay_ns: int | None, cursor: Position, batch: list[tuple[Position, WorkItem | None]]
    ) -> tuple[Position, StreamResolution | None]:
        """Resolves a batch and advances to the last event before the first unresolved one."""
        works = [work for _, work in batch if work is not None]
        answers = iter(await self._resolver.settle(works)) if works else iter(())
        judged = [
            (place, next(answers) if work is not None else StreamResolution.NOOP_RESOLVED) for place, work in batch
        ]
        passed = [place for place, answer in takewhile(lambda one: one[1].resolved, judged)]
        stuck = next((answer for _, answer in judged if not answer.resolved), None)
        if passed:
            cursor = await self._advance(delay_ns, cursor, passed[-1])
        return cursor, stuck

    async def _advance(self, delay_ns: int | None, seen: Position, to: Position) -> Position:
        state = await self._state.reader.change(changed(lambda known: advance_cursor(known, delay_ns, seen, to)))
        return state.cursor(delay_ns) or to

    async def _lost(self, error: LostLog) -> None:
        now_ns = self._state.clock.now_ns()

        def mark(state: ReaderState) -> ReaderState:
            if state.lost_log_since_ns:
                return state
            return msgspec.structs.replace(state, lost_log_since_ns=now_ns, lost_log=error.message)

        await self._state.reader.change(changed(mark))

    def _ended(self, delay_ns: int | None, read: int, worked: int, answer: StreamResolution) -> Sweep:
        halted = answer is StreamResolution.RETRY_LATER
        return Sweep(delay_ns, read, worked, halted=halted, blocked=not halted)


def seed_cursors(
    state: ReaderState,
    snapshot: PolicySnapshot,
    newly_completed: Iterable[ActionRef],
    target_modes: Mapping[ActionRef, Mode],
    started_ns: int,
    *,
    lookback_ns: int,
    force_delays_ns: Iterable[int] = (),
    force_predicate: bool = False,
) -> ReaderState:
    """The cursors after a scan that began at `started_ns`. Pure.

    A cursor moves only backwards, and only for actions that complete their bootstrap scan or groups that an operator
    reseeds: a safety scan does not make every sibling replay. The floor is the start of the scan, so that writes which
    the scan missed are replayed.

    `target_modes` was decided before, since an action completing now has no durable mode yet; scans need no cursor.
    """
    delays, predicate = set(force_delays_ns), force_predicate
    for ref in newly_completed:
        if target_modes.get(ref) is not Mode.EVENT_DRIVEN:
            continue
        delays |= set(snapshot.actions[ref].delays_ns)
        predicate = predicate or snapshot.actions[ref].predicate_sensitive
    for delay_ns in sorted(delays):
        floor = Position(started_ns - max(delay_ns, lookback_ns), BEFORE_FIRST)
        state = _pulled_back(state, delay_ns, floor)
    if predicate:
        state = _pulled_back(state, None, Position(started_ns - lookback_ns, BEFORE_FIRST))
    return state


def _pulled_back(state: ReaderState, delay_ns: int | None, floor: Position) -> ReaderState:
    known = state.cursor(delay_ns)
    return state if known is not None and known <= floor else state.at(delay_ns, floor)


def advance_cursor(state: ReaderState, delay_ns: int | None, seen: Position, to: Position) -> ReaderState:
    """The cursor moved from where the reader knew it to be; a cursor that a scan moved back meanwhile stays."""
    return state.at(delay_ns, to) if state.cursor(delay_ns) == seen and to > seen else state
