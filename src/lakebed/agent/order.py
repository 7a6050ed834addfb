"""Which collector is asked next, and which batches wait. Pure: times in, decisions out.

A collector that failed rests, longer each time, and then gets one batch as a probe; its first success opens it again.
A batch that failed while it was looked at rests too, on its own, so that one poisoned batch delays nobody but itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lakebed.agent.model import BatchKey, Queued
from lakebed.ids import Ids

DEMOTED_S = 30.0  # a collector that lost to a hedge is asked last for this long
WAITS_MAX = 1000  # batches whose failures are remembered
HEDGE_BURST = 5.0  # hedges that may be saved up


class Lane(msgspec.Struct, eq=False):
    """One collector, as this agent sees it now."""

    url: str
    under_way: int = 0
    failures: int = 0  # in a row
    falls: int = 0  # times it began to rest: tells a request begun before from one begun after
    rests_until_s: float = 0.0
    demoted_until_s: float = 0.0


class OrderLimits(msgspec.Struct, frozen=True):
    concurrency: int
    base_s: float
    cap_s: float
    retry_after_max_s: float
    denied_s: float
    hedge_share_max: float


class Order:
    def __init__(self, urls: Sequence[str], limits: OrderLimits, ids: Ids) -> None:
        self._limits, self._ids = limits, ids
        # Agents begin at different collectors, so that a fleet spreads over them.
        start = int(ids.uniform(0, len(urls))) % len(urls) if urls else 0
        self.lanes = [Lane(url.rstrip("/")) for url in (*urls[start:], *urls[:start])]
        self._waits: dict[BatchKey, tuple[int, float]] = {}
        self._hedges = HEDGE_BURST

    def lane(self, now_s: float, *, other_than: Lane | None = None) -> Lane | None:
        """The collector to ask now; None when all rest or are as busy as they may be."""
        ready = [lane for lane in self.lanes if lane is not other_than and self._open(lane, now_s)]
        return min(ready, key=lambda lane: (lane.demoted_until_s > now_s, lane.failures > 0), default=None)

    def may_hedge(self) -> bool:
        """Takes one hedge out of the budget, if there is one."""
        if self._hedges < 1:
            return False
        self._hedges -= 1
        return True

    def waits(self, entry: Queued, now_s: float) -> bool:
        found = self._waits.get(entry.key)
        return found is not None and found[1] > now_s

    def failed_before(self, entry: Queued) -> bool:
        """Whether the batch itself may be what fails: a probe had better be another one."""
        return entry.key in self._waits

    def next_s(self, now_s: float) -> float | None:
        """When a rest ends next; None when nothing rests."""
        ends = [lane.rests_until_s for lane in self.lanes] + [until for _, until in self._waits.values()]
        return min((end for end in ends if end > now_s), default=None)

    def started(self, lane: Lane) -> None:
        lane.under_way += 1

    def ended(self, lane: Lane) -> None:
        lane.under_way -= 1

    def succeeded(self, lane: Lane, *, falls: int) -> None:
        """Opens the collector again, unless it began to rest after this request had begun (`falls` was noted then)."""
        if lane.falls == falls:
            lane.failures = 0
            lane.rests_until_s = 0.0
        self._hedges = min(HEDGE_BURST, self._hedges + self._limits.hedge_share_max)

    def lost_hedge(self, lane: Lane, now_s: float) -> None:
        lane.demoted_until_s = now_s + DEMOTED_S

    def failed(self, lane: Lane, now_s: float, *, retry_after_s: float | None = None) -> None:
        """Rests the collector: for as long as it asked (within reason), or with backoff and jitter."""
        limits = self._limits
        resting = lane.rests_until_s > now_s  # the others of the same moment teach nothing new
        if resting and retry_after_s is None:
            return
        pause_s = self._ids.jitter_s(lane.failures, base_s=limits.base_s, cap_s=limits.cap_s)
        if retry_after_s is not None:
            # Never sooner than asked; a little later each, so that a fleet does not come back in one instant.
            pause_s = min(retry_after_s, limits.retry_after_max_s) + self._ids.uniform(0, limits.base_s)
        if not resting:
            lane.failures, lane.falls = lane.failures + 1, lane.falls + 1
        lane.rests_until_s = max(lane.rests_until_s, now_s + pause_s)

    def refused(self, lane: Lane, now_s: float) -> None:
        """Rests a collector that will refuse every batch until somebody mends something."""
        lane.failures, lane.falls = lane.failures + 1, lane.falls + 1
        lane.rests_until_s = now_s + self._limits.denied_s * self._ids.uniform(0.8, 1.2)

    def set_back(self, entry: Queued, now_s: float) -> None:
        """Rests the batch, longer each time."""
        attempts = self._waits.get(entry.key, (0, 0.0))[0]
        pause_s = self._ids.jitter_s(attempts, base_s=self._limits.base_s, cap_s=self._limits.cap_s)
        self._waits[entry.key] = (attempts + 1, now_s + pause_s)
        if len(self._waits) > WAITS_MAX:  # some may be gone from the queue: dropped when full, or by their owner
            self._waits = {key: wait for key, wait in self._waits.items() if wait[1] > now_s}

    def forget(self, entry: Queued) -> None:
        self._waits.pop(entry.key, None)

    def _open(self, lane: Lane, now_s: float) -> bool:
        at_once = 1 if lane.failures else self._limits.concurrency
        return lane.rests_until_s <= now_s and lane.under_way < at_once
