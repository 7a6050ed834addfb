"""Acceptance under faults and crashes; and collectors with known bugs, to show that the simulator sees them."""

from __future__ import annotations

import asyncio

import pytest

from lakebed.batches import acceptance, paths
from lakebed.batches.acceptance import Submission
from lakebed.batches.acceptor import Acceptor
from lakebed.batches.model import AcceptedBatch, UploadResponse, write_record
from lakebed.batches.packer import read_table, write_blob
from lakebed.batches.simulation import AcceptanceInvariants, SimCollector, batches, packed, submission
from lakebed.batches.sweeper import BlobSweeper, Judgement
from lakebed.core.errors import AlreadyExists, LakebedError, OutcomeUnknown
from lakebed.sim.commands import play
from lakebed.sim.faults import CALM
from lakebed.sim.world import InvariantBroken, Process, World
from lakebed.store.model import ObjectInfo, read_record
from support.seeds import seeds

SEEDS = 120
SEEDS_TO_CATCH = 150
STEPS_OF_AN_UPLOAD = 40  # more awaits than an upload and its derived writes have


@pytest.mark.parametrize("first", seeds(range(0, SEEDS, 40), quick=[0]))
@pytest.mark.parametrize("name", ["batches", "batches-packed"])
def test_nothing_acknowledged_is_lost_and_nothing_is_accepted_twice(name: str, first: int) -> None:
    """Races, lost answers, crashes and sweeps: one manifest per identity, its blob there, every 200 true."""
    for seed in range(first, first + 40):
        assert not play(name, seed).cut


@pytest.mark.parametrize("pack_s", [0.0, 0.05])
@pytest.mark.parametrize("other_bytes", [False, True])
def test_a_collector_killed_at_any_await_leaves_what_the_next_one_finishes(other_bytes: bool, pack_s: float) -> None:
    """kill -9 between any two of the ten steps: the retry elsewhere ends in exactly one truth."""
    finished = 0
    for crash_at in range(1, STEPS_OF_AN_UPLOAD):
        world = World(crash_at, name="batches", faults=CALM)
        died: list[bool] = []

        async def script(world: World, crash_at: int = crash_at, died: list[bool] = died) -> None:
            watch = AcceptanceInvariants(world)
            one = submission("agent", 0, 1.0)

            async def upload(process: Process, submitted: Submission) -> None:
                collector = SimCollector(world, process, pack_s=pack_s)
                collector.derived_writes.start()
                company = [submitted, submission("neighbour", crash_at, 1.0)] if pack_s else [submitted]

                async def one(each: Submission) -> None:
                    try:
                        await collector.acceptor.accept(each)
                        watch.answered(each)
                    except LakebedError:
                        pass

                await asyncio.gather(*map(one, company))
                await collector.derived_writes.drain()

            if other_bytes:
                first = world.process("first")
                await first.spawn(upload(first, submission("agent", 0, 2.0)))
            doomed = world.process("doomed", crash_at_await=crash_at)
            died.append(not await doomed.spawn(upload(doomed, one)))
            await asyncio.sleep(world.faults.late_s)
            successor = world.process("heir")
            await successor.spawn(upload(successor, one))
            sent = 2 if pack_s else 1
            world.check(len(world.keys(paths.ACCEPTED)) == sent, "not exactly one manifest for each identity")
            world.check(other_bytes or len(watch.acknowledged) == sent, "the retry was not acknowledged")

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


@pytest.mark.parametrize("first", seeds(range(0, 12, 6), quick=[0]))
@pytest.mark.parametrize("name", ["batches-retention", "batches-packed-retention"])
def test_months_of_retention_never_accept_a_batch_anew(name: str, first: int) -> None:
    """Old batches go with their blobs and rows; collectors die, and reconcilers stand still for weeks on the way."""
    for seed in range(first, first + 6):
        assert not play(name, seed).cut


class EarlySweeper(BlobSweeper):
    """Deletes a pack when one of its batches does not need it."""

    async def _pack(self, info: ObjectInfo, now_ns: int, dry_run: bool) -> Judgement:
        for frame in await read_table(self._store, info.key):
            accepted = await self._accepted(frame)
            if accepted is not None and accepted.raw_blob_key != info.key:
                await self._store.delete(info.key)
        return Judgement("delete", "")


def test_a_sweeper_that_deletes_a_pack_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack is needed while one manifest refers to it: the packed world sees the loss."""
    monkeypatch.setattr("lakebed.batches.simulation.BlobSweeper", EarlySweeper)
    with pytest.raises(InvariantBroken):
        for seed in range(SEEDS_TO_CATCH):
            World(seed, name="batches-packed").run(packed)
