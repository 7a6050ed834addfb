"""The batching producer: many requests share few blobs.

A blob leaves at once when no other is under way: nothing waits before an idle store. "At once" is when the event loop
has nothing more for it, so that requests which have already arrived go with it, at most as long after the first of them
as the last blob took; where requests come one at a time, nobody looks for others. While others are under way it waits
for more chunks, until the last of them is committed, the delay since the last departure is over, or the blob is a fair
share: worth a request of its own, and as large as all that is under way and buffered, divided by the blobs that there
would be. So blobs are alike in size, and the bucket works on one while the next is received. Where each request is
billed, a blob that is not full always waits until the delay since the last departure is over.

The writer's sequencers keep each partition in order. Everything buffered or in flight is counted; what would exceed the
limit is refused at once with BackPressureRejected, and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from lakebed.core.errors import LakebedError, OutcomeUnknown, Unavailable
from lakebed.core.runtime import Runtime
from lakebed.log import codec
from lakebed.log.codec import Records
from lakebed.log.model import BackPressureRejected, TopicPartition
from lakebed.log.producers import RecordChunk
from lakebed.log.settings import LogSettings
from lakebed.log.writer import Appended, LogWriter, Outcome, PartitionAppend

AppendedRecords = tuple[TopicPartition, int, Records]  # records, and the offset of the first of them

NO_OUTCOME = OutcomeUnknown(
    "this broker stopped before it knew whether the records were appended", hint="read the partition to find out"
)
CHUNK_OVERHEAD_BYTES = 64  # so that a flood of tiny chunks is counted too
BESIDE_BYTES = 192 * 1024  # the least that leaves beside other blobs: of less, the request costs more than the bytes
QUIET_TURNS = 2  # of the event loop without a new chunk: a request that is read in one turn is appended in the next
GROUP_OVERHEAD_BYTES = 256  # a partition's entry in the blob's header, and the header of its batch


class _Request:
    """The chunks of one produce request. Responds once, when the last of them has its outcome."""

    __slots__ = ("_left", "_outcomes", "_respond")

    def __init__(self, count: int, respond: Callable[[Sequence[Outcome]], None]) -> None:
        self._outcomes: list[Outcome] = [NO_OUTCOME] * count
        self._left, self._respond = count, respond

    def complete(self, index: int, outcome: Outcome) -> None:
        self._outcomes[index] = outcome
        self._left -= 1
        if self._left == 0:
            self._respond(self._outcomes)


class _Waiting:
    __slots__ = ("chunk", "index", "request")

    def __init__(self, chunk: RecordChunk, request: _Request, index: int) -> None:
        self.chunk, self.request, self.index = chunk, request, index

    def complete(self, outcome: Outcome) -> None:
        self.request.complete(self.index, outcome)


class _Buffer:
    def __init__(self) -> None:
        self.groups: dict[TopicPartition, list[_Waiting]] = {}
        self.size = self.held = 0

    def grown(self, tp: TopicPartition, size: int) -> int:
        """How large the blob would be with this much more."""
        return self.size + size + (0 if tp in self.groups else GROUP_OVERHEAD_BYTES)

    def add(self, tp: TopicPartition, size: int, waiting: _Waiting) -> None:
        self.size, self.held = self.grown(tp, size), self.held + size
        self.groups.setdefault(tp, []).append(waiting)


class _Slot:
    """A slot of a flight, released once."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots: asyncio.Semaphore | None = slots

    def leave(self) -> None:
        if self._slots is not None:
            self._slots.release()
            self._slots = None


