"""The writer: one shared blob for many partitions, then each partition commits on its own.

The one conditional write is the swap of `meta/control`: it gives out the offsets and names the blob. An append is
acknowledged there. The index entry follows, and pending is cleared when nobody waits to append; a crash in between
leaves a pending append that the next one to come, writer or compactor, puts into the index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import msgspec

from lakebed.clock import Clock, now_ms
from lakebed.errors import AlreadyExists, LakebedError, Unavailable
from lakebed.ids import Ids
from lakebed.log import blob, codec, control, paths
from lakebed.log.commit import Committer, Doubts, NotFresh, Written
from lakebed.log.control import BlobTooOld
from lakebed.log.lane import Lane, Ticket, any_turn
from lakebed.log.model import FIRST_OFFSET, Control, Cursor, LogDeleted, Mark, Pending, TopicPartition
from lakebed.log.paths import Uris
from lakebed.log.producers import MEMORY_MS, Chunk, Duplicate, Fresh, Refused, Verdict
from lakebed.log.records import Records, Versioned
from lakebed.metrics import Metrics
from lakebed.store.protocol import Store

SETTLE_S = 0.05  # a lane in which nothing happens for so long clears its pending append
LANES_MAX = 4096  # partitions whose control record is kept between appends: each may hold some hundred kilobytes
REWRITES_MAX = 3  # times one append writes its records again, because of duplicates in it or a blob grown old


class Group(msgspec.Struct, frozen=True, gc=False):
    """What one append brings to one partition."""

    tp: TopicPartition
    chunks: tuple[Chunk, ...]


class Appended(msgspec.Struct, frozen=True, gc=False):
    """Where a chunk's records are. `duplicate` when an earlier attempt had already appended them."""

    start_offset: int
    end_offset: int
    count: int
    index_key: str
    wal_uri: str
    duplicate: bool = False


Outcome = Appended | LakebedError


