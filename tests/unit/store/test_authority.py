"""A bucket knows who it is."""

from __future__ import annotations

import asyncio

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Conflict, Corrupt
from lakebed.core.ids import Ids
from lakebed.core.settings import Contradiction
from lakebed.store.authority import AUTHORITY_KEY, Authority, claim
from lakebed.store.memory import MemoryStore
from lakebed.store.model import StoredObject, read_record
from lakebed.store.settings import StoreSettings
from support.runtimes import runtime_on


async def test_the_first_claim_makes_the_authority_and_all_see_the_same(manual_clock: ManualClock) -> None:
    """Claims racing on an empty bucket agree on one id."""
    store = MemoryStore(clock=manual_clock)

    claimed = await asyncio.gather(
        *(claim(runtime_on(store, manual_clock, Ids.seeded(n)), expected="") for n in range(5))
    )

    assert len({authority.authority_id for authority in claimed}) == 1


async def test_another_bucket_than_the_expected_one_is_refused(manual_clock: ManualClock) -> None:
    """A gateway configured with another id than the bucket carries gets Conflict with both ids."""
    store = MemoryStore(clock=manual_clock)
    found = await claim(runtime_on(store, manual_clock, Ids.seeded(1)), expected="")

    with pytest.raises(Conflict) as caught:
        await claim(runtime_on(store, manual_clock, Ids.seeded(2)), expected="another")

    assert {"found": found.authority_id, "expected": "another"} == caught.value.detail


async def test_an_expected_id_is_given_to_an_empty_bucket(manual_clock: ManualClock) -> None:
    """The first gateway with a configured id names the bucket."""
    store = MemoryStore(clock=manual_clock)

    assert (await claim(runtime_on(store, manual_clock, Ids.seeded(1)), expected="mine")).authority_id == "mine"


async def test_a_mangled_authority_is_corrupt(manual_clock: ManualClock) -> None:
    """An authority object that does not decode stops the start, and is left as it is."""
    store = MemoryStore(clock=manual_clock)
    await store.create(AUTHORITY_KEY, b"{}")

    with pytest.raises(Corrupt):
        await claim(runtime_on(store, manual_clock, Ids.seeded(1)), expected="")
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
        return (await claim(runtime_on(store, manual_clock, Ids.seeded(number)), expected=expected)).authority_id

    *same, other = await asyncio.gather(*(claimed(n) for n in range(3)), claimed(9, "mine"), return_exceptions=True)

    stored = read_record(await store.get(AUTHORITY_KEY), Authority).authority_id
    assert [stored] * 3 == same
    assert isinstance(other, Conflict)


async def test_a_replica_with_the_same_authority_object_is_refused(manual_clock: ManualClock) -> None:
    """Replication copies the object; it names the bucket that it was created in, unless the lake has moved."""
    runtime = runtime_on(MemoryStore(clock=manual_clock), manual_clock, Ids.seeded(1))
    made = await claim(runtime, expected="", location="s3://one/lake")

    with pytest.raises(Conflict, match="is a copy: its authority object was created in s3://one/lake"):
        await claim(runtime, expected=made.authority_id, location="s3://two/lake")
    assert made == await claim(runtime, expected="", location="s3://one/lake")
    assert made == await claim(runtime, expected="", location="s3://two/lake", moved_from="s3://x, s3://one/lake/")


@pytest.mark.parametrize(
    "given",
    [
        {"url": "s3://arn:aws:s3::123456789012:accesspoint/mfzwi23gnjvgw.mrap"},
        {"url": "s3://mfzwi23gnjvgw.mrap"},
        {"url": "s3://lake", "endpoint": "https://mfzwi23gnjvgw.mrap.accesspoint.s3-global.amazonaws.com"},
    ],
)
def test_a_multi_region_access_point_is_refused(given: dict[str, str]) -> None:
    """It routes a conditional create to any of its buckets, so two may succeed."""
    with pytest.raises(Contradiction, match="name one bucket"):
        StoreSettings.of(given)


@pytest.mark.parametrize("url", ["s3://lake/prod", "s3://lake/a/b/", "gs://lake/prod", "az://lake/prod"])
def test_a_folder_is_named_by_the_prefix_alone(url: str) -> None:
    """The store would write below it, while the bucket policy, doctor, notifications and Spark look without it."""
    with pytest.raises(Contradiction, match=r"store\.url and store\.prefix: .* names a folder"):
        StoreSettings.of({"url": url})


def test_a_lake_whose_folder_moves_from_the_url_to_the_prefix_is_the_same_lake() -> None:
    """The location that its authority object names stays, so the correction asks for nothing else."""
    assert "s3://lake/prod" == StoreSettings.of({"url": "s3://lake/", "prefix": "prod"}).location
