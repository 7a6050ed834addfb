"""The trail: on record before it is begun, and how it ended."""

from __future__ import annotations

import msgspec
import pytest

from lakebed.clock import ManualClock
from lakebed.errors import Conflict, Corrupt, Unavailable
from lakebed.ids import Ids
from lakebed.store.memory import MemoryStore
from lakebed.trail import ROOT, Deed, Trail


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


async def test_acts_of_one_millisecond_list_in_the_order_in_which_they_were_begun() -> None:
    """The clock does not move: the order comes from the process, however it comes by its trail."""
    clock, ids = ManualClock(), Ids()
    store = MemoryStore(clock=clock)
    for number in range(30):
        async with Trail(store, clock=clock, ids=ids).record("ann", f"do.{number}", {}):
            pass

    deeds = await Trail(store, clock=clock, ids=Ids()).latest(30)

    assert [f"do.{number}" for number in reversed(range(30))] == [deed.what for deed in deeds]
    assert {clock.now_ns() // 1_000_000} == {deed.at_ms for deed in deeds}


async def test_a_clock_that_is_set_back_over_midnight_does_not_change_the_order() -> None:
    """A record tells the clock's time and keeps its place among the records of its process."""
    midnight_ns = 1_760_054_400_000_000_000
    clock, ids = ManualClock(midnight_ns + 1_000_000), Ids()
    store = MemoryStore(clock=clock)
    for number in range(3):
        async with Trail(store, clock=clock, ids=ids).record("ann", f"do.{number}", {}):
            clock._start_ns -= 2_000_000

    deeds = await Trail(store, clock=clock, ids=ids).latest()

    assert ["do.2", "do.1", "do.0"] == [deed.what for deed in deeds]
    assert [-3, -1, 1] == [deed.at_ms - midnight_ns // 1_000_000 for deed in deeds]


async def test_records_of_earlier_versions_list_by_their_time(trail: Trail) -> None:
    """Their names have no count; they stand among the new ones where their time puts them."""
    at_ms = trail._clock.now_ns() // 1_000_000
    async with trail.record("ann", "do.new", {}):
        pass
    for old_ms in (at_ms - 1, at_ms + 1):
        deed_id = f"{old_ms:015d}-ffffffffffffffff"
        old = Deed(deed_id, old_ms, "ann", f"do.{old_ms - at_ms}", {})
        await trail._store.create(f"{ROOT}date=2025-10-09/{deed_id}.json", msgspec.json.encode(old))

    assert ["do.1", "do.new", "do.-1"] == [deed.what for deed in await trail.latest()]


async def test_a_record_that_is_none_is_corrupt(trail: Trail) -> None:
    await trail._store.create(f"{ROOT}date=2026-01-01/000-x.json", b"{}")
    with pytest.raises(Corrupt):
        await trail.latest()
