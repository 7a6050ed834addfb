"""The commit of one append to one partition: swaps the control record until the append stands in it.

An append keeps its id through all attempts, so a swap whose answer was lost is recognised by reading: it stands in
pending, or its index entry stands where it would have gone. Only where a compaction has merged that place away is the
outcome unknown, and said to be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from lakebed.errors import LakebedError, OutcomeUnknown, Overloaded, Stale
from lakebed.log import blob, control, paths, producers
from lakebed.log.control import BlobTooOld
from lakebed.log.lane import Lane, Materialising
from lakebed.log.model import Control, LogFenced, Pending, TopicPartition
from lakebed.log.producers import Chunk, Verdict
from lakebed.log.records import SWAPS_MAX, Records, Versioned
from lakebed.metrics import Metrics


class Written(msgspec.Struct, frozen=True, gc=False):
    """A group's records in the bucket, not committed yet."""

    chunks: tuple[Chunk, ...]
    append_id: str
    data_key: str
    place: blob.Slice
    created_at_ms: int


Doubts = Sequence[Pending]  # appends of which an attempt does not know whether they happened


class NotFresh(Exception):
    """Some of the chunks must not be appended; nothing was."""

    def __init__(self, verdicts: Sequence[Verdict]) -> None:
        super().__init__("not every chunk is fresh")
        self.verdicts = verdicts


