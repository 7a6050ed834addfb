"""Sweeps the event stream: one pass serves every delay group and the predicates of the shards a worker has.

A stream is a delay group, or the predicates, of one shard. Streams whose ranges of the log overlap are read together. A
cursor passes only what is resolved. RETRY_LATER and BLOCKED end the stream that met them; the others go on. What a
crash loses is one batch of progress, and replaying it is harmless: every delete is guarded by identity.

Cursors change by compare-and-swap on what was read: the position, the set of rules and the generation. Whoever moves a
cursor back raises the generation, so that a sweep which began before it is refused and begins again, with the policies
and states as they are then. The caller reads the cursors before it compiles the snapshot.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from itertools import takewhile

import msgspec

from lakebed.core.logs import logger
from lakebed.lifecycle import blockers
from lakebed.lifecycle.cluster import SHARDS, names, shard_of
from lakebed.lifecycle.cursors import Move, advanced, stream_cutoff, without_unused
from lakebed.lifecycle.delete_decision import sweeps_original, sweeps_predicate
from lakebed.lifecycle.engine import ActionRef, CompiledAction, PolicySnapshot
from lakebed.lifecycle.gauges import stream_name
from lakebed.lifecycle.model import Calendar, Position, StreamResolution
from lakebed.lifecycle.resolver import Resolver, WorkItem
from lakebed.lifecycle.seams import ChangeEvent, EventSource, LostLog
from lakebed.lifecycle.settings import LifecycleSettings, ns
from lakebed.lifecycle.state import BlockerState, LifecycleState, ReaderState, changed
from lakebed.lifecycle.streams import OpenStream, Sweep, plan_passes

log = logger("lifecycle")

CHECKPOINT_EVENTS = 1000
CHECKPOINT_NS = 5_000_000_000
SOON_NS = 1_000_000_000
PEEK_EVENTS = 1000  # events behind the cutoff that are looked through for the next due instant
Alive = Callable[[], Awaitable[None]]


class ReaderRun(msgspec.Struct, frozen=True):
    """One pass over all streams. `unserved` are actions whose cursor is missing or was not moved for them."""

    sweeps: tuple[Sweep, ...] = ()
    unserved: tuple[ActionRef, ...] = ()


class _Quiet(msgspec.Struct, frozen=True):
    """What an earlier pass saw behind a cursor: no work until `clear_ns`."""

    generation: int
    cursor: Position
    rules: str
    clear_ns: int
    next_due_ns: int | None


class LifecycleReader:
    """`alive` is called between batches: it renews the hold on the shards, and raises when it was lost."""

    def __init__(
        self, source: EventSource, resolver: Resolver, state: LifecycleState, settings: LifecycleSettings
    ) -> None:
        self._source, self._resolver, self._state, self._settings = source, resolver, state, settings
        self._events = state.metrics.counter("lakebed_lifecycle_events_total")
        self._quiet: dict[tuple[int, int | None], _Quiet] = {}
        self._halted: dict[tuple[int, int | None], int] = {}  # streams with a failure, and when each is tried again

    async def run(
        self,
        snapshot: PolicySnapshot,
        alive: Alive,
        cursors: Mapping[int, ReaderState] | None = None,
        shards: Iterable[int] = range(SHARDS),
        *,
        pause_ns: int = 0,
    ) -> ReaderRun:
        """One pass over the streams of these shards. `cursors` were read before the snapshot was compiled. A stream
        that met a failure rests for `pause_ns`, however often others make a pass: its retries are counted.

        Raises LostLog when the log no longer reaches back to a cursor that is in use.
        """
        states = dict(cursors if cursors is not None else await self._state.cursors())
        held = (await self._state.blockers.read()).value
        sweeps: list[Sweep] = []
        streams: list[OpenStream] = []
        mine, groups = sorted(shards), _groups(snapshot)
        stored = states
        if unserved := _unserved(states, mine, groups, snapshot):
            stored = await self._state.cursors()  # an action may have joined since they were read
            unserved = _unserved(stored, mine, groups, snapshot)
        for shard in mine:
            states[shard] = await self._drop_unused(shard, states[shard], snapshot)
            for delay_ns, members in groups:
                found = self._open(shard, delay_ns, members, states[shard], snapshot)
                if found is None:
                    sweeps.append(Sweep(delay_ns, superseded=stored[shard].generation != states[shard].generation))
                elif blockers.blocks(held, found.lane):
                    sweeps.append(Sweep(delay_ns, blocked=True))
                elif self._halted.get((shard, delay_ns), 0) > self._state.clock.now_ns():
                    sweeps.append(Sweep(delay_ns, halted=True))
                else:
                    streams.append(found)
        for together in plan_passes(streams):
            if due := [stream for stream in together if not self._is_quiet(stream)]:
                await self._pass(due, snapshot, alive, held)
            await self._finish(together)
        until_ns = self._state.clock.now_ns() + pause_ns
        stuck = [stream for stream in streams if stream.stuck is StreamResolution.RETRY_LATER]
        self._halted = {(stream.shard, stream.delay_ns): until_ns for stream in stuck} | {
            place: at_ns for place, at_ns in self._halted.items() if at_ns > self._state.clock.now_ns()
        }
        sweeps += [stream.sweep() for stream in streams]
        return ReaderRun(tuple(_by_group(sweeps)), tuple(sorted(unserved)))

    def retry_now(self) -> None:
        """Ends the pause of streams that met a failure: an operator wants a round."""
        self._halted = {}

    def _open(
        self, shard: int, delay_ns: int | None, members: frozenset[ActionRef], state: ReaderState, snap: PolicySnapshot
    ) -> OpenStream | None:
        """The stream, unless it has no cursor."""
        cursor = state.cursor(delay_ns)
        if cursor is None or state.reach != snap.reach:
            return None
        if cursor.ts_ns < snap.log_begins_ns:
            raise LostLog(f"the event log begins at {snap.log_begins_ns}, a cursor is at {cursor.ts_ns}")
        now_ns = self._state.clock.now_ns()
        cutoff_ns = stream_cutoff(snap.calendar, now_ns, delay_ns, ns(self._settings.flush_lag_s))
        rules = names(f"{ref}@{snap.actions[ref].joined}" for ref in members)
        return OpenStream(shard, delay_ns, state, rules, cutoff_ns)

    async def _drop_unused(self, shard: int, state: ReaderState, snapshot: PolicySnapshot) -> ReaderState:
        """Cursors that no rule needs are dropped: they would only fall behind the log."""
        used = {delay_ns for delay_ns, _ in _groups(snapshot)}
        if without_unused(state, used) is state:
            return state

        def drop(known: ReaderState) -> ReaderState:
            return without_unused(known, used) if known.generation == state.generation else known

        return await self._state.readers[shard].change(changed(drop))

    def _is_quiet(self, stream: OpenStream) -> bool:
        """Whether an earlier pass has shown that there is no work up to the cutoff."""
        known = self._quiet.get((stream.shard, stream.delay_ns))
        if known is None or stream.cutoff_ns > known.clear_ns:
            return False
        if (known.generation, known.cursor, known.rules) != (stream.generation, stream.cursor, stream.rules):
            return False
        stream.next_due_ns = known.next_due_ns
        return True

    async def _pass(
        self, streams: Sequence[OpenStream], snapshot: PolicySnapshot, alive: Alive, held: BlockerState
    ) -> None:
        """Reads the log once for these streams, and resolves their work in batches."""
        by_shard: dict[int, list[OpenStream]] = {}
        for stream in streams:
            by_shard.setdefault(stream.shard, []).append(stream)
        until_ns, safe_ns = max(one.cutoff_ns for one in streams), self._safe_ns()
        clear_ns, peeked, count, cut = safe_ns - 1, 0, 0, False
        async with aclosing(self._source.read(min(one.cursor for one in streams), safe_ns)) as events:
            async for event in events:
                at = event.position
                matched = snapshot.match_active(event.bucket, event.key)
                for stream in by_shard.get(shard_of(event.bucket, event.key), ()):
                    self._offer(stream, event, matched, snapshot, held)
                    if len(stream.batch) >= self._settings.batch:
                        await self._settle([stream], at, alive)
                if at.ts_ns > until_ns:
                    peeked += 1
                    if peeked >= PEEK_EVENTS or all(one.next_due_ns is not None or one.ended for one in streams):
                        clear_ns, cut = at.ts_ns - 1, True
                        break
                    continue
                count += 1
                if count % CHECKPOINT_EVENTS == 0:
                    for some in by_shard.values():
                        await self._settle(some, at, alive)
                    if all(one.ended for one in streams):
                        break
        for some in by_shard.values():
            for stream in some:
                if stream.batch:
                    await self._settle([stream], stream.batch[-1][0], alive)
        self._remember(streams, snapshot.calendar, clear_ns, cut=cut)

    def _offer(
        self,
        stream: OpenStream,
        event: ChangeEvent,
        matched: Sequence[CompiledAction],
        snapshot: PolicySnapshot,
        held: BlockerState,
    ) -> None:
        at = event.position
        if stream.ended or at <= stream.cursor:
            return
        if at.ts_ns > stream.cutoff_ns:
            if stream.next_due_ns is None and self._work(snapshot, stream, event, matched) is not None:
                stream.next_due_ns = _due(at.ts_ns, stream.delay_ns, snapshot.calendar)
                stream.next_work_ns = at.ts_ns
            return
        stream.read += 1
        work = self._work(snapshot, stream, event, matched)
        if work is not None and work.stream.id not in held.skips:
            stream.worked += 1
            stream.batch.append((at, work))

    def _remember(self, streams: Iterable[OpenStream], calendar: Calendar, clear_ns: int, *, cut: bool) -> None:
        """Notes how far the log was seen to hold no more work. Beyond that it must be looked at again. Where the log
        holds more (`cut`), the stream is woken for it, at most once a second; at its end, one that waits long is
        woken too, and one that waits shortly is read by every round.
        """
        soon_ns = self._state.clock.now_ns() + SOON_NS
        for stream in streams:
            if stream.ended:
                self._quiet.pop((stream.shard, stream.delay_ns), None)
                continue
            unknown_ns = _due(clear_ns + 1, stream.delay_ns, calendar)
            if stream.next_due_ns is None and (cut or unknown_ns >= soon_ns):
                stream.next_due_ns = max(unknown_ns, soon_ns)
            clear = clear_ns if stream.next_work_ns is None else stream.next_work_ns - 1
            self._quiet[stream.shard, stream.delay_ns] = _Quiet(
                stream.generation, stream.cursor, stream.rules, clear, stream.next_due_ns
            )

    def _work(
        self, snapshot: PolicySnapshot, stream: OpenStream, event: ChangeEvent, matched: Sequence[CompiledAction]
    ) -> WorkItem | None:
        """`matched` are the active actions whose prefix begins the key."""
        if event.unreadable:
            known = event.bucket in snapshot.indexed or not event.bucket
            place = stream.stream(event)
            return WorkItem(place, event.bucket, event.key, (), unreadable=event.unreadable) if known else None
        if not matched:
            return None
        versioned, delay_ns = event.bucket in snapshot.versioned, stream.delay_ns
        if delay_ns is None:
            actions = tuple([one for one in matched if one.predicate_sensitive])
            wanted = bool(actions) and sweeps_predicate(event, versioned=versioned)
        else:
            actions = tuple([one for one in matched if delay_ns in one.delays_ns])
            wanted = bool(actions) and sweeps_original(event, versioned=versioned)
        if not wanted:
            return None
        return WorkItem(stream.stream(event), event.bucket, event.key, actions, event.upload_id, event)

    async def _settle(self, streams: Sequence[OpenStream], reached: Position, alive: Alive) -> None:
        """Resolves what waits in streams of one shard, and advances each: to `reached`, or to the last work before the
        first unresolved one. One write of the shard's cursors.
        """
        moves: list[tuple[OpenStream, Position]] = []
        for stream in streams:
            if stream.ended:
                continue
            batch, stream.batch = stream.batch, []
            to = min(reached, stream.end)
            if batch:
                await alive()
                answers = await self._resolver.settle([work for _, work in batch])
                judged = list(zip((place for place, _ in batch), answers, strict=True))
                stream.stuck = next((answer for _, answer in judged if not answer.resolved), None)
                passed = [place for place, _ in takewhile(lambda one: one[1].resolved, judged)]
                if stream.stuck is not None:
                    to = passed[-1] if passed else stream.cursor
            moves.append((stream, to))
        if moves:
            await self._advance(moves[0][0].shard, moves)

    async def _finish(self, streams: Sequence[OpenStream]) -> None:
        """Moves the streams that were read to their end there, in one write for each shard."""
        moves: dict[int, list[tuple[OpenStream, Position]]] = {}
        for stream in streams:
            self._events.labels(stream=stream_name(stream.delay_ns)).inc(stream.read)
            if not stream.ended and stream.end.ts_ns - stream.cursor.ts_ns >= CHECKPOINT_NS:
                moves.setdefault(stream.shard, []).append((stream, stream.end))
        for shard, some in moves.items():
            await self._advance(shard, some)

    async def _advance(self, shard: int, wanted: Iterable[tuple[OpenStream, Position]]) -> None:
        forward = [(stream, to) for stream, to in wanted if to > stream.cursor]
        if not forward:
            return
        moves = [Move(stream.delay_ns, stream.cursor, to, stream.stored_rules, stream.rules) for stream, to in forward]
        generation = forward[0][0].generation

        def move(state: ReaderState) -> tuple[ReaderState, bool]:
            after = advanced(state, generation, moves)
            return (state, False) if after is None else (after, True)

        done = await self._state.readers[shard].change(move)
        for stream, to in forward:
            if not done:
                stream.superseded = True
                continue
            known = self._quiet.get((stream.shard, stream.delay_ns))
            if known is not None and known.cursor == stream.cursor:
                self._quiet[stream.shard, stream.delay_ns] = msgspec.structs.replace(known, cursor=to)
            stream.cursor, stream.stored_rules = to, stream.rules

    def _safe_ns(self) -> int:
        return self._state.clock.now_ns() - ns(self._settings.flush_lag_s)


def _due(ts_ns: int, delay_ns: int | None, calendar: Calendar) -> int:
    return ts_ns + calendar.small_delay_ns if delay_ns is None else calendar.due(ts_ns, delay_ns)


def _groups(snapshot: PolicySnapshot) -> list[tuple[int | None, frozenset[ActionRef]]]:
    found: list[tuple[int | None, frozenset[ActionRef]]] = list(snapshot.original_delay_groups.items())
    return [*found, (None, snapshot.predicate_actions)] if snapshot.predicate_actions else found


def _unserved(
    states: Mapping[int, ReaderState],
    shards: Iterable[int],
    groups: Iterable[tuple[int | None, frozenset[ActionRef]]],
    snapshot: PolicySnapshot,
) -> set[ActionRef]:
    """The actions that joined, and whose cursor is missing, of another log, or was never moved back for them."""
    found: set[ActionRef] = set()
    for delay_ns, members in groups:
        for state in (states[shard] for shard in shards):
            serves = state.cursor(delay_ns) is not None and state.reach == snapshot.reach
            generation = state.generation if serves else 0
            found |= {ref for ref in members if snapshot.actions[ref].joined > generation}
    return found


def _by_group(sweeps: Iterable[Sweep]) -> list[Sweep]:
    found: dict[int | None, Sweep] = {}
    for sweep in sweeps:
        found[sweep.delay_ns] = found[sweep.delay_ns].plus(sweep) if sweep.delay_ns in found else sweep
    return [found[delay] for delay in sorted(found, key=lambda delay: (delay is None, delay or 0))]
