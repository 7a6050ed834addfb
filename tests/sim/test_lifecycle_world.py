"""Lifecycle under faults and crashes: nothing kept is deleted, everything due is, and broken twins are caught."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest

from lakebed.lifecycle.compiler import PolicyCompiler
from lakebed.lifecycle.delete_decision import decide, guard
from lakebed.lifecycle.memory import MemoryLake
from lakebed.lifecycle.model import DeleteOutcome, ObjectEntry, Position, Rule, Verb
from lakebed.lifecycle.policy import render_xml
from lakebed.lifecycle.reader import LifecycleReader
from lakebed.lifecycle.reserved import ReservedKeys
from lakebed.lifecycle.scanner import BucketScanner
from lakebed.lifecycle.simulation import BUCKET, DAY_S, RULES, SETTINGS, DeleteChecker, keep_running, lifecycle
from lakebed.sim.commands import deaths, play
from lakebed.sim.faults import CALM
from lakebed.sim.world import InvariantBroken, World

SEEDS = {"lifecycle": 4, "versions": 4, "policies": 4, "policies-away": 3}
SEEDS_FULL = 60
SEEDS_TO_CATCH = 25
SEEDS_TO_CATCH_RARE = 150  # a fault that few worlds meet
AWAITS_MAX = 2500
SPARSE = msgspec.structs.replace(SETTINGS, poll_s=8.0)  # few rounds in which nothing happens


@pytest.mark.parametrize("name", SEEDS)
def test_nothing_kept_is_deleted_and_everything_due_is(name: str) -> None:
    """Two mortal workers, clients and a policy that changes; then calm. Plain, and with versions kept or suspended."""
    for seed in range(SEEDS[name]):
        assert not play(name, seed).cut


def test_the_seeds_meet_what_the_world_is_about() -> None:
    """Objects do expire, and processes do die on the way."""
    verbs: Counter[str] = Counter()
    for seed in range(3):
        world = World(seed, name="lifecycle")
        world.run(lifecycle)
        verbs.update(event[3] for event in world.trace)

    assert verbs["expire"] >= 10
    assert verbs["crash"] >= 5


def caught(name: str = "lifecycle", seeds: int = SEEDS_TO_CATCH) -> bool:
    for seed in range(seeds):
        try:
            play(name, seed)
        except InvariantBroken:
            return True
    return False


def test_a_careless_delete_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the store's own condition, what a client has just written goes."""

    async def careless(self: MemoryLake, entry: ObjectEntry, verb: Verb) -> None:
        live = self._entries(entry.bucket, entry.key)
        if live:
            self._drop(entry.bucket, entry.key, self.objects[entry.bucket][entry.key][0])
            self.removed.append((self._now(), live[0], verb))

    monkeypatch.setattr(MemoryLake, "delete", careless)

    assert caught()


def test_a_hasty_cursor_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cursor that passes what was not resolved leaves something behind."""

    async def hasty(self: LifecycleReader, stream: Any, reached: Position, alive: Any) -> None:
        batch, stream.batch = stream.batch, []
        await self._resolver.settle([work for _, work in batch])
        await self._advance(stream.shard, [(stream, reached)])

    monkeypatch.setattr(LifecycleReader, "_settle", hasty)

    assert caught()


def test_a_walk_that_goes_on_over_failures_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a walk could not delete must hold it: no event comes for it any more. It meets failures at its deletes."""
    monkeypatch.setattr("lakebed.lifecycle.simulation.REFUSED_DELETE", 0.45)
    settle = BucketScanner._settle

    async def careless(self: BucketScanner, walk: Any, *, end: bool = False) -> bool:
        last = walk.batch[-1][0] if walk.batch else ""
        await settle(self, walk)
        walk.after, walk.stuck = last or walk.after, None
        return await self._checkpoint(walk, done=end)

    monkeypatch.setattr(BucketScanner, "_settle", careless)

    assert caught("policies")


