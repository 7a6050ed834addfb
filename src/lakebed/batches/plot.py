"""A metric over time for the console: quantiles from rollups, and from samples where they do not reach yet."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lakebed.batches.matchers import Selector, parse
from lakebed.batches.reader import RawBatches
from lakebed.batches.settings import BatchesSettings
from lakebed.batches.sources import WITHOUT_LIVE, SampleSources
from lakebed.batches.view import RecentBatches
from lakebed.batches.window_query import RollupQuerier, RollupSeries
from lakebed.core.context import Context
from lakebed.core.errors import LakebedError

NAMES_BATCHES = 12  # newest batches whose metrics are offered
NAMES_MAX = 300
SERIES_MAX = 50  # listed of one metric
QUERY_BATCHES_MAX = 2000  # batches read for the part that rollups do not cover
QUANTILES = (0.5, 0.9, 0.99)
SPOOLED = "batches in the local spool of a collector are not in the bucket yet"
INDEXED_NS = 5 * 10**9  # an accepted batch is in the index by then: the limit of batches.index_flush_s
SPANS = {
    "15m": (900, 60),
    "1h": (3600, 60),
    "6h": (6 * 3600, 300),
    "24h": (24 * 3600, 900),
}  # the range and its windows, in seconds


class PlottedMetric(msgspec.Struct, frozen=True, order=True):
    metric: str
    labels: tuple[str, ...]


class SeriesRow(msgspec.Struct, frozen=True):
    """One series: `match` selects it alone."""

    labels: dict[str, str]
    match: str
    windows: int
    low: float
    high: float
    last: float


class MetricPlot(msgspec.Struct, frozen=True):
    """`lines` are those of the first series: its smallest, largest and quantiles in each window.

    `partial`: batches accepted before `accepted_through_ns` are missing, and `why`.
    """

    metric: str
    window_s: int
    partial: bool
    why: list[str]
    series: list[SeriesRow]
    left_out: int
    at_s: list[float]
    lines: dict[str, list[float | None]]
    accepted_through_ns: int = 0


class MetricPlots:
    def __init__(self, context: Context, recent: RecentBatches, *, batches_max: int = QUERY_BATCHES_MAX) -> None:
        self._context, self._recent = context, recent
        self._raw = RawBatches(context.store, cache_bytes_max=8 * 1024 * 1024)
        self._querier = RollupQuerier(context, SampleSources.of_bucket(context, batches_max=batches_max))

    async def names(self) -> list[PlottedMetric]:
        """The metrics of the newest batches, with the names of their labels."""
        found: dict[str, set[str]] = {}
        for entry in await self._recent.newest_entries(NAMES_BATCHES):
            try:
                batch = await self._raw.batch(entry.frame_sha256, entry.place)
            except LakebedError:
                continue  # swept or damaged: the others name it too
            columns = batch.columns
            for series in range(len(columns.series_metric)):
                found.setdefault(columns.metric(series), set()).update(columns.labels(series))
        return sorted(PlottedMetric(metric, tuple(sorted(labels))) for metric, labels in found.items())[:NAMES_MAX]

    async def plot(self, metric: str, match: Sequence[str], span: str) -> MetricPlot:
        """Raises Invalid for what is no matcher or range."""
        seconds, window_s = SPANS.get(span, SPANS["1h"])
        now_ns = self._context.clock.now_ns()
        selector = Selector(metric, [parse(text) for text in match if text])
        found = await self._querier.range(selector, window_s, now_ns - seconds * 10**9, now_ns, QUANTILES)
        rows = [_row(series) for series in found.series if series.buckets]
        at_s, lines = drawn(found.series[0], window_s) if found.series else ([], {})
        left = max(0, len(rows) - SERIES_MAX)
        # Every accepted batch is in the bucket, but for those of a spool, and in the index a moment later.
        why = [reason for reason in found.why_partial if reason != WITHOUT_LIVE]
        if self._context.settings.of(BatchesSettings).acceptance == "local_spool":
            why.append(SPOOLED)
        through_ns = now_ns - INDEXED_NS
        return MetricPlot(metric, window_s, bool(why), why, rows[:SERIES_MAX], left, at_s, lines, through_ns)


def drawn(series: RollupSeries, window_s: int) -> tuple[list[float], dict[str, list[float | None]]]:
    """Pure: columns for a chart; a window without samples is a gap."""
    names = ("largest", *(f"p{q * 100:g}" for q in QUANTILES), "smallest")
    at_s: list[float] = []
    lines: dict[str, list[float | None]] = {name: [] for name in names}
    for bucket in series.buckets:
        start_s = bucket.start_ns / 1e9
        if at_s and start_s - at_s[-1] > window_s * 1.5:
            at_s.append((at_s[-1] + start_s) / 2)
            for values in lines.values():
                values.append(None)
        at_s.append(start_s)
        for name, value in zip(names, (bucket.max, *bucket.quantiles, bucket.min), strict=True):
            lines[name].append(value)
    return at_s, lines


def _row(series: RollupSeries) -> SeriesRow:
    buckets = series.buckets
    match = ",".join(f"{name}={value}" for name, value in sorted(series.labels.items()))
    low, high = min(one.min for one in buckets), max(one.max for one in buckets)
    return SeriesRow(series.labels, match, len(buckets), low, high, buckets[-1].last)
