"""A world in which policies, buckets and the event log come and go, under two or three workers that die at will.

Two buckets share their delays, so that one keeps the cursors moving while the other has no policy. A policy is removed,
made unreadable, replaced and put back; a bucket is deleted and made again; versioning is switched on; the server that
writes the log crashes and loses its last events; the log loses its files or its folder. In the end, in calm, everything
that is due under the policies in force must go, before any safety scan.
In most of these stories some other change leads to a scan, which hides what an absent policy alone would lose: `away`
is that one story, with nothing beside it.
"""

from __future__ import annotations

import asyncio

import msgspec

from lakebed.lifecycle.memory import MemoryLake
from lakebed.lifecycle.model import Rule
from lakebed.lifecycle.policy import render_xml
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.simulation import (
    CRASH,
    DAY_S,
    LIFE_S,
    SETTINGS,
    VERSION_RULES,
    DeleteChecker,
    come_to_rest,
    keep_running,
)
from lakebed.sim.world import World

BUCKETS = ("b", "c")
RULES = (VERSION_RULES[0], VERSION_RULES[2], VERSION_RULES[8])
# A longer rule takes what a shorter one missed, and uploads are scanned every day with all else: both hide a miss.
SECOND_CHANCES = (VERSION_RULES[1], VERSION_RULES[4])
LOST_EVENTS_S = 2.0
AWAY_LIFE_S = 3 * DAY_S
UNREADABLE = b"<LifecycleConfiguration><Rule><Status>Enabled</Status><Frob/></Rule></LifecycleConfiguration>"


async def policies(world: World) -> None:
    """Two or three workers, mortal; a world that changes under them; then calm, and everything due must go."""
    settings = msgspec.structs.replace(SETTINGS, rounding=world.rng.choice(("exact", "midnight")))
    rules = RULES if world.rng.random() < 0.6 else (*RULES, *SECOND_CHANCES)
    lake = MemoryLake(world.clock)
    lake.parts = 3
    judge = DeleteChecker(world, lake, settings.calendar)
    for bucket in BUCKETS:
        for number in range(4):
            lake.write(bucket, f"a-old{number}")
    await world.clock.sleep(1.5 * DAY_S)
    for bucket in BUCKETS:
        await _put(lake, judge, bucket, rules)
    world.faults = msgspec.structs.replace(world.faults, crash=CRASH)
    end_ns = world.clock.now_ns() + round(LIFE_S * 1e9)
    workers = [f"w{number}" for number in range(world.rng.choice((2, 3)))]
    await asyncio.gather(
        _clients(world, lake, end_ns),
        _changes(world, lake, judge, end_ns, rules),
        *(world.keep(name, _worker(world, lake, end_ns, settings)) for name in workers),
    )
    await come_to_rest(world, lake, judge, settings)


async def away(world: World) -> None:
    """A bucket's policy goes as a whole, and is back after all that the bucket holds fell due.

    Meanwhile the other bucket's events move the cursors on. Nothing is written again, so no later event brings what
    was passed, and no other change leads to a scan.
    """
    lake = MemoryLake(world.clock)
    judge = DeleteChecker(world, lake)
    rules = VERSION_RULES[:1]
    for bucket in BUCKETS:
        await _put(lake, judge, bucket, rules)
    world.faults = msgspec.structs.replace(world.faults, crash=CRASH)
    end_ns = world.clock.now_ns() + round(AWAY_LIFE_S * 1e9)

    async def story() -> None:
        await world.clock.sleep(world.rng.uniform(0.3, 0.5) * DAY_S)
        for number in range(6):
            lake.write(BUCKETS[0], f"a/{number}/x")  # a folder each: several shards
            await world.clock.sleep(world.rng.uniform(0.0, 1.0))
        await world.clock.sleep(world.rng.uniform(0.0, 0.6) * DAY_S)
        await _put(lake, judge, BUCKETS[0], ())
        await world.clock.sleep(world.rng.uniform(1.1, 1.3) * DAY_S)
        await _put(lake, judge, BUCKETS[0], rules)

    async def others() -> None:
        while world.clock.now_ns() < end_ns:
            lake.write(BUCKETS[1], f"a/{world.rng.randint(0, 9)}/x")
            await world.clock.sleep(world.rng.uniform(0.0, 2.0))

    workers = [world.keep(f"w{number}", _worker(world, lake, end_ns, SETTINGS)) for number in range(2)]
    await asyncio.gather(story(), others(), *workers)
    await come_to_rest(world, lake, judge)


def _worker(world: World, lake: MemoryLake, end_ns: int, settings: LifecycleSettings):  # type: ignore[no-untyped-def]
    return lambda process: keep_running(world, process, lake, end_ns, settings)


async def _clients(world: World, lake: MemoryLake, until_ns: int) -> None:
    keys = [f"{folder}{number}" for folder in ("a", "a/x/", "b/") for number in range(3)]
    while world.clock.now_ns() < until_ns:
        await world.clock.sleep(world.rng.uniform(0.0, 4.0))
        bucket, key, dice = world.rng.choice(BUCKETS), world.rng.choice(keys), world.rng.random()
        if dice < 0.8:
            lake.write(bucket, key, tags={"tmp": "1"} if world.rng.random() < 0.3 else {})
        elif dice < 0.9:
            lake.begin_upload(bucket, key)
        elif key in lake.objects.get(bucket, {}) and not lake.objects[bucket][key][0].marker:
            lake.tag(bucket, key, {"tmp": "1"})


async def _changes(
    world: World, lake: MemoryLake, judge: DeleteChecker, until_ns: int, rules: tuple[Rule, ...]
) -> None:
    """In the first half, so that no scan they lead to hides what is missed later."""
    half_ns = (world.clock.now_ns() + until_ns) // 2
    loses = world.rng.random() < 0.25  # a log that was lost leads to scans for a long time
    only_removed = not loses and world.rng.random() < 0.4  # nearly every other change leads to a scan by itself
    while world.clock.now_ns() < half_ns:
        await world.clock.sleep(world.rng.uniform(4.0, 16.0) if only_removed else world.rng.uniform(0.5, 6.0))
        bucket, dice = world.rng.choice(BUCKETS), world.rng.random()
        if dice < 0.35 or only_removed:
            await _put(lake, judge, bucket, rules if bucket not in lake.policies else ())
        elif dice < 0.45:
            await lake.put(bucket, UNREADABLE)
            judge.policy((), bucket)
        elif dice < 0.6:
            await _put(lake, judge, bucket, rules[: world.rng.randint(1, len(rules))])
        elif dice < 0.7:
            lake.remove_bucket(bucket)
            judge.policy((), bucket)
        elif dice < 0.75:
            lake.versioned.add(bucket)
        elif dice < 0.9:
            lake.crash_server(LOST_EVENTS_S)
            world.note("log", "crash")
        elif loses:
            lake.lose_log(world.rng.choice(("files", "gone", "remade")))
            world.note("log", "lost")
    for bucket in BUCKETS:
        if bucket not in lake.policies or lake.policies[bucket] == UNREADABLE:
            await _put(lake, judge, bucket, rules)


async def _put(lake: MemoryLake, judge: DeleteChecker, bucket: str, rules: tuple[Rule, ...]) -> None:
    await lake.put(bucket, render_xml(rules) if rules else b"")
    judge.policy(rules, bucket)
