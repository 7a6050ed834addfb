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


async def test_a_change_soon_after_the_last_round_has_one_of_its_own() -> None:
    """Changes at one moment cost one round; one that comes a moment after that round began is not left to the poll."""
    world = Harness()
    rounds: list[int] = []
    watch = asyncio.create_task(
        watch_policies(world.lake, world.clock, lambda: rounds.append(len(world.lake.policies)))
    )
    await asyncio.sleep(0)
    await world.policy("a", rule(expiration_days=1))
    await world.policy("b", rule(expiration_days=1))
    await world.clock.advance(SETTLE_S)
    await world.clock.advance(SETTLE_S / 2)
    first = list(rounds)
    await world.policy("c", rule(expiration_days=1))
    await world.clock.advance(SETTLE_S)
    await world.clock.advance(SETTLE_S)

    assert ([2], [2, 3]) == (first, rounds)
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


async def test_a_worker_deletes_in_its_hours_only() -> None:
    """What is due before they begin goes when they begin; a round by hand takes no notice of them."""
    world = Harness(run_hours="10-12", poll_s=60.0)
    opens_s = world.settings.hours_closed_s(world.clock.now_ns())
    assert opens_s > 3600
    await world.policy("b", rule(expiration_days=1))
    world.lake.write("b", "a")
    running = asyncio.create_task(world.worker.run())
    for _ in range(int(opens_s / 60)):
        await world.clock.advance(60.0)
    before = world.left()
    for _ in range(3):
        await world.clock.advance(60.0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert (["a"], []) == (before, world.left())
    world.lake.write("b", "by hand")
    await world.clock.advance(4 * 3600.0)
    assert world.settings.hours_closed_s(world.clock.now_ns())
    await world.run_round()
    assert [] == world.left()


@pytest.mark.parametrize("wrong", ["1-6", "01-01", "25-03", "night", "01-06,08-09"])
def test_hours_that_are_none_are_refused(wrong: str) -> None:
    """When the settings are loaded."""
    with pytest.raises(Contradiction):
        LifecycleSettings(run_hours=wrong).check()
