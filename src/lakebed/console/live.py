"""Live metrics: one sampler of the metrics registry for all viewers, sent as server-sent events.

It runs only while a page is open and reads only the metrics it shows. `rates` are of this gateway, over a second;
`lake` are rates of the whole lake, over a minute, from the history; levels (backlog, lag) are of the whole lake too.
What happened before is in the history, not here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import Overloaded
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime

VIEWERS_MAX = 32
EVERY_S = 1.0
WAITING_MAX = 8  # samples a slow viewer may be behind before it misses some

# "Not found" and "conflict" are normal for conditional writes; these are failures.
FAILURES = ("denied", "unauthenticated", "overloaded", "throttled", "unavailable", "outcome_unknown")

# name → (sample of the registry, label, its values that count; none: all of them)
RATES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "batches_samples": ("lakebed_batches_samples_total", "", ()),
    "batches_accepted": ("lakebed_batches_uploads_total", "outcome", ("accepted",)),
    "batches_duplicate": ("lakebed_batches_uploads_total", "outcome", ("duplicate",)),
    "batches_conflict": ("lakebed_batches_uploads_total", "outcome", ("conflict",)),
    "log_in": ("lakebed_log_records_total", "direction", ("in",)),
    "log_out": ("lakebed_log_records_total", "direction", ("out",)),
    "log_in_bytes": ("lakebed_log_record_bytes_total", "direction", ("in",)),
    "queue_entries": ("lakebed_queue_entries_total", "", ()),
    "queue_batches": ("lakebed_queue_batches_total", "", ()),
    "ticks_parts": ("lakebed_ticks_parts_total", "", ()),
    "ticks_rows": ("lakebed_ticks_rows_total", "", ()),
    "ticks_finalized": ("lakebed_ticks_finalized_total", "", ()),
    "store_requests": ("lakebed_store_requests_total", "", ()),
    "store_failures": ("lakebed_store_failures_total", "kind", FAILURES),
    "store_in_bytes": ("lakebed_store_bytes_total", "direction", ("in",)),
    "store_out_bytes": ("lakebed_store_bytes_total", "direction", ("out",)),
    "http_requests": ("lakebed_http_requests_total", "", ()),
    "http_errors": ("lakebed_http_requests_total", "status", ("500", "502", "503", "504")),
}
NAMES = sorted({name for name, _, _ in RATES.values()})

Levels = Callable[[], dict[str, float | None]]


class LiveSample(msgspec.Struct, frozen=True):
    """`lake` and `levels` have None for what is unknown."""

    at_ms: int
    rates: dict[str, float]
    levels: dict[str, float | None]
    totals: dict[str, float]
    lake: dict[str, float | None] = {}


class LiveMetrics:
    def __init__(self, runtime: Runtime, levels: Levels, lake: Levels) -> None:
        self._metrics, self._clock, self._levels, self._lake = runtime.metrics, runtime.clock, levels, lake
        self._last: LiveSample | None = None
        self._viewers: set[asyncio.Queue[LiveSample]] = set()
        self._task: asyncio.Task[None] | None = None
        self._before: tuple[float, dict[str, float]] | None = None

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    def now(self) -> LiveSample:
        """The last sample; without rates when there is none yet."""
        if self._last is not None and self._viewers:
            return self._last
        counted = totals(self._metrics)
        return LiveSample(now_ms(self._clock), dict.fromkeys(RATES, 0.0), self._levels(), counted, self._lake())

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[asyncio.Queue[LiveSample]]:
        """A queue of samples, from the last one on. Raises Overloaded when VIEWERS_MAX pages are open."""
        if len(self._viewers) >= VIEWERS_MAX:
            raise Overloaded(
                f"{VIEWERS_MAX} pages are already live", retry_after_s=10.0, hint="the page still refreshes"
            )
        mine: asyncio.Queue[LiveSample] = asyncio.Queue(WAITING_MAX)
        mine.put_nowait(self.now())
        self._viewers.add(mine)
        if self._task is None or self._task.done():
            self._last = None  # of an earlier time
            self._task = asyncio.create_task(self._run())
        try:
            yield mine
        finally:
            self._viewers.discard(mine)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        """Ends with its last viewer; the next viewer starts it again."""
        self._before = None
        while self._viewers:
            sample = self.take()
            if sample is not None:
                self._last = sample
                for viewer in self._viewers:
                    if not viewer.full():
                        viewer.put_nowait(sample)
            await self._clock.sleep(EVERY_S)

    def take(self) -> LiveSample | None:
        """One sample; None for the first, which has nothing to compare with."""
        at_s, counted = self._clock.monotonic_s(), totals(self._metrics)
        before, self._before = self._before, (at_s, counted)
        if before is None or at_s <= before[0]:
            return None
        took_s = at_s - before[0]
        rates = {name: round(max(0.0, counted[name] - before[1][name]) / took_s, 3) for name in RATES}
        return LiveSample(now_ms(self._clock), rates, self._levels(), counted, self._lake())


def totals(metrics: Metrics) -> dict[str, float]:
    """Each counter since this process started."""
    counted: dict[tuple[str, str, str], float] = {}
    for family in metrics.registry.restricted_registry(NAMES).collect():
        for sample in family.samples:
            for label, value in [("", ""), *sample.labels.items()]:
                key = (sample.name, label, value)
                counted[key] = counted.get(key, 0.0) + sample.value
    return {
        shown: sum(counted.get((name, label, value), 0.0) for value in values or ("",))
        for shown, (name, label, values) in RATES.items()
    }


def event(kind: str, data: object) -> bytes:
    """One server-sent event; JSON has no line breaks, so nothing in it can end the event."""
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"
