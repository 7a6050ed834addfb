"""Returns latest values and ranges of points, from live state, the local spool and raw batches, each counted once.

A response is `partial`, with the reasons, unless this is the designated query collector and it has caught up. It is
complete as far as the by-time index goes: batches that a crashed collector did not index are missing until the
reconciler indexes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import msgspec
import numpy as np

from lakebed.batches.matchers import Selector
from lakebed.batches.model import Batch, Kind
from lakebed.batches.sources import SKEW_NS, ReadResult, SampleSources
from lakebed.core.clock import Clock
from lakebed.core.errors import Invalid

RANGE_S_MAX = 31 * 86400
DAY_NS = 86400 * 1_000_000_000


class QuerySeries(msgspec.Struct, frozen=True):
    labels: dict[str, str]
    kind: str
    points: list[tuple[int, float]]


class QueryResponse(msgspec.Struct, frozen=True):
    metric: str
    partial: bool
    why_partial: list[str]
    from_unix_ns: int
    to_unix_ns: int
    accepted_through_unix_ns: int  # acceptances up to here were looked at
    sources: dict[str, int]  # batches read from each
    series: list[QuerySeries]


class Querier:
    def __init__(self, sources: SampleSources, *, points_max: int, clock: Clock) -> None:
        self._sources, self._points_max, self._clock = sources, points_max, clock

    async def range(
        self, selector: Selector, from_ns: int, to_ns: int, *, late_s: float | None = None
    ) -> QueryResponse:
        """Every point of the selected series in [from_ns, to_ns), in order of time.

        Batches are looked for however late they were accepted, or only up to `late_s` after the range: then the answer
        is partial. Raises Invalid over the limits.
        """
        if not 0 <= from_ns < to_ns or to_ns - from_ns > RANGE_S_MAX * 1_000_000_000:
            raise Invalid(f"range {from_ns} to {to_ns} is empty or longer than {RANGE_S_MAX // 86400} days")
        found = _Found(selector, from_ns, to_ns, self._points_max)
        now_ns = self._clock.now_ns()
        through_ns = now_ns if late_s is None else min(now_ns, to_ns + round(late_s * 1e9))
        limited = through_ns < now_ns
        reading = await self._sources.points(found, selector, from_ns, to_ns, through_ns, limited=limited)
        return self._answer(found, reading, through_ns)

    async def latest(self, selector: Selector, *, lookback_s: float = 300.0) -> QueryResponse:
        """The newest point of each selected series, not older than `lookback_s`."""
        now_ns = self._clock.now_ns()
        from_ns = max(0, now_ns - round(lookback_s * 1e9))
        answer = await self.range(selector, from_ns, now_ns + SKEW_NS, late_s=0.0)
        newest = [msgspec.structs.replace(series, points=series.points[-1:]) for series in answer.series]
        return msgspec.structs.replace(answer, series=newest)

    def _answer(self, found: _Found, reading: ReadResult, through_ns: int) -> QueryResponse:
        why = reading.why()
        return QueryResponse(
            metric=found.selector.metric,
            partial=bool(why),
            why_partial=why,
            from_unix_ns=found.from_ns,
            to_unix_ns=found.to_ns,
            accepted_through_unix_ns=through_ns,
            sources=reading.sources,
            series=found.series(),
        )


class _Found:
    """Points gathered for one query, by series."""

    def __init__(self, selector: Selector, from_ns: int, to_ns: int, points_max: int) -> None:
        self.selector, self.from_ns, self.to_ns = selector, from_ns, to_ns
        self._points_left, self._points_max = points_max, points_max
        self._parts: dict[tuple[tuple[str, str], ...], list[tuple[Any, Any, int]]] = {}

    def __call__(self, batch: Batch) -> None:
        columns = batch.columns
        wanted = self.selector.series(columns, batch.identity.agent_id)
        if not wanted:
            return
        mask = np.isin(columns.series, np.fromiter(wanted, np.uint32, len(wanted)))
        rows = np.nonzero(mask & (columns.times_ns >= self.from_ns) & (columns.times_ns < self.to_ns))[0]
        self._points_left -= len(rows)
        if self._points_left < 0:
            raise Invalid(f"more than {self._points_max} points", hint="narrow the range or add matchers")
        rows = rows[np.argsort(columns.series[rows], kind="stable")]
        for part in np.split(rows, np.nonzero(np.diff(columns.series[rows]))[0] + 1):
            if len(part):
                key = tuple(sorted(wanted[int(columns.series[part[0]])].items()))
                kept = (columns.times_ns[part], columns.values[part], int(columns.kinds[part[-1]]))
                self._parts.setdefault(key, []).append(kept)

    def series(self) -> list[QuerySeries]:
        return [_series(key, parts) for key, parts in sorted(self._parts.items())]


def _series(key: Iterable[tuple[str, str]], parts: list[tuple[Any, Any, int]]) -> QuerySeries:
    times, values = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    order = np.argsort(times, kind="stable")
    points = list(zip(times[order].tolist(), values[order].tolist(), strict=True))
    return QuerySeries(dict(key), Kind(parts[-1][2]).name.lower(), points)


def time_ns(text: str, name: str) -> int:
    """Unix nanoseconds, or ISO 8601 with its offset. Raises Invalid, naming the parameter."""
    if text.isdigit() and len(text) <= 19:
        return int(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise Invalid(f"{name}={text[:40]!r} is not a time", hint="unix nanoseconds or 2026-01-31T12:00:00Z") from error
    if at.tzinfo is None:
        raise Invalid(f"{name}={text[:40]!r} has no offset", hint="add Z or +00:00")
    return int(at.timestamp() * 1_000_000) * 1000
