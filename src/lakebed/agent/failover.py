"""Chooses the collector for the next request and the batches that wait. Pure: times in, decisions out.

A collector that failed is paused, longer each time, and then gets one batch as a probe; its first success resumes it. A
batch that failed is paused too, on its own, so that one bad batch delays no other.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lakebed.agent.model import BatchKey, QueuedBatch
from lakebed.core.ids import Ids

DEMOTED_S = 30.0  # a collector that lost to a hedge is chosen last for this long
WAITS_MAX = 1000  # batches whose failures are remembered
HEDGE_BURST = 5.0  # hedges that may be saved up


class CollectorState(msgspec.Struct, eq=False):
    """One collector, as this agent sees it now."""

    url: str
    under_way: int = 0
    failures: int = 0  # in a row
    pauses: int = 0  # times it was paused: separates requests begun before from those begun after
    paused_until_s: float = 0.0
    demoted_until_s: float = 0.0


class SendLimits(msgspec.Struct, frozen=True):
    concurrency: int
    base_s: float
    cap_s: float
    retry_after_max_s: float
    denied_s: float
    hedge_share_max: float


class SendOrder:
    def __init__(self, urls: Sequence[str], limits: SendLimits, ids: Ids) -> None:
        self._limits, self._ids = limits, ids
        # Agents begin at different collectors, so that a fleet spreads over them.
        start = int(ids.uniform(0, len(urls))) % len(urls) if urls else 0
        self.collectors = [CollectorState(url.rstrip("/")) for url in (*urls[start:], *urls[:start])]
        self._waits: dict[BatchKey, tuple[int, float]] = {}
        self._hedges = HEDGE_BURST

    def point(self, urls: Sequence[str]) -> None:
        """Sends to these collectors from now on. Requests under way end where they are; known ones keep their state."""
        known = {collector.url: collector for collector in self.collectors}
        wanted = [url.rstrip("/") for url in urls]
        self.collectors = [known.get(url) or CollectorState(url) for url in wanted]

    def collector(self, now_s: float, *, other_than: CollectorState | None = None) -> CollectorState | None:
        """The collector for the next request; None when all are paused or at their limit."""
        ready = [
            collector for collector in self.collectors if collector is not other_than and self._open(collector, now_s)
        ]
        return min(
            ready, key=lambda collector: (collector.demoted_until_s > now_s, collector.failures > 0), default=None
        )

    def may_hedge(self) -> bool:
        """Takes one hedge out of the budget, if there is one."""
        if self._hedges < 1:
            return False
        self._hedges -= 1
        return True

    def waits(self, entry: QueuedBatch, now_s: float) -> bool:
        found = self._waits.get(entry.key)
        return found is not None and found[1] > now_s

    def failed_before(self, entry: QueuedBatch) -> bool:
        """Whether the batch itself may be what fails: a probe had better be another one."""
        return entry.key in self._waits

    def next_s(self, now_s: float) -> float | None:
        """When the next pause ends; None when nothing is paused."""
        ends = [collector.paused_until_s for collector in self.collectors] + [
            until for _, until in self._waits.values()
        ]
        return min((end for end in ends if end > now_s), default=None)

    def started(self, collector: CollectorState) -> None:
        collector.under_way += 1

    def ended(self, collector: CollectorState) -> None:
        collector.under_way -= 1

    def succeeded(self, collector: CollectorState, *, pauses: int) -> None:
        """Resumes the collector, unless it was paused after this request had begun (`pauses` was noted then)."""
        if collector.pauses == pauses:
            collector.failures = 0
            collector.paused_until_s = 0.0
        self._hedges = min(HEDGE_BURST, self._hedges + self._limits.hedge_share_max)

    def lost_hedge(self, collector: CollectorState, now_s: float) -> None:
        collector.demoted_until_s = now_s + DEMOTED_S

    def failed(self, collector: CollectorState, now_s: float, *, retry_after_s: float | None = None) -> None:
        """Pauses the collector: for its Retry-After (up to a limit), or with backoff and jitter."""
        limits = self._limits
        resting = collector.paused_until_s > now_s  # the others of the same moment teach nothing new
        if resting and retry_after_s is None:
            return
        pause_s = self._ids.jitter_s(collector.failures, base_s=limits.base_s, cap_s=limits.cap_s)
        if retry_after_s is not None:
            # Never sooner than requested; a little later each, so that a fleet does not return in one instant.
            pause_s = min(retry_after_s, limits.retry_after_max_s) + self._ids.uniform(0, limits.base_s)
        if not resting:
            collector.failures, collector.pauses = collector.failures + 1, collector.pauses + 1
        collector.paused_until_s = max(collector.paused_until_s, now_s + pause_s)

    def refused(self, collector: CollectorState, now_s: float) -> None:
        """Pauses a collector that rejects every batch until its configuration is fixed."""
        collector.failures, collector.pauses = collector.failures + 1, collector.pauses + 1
        collector.paused_until_s = now_s + self._limits.denied_s * self._ids.uniform(0.8, 1.2)

    def set_back(self, entry: QueuedBatch, now_s: float) -> None:
        """Pauses the batch, longer each time."""
        attempts = self._waits.get(entry.key, (0, 0.0))[0]
        pause_s = self._ids.jitter_s(attempts, base_s=self._limits.base_s, cap_s=self._limits.cap_s)
        self._waits[entry.key] = (attempts + 1, now_s + pause_s)
        if len(self._waits) > WAITS_MAX:  # some may be gone from the queue: dropped when full, or by their owner
            self._waits = {key: wait for key, wait in self._waits.items() if wait[1] > now_s}

    def forget(self, entry: QueuedBatch) -> None:
        self._waits.pop(entry.key, None)

    def _open(self, collector: CollectorState, now_s: float) -> bool:
        at_once = 1 if collector.failures else self._limits.concurrency
        return collector.paused_until_s <= now_s and collector.under_way < at_once
