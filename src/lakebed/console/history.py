"""The lake's numbers over time: rings of points, one for each resolution. Pure values; the sampler stores them.

A point holds totals, which only grow, and levels. A rate is the difference of two totals that follow each other; where
points are further apart than GAP_STEPS steps, nobody sampled, and the rate is unknown: a chart shows a gap there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

SCHEMA = "lakebed.console-history.v1"
GAP_STEPS = 2.5
NAMES_MAX = 64  # numbers of one point
EARLY = 0.7  # of a step: a point this soon after the last one is the same sample of another gateway

Row = tuple[float | None, ...]  # the time in ms, then one value for each name


class Tier(msgspec.Struct, frozen=True):
    """A resolution: a point every `step_s`, kept for `kept_s`. Its object is a few tens of KB."""

    name: str
    step_s: int
    kept_s: int

    @property
    def rows_max(self) -> int:
        return self.kept_s // self.step_s + 1


FINE = Tier("15s", 15, 3600 + 300)
TIERS = (FINE, Tier("60s", 60, 6 * 3600), Tier("300s", 300, 24 * 3600))
# What a page may show: the range, and the resolution it is drawn with.
RANGES: dict[str, tuple[int, Tier]] = {
    "15m": (900, TIERS[0]),
    "1h": (3600, TIERS[0]),
    "6h": (6 * 3600, TIERS[1]),
    "24h": (24 * 3600, TIERS[2]),
}


class HistoryPoint(msgspec.Struct, frozen=True):
    """One sample of the lake. Totals have names such as `lake.log_in`, levels such as `level.queue_waiting`."""

    at_ms: int
    values: dict[str, float | None]


class HistoryRing(msgspec.Struct, frozen=True):
    """The points of one resolution, oldest first, as columns: a name is stored once."""

    names: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    schema: str = SCHEMA

    @property
    def last_ms(self) -> int:
        return int(self.rows[-1][0] or 0) if self.rows else 0

    def last(self) -> HistoryPoint | None:
        """The last point, with the last known value of each number: a total that was not read once goes on from it."""
        values: dict[str, float | None] = {}
        for row in reversed(self.rows):
            for name, value in self._point(row).values.items():
                if value is not None:
                    values.setdefault(name, value)
            if len(values) == len(self.names):
                break
        return HistoryPoint(self.last_ms, values) if self.rows else None

    def points(self, since_ms: int = 0) -> list[HistoryPoint]:
        return [self._point(row) for row in self.rows if (row[0] or 0) >= since_ms]

    def add(self, point: HistoryPoint, tier: Tier) -> HistoryRing:
        """With the point, unless there is one of the same step already; without those that are too old."""
        if self.rows and point.at_ms - self.last_ms < tier.step_s * 1000 * EARLY:
            return self
        names = self.names + tuple(name for name in point.values if name not in self.names)
        names = names[:NAMES_MAX]
        oldest = point.at_ms - tier.kept_s * 1000
        kept = [row for row in self.rows if (row[0] or 0) >= oldest][-tier.rows_max + 1 :]
        row: Row = (float(point.at_ms), *(_rounded(point.values.get(name)) for name in names))
        return HistoryRing(names, (*kept, row))

    def _point(self, row: Row) -> HistoryPoint:
        known = {name: row[at] if at < len(row) else None for at, name in enumerate(self.names, 1)}
        return HistoryPoint(int(row[0] or 0), known)


class HistorySeries(msgspec.Struct, frozen=True):
    """What a chart draws. A moment without values is a gap."""

    range: str
    step_s: int
    at_s: list[float]
    series: dict[str, list[float | None]]


def rates(before: HistoryPoint, after: HistoryPoint, names: Iterable[str]) -> dict[str, float | None]:
    """Of each total: its growth per second. A total that shrank was counted anew: unknown."""
    took_s = (after.at_ms - before.at_ms) / 1000

    def rate(name: str) -> float | None:
        first, last = before.values.get(name), after.values.get(name)
        if first is None or last is None or took_s <= 0 or last < first:
            return None
        return round((last - first) / took_s, 3)

    return {name: rate(name) for name in names}


def drawn(points: Sequence[HistoryPoint], chosen: str, *, totals: str) -> HistorySeries:
    """Columns for a chart: rates of the names that start with `totals`, levels of the others."""
    step_s = RANGES[chosen][1].step_s
    names = list(dict.fromkeys(name for point in points for name in point.values))
    growing = [name for name in names if name.startswith(totals)]
    times: list[float] = []
    columns: dict[str, list[float | None]] = {name: [] for name in names}

    def put(at_ms: float, values: Mapping[str, float | None]) -> None:
        times.append(at_ms / 1000)
        for name in names:
            columns[name].append(values.get(name))

    for before, after in pairwise(points):
        if after.at_ms - before.at_ms > GAP_STEPS * step_s * 1000:
            put((before.at_ms + after.at_ms) / 2, {})  # nobody sampled here
            put(after.at_ms, {name: value for name, value in after.values.items() if name not in growing})
        else:
            put(after.at_ms, after.values | rates(before, after, growing))
    return HistorySeries(chosen, step_s, times, columns)


def growth(points: Sequence[HistoryPoint], name: str) -> tuple[float, float] | None:
    """How much a total grew over the points that have it, and over how many seconds; None with fewer than two."""
    known = [(point.at_ms, value) for point in points if (value := point.values.get(name)) is not None]
    if len(known) < 2:
        return None
    grown = sum(max(0.0, after - before) for (_, before), (_, after) in pairwise(known))
    return grown, (known[-1][0] - known[0][0]) / 1000


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(float(value), 3)
