"""The rate of deletes, for the cluster: workers take turns from one register, some at a time."""

from __future__ import annotations

import asyncio

from lakebed.lifecycle.cluster import RateState, reserved_turns
from lakebed.lifecycle.state import LifecycleState

TURNS_S = 0.5  # turns that one worker takes at a time, as a share of a second
TURNS_MAX = 256


class DeleteRateLimiter:
    """Limits deletes per second of all workers together; `per_s` of 0 is no limit."""

    def __init__(self, per_s: float, state: LifecycleState) -> None:
        self._per_s, self._state, self._clock = per_s, state, state.clock
        self._turns: list[int] = []  # instants, latest first
        self._taking = asyncio.Lock()

    async def wait(self) -> None:
        """Returns when this caller may delete. Raises what the store of lifecycle's state raises."""
        if self._per_s <= 0:
            return
        async with self._taking:
            if not self._turns:
                self._turns = await self._take()
            turn_ns = self._turns.pop()
        wait_s = (turn_ns - self._clock.now_ns()) / 1e9
        if wait_s > 0:
            await self._clock.sleep(wait_s)

    async def _take(self) -> list[int]:
        count = max(1, min(TURNS_MAX, int(self._per_s * TURNS_S)))

        def take(known: RateState) -> tuple[RateState, int]:
            return reserved_turns(known, self._per_s, count, self._clock.now_ns())

        first_ns = await self._state.rate.change(take)
        return [first_ns + round(number * 1e9 / self._per_s) for number in reversed(range(count))]
