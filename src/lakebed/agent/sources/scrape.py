"""Prometheus text targets: each is asked on its own interval, and `up` tells whether it answered."""

from __future__ import annotations

from urllib.parse import urlsplit

from lakebed.agent.batcher import Batcher
from lakebed.agent.intake import Complaints, checked
from lakebed.agent.settings import ScrapeTarget
from lakebed.agent.sources.exposition import parse
from lakebed.agent.transport import HttpTransport
from lakebed.clock import Clock
from lakebed.errors import Invalid, Unavailable
from lakebed.frame.model import Kind, Sample
from lakebed.metrics import Metrics

ACCEPT = "text/plain;version=0.0.4"
PARSE_AT_ONCE = 2000  # samples put at a time, so that a huge target does not fill the buffer in one step


class ScrapeSource:
    def __init__(
        self,
        target: ScrapeTarget,
        batcher: Batcher,
        transport: HttpTransport,
        *,
        bytes_max: int,
        samples_max: int,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._target, self._batcher, self._transport = target, batcher, transport
        self._bytes_max, self._samples_max = bytes_max, samples_max
        self._clock, self._metrics = clock, metrics
        self._complaints = Complaints("scrape", metrics)
        self._labels = {"instance": urlsplit(target.url).netloc.rpartition("@")[2], **target.labels}

    async def run(self) -> None:
        """Scrapes until cancelled. A slow scrape or a full queue skips ticks; it never piles them up."""
        due_s = self._clock.monotonic_s()
        while True:
            await self.once()
            now_s = self._clock.monotonic_s()
            missed = int((now_s - due_s) // self._target.interval_s)
            if missed:
                self._metrics.counter("lakebed_agent_missed_ticks_total").labels("scrape").inc(missed)
            due_s += (missed + 1) * self._target.interval_s
            await self._clock.sleep(due_s - now_s)

    async def once(self) -> None:
        start_s, now_ns = self._clock.monotonic_s(), self._clock.now_ns()
        up, samples = await self._scrape(now_ns)
        took_s = self._clock.monotonic_s() - start_s
        about = (
            ("up", float(up)),
            ("scrape_duration_seconds", took_s),
            ("scrape_samples_scraped", float(len(samples))),
        )
        samples += [checked(name, now_ns, value, Kind.GAUGE, self._labels) for name, value in about]
        for at in range(0, len(samples), PARSE_AT_ONCE):
            await self._batcher.put(samples[at : at + PARSE_AT_ONCE])

    async def _scrape(self, now_ns: int) -> tuple[bool, list[Sample]]:
        target = self._target
        try:
            body = await self._transport.get(
                target.url, accept=ACCEPT, timeout_s=target.timeout_s, bytes_max=self._bytes_max
            )
            text = body.decode()
        except (Unavailable, Invalid, UnicodeDecodeError) as error:
            self._metrics.counter("lakebed_agent_scrape_failures_total").inc()
            self._complaints.report([(0, str(error))], origin=target.url)
            return False, []
        found = parse(text, now_ns=now_ns, labels=self._labels, samples_max=self._samples_max)
        self._complaints.report(found.complaints, origin=target.url)
        return True, list(found.samples)
