"""The trail: on record before it is begun, and how it ended."""

from __future__ import annotations

import pytest

from lakebed.clock import ManualClock
from lakebed.errors import Conflict, Corrupt, Unavailable
from lakebed.ids import Ids
from lakebed.store.memory import MemoryStore
from lakebed.trail import ROOT, Trail


@pytest.fixture
def trail() -> Trail:
    clock = ManualClock()
    return Trail(MemoryStore(clock=clock), clock=clock, ids=Ids.seeded(1), node="node-1")


async def test_a_deed_is_recorded_before_and_after(trail: Trail) -> None:
    """While it runs it has no outcome; then it says what came of it."""
    async with trail.record("ann", "queue.replay", {"queue": "jobs"}, "mended") as told:
        (during,) = await trail.latest()
        told.detail = "sequence 7"
    (after,) = await trail.latest()

    assert (during.who, during.outcome) == ("ann", "")
    assert (after.outcome, after.detail, after.reason, after.subject) == (
        "done",
        "sequence 7",
        "mended",
        {"queue": "jobs"},
    )


async def test_a_deed_that_fails_says_why(trail: Trail) -> None:
    with pytest.raises(Conflict):
        async with trail.record("ann", "batches.resolve", {}):
            raise Conflict("another decided before")

    (deed,) = await trail.latest()
    assert (deed.outcome, deed.detail) == ("conflict", "another decided before")


async def test_a_doer_that_dies_leaves_an_open_record(trail: Trail) -> None:
    with pytest.raises(ZeroDivisionError):
        async with trail.record("ann", "x.y", {}):
            raise ZeroDivisionError

    (deed,) = await trail.latest()
    assert deed.outcome == ""


async def test_what_cannot_be_recorded_is_not_done() -> None:
    """Without a record there is no act."""

    class Deaf(MemoryStore):
        async def create(self, key: str, data: bytes):  # type: ignore[no-untyped-def]
            raise Unavailable("no answer")

    clock, done = ManualClock(), False
    with pytest.raises(Unavailable):
        async with Trail(Deaf(clock=clock), clock=clock, ids=Ids.seeded(1)).record("ann", "x.y", {}):
            done = True
    assert not done


async def test_the_newest_come_first_and_few(trail: Trail) -> None:
    for number in range(5):
        async with trail.record("ann", f"do.{number}", {}):
            await trail._clock.advance(20_000)  # type: ignore[attr-defined]

    assert [deed.what for deed in await trail.latest(3)] == ["do.4", "do.3", "do.2"]


async def test_a_record_that_is_none_is_corrupt(trail: Trail) -> None:
    await trail._store.create(f"{ROOT}date=2026-01-01/000-x.json", b"{}")
    with pytest.raises(Corrupt):
        await trail.latest()
