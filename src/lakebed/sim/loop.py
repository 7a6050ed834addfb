"""An asyncio event loop on virtual time, whose every choice comes from a seed.

No selector, no threads, no sockets: when nothing is ready, time jumps to the next timer; when several things are ready,
the seed picks which one runs. So a second costs nothing, an interleaving is a number, and code that waits for something
that can never come fails at once (Deadlock).
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

TURNS_MAX = 1_000_000  # callbacks one world may run: far above any world of thousands of steps
START_NS = 1_760_000_000_000_000_000  # where simulated wall time begins


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: all tasks wait for each other."""


class Livelock(RuntimeError):
    """The world ran TURNS_MAX callbacks without coming to its end."""


class SimLoop(asyncio.BaseEventLoop):
    """Runs what is ready, one callback at a time.

    `forget` says which handles belong to a process that no longer exists: they are dropped, never run. `hold` takes
    away a handle of a process that is stopped for a while, and gives it back by call_again.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _stopping: bool
    _timer_cancelled_count: int

    def __init__(self, rng: random.Random, *, turns_max: int = TURNS_MAX) -> None:
        super().__init__()
        self._rng = rng
        self._now_s = 0.0
        self._turns_max = turns_max
        self.turns = 0
        self.tasks: list[asyncio.Task[Any]] = []  # all there ever were: the loop's owner closes those that did not end
        self.forget: Callable[[asyncio.Handle], bool] = lambda handle: False
        self.hold: Callable[[asyncio.Handle], bool] = lambda handle: False

    def time(self) -> float:
        return self._now_s

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = super().create_task(coro, **options)
        self.tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("a simulated world has no threads: pass the work in, or await it")

    def call_again(self, handles: list[asyncio.Handle]) -> None:
        """Readies handles that were held."""
        self._ready.extend(handles)

    def _run_once(self) -> None:
        ready = self._ready
        if not ready and not self._jump():
            return
        if len(ready) > 1:
            ready.rotate(-int(self._rng.random() * len(ready)))
        handle = ready.popleft()
        if handle.cancelled() or self.forget(handle) or self.hold(handle):
            return
        self.turns += 1
        if self.turns > self._turns_max:
            raise Livelock(f"{self._turns_max} callbacks ran and the world has not ended")
        handle._run()

    def _jump(self) -> bool:
        """Moves time to the next timer that is still needed, and readies all that are due then."""
        scheduled = self._scheduled
        while scheduled:
            if not scheduled[0].cancelled() and not self.forget(scheduled[0]):
                break
            self._pop_timer()
        if not scheduled:
            if self._stopping:
                return False
            raise Deadlock(f"at {self._now_s:.3f} s nothing is ready and no timer is set")
        self._now_s = max(self._now_s, scheduled[0].when())
        while scheduled and scheduled[0].when() <= self._now_s:
            self._ready.append(self._pop_timer())
        return True

    def _pop_timer(self) -> asyncio.TimerHandle:
        handle = heapq.heappop(self._scheduled)
        handle._scheduled = False  # type: ignore[attr-defined]
        if handle.cancelled():
            self._timer_cancelled_count -= 1
        return handle

    def _write_to_self(self) -> None:
        """Called by call_soon_threadsafe; there is no selector to wake."""

    def _process_events(self, event_list: Any) -> None:
        """There are no events but timers."""


def seeded_loop(seed: str, *, turns_max: int = TURNS_MAX) -> SimLoop:
    return SimLoop(random.Random(seed), turns_max=turns_max)


class SimClock:
    """A process's clock: the loop's time, with wall time off by `skew_s` as real machines' are."""

    def __init__(self, loop: SimLoop, *, skew_s: float = 0.0) -> None:
        self._loop = loop
        self._start_ns = START_NS + round(skew_s * 1e9)

    def now_ns(self) -> int:
        return self._start_ns + round(self._loop.time() * 1e9)

    def monotonic_s(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
