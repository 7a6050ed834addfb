"""How a bench measures: the contenders alternate in the same run, and the result is the ratio between them.

Machines are noisy, so absolute times mean little. A round measures every contender once, in alternating order; the
ratio is computed within each round, then the median over rounds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from lakebed.core.clock import Clock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.settings import Settings
from lakebed.store.settings import StoreSettings
from lakebed.wiring.context import make_context


class Check(msgspec.Struct, frozen=True, rename={"passed": "pass"}):
    """One measured number. Without a bar it is only reported; with one it is held or missed."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    passed: bool = True
    spread: float = 0.0


class BenchReport(msgspec.Struct, frozen=True):
    name: str
    checks: tuple[Check, ...]
    quick: bool
    seconds: float
    note: str = ""

    @property
    def held(self) -> bool:
        return all(check.passed for check in self.checks)


class BenchEnvironment(msgspec.Struct, frozen=True):
    """What a bench runs on: a real bucket, and how long it may take (`quick`: seconds, not minutes)."""

    settings: Settings
    quick: bool
    report: Callable[[str], None]  # prints one line of progress

    def context(self, role: str = "bench") -> Context:
        """A fresh context with a store client and metrics of its own."""
        return make_context(self.settings, role=role)

    def apart(self, role: str = "bench") -> Context:
        """A fresh context under a new, empty prefix of the bucket."""
        store = self.settings.of(StoreSettings)
        folder = f"bench-{Ids().token()}"
        inside = msgspec.structs.replace(store, prefix=f"{store.prefix.rstrip('/')}/{folder}".lstrip("/"))
        return make_context(self.settings.having(inside), role=role)

    @property
    def rounds(self) -> int:
        return 5 if self.quick else 9


Bench = Callable[[BenchEnvironment], Awaitable[Sequence[Check]]]
Contender = Callable[[], Awaitable[float]]


async def rounds_of(count: int, contenders: Mapping[str, Contender]) -> dict[str, list[float]]:
    """Measures every contender `count` times, interleaved; each returns its own number (a rate or a time)."""
    names = list(contenders)
    seen: dict[str, list[float]] = {name: [] for name in names}
    for number in range(count):
        for name in names if number % 2 == 0 else reversed(names):
            seen[name].append(await contenders[name]())
    return seen


def measured(name: str, values: Sequence[float], unit: str) -> Check:
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
