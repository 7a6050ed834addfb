"""The lease: one holder at a time, taken over after expiry, with a term that fences the late."""

from __future__ import annotations

import asyncio

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Fenced, OutcomeUnknown
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.store.lease import HeldByAnother, Lease
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo
from lakebed.store.runtime import StoreRuntime

KEY = "folder/lease.json"
LEASE_S, SKEW_S = 10.0, 1.0


@pytest.fixture
def store(manual_clock: ManualClock) -> MemoryStore:
    return MemoryStore(clock=manual_clock)


def contender(store: MemoryStore, clock: ManualClock, owner: str) -> Lease:
    return Lease(
        StoreRuntime(clock=clock, ids=Ids(), metrics=Metrics(), store=store),
        KEY,
        owner=owner,
        lease_s=LEASE_S,
        skew_s=SKEW_S,
    )


async def test_a_held_lease_is_refused_until_it_expired_on_every_clock(
    store: MemoryStore, manual_clock: ManualClock
) -> None:
    """The next owner waits for expiry plus the skew, and then starts a new term."""
    one, other = contender(store, manual_clock, "one"), contender(store, manual_clock, "other")
    held = await one.acquire()
    await manual_clock.advance(LEASE_S + SKEW_S - 0.001)
    with pytest.raises(HeldByAnother):
        await other.acquire()

    await manual_clock.advance(0.001)
    taken = await other.acquire()

    assert (held.epoch, taken.epoch) == (1, 2)
    assert (await one.holder()).owner == "other"


async def test_renewing_prolongs_what_is_ours_even_late_and_fences_what_is_not(
    store: MemoryStore, manual_clock: ManualClock
) -> None:
    """A late holder continues if nobody took over; once somebody did, it is fenced."""
    one, other = contender(store, manual_clock, "one"), contender(store, manual_clock, "other")
    held = await one.acquire()
    await manual_clock.advance(LEASE_S * 3)
    renewed = await one.renew(held)
    assert (held.epoch, held.expires_at_ms + 30_000) == (renewed.epoch, renewed.expires_at_ms)

    await manual_clock.advance(LEASE_S * 3)
    await other.acquire()

    with pytest.raises(Fenced):
        await one.renew(renewed)


async def test_a_released_lease_is_free_at_once_and_its_terms_go_on(
    store: MemoryStore, manual_clock: ManualClock
) -> None:
    """Releasing forgets the holder and keeps the count, and releasing again changes nothing."""
    one, other = contender(store, manual_clock, "one"), contender(store, manual_clock, "other")
    held = await one.acquire()
    await one.release(held)
    taken = await other.acquire()

    await one.release(held)

    assert taken.epoch == 2
    assert (await one.holder()).owner == "other"


async def test_contenders_of_one_name_exclude_each_other(store: MemoryStore, manual_clock: ManualClock) -> None:
    """Two tasks of one process, both called by its node, cannot both hold the lease."""
    one, other = contender(store, manual_clock, "node"), contender(store, manual_clock, "node")
    await one.acquire()

    with pytest.raises(HeldByAnother):
        await other.acquire()


async def test_an_earlier_term_of_ones_own_is_over(store: MemoryStore, manual_clock: ManualClock) -> None:
    """Proof of an older term neither prolongs nor gives back the newer one of the same owner."""
    one = contender(store, manual_clock, "one")
    old = await one.acquire()
    new = await one.acquire()

    with pytest.raises(Fenced):
        await one.renew(old)
    await one.release(old)

    assert (await one.renew(new)).epoch == new.epoch == 2


async def test_many_that_ask_at_once_have_one_winner(store: MemoryStore, manual_clock: ManualClock) -> None:
    """All but one are informed who holds it."""
    contenders = [contender(store, manual_clock, f"owner{number}") for number in range(16)]

    results = await asyncio.wait_for(
        asyncio.gather(*(each.acquire() for each in contenders), return_exceptions=True), timeout=100
    )

    assert [result.epoch for result in results if not isinstance(result, BaseException)] == [1]
    assert sum(isinstance(result, HeldByAnother) for result in results) == 15


async def test_after_an_unknown_outcome_asking_again_takes_the_lease_at_once(manual_clock: ManualClock) -> None:
    """A contender whose first querying took the lease, unheard, does not wait for itself."""

    class Mute(MemoryStore):
        async def create(self, key: str, data: bytes) -> ObjectInfo:
            await super().create(key, data)
            raise OutcomeUnknown("lost")

    one = contender(Mute(clock=manual_clock), manual_clock, "one")
    with pytest.raises(OutcomeUnknown):
        await one.acquire()

    assert (await one.acquire()).epoch == 2


async def test_a_clock_that_goes_back_does_not_shorten_what_was_promised(
    store: MemoryStore, manual_clock: ManualClock
) -> None:
    """A renewal never brings the expiry forward: another part of the holder may still rely on it."""
    one = contender(store, manual_clock, "one")
    held = await one.acquire()
    behind = ManualClock(start_ns=manual_clock.now_ns() - 5_000_000_000)
    one._clock = behind

    renewed = await one.renew(held)

    assert held.expires_at_ms == renewed.expires_at_ms
