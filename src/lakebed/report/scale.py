"""From numbers to places on paper: round ticks, short labels, bins. Pure; every input is finite here."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

TICKS = 5
ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
BIG = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Scale(msgspec.Struct, frozen=True):
    """A straight line from [low, high] to [start, end]; `ticks` are round numbers inside it."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def fit(low: float, high: float, start: float, end: float, *, widen: bool = True) -> Scale:
    """A scale that holds both; `widen` moves its ends out to round numbers."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    step = _step((high - low) / TICKS)
    if widen:
        low, high = math.floor(low / step) * step, math.ceil(high / step) * step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Scale(low, high, start, end, tuple(n * step for n in range(first, last + 1)))


def _step(least: float) -> float:
    """The smallest round number that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next((power * one for one in ROUND if power * one >= least * (1 - 1e-9)), power * 10)


def short(value: float) -> str:
    """A number as few characters: 1.5k, 0.25, 3M."""
    if not math.isfinite(value):
        return "–"
    for size, letter in BIG:
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def bins(values: Sequence[float], count: int) -> list[tuple[float, float, int]]:
    """`values` counted in bins of equal width, as (from, to, how many), the last bin closed."""
    low, high = min(values), max(values)
    if high <= low:
        return [(low, low, len(values))]
    width = (high - low) / count
    counts = [0] * count
    for value in values:
        counts[min(count - 1, int((value - low) / width))] += 1
    return [(low + n * width, low + (n + 1) * width, each) for n, each in enumerate(counts)]


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` of the ordered values do not exceed."""
    return ordered[max(0, min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1))]


def thin(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most `most` points that keep the lowest and the highest of each stretch, so that no peak is lost."""
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(len(points) / (most // 2))
    kept: list[tuple[float, float]] = []
    for at in range(0, len(points), stretch):
        part = points[at : at + stretch]
        kept += sorted({min(part, key=lambda one: one[1]), max(part, key=lambda one: one[1])})
    return kept
