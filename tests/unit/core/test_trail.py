"""The audit trail: an action is on record before it starts, then with its outcome."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lakebed.core.auth import Principal
from lakebed.core.clock import ManualClock, now_ms
from lakebed.core.errors import Conflict, Corrupt, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.trail import (
    CALLER,
    RACES_MAX,
    ROOT,
    BrokenTrail,
    Caller,
    OperatorAction,
    Trail,
    action_of_tenant,
    key_of,
)
from lakebed.store.memory import MemoryStore
from lakebed.store.protocol import Store
from lakebed.store.runtime import StoreRuntime


def trail_of(store: Store, clock: ManualClock, ids: Ids, node: str = "") -> Trail:
    return Trail(StoreRuntime(clock=clock, ids=ids, metrics=Metrics(), store=store), node=node)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def trail(clock: ManualClock) -> Trail:
    return trail_of(MemoryStore(clock=clock), clock, Ids.seeded(1), "node-1")


async def test_an_action_is_recorded_before_and_after(trail: Trail) -> None:
    """While it runs it has no outcome; afterwards it has its outcome and detail."""
    async with trail.record("ann", "queue.replay", {"queue": "jobs"}, "fixed") as outcome:
        (during,) = await trail.latest()
        outcome.detail = "sequence 7"
    (after,) = await trail.latest()

    assert (during.who, during.outcome) == ("ann", "")
    assert (after.outcome, after.detail, after.reason, after.subject) == (
        "done",
        "sequence 7",
        "fixed",
        {"queue": "jobs"},
    )


async def test_a_failed_action_records_why(trail: Trail) -> None:
    with pytest.raises(Conflict, match="another decided before"):
        async with trail.record("ann", "batches.resolve", {}):
            raise Conflict("another decided before")

    (action,) = await trail.latest()
    assert (action.outcome, action.detail) == ("conflict", "another decided before")


async def test_a_doer_that_dies_leaves_an_open_record(trail: Trail) -> None:
    with pytest.raises(ZeroDivisionError):
        async with trail.record("ann", "x.y", {}):
            raise ZeroDivisionError

    (action,) = await trail.latest()
    assert action.outcome == ""


async def test_what_cannot_be_recorded_is_not_done() -> None:
    """Without a record the action does not start."""

    class Deaf(MemoryStore):
        async def create(self, key: str, data: bytes):  # type: ignore[no-untyped-def]
            raise Unavailable("no answer")

    clock, done = ManualClock(), False
    with pytest.raises(Unavailable):
        async with trail_of(Deaf(clock=clock), clock, Ids.seeded(1)).record("ann", "x.y", {}):
            done = True
    assert not done


async def test_the_newest_come_first_and_few(trail: Trail, clock: ManualClock) -> None:
    for number in range(5):
        async with trail.record("ann", f"do.{number}", {}):
            await clock.advance(20_000)

    assert [action.what for action in await trail.latest(3)] == ["do.4", "do.3", "do.2"]


async def test_acts_of_one_millisecond_list_in_the_order_in_which_they_were_begun() -> None:
    """The clock does not move: the order comes from the process, whichever Trail object it uses."""
    clock, ids = ManualClock(), Ids()
    store = MemoryStore(clock=clock)
    for number in range(30):
        async with trail_of(store, clock, ids).record("ann", f"do.{number}", {}):
            pass

    actions = await trail_of(store, clock, Ids()).latest(30)

    assert [f"do.{number}" for number in reversed(range(30))] == [action.what for action in actions]
    assert {clock.now_ns() // 1_000_000} == {action.at_ms for action in actions}


async def test_a_clock_that_is_set_back_over_midnight_does_not_change_the_order() -> None:
    """A record has the clock's time and keeps its order among the records of its process."""
    midnight_ns = 1_760_054_400_000_000_000
    clock, ids = ManualClock(midnight_ns + 1_000_000), Ids()
    store = MemoryStore(clock=clock)
    for number in range(3):
        async with trail_of(store, clock, ids).record("ann", f"do.{number}", {}):
            clock._start_ns -= 2_000_000

    actions = await trail_of(store, clock, ids).latest()

    assert ["do.2", "do.1", "do.0"] == [action.what for action in actions]
    assert [-3, -1, 1] == [action.at_ms - midnight_ns // 1_000_000 for action in actions]


async def test_a_record_that_is_none_is_corrupt(trail: Trail) -> None:
    await trail._store.create(key_of(1), b"{}")
    with pytest.raises(Corrupt):
        await trail.latest()


async def test_a_record_says_where_and_when_it_was_begun(trail: Trail, clock: ManualClock) -> None:
    """Its time is that of the begin, its node the process's, and its key is in the folder of its day."""
    began_ms = now_ms(clock)
    async with trail.record("ann", "do.it", {"a": "b"}, "because"):
        await clock.advance(5.0)

    (action,) = await trail.latest()
    keys = [info.key async for info in trail._store.list(ROOT)]
    assert (began_ms, "node-1", "do.it", "lakebed.trail.v2") == (action.at_ms, action.node, action.what, action.schema)
    assert [key_of(1), key_of(2)] == keys


async def test_entries_are_only_ever_created() -> None:
    """A bucket that refuses to replace or delete them takes every action."""

    class AppendOnly(MemoryStore):
        async def replace(self, *_: Any) -> Any:
            raise AssertionError("an entry was replaced")

        async def delete(self, *_: Any) -> Any:
            raise AssertionError("an entry was deleted")

    clock = ManualClock()
    trail = trail_of(AppendOnly(clock=clock), clock, Ids.seeded(1))
    async with trail.record("ann", "do.it", {}):
        pass
    with pytest.raises(Conflict):
        async with trail.record("ann", "do.it", {}):
            raise Conflict("no")

    assert 4 == (await trail.verify()).number


async def test_processes_share_one_chain() -> None:
    """Whoever loses the race for a number takes the next: nothing is lost, and the chain holds."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)

    async def act(number: int) -> None:
        async with trail_of(store, clock, Ids.seeded(number)).record(f"op-{number}", "do.it", {}):
            await asyncio.sleep(0)

    await asyncio.gather(*(act(number) for number in range(8)))
    trail = trail_of(store, clock, Ids.seeded(99))

    assert 16 == (await trail.verify()).number
    assert {f"op-{number}" for number in range(8)} == {action.who for action in await trail.latest()}


async def test_a_long_action_ends_on_record_however_many_others_came_meanwhile(trail: Trail) -> None:
    """It is done, so that it must not end with an error; the chain is one all the same."""
    async with trail.record("ann", "lifecycle.round", {}):
        for _ in range(RACES_MAX // 2 + 10):
            async with trail.record("bob", "queue.replay", {}):
                pass

    actions = await trail.latest(limit=1000)
    assert [("ann", "done")] == [(one.who, one.outcome) for one in actions if one.who == "ann"]
    assert 2 * (RACES_MAX // 2 + 11) == (await trail.verify()).number


@pytest.mark.parametrize("harm", ["change", "remove", "insert", "swap", "shorten", "change the newest"])
async def test_a_trail_that_was_rewritten_is_found_out(harm: str) -> None:
    """One byte of one entry, one entry less, one more, two exchanged; the newest gone or changed, if it was noted."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    trail = trail_of(store, clock, Ids.seeded(1))
    for number in range(3):
        async with trail.record("ann", f"do.{number}", {}, "why"):
            pass
    noted = await trail.verify()

    async def put(number: int, data: bytes) -> None:
        await store.delete(key_of(number))
        await store.create(key_of(number), data)

    third, fourth = [(await store.get(key_of(number))).data for number in (3, 4)]
    if harm == "change":
        await put(3, third.replace(b"ann", b"bob"))
    elif harm == "remove":
        await store.delete(key_of(3))
    elif harm == "insert":
        await store.create(f"{ROOT}000000000/000000000003x.json", third)
    elif harm == "swap":
        await put(3, fourth)
        await put(4, third)
    elif harm == "change the newest":  # no entry follows that has its hash
        await put(6, (await store.get(key_of(6))).data.replace(b"ann", b"bob"))
    else:
        await store.delete(key_of(6))

    with pytest.raises(BrokenTrail):
        await trail.verify(noted)


async def test_an_entry_names_the_address_and_the_tenant_of_its_caller(trail: Trail) -> None:
    CALLER.set(Caller("10.1.2.3", "acme"))
    async with trail.record("ann", "do.it", {}):
        pass

    (action,) = await trail.latest()
    assert ("10.1.2.3", "acme") == (action.address, action.tenant)
    CALLER.set(Caller())


async def test_at_most_fifty_are_shown_without_a_limit(trail: Trail) -> None:
    for number in range(52):
        async with trail.record("ann", f"do.{number}", {}):
            pass

    assert 50 == len(await trail.latest())


def test_a_tenant_sees_its_own_actions_and_those_on_its_things() -> None:
    """Also its actions on things that are not named for it; and nothing of other tenants."""
    acme = Principal("a", ("*",), tenant="acme")
    own, on_its = action(tenant="acme", topic="shared"), action(tenant="", topic="acme.orders")
    other = action(tenant="other", topic="other.orders")

    assert [True, True, False] == [action_of_tenant(acme, each) for each in (own, on_its, other)]
    assert all(action_of_tenant(Principal("root", ("*",)), each) for each in (own, on_its, other))


def action(*, tenant: str, **subject: str) -> OperatorAction:
    return OperatorAction("id", 1, "who", "what", subject, tenant=tenant)
