"""A session kept alive by heartbeats, for the backends that keep sessions as records of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from lakebed.clock import Clock
from lakebed.errors import Fenced, LakebedError

BEATS_PER_TIMEOUT = 3  # two heartbeats may be lost before others see the session end


class HeartbeatSession:
    """Calls `beat` (raises Fenced when the session has ended) a few times per timeout, and `end` on close.

    Judges its own end by its own monotonic clock too: unless a heartbeat that was *sent* within the timeout succeeded,
    it calls itself dead, so an owner that was paused stops before it can learn of it. `opened_s` is when its opening
    was sent, for backends that may be slow to answer it.
    """

    def __init__(
        self,
        id: str,
        *,
        timeout_s: float,
        clock: Clock,
        beat: Callable[[], Awaitable[None]],
        end: Callable[[], Awaitable[None]],
        opened_s: float | None = None,
    ) -> None:
        self._id, self._timeout_s, self._clock = id, timeout_s, clock
        self._beat, self._end = beat, end
        self._good_until_s = (clock.monotonic_s() if opened_s is None else opened_s) + timeout_s
        self._ended = False
        self._beating = asyncio.create_task(self._keep())

    @property
    def id(self) -> str:
        return self._id

    @property
    def alive(self) -> bool:
        return not self._ended and self._clock.monotonic_s() < self._good_until_s

    async def close(self) -> None:
        if self._beating.done() and self._ended:
            return
        self._ended = True
        self._beating.cancel()
        await asyncio.wait([self._beating])
        await self._end()

    async def _keep(self) -> None:
        while not self._ended:
            await self._clock.sleep(self._timeout_s / BEATS_PER_TIMEOUT)
            sent_s = self._clock.monotonic_s()
            try:
                await self._beat()
            except Fenced:
                self._ended = True
            except LakebedError:
                continue  # not now: the next beat may come through in time
            else:
                self._good_until_s = sent_s + self._timeout_s
