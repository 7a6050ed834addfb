"""Acceptance under faults and crashes; and collectors with known bugs, to show that the simulator sees them."""

from __future__ import annotations

import asyncio

import pytest

from lakebed.batches import acceptance, paths
from lakebed.batches.acceptance import Submission
from lakebed.batches.acceptor import Acceptor, write_blob
from lakebed.batches.model import AcceptedBatch, UploadResponse, write_record
from lakebed.batches.simulation import AcceptanceInvariants, SimCollector, batches, submission
from lakebed.core.errors import AlreadyExists, LakebedError, OutcomeUnknown
from lakebed.sim.commands import play
from lakebed.sim.faults import CALM
from lakebed.sim.world import InvariantBroken, Process, World
from lakebed.store.model import read_record

SEEDS = 120
SEEDS_TO_CATCH = 150
STEPS_OF_AN_UPLOAD = 40  # more awaits than an upload and its derived writes have


@pytest.mark.parametrize("first", range(0, SEEDS, 40))
def test_nothing_acknowledged_is_lost_and_nothing_is_accepted_twice(first: int) -> None:
    """Races, lost answers, crashes and sweeps: one manifest per identity, its blob there, every 200 true."""
    for seed in range(first, first + 40):
        assert not play("batches", seed).cut


@pytest.mark.parametrize("other_bytes", [False, True])
def test_a_collector_killed_at_any_await_leaves_what_the_next_one_finishes(other_bytes: bool) -> None:
    """kill -9 between any two of the ten steps: the retry elsewhere ends in exactly one truth."""
    finished = 0
    for crash_at in range(1, STEPS_OF_AN_UPLOAD):
        world = World(crash_at, name="batches", faults=CALM)
        died: list[bool] = []

        async def script(world: World, crash_at: int = crash_at, died: list[bool] = died) -> None:
            watch = AcceptanceInvariants(world)
            one = submission("agent", 0, 1.0)

            async def upload(process: Process, submitted: Submission) -> None:
                collector = SimCollector(world, process)
                collector.derived_writes.start()
                try:
                    await collector.acceptor.accept(submitted)
                    watch.answered(submitted)
                except LakebedError:
                    pass
                await collector.derived_writes.drain()

            if other_bytes:
                first = world.process("first")
                await first.spawn(upload(first, submission("agent", 0, 2.0)))
            doomed = world.process("doomed", crash_at_await=crash_at)
            died.append(not await doomed.spawn(upload(doomed, one)))
            await asyncio.sleep(world.faults.late_s)
            successor = world.process("heir")
            await successor.spawn(upload(successor, one))
            world.check(len(world.keys(paths.ACCEPTED)) == 1, "not exactly one manifest")
            world.check(other_bytes or len(watch.acknowledged) == 1, "the retry was not acknowledged")

        world.run(script)
        finished += not died[0]

    assert 0 < finished < STEPS_OF_AN_UPLOAD - 1


class ManifestFirst(Acceptor):
    """Accepts before the bytes are there."""

    async def _accept(self, submitted: Submission) -> UploadResponse:
        mine = acceptance.manifest(
            submitted, at_ns=self._clock.now_ns(), collector_id=self._collector_id, attempt_id=self._ids.token()
        )
        await self._create_manifest(mine)
        await write_blob(self._store, submitted)
        return await super()._accept(submitted)


class Presuming(Acceptor):
    """Takes an unknown outcome for success."""

    async def _create_manifest(self, mine: AcceptedBatch) -> AcceptedBatch:
        try:
            await self._store.create(paths.accepted_key(mine.identity), write_record(mine))
            return mine
        except OutcomeUnknown:
            return mine
        except AlreadyExists as error:
            return read_record(error.current, AcceptedBatch)


class Forgetful(Acceptor):
    """Does not compare hashes: whatever is there is a duplicate."""

    async def _create_manifest(self, mine: AcceptedBatch) -> AcceptedBatch:
        await super()._create_manifest(mine)
        return mine


@pytest.mark.parametrize("acceptor", [ManifestFirst, Presuming, Forgetful])
def test_a_collector_with_a_bug_is_caught(acceptor: type[Acceptor]) -> None:
    """The invariants are not satisfied by everything: each of these bugs breaks one within a few seeds."""
    with pytest.raises(InvariantBroken):
        for seed in range(SEEDS_TO_CATCH):
            World(seed, name="batches").run(lambda world: batches(world, acceptor))


@pytest.mark.parametrize("first", range(0, 12, 6))
def test_weeks_of_retention_never_accept_a_batch_anew(first: int) -> None:
    """Old batches go with their blobs and rows; collectors and retention die and restart on the way."""
    for seed in range(first, first + 6):
        assert not play("batches-retention", seed).cut
