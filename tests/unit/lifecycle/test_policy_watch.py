"""A policy is taken up by the event of its change, and work keeps to its hours."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from lakebed.core.settings import Contradiction
from lakebed.lifecycle.model import SECOND_NS
from lakebed.lifecycle.policy_watch import SETTLE_S, watch_policies
from lakebed.lifecycle.settings import LifecycleSettings
from support.lifecycle_harness import Harness
from support.lifecycle_makers import rule

HOUR_NS = 3600 * SECOND_NS


async def test_a_policy_that_is_put_is_noticed_within_two_seconds() -> None:
    """By its event, whoever put it: long before the poll."""
    world = Harness()
    seen: list[int] = []
    watch = asyncio.create_task(watch_policies(world.lake, world.clock, lambda: seen.append(world.clock.now_ns())))
    await asyncio.sleep(0)
    began_ns = world.clock.now_ns()
    await world.policy("b", rule(expiration_days=1))
    for _ in range(10):
        await world.clock.advance(SETTLE_S)

    assert seen and seen[0] - began_ns < 2 * SECOND_NS
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch


@pytest.mark.parametrize(
    ("hours", "at_hour", "closed_h"),
    [("", 12, 0), ("01-06", 1, 0), ("01-06", 5.9, 0), ("01-06", 6, 19), ("01-06", 0, 1), ("22-04", 23, 0),
     ("22-04", 3, 0), ("22-04", 4, 18), ("00-24", 12, 0)],
)  # fmt: skip
def test_work_keeps_to_its_hours(hours: str, at_hour: float, closed_h: float) -> None:
    """In UTC; a window may pass midnight."""
    settings = LifecycleSettings(run_hours=hours)

    assert pytest.approx(closed_h * 3600) == settings.hours_closed_s(round((20_000 * 24 + at_hour) * HOUR_NS))


@pytest.mark.parametrize("wrong", ["1-6", "01-01", "25-03", "night", "01-06,08-09"])
def test_hours_that_are_none_are_refused(wrong: str) -> None:
    """When the settings are loaded."""
    with pytest.raises(Contradiction):
        LifecycleSettings(run_hours=wrong).check()
