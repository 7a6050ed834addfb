"""Time, passed in. Only this module reads it; everything else takes a `Clock`.

In simulation the event loop itself runs on virtual time, so `asyncio.timeout` is exact there too.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # loaded where something sleeps: `lakebed --help` does not
    import asyncio


class Clock(Protocol):
    def now_ns(self) -> int:
        """Wall time, nanoseconds since the Unix epoch."""

    def monotonic_s(self) -> float:
        """Seconds that only go forward: for durations and deadlines inside one process."""

    async def sleep(self, seconds: float) -> None: ...


def now_ms(clock: Clock) -> int:
    """Wall time in milliseconds, the unit of every timestamp we store unless a seed says otherwise."""
    return clock.now_ns() // 1_000_000


class SystemClock:
    def now_ns(self) -> int:
        return time.time_ns()

    def monotonic_s(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        import asyncio

        await asyncio.sleep(seconds)


class ManualClock:
    """A clock that moves only by `advance`, for unit tests. Sleepers wake in order of their deadlines."""

    def __init__(self, start_ns: int = 1_760_000_000_000_000_000) -> None:
        self._start_ns = start_ns
        self._elapsed_ns = 0
        self._sleepers: list[tuple[int, asyncio.Future[None]]] = []

    def now_ns(self) -> int:
        return self._start_ns + self._elapsed_ns

    def monotonic_s(self) -> float:
        return self._elapsed_ns / 1e9

    async def sleep(self, seconds: float) -> None:
        import asyncio

        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._elapsed_ns + round(seconds * 1e9), woken))
        await woken

    async def advance(self, seconds: float) -> None:
        """Moves time forward, stopping at each sleeper's deadline and letting it run before going on."""
        target = self._elapsed_ns + round(seconds * 1e9)
        while True:
            await settle()
            due = sorted(((at, i) for i, (at, _) in enumerate(self._sleepers) if at <= target))
            if not due:
                break
            at, index = due[0]
            self._elapsed_ns = max(self._elapsed_ns, at)
            _, woken = self._sleepers.pop(index)
            if not woken.done():
                woken.set_result(None)
        self._elapsed_ns = target
        await settle()


async def settle(turns: int = 20) -> None:
    """Gives every ready task `turns` turns of the loop."""
    import asyncio

    for _ in range(turns):
        await asyncio.sleep(0)
