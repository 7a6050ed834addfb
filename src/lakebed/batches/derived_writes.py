"""Index entries of an accepted batch, written after the response. Losing them loses no data: the reconciler writes
them.

Uploads have priority: while some are in progress a write waits, at most `DELAY_MAX_S`. The queue is bounded; what does
not fit, or fails too often, is dropped and counted. Correctness never depends on it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from lakebed.batches.acceptance import Write
from lakebed.core.errors import AlreadyExists, LakebedError
from lakebed.core.logs import logger
from lakebed.store.runtime import StoreRuntime

TRIES_MAX = 4  # a write that fails this often is left to the reconciler
BACKOFF_BASE_S = 0.1
BACKOFF_CAP_S = 2.0
YIELD_POLL_S = 0.05  # how often a delayed write checks again
DELAY_MAX_S = 5.0  # how long uploads may delay a derived write

log = logger("batches")


class DerivedWrites:
    """Writes what was put, with `writers` tasks, from `start` to `stop`."""

    def __init__(
        self, runtime: StoreRuntime, *, waiting_max: int, writers: int, uploading: Callable[[], bool] = lambda: False
    ) -> None:
        store, clock, ids, metrics = runtime.store, runtime.clock, runtime.ids, runtime.metrics
        self._store, self._clock, self._ids = store, clock, ids
        self.uploading = uploading
        self._waiting: deque[tuple[float, Callable[[], Iterable[Write]]]] = deque()
        self._waiting_max, self._writers = waiting_max, writers
        self._arrived = asyncio.Event()
        self._busy = 0
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._depth = metrics.gauge("lakebed_batches_aftermath_waiting")
        outcomes = metrics.counter("lakebed_batches_aftermath_total")
        self._written = outcomes.labels(outcome="written")
        self._dropped = outcomes.labels(outcome="dropped")

    def put(self, writes: Callable[[], Iterable[Write]]) -> None:
        """Takes what is to be written, made only when its turn comes; dropped and counted when full. Never waits."""
        if len(self._waiting) >= self._waiting_max:
            self._dropped.inc()
            return
        self._waiting.append((self._clock.monotonic_s(), writes))
        self._depth.set(len(self._waiting))
        self._arrived.set()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._write_all()) for _ in range(self._writers)]

    async def drain(self) -> None:
        """Returns when everything put so far is written or dropped."""
        while self._waiting or self._busy:
            await self._clock.sleep(0.01)

    async def stop(self, drain_s: float = 5.0) -> None:
        self._stopping = True
        try:
            async with asyncio.timeout(drain_s):
                await self.drain()
        except TimeoutError:
            self._dropped.inc(len(self._waiting))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _write_all(self) -> None:
        while True:
            if not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            if (
                self.uploading()
                and self._clock.monotonic_s() - self._waiting[0][0] < DELAY_MAX_S
                and not self._stopping
            ):
                await self._clock.sleep(YIELD_POLL_S)
                continue
            _, writes = self._waiting.popleft()
            self._busy += 1
            try:
                for write in writes():
                    await self._write(write)
            finally:
                self._busy -= 1
                self._depth.set(len(self._waiting) + self._busy)

    async def _write(self, write: Write) -> None:
        for attempt in range(TRIES_MAX):
            try:
                await self._store.create(write.key, write.data)
            except AlreadyExists:
                break  # another version of this code wrote it: it is kept
            except LakebedError as error:
                if attempt + 1 == TRIES_MAX:
                    log.warning("derived write left to the reconciler", key=write.key, error=error.message)
                    self._dropped.inc()
                    return
                await self._clock.sleep(self._ids.jitter_s(attempt, base_s=BACKOFF_BASE_S, cap_s=BACKOFF_CAP_S))
            else:
                break
        self._written.inc()
