"""How a bench measures: contenders take turns in the same run, and what counts is the ratio between them.

Machines are noisy, so absolute times mean little; a round measures every contender once, in alternating order, and a
ratio is taken inside each round before the median is taken over rounds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from lakebed.clock import Clock
from lakebed.context import Context, make_context
from lakebed.ids import Ids
from lakebed.settings import Settings
from lakebed.store.settings import StoreSettings


class Check(msgspec.Struct, frozen=True, rename={"passed": "pass"}):
    """One measured number. Without a bar it is only told; with one it is held or missed."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    passed: bool = True
    spread: float = 0.0


class Report(msgspec.Struct, frozen=True):
    name: str
    checks: tuple[Check, ...]
    quick: bool
    seconds: float

    @property
    def held(self) -> bool:
        return all(check.passed for check in self.checks)


class Stand(msgspec.Struct, frozen=True):
    """What a bench stands on: a real bucket, and how long it may take (`quick` means seconds, not minutes)."""

    settings: Settings
    quick: bool
    tell: Callable[[str], None]

    def context(self, role: str = "bench") -> Context:
        """A fresh context with a store client and metrics of its own."""
        return make_context(self.settings, role=role)

    def apart(self, role: str = "bench") -> Context:
        """A fresh context in a new folder of the bucket: nothing is there but what it writes."""
        place = self.settings.of(StoreSettings)
        folder = f"bench-{Ids().token()}"
        inside = msgspec.structs.replace(place, prefix=f"{place.prefix.rstrip('/')}/{folder}".lstrip("/"))
        return make_context(self.settings.having(inside), role=role)

    @property
    def rounds(self) -> int:
        return 5 if self.quick else 9


Bench = Callable[[Stand], Awaitable[Sequence[Check]]]
Contender = Callable[[], Awaitable[float]]


async def rounds_of(count: int, contenders: Mapping[str, Contender]) -> dict[str, list[float]]:
    """Measures every contender `count` times, interleaved; each returns its own number (a rate or a time)."""
    names = list(contenders)
    seen: dict[str, list[float]] = {name: [] for name in names}
    for number in range(count):
        for name in names if number % 2 == 0 else reversed(names):
            seen[name].append(await contenders[name]())
    return seen


def told(name: str, values: Sequence[float], unit: str) -> Check:
    """A number without a bar."""
    return Check(name, round(median(values), 4), unit, spread=round(max(values) - min(values), 4))


def at_least(name: str, values: Sequence[float], bare: Sequence[float], bar: float) -> Check:
    """The median over rounds of value ÷ bare, which must reach the bar."""
    ratios = [value / base for value, base in zip(values, bare, strict=True)]
    middle = median(ratios)
    return Check(name, round(middle, 3), "ratio", bar, middle >= bar, round(max(ratios) - min(ratios), 3))


def at_most(name: str, values: Sequence[float], bare: Sequence[float], bar: float) -> Check:
    """The median over rounds of value ÷ bare, which must stay under the bar."""
    ratios = [value / base for value, base in zip(values, bare, strict=True)]
    middle = median(ratios)
    return Check(name, round(middle, 3), "ratio", bar, middle <= bar, round(max(ratios) - min(ratios), 3))


async def rate(clock: Clock, count: int, work: Callable[[], Awaitable[Any]]) -> float:
    """How many of `count` units of work were done per second."""
    began = clock.monotonic_s()
    await work()
    return count / (clock.monotonic_s() - began)
