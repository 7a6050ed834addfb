"""The simulator itself: one seed, one trace; virtual time; crashes that leave nothing running."""

from __future__ import annotations

import asyncio
import random

import pytest

from lakebed.core.errors import NotFound
from lakebed.sim.commands import WORLDS, find, play
from lakebed.sim.faults import CALM, NONE, Crashed, Faults
from lakebed.sim.loop import Deadlock, Livelock, SimLoop
from lakebed.sim.world import InvariantBroken, Process, World


@pytest.mark.parametrize("name", [row.name for row in WORLDS])
def test_the_same_seed_gives_the_same_trace_and_another_seed_another(name: str) -> None:
    """A seed is the whole world: replaying it repeats every event, and no two seeds are alike."""
    traces = []
    for seed in (1, 2, 3, 4, 5, 1, 2, 3, 4, 5):
        world = World(seed, name=name)
        world.run(find(name))
        traces.append((world.digest(), world.trace))

    assert traces[:5] == traces[5:]
    assert len({digest for digest, _ in traces}) == 5


def test_virtual_time_costs_nothing_and_timeouts_are_exact() -> None:
    """Sleeping an hour takes no time, and asyncio.timeout fires at its instant."""
    loop = SimLoop(random.Random(1))

    async def script() -> tuple[float, float]:
        await asyncio.sleep(3600)
        try:
            async with asyncio.timeout(2.5):
                await asyncio.sleep(10)
        except TimeoutError:
            return 3600.0, loop.time() - 3600.0
        raise AssertionError("the timeout did not fire")

    slept_s, timeout_s = loop.run_until_complete(script())
    loop.close()

    assert (slept_s, timeout_s) == (3600.0, 2.5)


def test_the_seed_decides_which_ready_task_runs_first() -> None:
    """Interleavings vary with the seed, and all orders of three tasks are met."""

    def order(seed: int) -> str:
        loop, output = SimLoop(random.Random(seed)), []

        async def one(name: str) -> None:
            await asyncio.sleep(0)
            output.append(name)

        async def script() -> None:
            await asyncio.gather(one("a"), one("b"), one("c"))

        loop.run_until_complete(script())
        loop.close()
        return "".join(output)

    orders = {order(seed) for seed in range(60)}

    assert {"abc", "acb", "bac", "bca", "cab", "cba"} == orders


def test_waiting_for_nobody_is_a_deadlock_and_spinning_for_ever_a_livelock() -> None:
    """A world that cannot continue, or never ends, reports it instead of hanging."""

    async def waits(world: World) -> None:
        await asyncio.get_running_loop().create_future()

    async def spins(world: World) -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(InvariantBroken, match="nothing is ready") as dead:
        World(1).run(waits)
    world = World(1)
    world.loop._turns_max = 1000
    with pytest.raises(InvariantBroken, match="has not ended") as alive:
        world.run(spins)

    assert isinstance(dead.value.__cause__, Deadlock)
    assert isinstance(alive.value.__cause__, Livelock)


def test_a_crash_stops_every_task_of_the_process_and_no_finally_reaches_the_store() -> None:
    """kill -9: tasks that the process's code started die with it; nothing they clean up with is heard."""
    reached: list[str] = []

    async def background(process: Process) -> None:
        try:
            while True:
                await process.clock.sleep(1.0)
                await process.store.create(f"beat/{process.clock.now_ns()}", b"x")
        finally:
            try:
                await process.store.create("last-words", b"x")
                reached.append("stored")
            except Crashed:
                reached.append("refused")
                raise

    async def body(process: Process) -> None:
        task = asyncio.create_task(background(process))
        await task

    async def script(world: World) -> None:
        process = world.process("p")
        ended = process.spawn(body(process))
        await asyncio.sleep(3.5)
        before = len(world.keys("beat/"))
        world.crash(process)
        assert await ended is False
        await asyncio.sleep(60)
        assert (before, len(world.keys("beat/"))) == (3, 3)
        assert reached == []  # not even a finally has run

    world = World(1, faults=NONE)
    world.run(script)

    assert reached == ["refused"]
    assert world.peek("last-words") is None


