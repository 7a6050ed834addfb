"""The register under faults and crashes; and registers with known bugs, to show that the simulator sees them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from msgspec import structs

from lakebed.core.errors import OutcomeUnknown, Stale, Unavailable
from lakebed.sim.commands import play
from lakebed.sim.faults import CALM, Faults
from lakebed.sim.world import InvariantBroken, World
from lakebed.store import register as register_module
from lakebed.store.bucket import BucketStore
from lakebed.store.model import Written
from lakebed.store.register import Register, RegisterState
from lakebed.store.simulation import Journal, crowd, register
from support.seeds import seeds

MET = ("crash", "pause", "done", "conflict", "unavailable", "cut short", "done, lost", "unanswered (unknown)")
MET += ("unanswered (late)", "landed late, done", "landed late, conflict", "done, duplicated")
MET += ("repeated, first done", "conflict, repeated")
DOUBTFUL = Faults(repeated=0.2, lost=0.15)
SEEDS = 500
SEEDS_TO_CATCH = 200  # a bug that this many seeds do not show would not be caught in a run of the lane either


@pytest.mark.parametrize("first", seeds(range(0, SEEDS, 100), quick=[0]))
def test_no_change_is_lost_doubled_or_written_by_a_fenced_owner(first: int) -> None:
    """Whatever fails or dies: acknowledged once means applied once, refused never, and epochs only rise."""
    for seed in range(first, first + 100):
        assert not play("register", seed).cut


def test_a_register_that_remembers_few_writers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more writers than the object remembers, a lost answer stays unknown, and is never guessed."""
    monkeypatch.setattr(register_module, "WRITERS_MAX", 2)
    for seed in range(SEEDS_TO_CATCH):
        World(seed, name="register", faults=DOUBTFUL).run(register)


def test_two_hundred_writers_are_in_doubt_only_where_an_answer_was_lost() -> None:
    """On a store that answers, 200 processes on one register get decisions; where clients retry, none is wrong."""
    for writers, faults in ((200, CALM), (40, DOUBTFUL), (50, DOUBTFUL)):
        world = World(writers, name="register", faults=faults)
        world.run(lambda world, writers=writers: crowd(world, writers))
        assert not world.cut


def test_the_seeds_meet_what_the_world_is_about() -> None:
    """Not a world in which nothing happens: every fate of a change, every fault, crashes and grouped writes are met."""
    outcomes: Counter[str] = Counter()
    for seed in range(100):
        world = World(seed, name="register")
        world.run(register)
        outcomes.update({verb for _, _, _, verb, _, _ in world.trace})
        outcomes.update({outcome for _, _, _, _, _, outcome in world.trace})

    for met in MET:
        assert outcomes[met] >= 3, met


class Unconditional(Register[Journal]):
    """Replaces whatever is there."""

    async def _put(self, snapshot: RegisterState[Journal], value: Journal, epoch: int, attempt: str) -> None:
        await self._store.delete(self._key)
        await super()._put(RegisterState(snapshot.value, snapshot.epoch, "", snapshot.attempts), value, epoch, attempt)


class Pessimist(Register[Journal]):
    """Believes that an unknown outcome is a failure, and tries again."""

    async def _put(self, snapshot: RegisterState[Journal], value: Journal, epoch: int, attempt: str) -> None:
        try:
            await super()._put(snapshot, value, epoch, attempt)
        except OutcomeUnknown as error:
            raise Stale("it did not work", current=None) from error

    async def _after_conflict(self, error: Any) -> RegisterState[Journal]:
        found = await (self.read() if isinstance(error.__cause__, OutcomeUnknown) else super()._after_conflict(error))
        return msgspec.structs.replace(found, attempts=())


class Forgetful(Register[Journal]):
    """Does not know its own write again when another was built upon it."""

    async def _after_conflict(self, error: Any) -> RegisterState[Journal]:
        return msgspec.structs.replace(await super()._after_conflict(error), attempts=())


class Unfenced(Register[Journal]):
    """Keeps no epoch."""

    async def change(self, decide: Any, *, epoch: int | None = None) -> Any:
        return await super().change(decide, epoch=None)


class Optimist(Register[Journal]):
    """Believes that an unknown outcome is a success."""

    async def _put(self, snapshot: RegisterState[Journal], value: Journal, epoch: int, attempt: str) -> None:
        try:
            await super()._put(snapshot, value, epoch, attempt)
        except OutcomeUnknown:
            self._known = None


class TwoAnswers(BucketStore):
    """Compares the bytes of one answer and takes the version from another."""

    async def _look(self, key: str, data: bytes, cause: Any, doubt: int) -> Any:
        found = await super()._look(key, data, cause, doubt)
        return found if not isinstance(found, Written) else Written(**structs.asdict(await self.head(key)))


class Hasty(BucketStore):
    """Believes that what is not there yet will never come."""

    async def _again(self, doubt: int, cause: Any) -> None:
        raise Unavailable("nothing was done") from cause


@pytest.mark.parametrize("kind", [TwoAnswers, Hasty])
def test_a_store_that_guesses_is_caught(kind: type[BucketStore], monkeypatch: pytest.MonkeyPatch) -> None:
    """The decisions after a lost answer are part of the world: a store that makes them wrongly breaks it."""
    monkeypatch.setattr("lakebed.sim.process.BucketStore", kind)
    with pytest.raises(InvariantBroken, match="register: "):
        for seed in range(SEEDS_TO_CATCH):
            World(seed, name="register", faults=DOUBTFUL).run(register)


@pytest.mark.parametrize("kind", [Unconditional, Pessimist, Forgetful, Unfenced, Optimist])
def test_a_broken_register_is_caught(kind: type[Register[Journal]]) -> None:
    """Each bug that a register could have is seen within a small number of seeds, and replays."""

    def caught(seed: int) -> str:
        world = World(seed, name="register")
        try:
            world.run(lambda world: register(world, kind))
        except InvariantBroken as broken:
            return str(broken)
        return ""

    found = next(((seed, what) for seed in range(SEEDS_TO_CATCH) if (what := caught(seed))), None)

    assert found is not None
    assert caught(found[0]) == found[1]
