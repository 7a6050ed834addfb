"""The queue under faults and crashes; and queues with known bugs, to show that the simulator sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from lakebed.queue import appending, claiming, collector, paths, sweeper
from lakebed.queue.model import ConsumerManifest, ProducerManifest
from lakebed.queue.simulation import crash, queue, writers
from lakebed.sim.commands import play
from lakebed.sim.world import InvariantBroken, World
from support.seeds import seeds

SEEDS = 60
SEEDS_TO_CATCH = 250  # a bug that this many seeds do not show would not be caught by running the lane either


@pytest.mark.parametrize("first", seeds(range(0, SEEDS, 20), quick=[0]))
def test_nothing_durable_is_lost_doubled_or_out_of_order(first: int) -> None:
    """Whatever fails or dies: durable means delivered, applied once, in order; only one holds a batch at a time."""
    for seed in range(first, first + 20):
        assert not play("queue", seed).cut


def test_two_hundred_processes_append_to_one_queue_and_none_is_in_doubt() -> None:
    """More than a manifest records: no answer is lost, so every append has a definite outcome, and all are pending."""
    world = World(200, name="queue")
    world.run(lambda world: writers(world, 200))
    assert not world.cut


@pytest.mark.parametrize("victim", ["ingest", "collect", "sweeper"])
def test_a_crash_at_any_await_harms_nothing(victim: str) -> None:
    """Each role is killed at every await at the store that it comes to, one world for each."""
    awaits = 0
    for at_await in range(1, 45):
        reached: list[bool] = []

        async def script(world: World, at_await: int = at_await, reached: list[bool] = reached) -> None:
            reached.append(await crash(world, victim, at_await))

        world = World(at_await, name="queue")
        world.run(script)
        awaits += reached[0]

    assert awaits >= 10


def forgets_counters(patch: pytest.MonkeyPatch) -> None:
    """An append that is tried again is taken for a new one unless it is still pending."""
    real = appending.append

    def append(manifest: ProducerManifest, batches: Any, **options: Any) -> Any:
        after, answers = real(msgspec.structs.replace(manifest, sessions={}), batches, **options)
        return after, answers

    patch.setattr(appending, "append", append)


def forgets_generations(patch: pytest.MonkeyPatch) -> None:
    """Batches that the sweep may have removed are still enqueued."""
    patch.setattr(appending, "is_over", lambda generation, current: False)


def sweeps_too_early(patch: pytest.MonkeyPatch) -> None:
    """The sweep takes what can still be enqueued."""
    patch.setattr(sweeper, "is_over", lambda generation, current: True)


def acks_for_anybody(patch: pytest.MonkeyPatch) -> None:
    """A late collector acks, rejects and buries what another holds."""
    patch.setattr(claiming, "_demand", lambda consumer, claimed: None)


def ignores_clean_ups(patch: pytest.MonkeyPatch) -> None:
    """A manifest that was read before a clean-up is believed after it."""
    real = claiming.trim

    def trim(consumer: ConsumerManifest, locations: Any, cleanups: int) -> Any:
        return real(consumer, locations, 0)

    patch.setattr(claiming, "trim", trim)


def trusts_its_memory(patch: pytest.MonkeyPatch) -> None:
    """A collector that slept passes out what it had read ahead."""
    patch.setattr(collector, "FRESH_SHARE", 1e9)


def takes_what_is_fresh(patch: pytest.MonkeyPatch) -> None:
    """A claim is taken over whenever one likes."""
    real = claiming.claim

    def claim(consumer: Any, producer: Any, rules: Any, **options: Any) -> Any:
        return real(consumer, producer, msgspec.structs.replace(rules, timeout_ms=-1), **options)

    patch.setattr(claiming, "claim", claim)


def deletes_first(patch: pytest.MonkeyPatch) -> None:
    """Clean-up takes claimed batches for done ones."""
    real = sweeper.QueueSweeper.sweep_done

    async def clean(self: sweeper.QueueSweeper) -> int:
        manifest = await self._consumer.read()
        await self._delete(list(manifest.claimed))
        return await real(self)

    patch.setattr(sweeper.QueueSweeper, "sweep_done", clean)


def sweeps_for_all(patch: pytest.MonkeyPatch) -> None:
    """The sweep takes every generation's folder for its own."""

    def generation_of(folder: str, manifest_path: str) -> int | None:
        found = paths.GENERATION.match(folder)
        return int(found[1]) if found else None

    patch.setattr(sweeper.paths, "generation_of", generation_of)
    folder = paths.generation_folder
    patch.setattr(paths, "owner", lambda manifest_path: "0" * 12)
    patch.setattr(paths, "generation_folder", folder)


