"""One process dies at each of its awaits at the store in turn; another continues and finds everything in order."""

from __future__ import annotations

import asyncio

import pytest

from lakebed.core.errors import Fenced
from lakebed.sim.commands import deaths
from lakebed.sim.faults import CALM
from lakebed.sim.history import ACKNOWLEDGED
from lakebed.sim.world import Process, World
from lakebed.store.lease import HeldByAnother
from lakebed.store.simulation import LEASE_S, RegisterWatch, open_journal, open_lease, write
from support.seeds import seeds

CHANGES = 5  # that one life makes
AWAITS_MIN = 14  # one life is at least seven requests of two awaits each
SEEDS = 5


async def live(process: Process, watch: RegisterWatch, ends: list[str]) -> None:
    """A whole life: take the lease, write under it and beside it, renew, give it back."""
    mine, journal = open_lease(process), open_journal(process)
    while True:
        try:
            held = await mine.acquire()
            break
        except HeldByAnother:
            await process.clock.sleep(1.0)
    await write(watch, journal, f"{process.node}-first", held.epoch, 60.0)
    await asyncio.gather(*(write(watch, journal, f"{process.node}-{n}", held.epoch, 60.0) for n in range(3)))
    try:
        held = await mine.renew(held)
        await write(watch, journal, f"{process.node}-last", held.epoch, 60.0)
        await mine.release(held)
    except Fenced:
        pass
    ends.append(process.node)


def play(seed: int, crash_at_await: int) -> tuple[RegisterWatch, list[str], bool]:
    """A victim that dies at the given await, if it gets there, and a survivor: who came to an end, and if it died."""
    world, watches, ends = World(seed, name="crash", faults=CALM), [], []

    async def script(world: World) -> None:
        watch = RegisterWatch(world)
        watches.append(watch)
        victim, survivor = world.process("victim", crash_at_await=crash_at_await), world.process("survivor")
        victim_ended = victim.spawn(live(victim, watch, ends))
        async with asyncio.timeout(5 * LEASE_S):
            assert await survivor.spawn(live(survivor, watch, ends))
            await victim_ended
        await asyncio.sleep(world.faults.late_s)
        watch.verdict()

    world.run(script)
    died = any(verb == "crash" for _, _, _, verb, _, _ in world.trace)
    return watches[0], ends, died


@pytest.mark.parametrize("seed", seeds(range(SEEDS), quick=[0]))
def test_a_death_at_any_await_loses_nothing_acknowledged_and_blocks_nobody(seed: int) -> None:
    """For every k: the survivor gets the lease after one term, and every acknowledged change is there once."""

    def life(crash_at_await: int) -> bool:
        watch, ends, died = play(seed, crash_at_await)
        acknowledged = watch.history.count(ACKNOWLEDGED)
        if died:
            assert ends == ["survivor.1"]
            assert CHANGES <= acknowledged <= 2 * CHANGES
        else:
            assert sorted(ends) == ["survivor.1", "victim.1"]
            assert acknowledged == 2 * CHANGES
        return died

    assert deaths(life) >= AWAITS_MIN
