"""The index rows of accepted batches, written after the response: all rows of a flush in one segment.

Losing them loses no data: the reconciler finds batches that are in no segment. Rows wait until the oldest is `flush_s`
old or a segment is full. The queue is bounded: what does not fit is dropped and counted, and so is what is left at the
end. A flush that fails is tried again with the rows that came meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

from lakebed.batches import acceptance
from lakebed.batches.acceptance import SampleSpan
from lakebed.batches.codec.index import ROWS_MAX, OrphanRow
from lakebed.batches.index import write_rows
from lakebed.batches.model import LATE_NS, AcceptedBatch, FramePlace
from lakebed.core.errors import AlreadyExists, LakebedError
from lakebed.core.feed import ahead
from lakebed.core.logs import logger
from lakebed.store.runtime import StoreRuntime

FLUSH_S = 2.0
BACKOFF_BASE_S = 0.1
BACKOFF_CAP_S = 2.0

log = logger("batches")


class FlushRow(NamedTuple):
    accepted: AcceptedBatch
    span: SampleSpan


class DerivedWrites:
    """Writes what was put, from `start` to `stop`."""

    def __init__(
        self, runtime: StoreRuntime, *, waiting_max: int, flush_s: float = FLUSH_S, writer: str = "collector"
    ) -> None:
        self._store, self._clock, self._ids = runtime.store, runtime.clock, runtime.ids
        self._waiting: deque[tuple[float, FlushRow | OrphanRow]] = deque()
        self._waiting_max, self._flush_s, self._writer = waiting_max, flush_s, writer
        self._arrived, self._wanted, self._empty = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._empty.set()
        self._in_flush = 0
        self._urgent = 0
        self._task: asyncio.Task[None] | None = None
        self._depth = runtime.metrics.gauge("lakebed_batches_aftermath_waiting")
        outcomes = runtime.metrics.counter("lakebed_batches_aftermath_total")
        self._written = outcomes.labels(outcome="written")
        self._dropped = outcomes.labels(outcome="dropped")

    def put(self, accepted: AcceptedBatch, span: SampleSpan) -> None:
        """Takes the row of an accepted batch; dropped and counted when full. Never waits."""
        self._put(FlushRow(accepted, span))

    def put_orphan(self, sha256: str, at_ns: int, place: FramePlace) -> None:
        """The same for a blob that nothing may refer to: garbage collection finds it without a full listing."""
        self._put(OrphanRow(sha256, at_ns, place.key if place.offset else ""))

    def _put(self, row: FlushRow | OrphanRow) -> None:
        if len(self._waiting) >= self._waiting_max:
            self._dropped.inc()
            return
        self._waiting.append((self._clock.monotonic_s(), row))
        self._depth.set(len(self._waiting))
        self._empty.clear()
        self._arrived.set()
        if len(self._waiting) >= ROWS_MAX:
            self._wanted.set()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def drain(self) -> None:
        """Returns when everything put so far is written or dropped. It is written at once."""
        self._urgent += 1
        self._wanted.set()
        try:
            await self._empty.wait()
        finally:
            self._urgent -= 1

    async def stop(self, drain_s: float = 5.0) -> None:
        try:
            async with asyncio.timeout(drain_s):
                await self.drain()
        except TimeoutError:
            self._dropped.inc(len(self._waiting) + self._in_flush)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        failures = 0
        while True:
            if not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            if not await self._due():
                continue
            taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), ROWS_MAX))]
            self._in_flush = len(taken)
            try:
                await self._flush([row for _, row in taken])
                failures = 0
                self._written.inc(len(taken))
            except LakebedError as error:
                log.warning("index rows were not written and are retried", rows=len(taken), error=error.message)
                self._waiting.extendleft(reversed(taken))
                self._in_flush = 0
                await self._clock.sleep(self._ids.jitter_s(failures, base_s=BACKOFF_BASE_S, cap_s=BACKOFF_CAP_S))
                failures += 1
            finally:
                self._in_flush = 0
                self._depth.set(len(self._waiting))
                if not self._waiting:
                    self._empty.set()

    async def _due(self) -> bool:
        """Whether the rows are to be written now; waits for the interval, a full segment or a drain."""
        left_s = self._flush_s - (self._clock.monotonic_s() - self._waiting[0][0])
        if self._urgent or left_s <= 0 or len(self._waiting) >= ROWS_MAX:
            return True
        self._wanted.clear()
        waits = [asyncio.ensure_future(self._wanted.wait()), asyncio.ensure_future(self._clock.sleep(left_s))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return waits[1].done()
        finally:
            for each in waits:
                each.cancel()

    async def _flush(self, taken: list[FlushRow | OrphanRow]) -> None:
        rows = [row for row in taken if isinstance(row, FlushRow)]
        # Notes first: a row that came late without one would never be rolled up.
        late = [row for row in rows if self._clock.now_ns() - row.accepted.accepted_at_unix_ns > LATE_NS]
        async for _ in ahead(late, self._note):
            pass
        await write_rows(
            self._store,
            [acceptance.entry_of(row.accepted, row.span) for row in rows],
            [row for row in taken if isinstance(row, OrphanRow)],
            writer=self._writer,
        )

    async def _note(self, row: FlushRow) -> None:
        note = acceptance.rollup_work(row.accepted)
        try:
            await self._store.create(note.key, note.data)
        except AlreadyExists:
            return  # another version of this code wrote it: it is kept
