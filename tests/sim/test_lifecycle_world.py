"""Lifecycle under faults and crashes: nothing kept is deleted, everything due is, and broken twins are caught."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from lakebed.lifecycle import xml
from lakebed.lifecycle.memory import MemoryLake
from lakebed.lifecycle.model import Entry, Position, Verb
from lakebed.lifecycle.reader import Reader
from lakebed.lifecycle.walker import Walker
from lakebed.sim.faults import CALM
from lakebed.sim.lifecycle import BUCKET, DAY_S, RULES, Judge, keep_ticking, lifecycle
from lakebed.sim.world import InvariantBroken, World
from lakebed.sim.worlds import deaths, play

SEEDS = 10
SEEDS_TO_CATCH = 25
STRIDE = 5  # every await would take a minute; over the seeds, the world's own crashes meet the others


def test_nothing_kept_is_deleted_and_everything_due_is() -> None:
    """Two mortal workers, clients and a policy that changes; then calm."""
    for seed in range(SEEDS):
        assert not play("lifecycle", seed).cut


def test_the_seeds_meet_what_the_world_is_about() -> None:
    """Objects do expire, and processes do die on the way."""
    verbs: Counter[str] = Counter()
    for seed in range(3):
        world = World(seed, name="lifecycle")
        world.run(lifecycle)
        verbs.update(event[3] for event in world.trace)

    assert verbs["expire"] >= 10
    assert verbs["crash"] >= 5


def caught() -> bool:
    for seed in range(SEEDS_TO_CATCH):
        try:
            World(seed, name="lifecycle").run(lifecycle)
        except InvariantBroken:
            return True
    return False


def test_a_careless_delete_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the store's own condition, what a client has just written goes."""

    async def careless(self: MemoryLake, entry: Entry, verb: Verb) -> None:
        live = self._entries(entry.bucket, entry.key)
        if live:
            self._drop(entry.bucket, entry.key, self.objects[entry.bucket][entry.key][0])
            self.removed.append((self._now(), live[0], verb))

    monkeypatch.setattr(MemoryLake, "delete", careless)

    assert caught()


def test_a_hasty_cursor_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cursor that passes what was not resolved leaves something behind."""

    async def hasty(self: Reader, delay_ns: int | None, cursor: Position, batch: list[Any]) -> Any:
        works = [work for _, work in batch if work is not None]
        await self._resolver.settle(works)
        return await self._advance(delay_ns, cursor, batch[-1][0]), None

    monkeypatch.setattr(Reader, "_settle", hasty)

    assert caught()


def test_a_walk_that_goes_on_over_failures_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a walk could not delete must hold it: no event comes for it any more."""
    settle = Walker._settle

    async def careless(self: Walker, *arguments: Any) -> None:
        await settle(self, *arguments)

    monkeypatch.setattr(Walker, "_settle", careless)

    assert caught()


def life(seed: int, crash_at_await: int) -> bool:
    """One worker dies at its k-th await; the next goes on, and nothing is left. Gives back whether it died."""
    world, died = World(seed, name="lifecycle", faults=CALM), []

    async def script(world: World) -> None:
        lake = MemoryLake(world.clock)
        judge = Judge(world, lake)
        lake.write(BUCKET, "a-old")
        await asyncio.sleep(1.5 * DAY_S)
        rules = (RULES[0], RULES[2])
        await lake.put(BUCKET, xml.render(rules))
        judge.policy(rules)
        lake.write(BUCKET, "a-new")
        lake.write(BUCKET, "b-kept")
        end_ns = world.clock.now_ns() + round(2.0 * DAY_S * 1e9)
        last = await world.keep(
            "w", lambda process: keep_ticking(world, process, lake, end_ns), crash_at_await=crash_at_await
        )
        died.append(last.boot > 1)
        world.check(judge.due_and_there() == [], f"{judge.due_and_there()} should be gone")
        world.check(sorted(lake.objects[BUCKET]) == ["b-kept"], f"left: {sorted(lake.objects[BUCKET])}")

    world.run(script)
    return died[0]


def test_a_worker_may_die_at_every_await() -> None:
    """At each await of its life in turn: after the next boot everything is in order."""
    assert deaths(lambda k: life(1, STRIDE * k), awaits_max=400) * STRIDE >= 200
