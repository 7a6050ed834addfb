"""The commit of one append to one partition: swaps the control record until it contains the append.

An append keeps its id through all attempts, so a swap whose response was lost is recognised by reading: the append is
pending, or its index entry is at its key. Only where a compaction has replaced that entry does it raise
OutcomeUnknown.

A sequencer keeps the appends of one process to one partition in order. A ticket is taken before the blob is written, so
blobs are uploaded in parallel. The control record is kept between appends: an uncontended append is one
compare-and-swap, which brings the index entry of the append before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from lakebed.core.errors import LakebedError, OutcomeUnknown, Overloaded, Stale
from lakebed.core.runtime import Runtime
from lakebed.log import blob, control, paths, producers
from lakebed.log.control import BlobTooOld
from lakebed.log.model import Control, LogFenced, PendingAppend, ProducersSnapshot, TopicPartition
from lakebed.log.producers import ProducerMarks, RecordChunk, Verdict
from lakebed.log.records import SWAPS_MAX, Records, Versioned

UncertainAppends = Sequence[PendingAppend]  # appends whose outcome is unknown


class Sequencer:
    def __init__(self, tp: TopicPartition) -> None:
        self.tp = tp
        self.known: Versioned[Control] | None = None
        self.snapshot: tuple[str, ProducerMarks] = ("", {})  # of producers: its key and content
        self.appends = 0
        self.waiting = 0
        self._tail: asyncio.Future[None] | None = None

    def forget(self) -> None:
        """The known control record may be outdated: the next turn reads it."""
        self.known = None

    @property
    def pending(self) -> bool:
        """Whether the last append is to be put into the index: by the next one, or when the partition is idle."""
        return self.known is not None and self.known.value.pending is not None

    def ticket(self) -> Ticket:
        self.waiting += 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        made = Ticket(self, self._tail, done)
        self._tail = done
        return made


class Ticket:
    """A turn in the sequence: ready when all earlier tickets have left. `leave` must be called in any case."""

    def __init__(self, sequencer: Sequencer, before: asyncio.Future[None] | None, done: asyncio.Future[None]) -> None:
        self.sequencer, self._before, self._done = sequencer, before, done

    @property
    def ready(self) -> bool:
        """Whether all earlier tickets have left."""
        return self._before is None or self._before.done()

    def leave(self) -> None:
        """A ticket that leaves before its turn lets the next one go when its turn comes."""
        if self._done.done():
            return
        if self._before is not None and not self._before.done():
            self._before.add_done_callback(lambda _: self.leave())
            return
        self.sequencer.waiting -= 1
        self._done.set_result(None)


async def any_turn(tickets: Iterable[Ticket]) -> None:
    """Returns when one of them is ready."""
    before = [ticket._before for ticket in tickets if ticket._before is not None]
    await asyncio.wait(before, return_when=asyncio.FIRST_COMPLETED)


class UploadedAppend(msgspec.Struct, frozen=True, gc=False):
    """A group's records in the bucket, not committed yet."""

    chunks: tuple[RecordChunk, ...]
    append_id: str
    data_key: str
    place: blob.BlobSlice
    created_at_ms: int


class NotFresh(Exception):
    """Some of the chunks must not be appended; nothing was."""

    def __init__(self, verdicts: Sequence[Verdict]) -> None:
        super().__init__("not every chunk is fresh")
        self.verdicts = verdicts


