"""The prover believes a good store and refuses one that ignores the condition."""

from __future__ import annotations

import msgspec
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Invalid, Unavailable
from lakebed.core.ids import Ids
from lakebed.store import prover
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo
from lakebed.store.prover import StoreProof
from support.runtimes import runtime_of
from support.store_without_conditions import CarelessBucket, careless_store


class Silent(MemoryStore):
    """A store that never answers a create."""

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        raise Unavailable("no answer")


class CarelessAndSilent(MemoryStore):
    """A store that ignores conditions and stops answering."""

    creates = 0

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        self.creates += 1
        if self.creates > 5:
            raise Unavailable("no answer")
        return await super().create(key, data)


async def proof_of(store: MemoryStore, clock: ManualClock) -> StoreProof:
    return await prover.prove([store] * 5, runtime_of(clock, Ids.seeded(1)), rounds=3)


async def test_a_good_store_is_believed_and_its_report_kept(manual_clock: ManualClock) -> None:
    """Every property holds, the report is in the bucket and the scratch objects are gone."""
    store = MemoryStore(clock=manual_clock)

    proof = await proof_of(store, manual_clock)

    prover.demand(proof)
    kept = [info.key async for info in store.list("lakebed/")]
    assert len(kept) == 1
    assert proof == msgspec.json.decode((await store.get(kept[0])).data, type=StoreProof)


async def test_a_store_that_ignores_the_condition_is_refused_in_plain_words(manual_clock: ManualClock) -> None:
    """Several winners are named, and the hint reports what to do."""
    proof = await proof_of(careless_store(manual_clock), manual_clock)

    with pytest.raises(Invalid) as caught:
        prover.demand(proof)
    assert "create_has_one_winner (5 of 5 clients won" in caught.value.message
    assert "replace_has_one_winner" in caught.value.message
    assert "conditional PUT" in caught.value.hint


async def test_a_store_that_does_not_answer_is_neither_believed_nor_refused(manual_clock: ManualClock) -> None:
    """No answer is no proof, and no proof of the contrary: it is to be made again."""
    proof = await proof_of(Silent(clock=manual_clock), manual_clock)

    assert not proof.held
    with pytest.raises(Unavailable, match="no answer"):
        prover.demand(proof)


async def test_two_winners_are_refused_although_other_races_were_not_answered(manual_clock: ManualClock) -> None:
    """What was seen is evidence, whatever could not be seen beside it."""
    proof = await proof_of(
        CarelessAndSilent(clock=manual_clock, bucket=CarelessBucket(clock=manual_clock)), manual_clock
    )

    with pytest.raises(Invalid, match="create_has_one_winner"):
        prover.demand(proof)
