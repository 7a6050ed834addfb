"""At most so many a second: a token bucket of one second's worth."""

from __future__ import annotations

from lakebed.clock import Clock


class Pace:
    """`per_s` of 0 is no limit."""

    def __init__(self, per_s: float, clock: Clock) -> None:
        self._per_s, self._clock = per_s, clock
        self._next_s = float("-inf")

    async def wait(self) -> None:
        """Comes back when it is this caller's turn."""
        if self._per_s <= 0:
            return
        now_s = self._clock.monotonic_s()
        turn_s = max(self._next_s, now_s - 1.0)
        self._next_s = turn_s + 1.0 / self._per_s
        if turn_s > now_s:
            await self._clock.sleep(turn_s - now_s)