class Committer:
    """Works inside a turn of the lane, which it leaves knowing the control record, or knowing nothing."""

    def __init__(self, records: Records, *, producer_memory_s: float, metrics: Metrics) -> None:
        self._records, self._memory_ms = records, round(producer_memory_s * 1000)
        self._lost_swaps = metrics.counter("lakebed_log_lost_swaps_total")

    async def append_all(self, turns: Sequence[tuple[Lane, Written]]) -> list[Pending | Doubts]:
        """One attempt for many partitions together, with two calls to meta for all of them.

        Gives each append, or what the attempt leaves in doubt: whoever gets that goes on with `append`.
        """
        await _arrived([lane.materialising[1] for lane, _ in turns if lane.materialising is not None])
        planned = [self._planned(lane, written) for lane, written in turns]
        swaps = [
            (lane.tp, after, lane.known.version)
            for (lane, _), after in zip(turns, planned, strict=True)
            if after is not None and lane.known is not None
        ]
        swapped = iter(await self._records.swap_all(swaps) if swaps else ())
        outcomes: list[Pending | Doubts] = []
        made: list[Lane] = []
        for (lane, _), after in zip(turns, planned, strict=True):
            put = next(swapped) if after is not None else None
            if after is None or after.pending is None or put is None:
                outcomes.append(())
            elif isinstance(put, LakebedError):
                self._lost_swaps.inc()
                lane.forget()
                outcomes.append((after.pending,) if isinstance(put, Stale | OutcomeUnknown) else ())
            else:
                lane.known = put
                made.append(lane)
                outcomes.append(after.pending)
        self._materialise_later(made)
        return outcomes

    def _materialise_later(self, lanes: Sequence[Lane]) -> None:
        known = [(lane, lane.known.value) for lane in lanes if lane.known is not None]
        task = asyncio.create_task(self._records.materialise_all([(lane.tp, now) for lane, now in known]))
        task.add_done_callback(_observed)
        for lane, now in known:
            assert now.pending is not None
            lane.appends += 1
            lane.materialising = (now.pending.append_id, task)

    async def append(self, lane: Lane, written: Written, doubts: Doubts = ()) -> Pending:
        """Raises NotFresh, BlobTooOld, LogFenced, Overloaded after too many lost swaps, or OutcomeUnknown."""
        doubts = list(doubts)
        try:
            for attempt in range(SWAPS_MAX):
                fresh = lane.known is None
                known = lane.known or await self._read(lane)
                landed = await self._landed(lane.tp, known.value, written, doubts)
                if landed is not None:
                    return landed
                verdicts = self._judged(known.value, written)
                if not producers.all_fresh(verdicts):
                    if fresh:
                        raise NotFresh(verdicts)
                    lane.forget()  # only believed on a fresh read
                    continue
                after = self._after(lane.tp, known.value, written)
                await self._materialised(lane, known.value)
                try:
                    lane.known = await self._records.swap(lane.tp, paths.control(lane.tp), after, known.version)
                except (Stale, OutcomeUnknown):
                    self._lost_swaps.inc()
                    lane.forget()
                    if after.pending is not None:
                        doubts.append(after.pending)  # a client below may have retried: Stale is no proof either
                    if attempt:
                        await self._records.pause(attempt)
                    continue
                assert after.pending is not None
                self._materialise_later([lane])
                return after.pending
        except (LogFenced, BlobTooOld):
            lane.forget()
            raise  # read from a control record in which this append can no longer land
        except LakebedError as error:
            lane.forget()
            if doubts:
                raise OutcomeUnknown(f"an append to {lane.tp} may have happened: {error.message}") from error
            raise
        raise Overloaded(f"the control record of {lane.tp} changed under us {SWAPS_MAX} times")

    async def settle(self, lanes: Sequence[Lane]) -> None:
        """Clears pending where it is in the index. What cannot be cleared is left to the next one to come."""
        await _arrived([lane.materialising[1] for lane in lanes if lane.materialising is not None])
        swaps: list[tuple[Lane, Control, str]] = []
        for lane in lanes:
            known = lane.known
            if known is not None and known.value.pending is not None and _in_index(lane, known.value):
                swaps.append((lane, control.cleared(known.value), known.version))
        made = await self._records.swap_all([(lane.tp, after, version) for lane, after, version in swaps])
        for (lane, _, _), put in zip(swaps, made, strict=True):
            if isinstance(put, LakebedError):
                lane.forget()
            else:
                lane.known, lane.materialising = put, None

    async def _read(self, lane: Lane) -> Versioned[Control]:
        lane.known = await self._records.control(lane.tp)
        return lane.known

    async def _materialised(self, lane: Lane, known: Control) -> None:
        """Returns once the pending append, ours or another's, is in the index."""
        under_way, lane.materialising = lane.materialising, None
        if known.pending is None:
            return
        if under_way is not None and under_way[0] == known.pending.append_id:
            await _arrived([under_way[1]])
            if _here(under_way[1], lane.tp):
                return
        await self._records.materialise(lane.tp, known)

    async def _landed(
        self, tp: TopicPartition, now: Control, written: Written, doubts: Sequence[Pending]
    ) -> Pending | None:
        """Our own append, when an earlier attempt whose answer was lost has gone through."""
        if now.pending is not None and now.pending.append_id == written.append_id:
            return now.pending
        for doubt in doubts:
            if now.sequence_counter < doubt.end_offset:
                continue
            if doubt.end_offset < now.log_start_offset:
                raise OutcomeUnknown(f"an append to {tp} may have happened; its place has been trimmed or deleted")
            for found in await self._records.spans(tp, doubt.end_offset, limit=1):
                if found.end_offset == doubt.end_offset and found.entry == doubt.entry():
                    return doubt
                if found.entry.type == "COMPACTED" and found.covers(doubt.end_offset):
                    raise OutcomeUnknown(f"an append to {tp} may have happened; a compaction has passed over its place")
        return None

    def _judged(self, now: Control, written: Written) -> list[Verdict]:
        return producers.judge(now, written.chunks, now_ms=written.created_at_ms, memory_ms=self._memory_ms)

    def _after(self, tp: TopicPartition, known: Control, written: Written) -> Control:
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

    def _planned(self, lane: Lane, written: Written) -> Control | None:
        """The control record after the append; None where it is not known, not fresh, refused, or not in the index."""
        if lane.known is None:
            return None
        now = lane.known.value
        if now.pending is not None and not _in_index(lane, now):
            return None
        if not producers.all_fresh(self._judged(now, written)):
            return None
        try:
            return self._after(lane.tp, now, written)
        except (LogFenced, BlobTooOld):
            return None


def _in_index(lane: Lane, now: Control) -> bool:
    """Whether the pending append is known to be in the index."""
    assert now.pending is not None
    under_way = lane.materialising
    return under_way is not None and under_way[0] == now.pending.append_id and _here(under_way[1], lane.tp)


def _here(task: Materialising, tp: TopicPartition) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None and tp not in task.result()


async def _arrived(tasks: Sequence[Materialising]) -> None:
    """Waits without taking part: who is cancelled here cancels nothing that others wait for."""
    waiting = {task for task in tasks if not task.done()}
    if waiting:
        await asyncio.wait(waiting)


def _observed(task: Materialising) -> None:
    """Its failure is met by whoever awaits it, or made good by whoever comes next."""
    if not task.cancelled():
        task.exception()
