"""A bucket knows who it is."""

from __future__ import annotations

import asyncio

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Conflict, Corrupt
from lakebed.core.ids import Ids
from lakebed.store.authority import AUTHORITY_KEY, claim, decode
from lakebed.store.memory import MemoryStore
from lakebed.store.model import StoredObject


async def test_the_first_claim_makes_the_authority_and_all_see_the_same(manual_clock: ManualClock) -> None:
    """Claims racing on an empty bucket agree on one id."""
    store = MemoryStore(clock=manual_clock)

    claimed = await asyncio.gather(
        *(claim(store, expected="", clock=manual_clock, ids=Ids.seeded(n)) for n in range(5))
    )

    assert len({authority.authority_id for authority in claimed}) == 1


async def test_another_bucket_than_the_expected_one_is_refused(manual_clock: ManualClock) -> None:
    """A gateway told another id than the bucket carries gets Conflict with both ids."""
    store = MemoryStore(clock=manual_clock)
    found = await claim(store, expected="", clock=manual_clock, ids=Ids.seeded(1))

    with pytest.raises(Conflict) as caught:
        await claim(store, expected="another", clock=manual_clock, ids=Ids.seeded(2))

    assert {"found": found.authority_id, "expected": "another"} == caught.value.detail


async def test_an_expected_id_is_given_to_an_empty_bucket(manual_clock: ManualClock) -> None:
    """The first gateway with a configured id names the bucket."""
    store = MemoryStore(clock=manual_clock)

    assert (await claim(store, expected="mine", clock=manual_clock, ids=Ids.seeded(1))).authority_id == "mine"


async def test_a_mangled_authority_is_corrupt(manual_clock: ManualClock) -> None:
    """An authority object that does not decode stops the start, and is left as it is."""
    store = MemoryStore(clock=manual_clock)
    await store.create(AUTHORITY_KEY, b"{}")

    with pytest.raises(Corrupt):
        await claim(store, expected="", clock=manual_clock, ids=Ids.seeded(1))
    assert (await store.get(AUTHORITY_KEY)).data == b"{}"


class Slow(MemoryStore):
    """Lets others run between a look and its answer, as every real store does."""

    async def get(self, key: str) -> StoredObject:
        try:
            return await super().get(key)
        finally:
            await asyncio.sleep(0)


async def test_whoever_lost_the_race_for_an_empty_bucket_carries_the_winners_id(manual_clock: ManualClock) -> None:
    """All have seen it empty before the first one creates; one that expects its own id is refused."""
    store = Slow(clock=manual_clock)

    async def claimed(number: int, expected: str = "") -> str:
        return (await claim(store, expected=expected, clock=manual_clock, ids=Ids.seeded(number))).authority_id

    *same, other = await asyncio.gather(*(claimed(n) for n in range(3)), claimed(9, "mine"), return_exceptions=True)

    stored = decode(await store.get(AUTHORITY_KEY)).authority_id
    assert [stored] * 3 == same
    assert isinstance(other, Conflict)