class Writer:
    """Appends to any partition. One per process, so that its lanes see every append of the process."""

    def __init__(
        self,
        store: Store,
        records: Records,
        uris: Uris,
        *,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
        producer_memory_s: float = MEMORY_MS / 1000,
    ) -> None:
        self._store, self._records, self._uris = store, records, uris
        self._clock, self._ids = clock, ids
        self._lanes: dict[TopicPartition, Lane] = {}
        self._committer = Committer(records, producer_memory_s=producer_memory_s, metrics=metrics)
        self._unsettled: dict[Lane, int] = {}  # lanes to be cleared when quiet → how many appends were last seen there
        self._settler: asyncio.Task[None] | None = None
        self._blobs = metrics.counter("lakebed_log_blobs_total")
        self._blob_bytes = metrics.counter("lakebed_log_blob_bytes_total")
        self._appends = metrics.counter("lakebed_log_appends_total")

    async def append_shared(
        self, groups: Sequence[Group], *, uploaded: Callable[[], None] = lambda: None
    ) -> list[list[Outcome]]:
        """Appends every group, all in one blob. Gives an outcome for each chunk of each group; raises nothing.

        Each partition succeeds or fails on its own. Groups of one partition commit in the order of these calls.
        `uploaded` is called when the blob is in the bucket and only commits are left.
        """
        tickets = [self._lane(group.tp).ticket() for group in groups]
        try:
            await self._initialise([ticket.lane for ticket in tickets])
            written = await self._write(groups)
            uploaded()
            return await self._commit_all(tickets, written)
        except LakebedError as error:
            return [[error] * len(group.chunks) for group in groups]
        finally:
            for ticket in tickets:
                ticket.leave()

    async def ensure(self, tp: TopicPartition) -> Versioned[Control]:
        """Creates the partition where it does not exist, and opens it again where it was deleted. Idempotent."""
        found = await self._records.find(tp, paths.control(tp), Control)
        if found is None:
            try:
                found = await self._records.create(tp, paths.control(tp), control.opened(now_ms(self._clock)))
            except AlreadyExists:
                found = await self._records.control(tp)
            with suppress(AlreadyExists):
                await self._records.create(tp, paths.cursor(tp), Cursor(FIRST_OFFSET))
        if found.value.log_state == "DELETED":
            found = await self._records.change(
                tp, lambda now: control.reopened(now, now_ms(self._clock)) if now.log_state == "DELETED" else now
            )
        return found

    async def drain(self) -> None:
        """Puts the pending appends of this process into the index, and clears them."""
        if self._settler is not None:
            self._settler.cancel()
            await asyncio.wait([self._settler])
        await self._settle(list(self._unsettled))

    def _lane(self, tp: TopicPartition) -> Lane:
        found = self._lanes.pop(tp, None) or Lane(tp)
        self._lanes[tp] = found  # the longest unused comes first
        if len(self._lanes) > LANES_MAX:
            self._forget_idle()
        return found

    def _forget_idle(self) -> None:
        """A lane that is not in use only saves its next append a read."""
        for tp, lane in list(self._lanes.items())[: len(self._lanes) - LANES_MAX]:
            if not lane.waiting and lane not in self._unsettled:
                del self._lanes[tp]

    async def _initialise(self, lanes: Sequence[Lane]) -> None:
        """Before a blob is named: so no blob is older than the control record of a partition it is for."""

        async def one(lane: Lane) -> None:
            found = await self.ensure(lane.tp)
            lane.known = lane.known or found  # another turn may know more by now

        unknown = [lane for lane in lanes if lane.known is None]
        if unknown:
            await asyncio.gather(*map(one, unknown))

    async def _write(self, groups: Sequence[Group]) -> list[Written]:
        made_at_ms = now_ms(self._clock)
        bodies = [_body(group, made_at_ms) for group in groups]
        data, places = blob.encode(bodies, made_at_ms)
        name = self._ids.uuid()
        key = paths.shared_blob(name)
        await self._store.create(key, data)
        self._blobs.inc()
        self._blob_bytes.inc(len(data))
        uri = self._uris.uri(key)
        return [
            Written(group.chunks, f"{name}-{number}", uri, place, made_at_ms)
            for number, (group, place) in enumerate(zip(groups, places, strict=True))
        ]

    async def _commit_all(self, tickets: Sequence[Ticket], written: Sequence[Written]) -> list[list[Outcome]]:
        """Commits every partition when its turn has come: those whose turn comes together, in one attempt."""
        outcomes: dict[int, list[Outcome]] = {}
        hard: dict[int, asyncio.Task[list[Outcome]]] = {}
        waiting = dict(enumerate(tickets))
        try:
            while waiting:
                turns = [number for number, ticket in waiting.items() if ticket.ready]
                if not turns:
                    await any_turn(waiting.values())
                    continue
                found = await self._committer.append_all([(waiting[n].lane, written[n]) for n in turns])
                self._appends.inc(sum([isinstance(pending, Pending) for pending in found]))
                for number, pending in zip(turns, found, strict=True):
                    ticket = waiting.pop(number)
                    if isinstance(pending, Pending):
                        outcomes[number] = [*_appended(ticket.lane.tp, written[number].chunks, pending)]
                        self._leave(ticket)
                    else:
                        hard[number] = asyncio.create_task(self._commit(ticket, written[number], pending))
            for number, task in hard.items():
                outcomes[number] = await task
        finally:
            for task in hard.values():
                task.cancel()
        return [outcomes[number] for number in range(len(tickets))]

    async def _commit(self, ticket: Ticket, written: Written, doubts: Doubts) -> list[Outcome]:
        """A turn in which a first attempt did not succeed."""
        try:
            return await self._place(ticket.lane, written, doubts)
        except LakebedError as error:
            return [error] * len(written.chunks)
        finally:
            self._leave(ticket)

    def _leave(self, ticket: Ticket) -> None:
        ticket.leave()
        if ticket.lane.materialising is not None and not ticket.lane.waiting:
            self._settle_later(ticket.lane)

    async def _place(self, lane: Lane, written: Written, doubts: Doubts = ()) -> list[Outcome]:
        """One turn. Records are written again without what turned out to be duplicates, or when the blob grew old."""
        for _ in range(REWRITES_MAX):
            try:
                pending = await self._committer.append(lane, written, doubts)
            except BlobTooOld:
                written, doubts = (await self._write([Group(lane.tp, written.chunks)]))[0], ()
                continue
            except LogDeleted:
                lane.known = await self.ensure(lane.tp)  # somebody else deleted it; this append opens it again
                continue
            except NotFresh as found:
                return await self._around(lane, written, found.verdicts)
            self._appends.inc()
            return [*_appended(lane.tp, written.chunks, pending)]
        raise Unavailable(f"{lane.tp} was deleted or vacuumed {REWRITES_MAX} times during one append")

    async def _around(self, lane: Lane, written: Written, verdicts: Sequence[Verdict]) -> list[Outcome]:
        """Appends what is fresh, and answers the rest from what is known of it."""
        fresh = tuple(c for c, verdict in zip(written.chunks, verdicts, strict=True) if isinstance(verdict, Fresh))
        placed: list[Outcome] = []
        if fresh:
            placed = await self._place(lane, (await self._write([Group(lane.tp, fresh)]))[0])
        answers: list[Outcome] = []
        for verdict in verdicts:
            if isinstance(verdict, Fresh):
                answers.append(placed.pop(0))
            elif isinstance(verdict, Refused):
                answers.append(verdict.error)
            elif isinstance(verdict, Duplicate):
                answers.append(_duplicate(lane.tp, verdict.mark))
            else:
                answers.append(answers[verdict.index])
        return answers

    def _settle_later(self, lane: Lane) -> None:
        """An append that follows soon takes the place of pending by itself; only a quiet lane is cleared."""
        self._unsettled.setdefault(lane, -1)
        if self._settler is None or self._settler.done():
            self._settler = asyncio.create_task(self._settle_quiet())

    async def _settle_quiet(self) -> None:
        """Clears lanes in which nothing happened between two looks, together, until none is left."""
        while self._unsettled:
            await self._clock.sleep(SETTLE_S)
            quiet = [lane for lane, seen in self._unsettled.items() if lane.appends == seen]
            self._unsettled = {lane: lane.appends for lane in self._unsettled}
            await self._settle(quiet)

    async def _settle(self, lanes: Sequence[Lane]) -> None:
        """Where nobody waits to append, clears pending. Whatever fails here, the next one to come does."""
        for lane in lanes:
            self._unsettled.pop(lane, None)
        tickets = [lane.ticket() for lane in lanes if not lane.waiting]
        try:
            if tickets:
                await self._committer.settle([ticket.lane for ticket in tickets])
        finally:
            for ticket in tickets:
                ticket.leave()


def _body(group: Group, made_at_ms: int) -> blob.Body:
    parts = [chunk.records for chunk in group.chunks]
    count = sum([part.count for part in parts])
    return blob.Body(group.tp, count, codec.encode(parts, [codec.Segment(count, made_at_ms)]))


def _appended(tp: TopicPartition, chunks: Sequence[Chunk], pending: Pending) -> Iterator[Appended]:
    start = pending.start_offset
    for chunk in chunks:
        end = start + chunk.records.count - 1
        yield Appended(start, end, chunk.records.count, paths.index(tp, pending.end_offset), pending.data_key)
        start = end + 1


def _duplicate(tp: TopicPartition, mark: Mark) -> Appended:
    count = mark.end_offset - mark.start_offset + 1
    return Appended(mark.start_offset, mark.end_offset, count, paths.index(tp, mark.end_offset), "", duplicate=True)