def keeps_dropped_collectors_alive(patch: pytest.MonkeyPatch) -> None:
    """The heartbeat holds its collector."""
    patch.setattr(collector.weakref, "ref", lambda held: lambda: held)


def forgets_segments(patch: pytest.MonkeyPatch) -> None:
    """The manifest gives batches up that no segment holds."""
    real = appending.seal

    def seal(manifest: ProducerManifest, folder: str, block: int, until: int, sealed: Any) -> Any:
        return real(manifest, folder, block, until, {*manifest.pending})

    patch.setattr(appending, "seal", seal)


def sweeps_segments_too_far(patch: pytest.MonkeyPatch) -> None:
    """The block of the floor is deleted with those below it."""
    real = sweeper.QueueSweeper._below

    async def below(self: sweeper.QueueSweeper, folder: str, first: int) -> list[str]:
        return await real(self, folder, first + 1)

    patch.setattr(sweeper.QueueSweeper, "_below", below)


def forgets_keys(patch: pytest.MonkeyPatch) -> None:
    """A repeated call is enqueued again."""
    patch.setattr(appending, "_demand_new_keys", lambda manifest, fresh, index: None)


def forgets_delays(patch: pytest.MonkeyPatch) -> None:
    """A rejected batch blocks nothing: what is behind it is delivered first."""
    real = claiming.claim

    def claim(consumer: Any, producer: Any, rules: Any, **options: Any) -> Any:
        delayed = {place for place, row in consumer.troubles.items() if row.until_ms > options["now_ms"]}
        rest = tuple(place for place in producer.pending if place not in delayed)
        return real(consumer, msgspec.structs.replace(producer, pending=rest), rules, **options)

    patch.setattr(claiming, "claim", claim)


def forgets_order(patch: pytest.MonkeyPatch) -> None:
    """Pending is appended to at the front."""
    real = appending.append

    def append(manifest: ProducerManifest, batches: Any, **options: Any) -> Any:
        after, answers = real(manifest, batches, **options)
        known = len(manifest.pending)
        return msgspec.structs.replace(after, pending=after.pending[known:] + after.pending[:known]), answers

    patch.setattr(appending, "append", append)


BUGS: list[Callable[[pytest.MonkeyPatch], None]] = [
    forgets_counters,
    forgets_generations,
    sweeps_too_early,
    acks_for_anybody,
    ignores_clean_ups,
    trusts_its_memory,
    takes_what_is_fresh,
    deletes_first,
    forgets_order,
    sweeps_for_all,
    keeps_dropped_collectors_alive,
    forgets_segments,
    sweeps_segments_too_far,
    forgets_keys,
    forgets_delays,
]


RARE = {ignores_clean_ups, keeps_dropped_collectors_alive, forgets_segments}  # shown by few of the seeds


@pytest.mark.parametrize("bug", seeds(BUGS, quick=set(BUGS) - RARE), ids=lambda bug: bug.__name__)
def test_a_broken_queue_is_caught(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bug that this queue could have is seen within a small number of seeds."""
    bug(monkeypatch)

    def caught(seed: int) -> bool:
        try:
            World(seed, name="queue").run(queue)
        except InvariantBroken:
            return True
        return False

    assert any(caught(seed) for seed in range(SEEDS_TO_CATCH))