class BatchingProducer:
    """`appended` gets the records of each flight, so that the tail cache and long polls see them at once."""

    def __init__(
        self,
        runtime: Runtime,
        writer: LogWriter,
        settings: LogSettings,
        *,
        billed: bool = False,
        appended: Callable[[Sequence[AppendedRecords]], None] = lambda _: None,
    ) -> None:
        self._writer, self._settings, self._clock, self._appended = writer, settings, runtime.clock, appended
        self._billed, self._delay_s = billed, settings.delay_ms(billed=billed) / 1000
        self._left_s = float("-inf")  # when the last blob left
        self._patience_s = 0.0  # how long the last blob of several requests took; half of it after each of a single one
        self._buffer = _Buffer()
        self._due: asyncio.Task[None] | None = None
        self._leaving = False  # what is buffered leaves within a few turns of the loop
        self._flights: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(settings.flights_max)
        self._held = 0
        self._closed = False
        metrics = runtime.metrics
        metrics.gauge("lakebed_log_buffered_bytes").set_function(lambda: self._held)
        self._flushes = metrics.counter("lakebed_log_flushes_total")
        self._refused = metrics.counter("lakebed_log_refused_total")

    @property
    def held_bytes(self) -> int:
        """Bytes that are buffered or in flight."""
        return self._held

    def append(
        self, groups: Sequence[tuple[TopicPartition, RecordChunk]], respond: Callable[[Sequence[Outcome]], None]
    ) -> None:
        """Appends each chunk to its partition. Calls `respond` with all outcomes, in order: once, now or later."""
        request = _Request(len(groups), respond)
        for index, (tp, chunk) in enumerate(groups):
            self._add(tp, _Waiting(chunk, request, index))

    def _add(self, tp: TopicPartition, waiting: _Waiting) -> None:
        records = waiting.chunk.records
        size = records.size + records.count * 4 + CHUNK_OVERHEAD_BYTES
        if self._closed:
            waiting.complete(Unavailable("this broker is stopping"))
        elif self._held + size > self._settings.buffer_max_bytes:
            self._refused.inc()
            waiting.complete(
                BackPressureRejected(
                    f"{self._held} bytes are buffered; {size} more would exceed log.buffer_max_bytes",
                    retry_after_s=0.5,
                    hint="retry later, or send to another broker",
                )
            )
        else:
            self._held += size
            if self._buffer.groups and self._buffer.grown(tp, size) > self._settings.batch_max_bytes:
                self._flush()
            self._buffer.add(tp, size, waiting)
            if self._buffer.size >= self._settings.batch_max_bytes:
                self._flush()
            else:
                self._leave_soon()

    def _leave_soon(self) -> None:
        """Decides when the buffered chunks leave. Called when there are more of them, and when a flight has ended."""
        if self._leaving or not self._buffer.groups:
            return
        due_s = self._left_s + self._delay_s
        if (self._idle() and self._clock.monotonic_s() >= due_s) or (not self._billed and self._may_leave()):
            self._leaving = True
            self._leave_when_quiet(self._buffer, self._clock.monotonic_s() + self._patience_s)
        elif self._due is None:
            self._due = asyncio.create_task(self._flush_when_due(due_s))

    def _idle(self) -> bool:
        return not self._flights

    def _may_leave(self) -> bool:
        """Whether nothing is under way, or the blob is a fair share of all that is held."""
        count = len(self._flights)
        share = max(BESIDE_BYTES, self._held / (count + 1))
        return count == 0 or (count < self._settings.flights_max and self._buffer.size >= share)

    def _leave_when_quiet(self, buffer: _Buffer, until_s: float, seen_bytes: int = -1, quiet: int = 0) -> None:
        """With everything that has arrived: looks again in each turn of the loop until it has brought nothing more."""
        quiet = quiet + 1 if buffer.size == seen_bytes else 0
        more = quiet < QUIET_TURNS and buffer.size < BESIDE_BYTES and self._clock.monotonic_s() < until_s
        if buffer is self._buffer and (more or seen_bytes < 0):
            asyncio.get_running_loop().call_soon(self._leave_when_quiet, buffer, until_s, buffer.size, quiet)
            return
        self._leaving = False
        if buffer is self._buffer:
            self._flush(hold=True)
        else:
            self._leave_soon()  # it was full, and has left: what came behind it is looked at anew

    async def drain(self) -> None:
        """Refuses new requests, and waits for everything that was accepted."""
        self._closed = True
        self._flush()
        while self._flights:
            await asyncio.wait(list(self._flights))
        await self._writer.drain()

    async def _flush_when_due(self, due_s: float) -> None:
        # Only the rest of the delay: under load a new task starts late.
        await self._clock.sleep(max(0.0, due_s - self._clock.monotonic_s()))
        await self._slots.acquire()  # while every slot is taken, more goes into this blob
        self._due = None
        if self._buffer.groups:
            self._flush(hold=True, slot=_Slot(self._slots))
        else:
            self._slots.release()

    def _flush(self, *, hold: bool = False, slot: _Slot | None = None) -> None:
        """Starts a flight with what is buffered. `hold`: see `_fly`; `slot` where it has one already."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        full, self._buffer = self._buffer, _Buffer()
        if full.groups:
            self._left_s = self._clock.monotonic_s()
            flight = asyncio.create_task(self._fly(full, hold, slot))
            self._flights.add(flight)
            flight.add_done_callback(self._landed)

    def _landed(self, flight: asyncio.Task[None]) -> None:
        self._flights.discard(flight)
        self._leave_soon()

    async def _fly(self, full: _Buffer, hold: bool, slot: _Slot | None) -> None:
        """One blob and its commits. A full blob frees its slot after the upload, so that uploads never pause; one that
        is not full holds it to the end, so that more is buffered behind slow commits."""
        groups = list(full.groups.items())
        if slot is None:
            await self._slots.acquire()
            slot = _Slot(self._slots)
        began_s = self._clock.monotonic_s()
        try:
            self._flushes.inc()
            outcomes = await self._writer.append_shared(
                [PartitionAppend(tp, tuple([waiting.chunk for waiting in group])) for tp, group in groups],
                uploaded=slot.leave if not hold else lambda: None,
            )
        except LakebedError as error:
            # Without its traceback, whose frames hold this list, the records and the blob: a cycle of megabytes.
            failed = error.with_traceback(None)
            outcomes = [[failed] * len(group) for _, group in groups]
        except BaseException:
            self._complete(groups, [[NO_OUTCOME] * len(group) for _, group in groups])
            raise
        finally:
            slot.leave()
            self._held -= full.held
            shared = sum(len(group) for _, group in groups) > 1
            self._patience_s = self._clock.monotonic_s() - began_s if shared else self._patience_s / 2
        self._complete(groups, outcomes)

    def _complete(
        self, groups: Sequence[tuple[TopicPartition, Sequence[_Waiting]]], outcomes: Sequence[Sequence[Outcome]]
    ) -> None:
        completed = [
            (tp, waiting, outcome)
            for (tp, group), of_group in zip(groups, outcomes, strict=True)
            for waiting, outcome in zip(group, of_group, strict=True)
        ]
        self._appended(
            [
                (tp, outcome.start_offset, codec.appended(waiting.chunk.records, outcome.at_ms))
                for tp, waiting, outcome in completed
                if isinstance(outcome, Appended) and not outcome.duplicate
            ]
        )
        for _, waiting, outcome in completed:
            waiting.complete(outcome)