class Committer:
    """Works inside a turn of the sequencer, which knows the control record afterwards, or nothing."""

    def __init__(self, runtime: Runtime, records: Records, *, producer_memory_s: float) -> None:
        self._records, self._memory_ms, self._ids = records, round(producer_memory_s * 1000), runtime.ids
        self._lost_swaps = runtime.metrics.counter("lakebed_log_lost_swaps_total")

    async def append_all(
        self, turns: Sequence[tuple[Sequencer, UploadedAppend]]
    ) -> list[PendingAppend | UncertainAppends]:
        """One attempt for many partitions together, with one call to meta for all of them.

        Gives each append, or the appends whose outcome is unknown: the caller continues with `append`.
        """
        planned = [self._planned(sequencer, written) for sequencer, written in turns]
        swaps = [
            (sequencer.tp, sequencer.known, after)
            for (sequencer, _), after in zip(turns, planned, strict=True)
            if after is not None and sequencer.known is not None
        ]
        swapped = iter(await self._records.swap_all(swaps))
        outcomes: list[PendingAppend | UncertainAppends] = []
        for (sequencer, _), after in zip(turns, planned, strict=True):
            put = next(swapped) if after is not None else None
            if after is None or after.pending is None or put is None:
                outcomes.append(())
            elif isinstance(put, LakebedError):
                self._lost_swaps.inc()
                sequencer.forget()
                outcomes.append((after.pending,) if isinstance(put, Stale | OutcomeUnknown) else ())
            else:
                sequencer.known = put
                sequencer.appends += 1
                outcomes.append(after.pending)
        return outcomes

    async def append(
        self, sequencer: Sequencer, written: UploadedAppend, doubts: UncertainAppends = ()
    ) -> PendingAppend:
        """Raises NotFresh, BlobTooOld, LogFenced, Overloaded after too many lost swaps, or OutcomeUnknown."""
        doubts = list(doubts)
        try:
            for attempt in range(SWAPS_MAX):
                fresh = sequencer.known is None
                known = sequencer.known or await self._read(sequencer)
                landed = await self._landed(sequencer.tp, known.value, written, doubts)
                if landed is not None:
                    return landed
                if not await self._load_snapshot(sequencer, known.value, written):
                    sequencer.forget()
                    continue
                full = _with_producers(sequencer, known.value, written)
                assert full is not None
                verdicts = self._judged(full, written)
                if not producers.all_fresh(verdicts):
                    if fresh:
                        raise NotFresh(verdicts)
                    sequencer.forget()  # only believed on a fresh read
                    continue
                after = await self._stored(sequencer, self._after(sequencer.tp, full, written), written)
                (put,) = await self._records.swap_all([(sequencer.tp, known, after)])
                if isinstance(put, Stale | OutcomeUnknown):
                    self._lost_swaps.inc()
                    sequencer.forget()
                    if after.pending is not None:
                        doubts.append(after.pending)  # a client below may have retried: Stale is no proof either
                    if attempt:
                        await self._records.pause(attempt)
                    continue
                if isinstance(put, LakebedError):
                    raise put
                assert after.pending is not None
                sequencer.known = put
                sequencer.appends += 1
                await self._replaced_snapshot(sequencer.tp, known.value, after)
                return after.pending
            known = await self._read(sequencer)  # the last swap was made where only its answer was lost
            landed = await self._landed(sequencer.tp, known.value, written, doubts)
            if landed is not None:
                return landed
        except (LogFenced, BlobTooOld):
            sequencer.forget()
            raise  # read from a control record in which this append can no longer land
        except LakebedError as error:
            sequencer.forget()
            if doubts:
                raise OutcomeUnknown(f"an append to {sequencer.tp} may have happened: {error.message}") from error
            raise
        raise Overloaded(f"the control record of {sequencer.tp} changed {SWAPS_MAX} times during one append")

    async def settle(self, sequencers: Sequence[Sequencer]) -> None:
        """Puts pending appends into the index and clears them. What fails here is left to the next append."""
        pending = [(each, each.known) for each in sequencers if each.known is not None and each.pending]
        swaps = [(sequencer.tp, known, control.cleared(known.value)) for sequencer, known in pending]
        for (sequencer, _), put in zip(pending, await self._records.swap_all(swaps), strict=True):
            sequencer.known = None if isinstance(put, LakebedError) else put

    async def _read(self, sequencer: Sequencer) -> Versioned[Control]:
        sequencer.known = await self._records.control(sequencer.tp)
        return sequencer.known

    async def _landed(
        self, tp: TopicPartition, now: Control, written: UploadedAppend, doubts: Sequence[PendingAppend]
    ) -> PendingAppend | None:
        """Our own append, when an earlier attempt whose response was lost has succeeded."""
        if now.pending is not None and now.pending.append_id == written.append_id:
            return now.pending
        for doubt in doubts:
            if now.sequence_counter < doubt.end_offset:
                continue
            if doubt.end_offset < now.log_start_offset:
                raise OutcomeUnknown(f"an append to {tp} may have happened; its offsets were trimmed or deleted")
            for found in await self._records.spans(tp, doubt.end_offset, limit=1):
                if found.end_offset == doubt.end_offset and found.entry == doubt.entry():
                    return doubt
                if found.entry.type == "COMPACTED" and found.covers(doubt.end_offset):
                    raise OutcomeUnknown(
                        f"an append to {tp} may have happened; a compaction has replaced its index entry"
                    )
        return None

    def _judged(self, now: Control, written: UploadedAppend) -> list[Verdict]:
        return producers.judge(now, written.chunks, now_ms=written.created_at_ms, memory_ms=self._memory_ms)

    def _after(self, tp: TopicPartition, known: Control, written: UploadedAppend) -> Control:
        return control.append(
            known,
            written.chunks,
            tp=tp,
            append_id=written.append_id,
            data_key=written.data_key,
            place=written.place,
            created_at_ms=written.created_at_ms,
            memory_ms=self._memory_ms,
        )

    def _planned(self, sequencer: Sequencer, written: UploadedAppend) -> Control | None:
        """The control record after the append; None where it is not known, not fresh, or refused."""
        if sequencer.known is None:
            return None
        now = sequencer.known.value
        full = _with_producers(sequencer, now, written)
        if full is None or not producers.all_fresh(self._judged(full, written)):
            return None
        try:
            return _in_control(sequencer, self._after(sequencer.tp, full, written), written)
        except (LogFenced, BlobTooOld):
            return None

    async def _load_snapshot(self, sequencer: Sequencer, now: Control, written: UploadedAppend) -> bool:
        """False when the snapshot is gone: the control record has changed."""
        if now.producers_key == sequencer.snapshot[0] or not _stamped(written):
            return True
        found = await self._records.producers(sequencer.tp, now)
        if found is not None:
            sequencer.snapshot = (now.producers_key, found)
        return found is not None

    async def _stored(self, sequencer: Sequencer, after: Control, written: UploadedAppend) -> Control:
        """The control record as it is stored. Too many producers are written into a new snapshot, which it names."""
        small = _in_control(sequencer, after, written)
        if small is not None:
            return small
        id = self._ids.uuid()
        snapshot = ProducersSnapshot(written.created_at_ms, after.producers)
        await self._records.create(sequencer.tp, paths.producers(sequencer.tp, id), snapshot)
        sequencer.snapshot = (id, after.producers)
        return msgspec.structs.replace(after, producers={}, producers_key=id)

    async def _replaced_snapshot(self, tp: TopicPartition, before: Control, after: Control) -> None:
        """Deletes a snapshot that no control record names any more. What fails here is left to the sweeper."""
        if before.producers_key and before.producers_key != after.producers_key:
            with suppress(LakebedError):
                await self._records.meta.delete(
                    paths.producers(tp, before.producers_key), partition_key=tp.partition_key
                )


def _stamped(written: UploadedAppend) -> bool:
    return any(chunk.stamp is not None for chunk in written.chunks)


def _with_producers(sequencer: Sequencer, now: Control, written: UploadedAppend) -> Control | None:
    """The control record with all that is known of producers, where the append needs it; None without the snapshot."""
    if not now.producers_key or not _stamped(written):
        return now
    key, snapshot = sequencer.snapshot
    if key != now.producers_key:
        return None
    return msgspec.structs.replace(now, producers=producers.expanded(snapshot, now.producers))


def _in_control(sequencer: Sequencer, after: Control, written: UploadedAppend) -> Control | None:
    """The control record as it is stored, with the changes since the snapshot; None when they are too many."""
    if not _stamped(written):
        return after
    changed = after.producers
    if after.producers_key:
        changed = producers.changes_since(sequencer.snapshot[1], after.producers)
    return msgspec.structs.replace(after, producers=changed) if len(changed) <= producers.CHANGES_MAX else None
