"""Files that are gone from the middle or the end of the event log are noticed, and lead to a recovery scan."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from lakebed.core.errors import Unavailable
from lakebed.lifecycle.cluster import LATE_NS, LogDay, LogGap, LogReach, LogState, counted, days_to_count, missing_files
from lakebed.lifecycle.model import Mode
from lakebed.lifecycle.paths import LOG_DAYS
from support.lifecycle_harness import Harness
from support.lifecycle_makers import rule

SECOND = 1_000_000_000
HOUR_NS = 3600 * SECOND
NOON_NS = 1_794_744_000 * SECOND  # 2026-11-15 12:00
FIVE_DAYS = rule(prefix="x/", expiration_days=5)


async def seen(*keys: str) -> tuple[Harness, list[int]]:
    """Each key was written in a minute of its own, and the files of all minutes were seen."""
    world = Harness()
    await world.policy("b", FIVE_DAYS)
    await world.run_round()
    times = []
    for key in keys:
        times.append(world.clock.now_ns())
        world.lake.write("b", key)
        await world.clock.advance(61.0)
    await world.run_round()
    return world, times


@pytest.mark.parametrize("which", [0, 1, 2])
async def test_objects_of_a_file_that_is_gone_expire_in_time(which: int) -> None:
    """A file at the beginning, in the middle or at the end: a scan finds what its events would have brought."""
    world, times = await seen("x/a", "x/b", "x/c")
    world.lake.lose_minute(times[which])

    await world.clock.advance(31.0)
    await world.run_round()
    await world.run_round()

    known = (await world.registers.log.read()).value
    assert (1, "1 files of the event log are gone") == (known.generation, known.lost[:33])
    assert 1 == world.metrics.value("lakebed_lifecycle_lost_log_total")
    assert known.gaps[0].holds(times[which])
    for _ in range(30):
        await world.run_round(0.2)
    assert [] == world.left()
    assert Mode.EVENT_DRIVEN is (await world.action("EXPIRATION_DAYS")).mode
    assert 1 == (await world.registers.log.read()).value.generation  # it is noticed once


async def test_two_workers_that_notice_the_same_loss_make_one_of_it() -> None:
    """Both compared the files before either had it on record: every bucket is scanned once more, not twice."""
    world, times = await seen("x/a", "x/b", "x/c")
    other = world.new_worker(world.lake)
    world.lake.lose_minute(times[1])
    await world.clock.advance(31.0)

    await asyncio.gather(world.worker._monitor.observe(), other._monitor.observe())

    assert 1 == (await world.registers.log.read()).value.generation


async def test_a_loss_that_could_not_be_recorded_is_noticed_again() -> None:
    """What was seen of the log is replaced behind the loss: a worker that dies between loses neither."""
    world, times = await seen("x/a", "x/b", "x/c")
    world.lake.lose_minute(times[1])
    await world.clock.advance(31.0)
    change = world.registers.log.change

    async def dies(_: Any) -> Any:
        raise Unavailable("killed")

    world.registers.log.change = dies  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await world.worker._monitor.observe()
    world.registers.log.change = change  # type: ignore[method-assign]

    await world.new_worker(world.lake)._monitor.observe()

    assert 1 == (await world.registers.log.read()).value.generation


async def test_a_log_that_only_grows_loses_nothing() -> None:
    """Rounds while files come, and one at which the store does not list them."""
    world, _ = await seen("x/a", "x/b")

    async def files(day: str) -> dict[str, int]:
        raise Unavailable("not now")

    world.lake.files, listed = files, world.lake.files  # type: ignore[method-assign]
    await world.clock.advance(31.0)
    await world.run_round()
    world.lake.files = listed  # type: ignore[method-assign]
    for number in range(10):
        world.lake.write("b", f"x/{number}")
        await world.run_round(0.4)

    assert 0 == (await world.registers.log.read()).value.generation


async def test_files_that_retention_removed_are_no_loss_and_are_forgotten() -> None:
    """What is before the first file that is left may go, a day at a time; its record goes with it."""
    world = Harness(day_s=HOUR_NS / SECOND)
    await world.policy("b", rule(expiration_days=1))
    for _ in range(5 * 12):
        world.lake.write("b", "k")
        await world.clock.advance(7200.0)
        begins_ns = max(world.lake.log_made_ns, world.clock.now_ns() - 30 * HOUR_NS)
        world.lake.log = [event for event in world.lake.log if event.position.ts_ns >= begins_ns]
        world.lake.log_begins_ns = begins_ns
        await world.run_round()

    days = [info.key.removeprefix(LOG_DAYS) async for info in world.store.list(LOG_DAYS)]
    assert 0 == (await world.registers.log.read()).value.generation
    assert ["2025-10-13.json", "2025-10-14.json"] == days


def test_every_day_of_the_log_has_its_turn_and_today_always() -> None:
    """Also days of which nothing is left: nobody lists them otherwise."""
    reach = LogReach(1, NOON_NS - 72 * HOUR_NS)
    known, turns = LogState(), []
    for _ in range(4):
        days = days_to_count(known, reach, NOON_NS)
        turns.append(days[0])
        assert "2026-11-15" == days[-1]
        known = counted(known, days, (), NOON_NS)

    assert ["2026-11-12", "2026-11-13", "2026-11-14", "2026-11-12"] == turns
    assert 0 == known.generation
    assert ("2026-11-15",) == days_to_count(known, LogReach(1, NOON_NS), NOON_NS)
    assert () == days_to_count(known, LogReach(1, None), NOON_NS)


def test_a_missing_file_is_a_gap_unless_it_was_before_the_first_one() -> None:
    """A file holds what was written from its minute on until its server wrote it."""
    day = LogDay(
        files={"12-00.a": NOON_NS // SECOND, "12-01.a": NOON_NS // SECOND + 60, "12-01.b": NOON_NS // SECOND + 60}
    )
    left = {"12-01.a": NOON_NS // SECOND + 60}

    both = missing_files(day, left, NOON_NS)
    assert (LogGap(NOON_NS, NOON_NS + LATE_NS), LogGap(NOON_NS + 60 * SECOND, NOON_NS + 60 * SECOND + LATE_NS)) == both
    assert both[1:] == missing_files(day, left, NOON_NS + 60 * SECOND)
    assert () == missing_files(day, left, None)
    lost = counted(LogState(), ("2026-11-15",), both, 7)
    assert (1, 7, 1, "") == (lost.generation, lost.lost_ns, len(lost.gaps), lost.counted)
    assert msgspec.structs.replace(LogState(), counted="d") == counted(LogState(), ("d", "e"), (), 7)
