"""Which metrics there are: their names, the names of their labels, and how many series each has.

Read from the index of rollups, and from the batches that are in no rollup yet. Bounded as a query is: `partial` says
why something may be missing.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import msgspec

from lakebed.batches import paths
from lakebed.batches.model import Batch
from lakebed.batches.sources import SampleSources
from lakebed.core.errors import Invalid, NotFound
from lakebed.rollups.paths import index_folder

SERIES_MAX = 200_000  # series that one answer counts


class MetricName(msgspec.Struct, frozen=True):
    metric: str
    series: int
    labels: list[str]


class MetricNames(msgspec.Struct, frozen=True):
    """`partial`: names may be missing; `why_partial` says why."""

    partial: bool
    why_partial: list[str]
    metrics: list[MetricName]


async def metric_names(sources: SampleSources, from_ns: int, to_ns: int, through_ns: int) -> MetricNames:
    """Every metric with samples in [from_ns, to_ns), by name."""
    found: dict[str, set[tuple[Any, ...]]] = {}
    counted, full = 0, False

    def add(metric: str, agent_id: str, labels: list[tuple[str, str]]) -> None:
        nonlocal counted, full
        series = (agent_id, *sorted(labels))
        known = found.setdefault(metric, set())
        if series in known:
            return
        if counted < SERIES_MAX or not known:
            known.add(series)
            counted += 1
        else:
            full = True

    def take(batch: Batch) -> None:
        columns = batch.columns
        for series in range(len(columns.series_metric)):
            add(columns.metric(series), batch.identity.agent_id, list(columns.labels(series).items()))

    covered = await sources.coverage.snapshot()
    reading = await sources.uncovered(take, covered, from_ns, to_ns, through_ns)
    for hour in paths.hours(from_ns, to_ns - 1) if covered.state.committed else ():
        async for key in sources.coverage.chunks(covered, index_folder(hour)):
            try:
                _, series = await sources.coverage.index_chunk(key)
            except (Invalid, NotFound):
                reading.damaged_chunks += 1
                continue
            for row in series.select(["metric", "agent_id", "labels"]).to_pylist():
                add(row["metric"], row["agent_id"], list(row["labels"]))
    await sources.note_removed(reading, from_ns)
    why = reading.why()
    if full:
        why.append(f"more than {SERIES_MAX} series: every metric is named, and not all series and labels are counted")
    return MetricNames(bool(why), why, [_row(metric, found[metric]) for metric in sorted(found)])


def _row(metric: str, series: set[tuple[Any, ...]]) -> MetricName:
    return MetricName(metric, len(series), sorted({name for _, *labels in series for name, _ in labels}))


def unknown(metric: str, known: MetricNames) -> NotFound | None:
    """The error for a metric that has no samples, with the nearest names; None when it is known."""
    names = [each.metric for each in known.metrics]
    if metric in names:
        return None
    near = get_close_matches(metric, names, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else "lakebed batches metrics lists all names"
    return NotFound(f"no metric {metric} has samples in this range or the day before its end", hint=hint)
