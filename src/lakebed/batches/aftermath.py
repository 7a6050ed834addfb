"""What follows an acceptance, written after the answer. Losing it loses nothing: the reconciler derives it again.

It gives way to uploads: while some are under way a write waits, but not longer than its patience. The queue is bounded;
what does not fit, or fails too often, is dropped and counted. Correctness never waits for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from lakebed.batches.acceptance import Write
from lakebed.clock import Clock
from lakebed.errors import AlreadyExists, LakebedError
from lakebed.ids import Ids
from lakebed.logs import logger
from lakebed.metrics import Metrics
from lakebed.store.protocol import Store

TRIES_MAX = 4  # a write that fails this often is left to the reconciler
BACKOFF_BASE_S = 0.1
BACKOFF_CAP_S = 2.0
GIVE_WAY_S = 0.05  # how often a write that gives way looks again
PATIENCE_S = 5.0  # how long uploads may hold a derived write back

log = logger("batches")


class Aftermath:
    """Writes what was put, `writers` at a time, from `start` to `stop`."""

    def __init__(
        self,
        store: Store,
        *,
        waiting_max: int,
        writers: int,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
        uploading: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store, self._clock, self._ids = store, clock, ids
        self.uploading = uploading
        self._waiting: deque[tuple[float, Callable[[], Iterable[Write]]]] = deque()
        self._waiting_max, self._writers = waiting_max, writers
        self._arrived = asyncio.Event()
        self._busy = 0
        self._hurry = False
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
        self._hurry = True
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
            if self.uploading() and self._clock.monotonic_s() - self._waiting[0][0] < PATIENCE_S and not self._hurry:
                await self._clock.sleep(GIVE_WAY_S)
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
                break  # another version of this code derived it: it stands
            except LakebedError as error:
                if attempt + 1 == TRIES_MAX:
                    log.warning("derived write left to the reconciler", key=write.key, cause=error.message)
                    self._dropped.inc()
                    return
                await self._clock.sleep(self._ids.jitter_s(attempt, base_s=BACKOFF_BASE_S, cap_s=BACKOFF_CAP_S))
            else:
                break
        self._written.inc()
