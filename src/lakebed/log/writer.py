"""The writer: one shared blob for many partitions, then each partition commits on its own.

The one conditional write is the swap of `meta/control`: it gives out the offsets and names the blob. An append is
acknowledged there. The next append brings its index entry, or the writer does when no append follows; a crash in
between leaves a pending append that the next writer or compactor puts into the index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import AlreadyExists, LakebedError, Unavailable
from lakebed.log import blob, codec, control, paths
from lakebed.log.commit import Committer, NotFresh, Sequencer, Ticket, UncertainAppends, UploadedAppend, any_turn
from lakebed.log.control import BlobTooOld
from lakebed.log.model import FIRST_OFFSET, Control, Cursor, LogDeleted, PendingAppend, ProducerMark, TopicPartition
from lakebed.log.paths import Uris
from lakebed.log.producers import MEMORY_MS, Duplicate, Fresh, RecordChunk, RefusedChunk, Verdict
from lakebed.log.records import Records, Versioned
from lakebed.store.runtime import StoreRuntime

SETTLE_S = 0.05  # at least: a partition without an append for this long gets its pending append cleared
SETTLE_DELAYS = 4  # or for so many batching delays, so that the next flight of a busy partition does it
SEQUENCERS_MAX = 4096  # partitions whose control record is kept between appends: each may hold some hundred kilobytes
REWRITES_MAX = 3  # times one append writes its records again, because of duplicates in it or a blob grown old


class PartitionAppend(msgspec.Struct, frozen=True, gc=False):
    """What one append brings to one partition."""

    tp: TopicPartition
    chunks: tuple[RecordChunk, ...]


class Appended(msgspec.Struct, frozen=True, gc=False):
    """Where a chunk's records are. `duplicate` when an earlier attempt had already appended them.

    `at_ms` is when they were appended, 0 for a duplicate.
    """

    start_offset: int
    end_offset: int
    count: int
    index_key: str
    wal_uri: str
    duplicate: bool = False
    at_ms: int = 0


Outcome = Appended | LakebedError


class LogWriter:
    """Appends to any partition. One per process, so that its sequencers see every append of the process.

    `delay_s` is how far flights of a busy partition are apart.
    """

    def __init__(
        self,
        runtime: StoreRuntime,
        records: Records,
        uris: Uris,
        *,
        horizon_s: float,
        producer_memory_s: float = MEMORY_MS / 1000,
        delay_s: float = 0.0,
    ) -> None:
        self._store, self._records, self._uris = runtime.store, records, uris
        self._horizon_ms = round(horizon_s * 1000)  # of the vacuum
        self._clock, self._ids, metrics = runtime.clock, runtime.ids, runtime.metrics
        self._sequencers: dict[TopicPartition, Sequencer] = {}
        self._committer = Committer(runtime, records, producer_memory_s=producer_memory_s)
        self._settle_s = max(SETTLE_S, SETTLE_DELAYS * delay_s)
        self._unsettled: dict[Sequencer, int] = {}  # to clear when idle → appends at the last look
        self._settler: asyncio.Task[None] | None = None
        self._blobs = metrics.counter("lakebed_log_blobs_total")
        self._blob_bytes = metrics.counter("lakebed_log_blob_bytes_total")
        self._appends = metrics.counter("lakebed_log_appends_total")

    async def append_shared(
        self, groups: Sequence[PartitionAppend], *, uploaded: Callable[[], None] = lambda: None
    ) -> list[list[Outcome]]:
        """Appends every group, all in one blob. Gives an outcome for each chunk of each group; raises nothing.

        Each partition succeeds or fails on its own. Groups of one partition commit in the order of these calls.
        `uploaded` is called when the blob is in the bucket and only commits are left.
        """
        tickets = [self._sequencer(group.tp).ticket() for group in groups]
        try:
            await self._initialise([ticket.sequencer for ticket in tickets])
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
        if found is None or found.value.log_state == "DELETED":
            await self._records.registry.register(tp)
        if found is None:
            try:
                made = control.opened(now_ms(self._clock), horizon_ms=self._horizon_ms)
                found = await self._records.create(tp, paths.control(tp), made)
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

    def _sequencer(self, tp: TopicPartition) -> Sequencer:
        found = self._sequencers.pop(tp, None) or Sequencer(tp)
        self._sequencers[tp] = found  # the least recently used comes first
        if len(self._sequencers) > SEQUENCERS_MAX:
            self._forget_idle()
        return found

    def _forget_idle(self) -> None:
        """An idle sequencer only saves the next append a read."""
        for tp, sequencer in list(self._sequencers.items())[: len(self._sequencers) - SEQUENCERS_MAX]:
            if not sequencer.waiting and sequencer not in self._unsettled:
                del self._sequencers[tp]

    async def _initialise(self, sequencers: Sequence[Sequencer]) -> None:
        """Before a blob is named: so no blob is older than the control record of a partition it is for."""

        async def one(sequencer: Sequencer) -> None:
            found = await self.ensure(sequencer.tp)
            sequencer.known = sequencer.known or found  # another turn may know more by now

        unknown = [sequencer for sequencer in sequencers if sequencer.known is None]
        if unknown:
            await asyncio.gather(*map(one, unknown))

    async def _write(self, groups: Sequence[PartitionAppend]) -> list[UploadedAppend]:
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
            UploadedAppend(group.chunks, f"{name}-{number}", uri, place, made_at_ms)
            for number, (group, place) in enumerate(zip(groups, places, strict=True))
        ]

    async def _commit_all(self, tickets: Sequence[Ticket], written: Sequence[UploadedAppend]) -> list[list[Outcome]]:
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
                found = await self._committer.append_all([(waiting[n].sequencer, written[n]) for n in turns])
                self._appends.inc(sum([isinstance(pending, PendingAppend) for pending in found]))
                for number, pending in zip(turns, found, strict=True):
                    ticket = waiting.pop(number)
                    if isinstance(pending, PendingAppend):
                        outcomes[number] = [*_appended(ticket.sequencer.tp, written[number].chunks, pending)]
                        self._leave(ticket)
                    else:
                        hard[number] = asyncio.create_task(self._commit(ticket, written[number], pending))
            for number, task in hard.items():
                outcomes[number] = await task
        finally:
            for task in hard.values():
                task.cancel()
        return [outcomes[number] for number in range(len(tickets))]

    async def _commit(self, ticket: Ticket, written: UploadedAppend, doubts: UncertainAppends) -> list[Outcome]:
        """A turn in which a first attempt did not succeed."""
        try:
            return await self._place(ticket.sequencer, written, doubts)
        except LakebedError as error:
            return [error] * len(written.chunks)
        finally:
            self._leave(ticket)

    def _leave(self, ticket: Ticket) -> None:
        ticket.leave()
        if ticket.sequencer.pending and not ticket.sequencer.waiting:
            self._settle_later(ticket.sequencer)

    async def _place(
        self, sequencer: Sequencer, written: UploadedAppend, doubts: UncertainAppends = ()
    ) -> list[Outcome]:
        """One turn. Records are written again without what turned out to be duplicates, or when the blob grew old."""
        for _ in range(REWRITES_MAX):
            try:
                pending = await self._committer.append(sequencer, written, doubts)
            except BlobTooOld:
                written, doubts = (await self._write([PartitionAppend(sequencer.tp, written.chunks)]))[0], ()
                continue
            except LogDeleted:
                sequencer.known = await self.ensure(
                    sequencer.tp
                )  # somebody else deleted it; this append opens it again
                continue
            except NotFresh as found:
                return await self._around(sequencer, written, found.verdicts)
            self._appends.inc()
            return [*_appended(sequencer.tp, written.chunks, pending)]
        raise Unavailable(f"{sequencer.tp} was deleted or swept {REWRITES_MAX} times during one append")

    async def _around(
        self, sequencer: Sequencer, written: UploadedAppend, verdicts: Sequence[Verdict]
    ) -> list[Outcome]:
        """Appends what is fresh, and answers the rest from what is known of it."""
        fresh = tuple(c for c, verdict in zip(written.chunks, verdicts, strict=True) if isinstance(verdict, Fresh))
        placed: list[Outcome] = []
        if fresh:
            placed = await self._place(sequencer, (await self._write([PartitionAppend(sequencer.tp, fresh)]))[0])
        answers: list[Outcome] = []
        for verdict in verdicts:
            if isinstance(verdict, Fresh):
                answers.append(placed.pop(0))
            elif isinstance(verdict, RefusedChunk):
                answers.append(verdict.error)
            elif isinstance(verdict, Duplicate):
                answers.append(_duplicate(sequencer.tp, verdict.mark))
            else:
                answers.append(answers[verdict.index])
        return answers

    def _settle_later(self, sequencer: Sequencer) -> None:
        """An append that follows soon takes the place of pending by itself; only an idle partition is cleared."""
        self._unsettled.setdefault(sequencer, -1)
        if self._settler is None or self._settler.done():
            self._settler = asyncio.create_task(self._settle_quiet())

    async def _settle_quiet(self) -> None:
        """Clears partitions without an append since the last look, together, until none is left."""
        while self._unsettled:
            await self._clock.sleep(self._settle_s)
            quiet = [sequencer for sequencer, seen in self._unsettled.items() if sequencer.appends == seen]
            self._unsettled = {sequencer: sequencer.appends for sequencer in self._unsettled}
            await self._settle(quiet)

    async def _settle(self, sequencers: Sequence[Sequencer]) -> None:
        """Clears pending where no append waits. After a failure, the next append does it."""
        for sequencer in sequencers:
            self._unsettled.pop(sequencer, None)
        tickets = [sequencer.ticket() for sequencer in sequencers if not sequencer.waiting]
        try:
            if tickets:
                await self._committer.settle([ticket.sequencer for ticket in tickets])
        finally:
            for ticket in tickets:
                ticket.leave()


def _body(group: PartitionAppend, made_at_ms: int) -> blob.PartitionBody:
    parts = [chunk.records for chunk in group.chunks]
    count = sum([part.count for part in parts])
    buffers = codec.encode(parts, [codec.BatchSegment(count, made_at_ms)])
    return blob.PartitionBody(group.tp, count, buffers, codec.encoding_of(parts))


def _appended(tp: TopicPartition, chunks: Sequence[RecordChunk], pending: PendingAppend) -> Iterator[Appended]:
    start = pending.start_offset
    for chunk in chunks:
        end = start + chunk.records.count - 1
        key = paths.index(tp, pending.end_offset)
        yield Appended(start, end, chunk.records.count, key, pending.data_key, at_ms=pending.created_at_ms)
        start = end + 1


def _duplicate(tp: TopicPartition, mark: ProducerMark) -> Appended:
    count = mark.end_offset - mark.start_offset + 1
    return Appended(mark.start_offset, mark.end_offset, count, paths.index(tp, mark.end_offset), "", duplicate=True)
