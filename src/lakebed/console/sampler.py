"""Samples the lake's numbers from the bucket, whether somebody looks or not, and stores them in the bucket.

The gateways of a lake share the history: each reads it every step, and the first that finds it old takes the sample
and appends it by compare-and-swap. So a lake is sampled once a step, however many gateways and viewers there are, and a
gateway that starts shows the past of the lake. Without a bucket that answers, nothing is stored: the charts have a gap.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping

from lakebed.console.history import FINE, RANGES, TIERS, HistoryPoint, HistoryRing, HistorySeries, Tier, drawn, rates
from lakebed.console.page import Counted
from lakebed.core.clock import now_ms
from lakebed.core.errors import LakebedError
from lakebed.core.logs import logger
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime

ROOT = "console/v1/history/"
SETTLE_MS = 5000  # derived writes follow an acceptance: what is younger is counted by the next sample
COUNT_TIMEOUT_S = 10.0  # of all parts together
LEVELS_EVERY = 4  # samples between two reads of the levels, some of which are listings
RATE_WINDOW_MS = 60_000  # of the rates that the overview shows
ADDED_MAX_MS = 3_600_000  # what happened in a longer pause is not counted afterwards

Count = Callable[[int, int], Awaitable[Counted]]  # from and to, in ms
Numbers = Callable[[], Mapping[str, float | None]]

log = logger("console")


class LakeSampler:
    """`count` reads the totals of all parts, `refresh` their levels; `own` are the numbers of this process."""

    def __init__(
        self,
        runtime: StoreRuntime,
        *,
        count: Count,
        refresh: Callable[[], Awaitable[None]],
        levels: Numbers,
        own: Numbers,
        stores: bool = True,
    ) -> None:
        self._clock = runtime.clock
        self._count, self._refresh, self._levels, self._own, self._stores = count, refresh, levels, own, stores
        self._registers = {
            tier.name: Register(runtime, f"{ROOT}{tier.name}.json", HistoryRing, HistoryRing(), name="console_history")
            for tier in TIERS
        }
        self._rings = {tier.name: HistoryRing() for tier in TIERS}
        self._here: deque[HistoryPoint] = deque(maxlen=FINE.rows_max)  # of this process, which no other one has
        self._task: asyncio.Task[None] | None = None
        self._taken = 0

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self.step()
            await self._clock.sleep(FINE.step_s)

    async def step(self) -> None:
        """One step: adopts the sample of another gateway, or takes one and stores it. Never raises."""
        now = now_ms(self._clock)
        self._here.append(HistoryPoint(now, dict(self._own())))
        try:
            for tier in TIERS[1:]:
                if now - self._rings[tier.name].last_ms >= tier.step_s * 1300:
                    await self._adopt(tier)  # another gateway may have sampled
            ring = await self._adopt(FINE)
            if now - ring.last_ms >= FINE.step_s * 1000 * 0.7:
                await self._store(await self._sample(ring.last(), now))
        except LakebedError as error:
            log.warning("the lake was not sampled", error=error.code, detail=error.message)
        except Exception as error:
            log.error("the lake was not sampled", error=type(error).__name__, exc_info=error)

    async def _adopt(self, tier: Tier) -> HistoryRing:
        """The ring as it is stored, or our own where that is newer: this gateway may be read-only."""
        try:
            stored = (await self._registers[tier.name].read()).value
        except LakebedError as error:
            log.warning("the history was not read", tier=tier.name, error=error.code)
            return self._rings[tier.name]
        if stored.last_ms > self._rings[tier.name].last_ms or self._stores:
            self._rings[tier.name] = stored
        return self._rings[tier.name]

    async def _sample(self, before: HistoryPoint | None, now: int) -> HistoryPoint:
        since = max(before.at_ms if before else now, now - ADDED_MAX_MS)
        if self._taken % LEVELS_EVERY == 0:
            await self._refresh()
        self._taken += 1
        async with asyncio.timeout(COUNT_TIMEOUT_S):
            counted = await self._count(since - SETTLE_MS, now - SETTLE_MS)
        values: dict[str, float | None] = {f"lake.{name}": total for name, total in counted.totals.items()}
        for name, added in counted.added.items():
            earlier = before.values.get(f"lake.{name}") if before else 0.0
            values[f"lake.{name}"] = (earlier or 0.0) + added
        values |= {f"level.{name}": level for name, level in self._levels().items()}
        return HistoryPoint(now, values)

    async def _store(self, point: HistoryPoint) -> None:
        for tier in TIERS:
            ring = self._rings[tier.name]
            if ring.add(point, tier) is ring:
                continue
            if self._stores:
                kept = await self._registers[tier.name].change(lambda at, tier=tier: _added(at, point, tier))  # type: ignore[misc]
                self._rings[tier.name] = kept
            else:
                self._rings[tier.name] = ring.add(point, tier)

    # What pages show.

    def now(self) -> dict[str, float | None]:
        """The lake's rates over the last minute, by name without `lake.`; None for what is unknown."""
        recent = self._rings[FINE.name].points(now_ms(self._clock) - RATE_WINDOW_MS - FINE.step_s * 1000)
        if not recent:
            return {}
        names = [name for name in recent[-1].values if name.startswith("lake.")]
        found = rates(recent[0], recent[-1], names) if len(recent) > 1 else dict.fromkeys(names)
        return {name.removeprefix("lake."): value for name, value in found.items()}

    def points(self, chosen: str) -> list[HistoryPoint]:
        """The lake's points of a range of RANGES."""
        seconds, tier = RANGES[chosen]
        return self._rings[tier.name].points(now_ms(self._clock) - seconds * 1000)

    def series(self, chosen: str) -> tuple[HistorySeries, HistorySeries]:
        """The lake's numbers, and this process's own, which it has for an hour at most."""
        since = now_ms(self._clock) - RANGES[chosen][0] * 1000
        fine = chosen if RANGES[chosen][1] is FINE else "1h"
        here = [point for point in self._here if point.at_ms >= since]
        return drawn(self.points(chosen), chosen, totals="lake."), drawn(here, fine, totals="rate.")


def _added(ring: HistoryRing, point: HistoryPoint, tier: Tier) -> tuple[HistoryRing, HistoryRing]:
    after = ring.add(point, tier)
    return after, after