def test_a_write_under_way_when_its_process_dies_lands_by_chance() -> None:
    """Both fates of a request on the wire are met, and one that lands may do so after the crash."""

    async def script(world: World) -> None:
        process = world.process("p", crash_at_await=1)
        await process.spawn(process.store.create("key", b"x"))
        assert world.peek("key") is None
        await asyncio.sleep(world.faults.late_s)

    fates = set()
    for seed in range(30):
        world = World(seed, faults=CALM)
        world.run(script)
        fates.add(world.peek("key") is not None)

    assert fates == {True, False}


def test_every_fault_of_a_write_is_met_and_tells_no_lie() -> None:
    """OutcomeUnknown comes done, not done and done later; success means done, whatever happened on the wire."""
    met = set()

    async def script(world: World) -> None:
        process = world.process("p")

        async def body() -> None:
            for number in range(40):
                key = f"key/{number}"
                try:
                    await process.store.create(key, b"x")
                    answer = "ok"
                except Exception as error:
                    answer = type(error).__name__
                at_once = world.peek(key) is not None
                await process.clock.sleep(world.faults.late_s)
                met.add((answer, at_once, world.peek(key) is not None))

        await process.spawn(body())

    for seed in range(20):
        World(seed, faults=Faults(late=0.1, lost=0.1, unknown=0.1, unavailable=0.1)).run(script)

    assert {
        ("ok", True, True),
        ("OutcomeUnknown", True, True),
        ("OutcomeUnknown", False, True),
        ("OutcomeUnknown", False, False),
    } == met


def test_a_broken_invariant_names_seed_step_tail_and_replay() -> None:
    """The first step after which an invariant does not hold ends the world, even where library code catches all."""

    async def script(world: World) -> None:
        world.invariant("at most two", lambda: "three are stored" if len(world.keys("key/")) > 2 else None)
        process = world.process("p")

        async def body() -> None:
            for number in range(10):
                try:
                    await process.store.create(f"key/{number}", b"x")
                except Exception:
                    continue

        await process.spawn(body())

    with pytest.raises(InvariantBroken) as caught:
        World(7, name="mine", faults=NONE).run(script)

    assert (caught.value.seed, caught.value.step) == (7, 3)
    assert "key/2 done" in caught.value.tail[-1]
    assert "lakebed sim --world mine --seed 7" in str(caught.value)


def test_what_a_process_does_not_handle_ends_the_world() -> None:
    """An exception nobody expected is a finding, not a silent end of one task."""

    async def script(world: World) -> None:
        process = world.process("p")
        await process.spawn(process.store.get("absent"))

    with pytest.raises(InvariantBroken, match="NotFound") as caught:
        World(1, faults=NONE).run(script)

    assert isinstance(caught.value.__cause__, NotFound)


def test_a_script_that_fails_can_be_replayed_like_any_other_finding() -> None:
    """A deadline that passes in the script itself carries the seed, too."""

    async def script(world: World) -> None:
        async with asyncio.timeout(5.0):
            await asyncio.sleep(10.0)

    with pytest.raises(InvariantBroken, match="--seed 9") as caught:
        World(9, name="mine").run(script)

    assert isinstance(caught.value.__cause__, TimeoutError)


def test_the_limit_on_steps_ends_a_world_where_it_stands() -> None:
    """A world is bounded by its steps, and reports that it was cut."""
    played = play("register", 3, steps=10)

    assert (played.steps, played.cut) == (10, True)


def test_a_listing_sees_later_pages_as_they_are_when_it_reaches_them() -> None:
    """A slow listing is no snapshot: what is created behind its place appears, each key once."""
    seen: list[str] = []

    async def script(world: World) -> None:
        process, other = world.process("p"), world.process("q")
        for number in range(0, 12, 2):
            await other.store.create(f"key/{number:02d}", b"x")

        async def body() -> None:
            async for info in process.store.list("key/"):
                seen.append(info.key)
                if len(seen) == 3:
                    await other.store.create("key/01", b"x")
                    await other.store.create("key/11", b"x")

        await process.spawn(body())

    World(1, faults=NONE).run(script)

    assert [f"key/{number:02d}" for number in (0, 2, 4, 6, 8, 10, 11)] == seen
