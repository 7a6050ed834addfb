"""Claims under sessions of the bucket backend: processes that crash, stop and continue, with clocks that differ."""

from __future__ import annotations

import asyncio

import pytest

from lakebed.core.errors import LakebedError
from lakebed.meta.bucket.backend import BucketMeta
from lakebed.meta.model import ABSENT
from lakebed.meta.protocol import MetaSession
from lakebed.sim.faults import NONE, Faults
from lakebed.sim.world import Process, World
from support.seeds import seeds

GROUP = "orders:0"
CLAIM = "llog/orders/partitions/0/meta/compactor-claim"
TIMEOUT_S = 3.0
SKEW_S = 0.4  # each clock, either way: together below the second that the backend allows for
TURNS = 12
SEEDS = 8
SLOW_OPENING = 133  # a session whose opening was answered after it had expired


def connect(process: Process) -> BucketMeta:
    return BucketMeta(process.context(), "m")


async def contend(world: World, process: Process, holders: dict[str, MetaSession], acts: list[str]) -> None:
    """Claims, acts a few times as long as its session lives, lets go, and begins anew."""
    meta = connect(process)
    for _ in range(TURNS):
        try:
            session = await meta.open_session(timeout_s=TIMEOUT_S)
        except LakebedError:
            await process.clock.sleep(0.5)
            continue
        try:
            await meta.put(CLAIM, process.node.encode(), expected=ABSENT, session=session, partition_key=GROUP)
        except LakebedError:
            await closed(session)
            await process.clock.sleep(0.5)
            continue
        holders[process.node] = session
        for _ in range(4):
            if not session.alive:
                break
            others = [node for node, other in holders.items() if node != process.node and other.alive]
            world.check(not others, f"{process.node} acts while {others[0] if others else ''} holds the claim")
            acts.append(process.node)
            await process.clock.sleep(world.rng.uniform(0.1, 1.0))
        del holders[process.node]
        await closed(session)


async def closed(session: MetaSession) -> None:
    try:
        await session.close()
    except LakebedError:
        return  # it ends by itself


@pytest.mark.parametrize("seed", seeds([*range(SEEDS), SLOW_OPENING], quick=[0, 1, SLOW_OPENING]))
def test_a_claim_has_one_living_holder_at_a_time(seed: int) -> None:
    """Anyone who acts under a living session is alone; crashed and stopped holders are followed by others."""
    world, acts = World(seed, name="meta-claims", faults=Faults(crash=0.003)), list[str]()
    holders: dict[str, MetaSession] = {}

    async def script(world: World) -> None:
        async def one(name: str, skew_s: float) -> None:
            def body(process: Process) -> object:
                for node in [node for node in holders if node.split(".")[0] == name]:
                    del holders[node]  # that boot is dead
                return contend(world, process, holders, acts)

            await world.keep(name, body, skew_s=skew_s)  # type: ignore[arg-type]

        async def stops() -> None:
            for _ in range(6):
                await asyncio.sleep(world.rng.uniform(1.0, 5.0))
                running = [process for process in world.processes if process.alive]
                if running:
                    world.pause(world.rng.choice(running), world.rng.uniform(0.5, 6.0))

        await asyncio.gather(one("a", SKEW_S), one("b", -SKEW_S), one("c", 0.0), stops())
        world.heal(NONE)
        await asyncio.sleep(2 * TIMEOUT_S)
        successor = connect(world.process("heir"))
        await successor.put(CLAIM, b"heir", expected=ABSENT, partition_key=GROUP)

    world.run(script)

    assert not world.cut
    assert acts