def test_lakebeds_own_keys_outlive_either_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of policies the guarded delete still refuses; without both the world is caught."""
    monkeypatch.setattr(ReservedKeys, "check", lambda *_: None)
    World(1, name="lifecycle").run(lifecycle)

    def open_door(*words: Any, **said: Any) -> DeleteOutcome | None:
        return guard(*words, **{**said, "reserved": ReservedKeys("")})

    monkeypatch.setattr("lakebed.lifecycle.resolver.guard", open_door)

    assert caught()


def life(rules: tuple[Rule, ...], versioned: bool, crash_at_await: int) -> bool:
    """One worker dies at its k-th await; the next continues, and nothing is left. Gives back whether it died.

    With versions, the old object has one of its own, and the new one is written after versioning was suspended.
    """
    world, died = World(1, name="lifecycle", faults=CALM), []

    async def script(world: World) -> None:
        lake = MemoryLake(world.clock)
        judge = DeleteChecker(world, lake)
        (lake.versioned if versioned else set[str]()).add(BUCKET)
        lake.write(BUCKET, "a-old")
        await asyncio.sleep(1.5 * DAY_S)
        await lake.put(BUCKET, render_xml(rules))
        judge.policy(rules)
        lake.write(BUCKET, "b-kept")
        if versioned:
            lake.versioned.discard(BUCKET)
            lake.suspended.add(BUCKET)
        lake.write(BUCKET, "a-new")
        end_ns = world.clock.now_ns() + round(1.45 * DAY_S * 1e9)
        last = await world.keep(
            "w", lambda process: keep_running(world, process, lake, end_ns, SPARSE), crash_at_await=crash_at_await
        )
        died.append(last.boot > 1)
        world.check(judge.due_and_there() == [], f"{judge.due_and_there()} should be gone")
        kept = [key for key, found in lake.objects[BUCKET].items() if not found[0].marker]
        world.check(kept == ["b-kept"], f"left: {kept}")

    world.run(script)
    return died[0]


LIVES = pytest.mark.parametrize(
    ("rules", "versioned"), [((RULES[0], RULES[2]), False), ((RULES[0],), True)], ids=["plain", "versions"]
)


@LIVES
def test_a_worker_may_die_at_any_await(rules: tuple[Rule, ...], versioned: bool) -> None:
    """At some awaits of its life: after the next boot everything is in order."""
    assert all(life(rules, versioned, k) for k in range(1, 300, 23))


@pytest.mark.full
@pytest.mark.parametrize("name", SEEDS)
def test_many_seeds_leave_nothing_behind(name: str) -> None:
    """The same worlds, far more often."""
    for seed in range(100, 100 + SEEDS_FULL):
        assert not play(name, seed).cut


@pytest.mark.full
@LIVES
def test_a_worker_may_die_at_every_await(rules: tuple[Rule, ...], versioned: bool) -> None:
    """At each await of its life in turn, none left out: after the next boot everything is in order."""
    assert deaths(lambda k: life(rules, versioned, k), awaits_max=AWAITS_MAX) >= 100


def test_actions_that_are_not_marked_when_their_policy_goes_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket whose policy went as a whole and came back misses what fell due meanwhile: nothing else brings it."""

    async def forgetful(self: PolicyCompiler, present: set[str]) -> None:
        return None

    monkeypatch.setattr(PolicyCompiler, "_without_policy", forgetful)

    assert caught("policies-away")


def test_a_scan_that_moves_no_cursor_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came while it went along has no cursor before it."""

    async def lazy(self: BucketScanner, *words: Any) -> None:
        return None

    monkeypatch.setattr(BucketScanner, "join", lazy)

    assert caught("policies")


@pytest.mark.full
def test_events_that_a_crash_lost_and_nobody_waits_for_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of the gap have no event to come."""
    decided = decide

    def gapless(actions: Any, family: Any, now_ns: int, calendar: Any, event: Any = None, gaps: Any = ()) -> Any:
        return decided(actions, family, now_ns, calendar, event, ())

    monkeypatch.setattr("lakebed.lifecycle.scanner.decide", gapless)

    assert caught("policies", SEEDS_TO_CATCH_RARE)
