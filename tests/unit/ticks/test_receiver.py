"""What happens to a part's bytes when its entry in the tick's register is refused, or may have been written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Conflict, LakebedError, OutcomeUnknown, Unavailable
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo, StoredObject
from lakebed.ticks import paths
from lakebed.ticks.model import TickId
from lakebed.ticks.receiver import Receiver, register_of
from support.tick_fixtures import context_of, parquet, sha

OF = TickId("acme", "p-1", "20261115T120000__abc")


async def chunks(data: bytes) -> AsyncIterator[bytes]:
    yield data


class LosesTheAnswer(MemoryStore):
    """The register's first write is made, its answer is lost, and the store cannot be queried until it is back."""

    lost = away = False

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        written = await super().create(key, data)
        if key == paths.state(OF) and not self.lost:
            self.lost = self.away = True
            raise OutcomeUnknown("the answer was lost")
        return written

    async def get(self, key: str) -> StoredObject:
        if self.away:
            raise Unavailable("the store is away")
        return await super().get(key)


async def test_a_part_whose_entry_may_have_been_written_keeps_its_bytes(manual_clock: ManualClock) -> None:
    """The sender does not know the outcome; when the entry was written, the register names bytes that exist."""
    store = LosesTheAnswer(clock=manual_clock)
    context = context_of(store, clock=manual_clock)
    data = parquet([1, 2])

    putting = asyncio.create_task(Receiver(context).put(OF, 1, sha(data), chunks(data)))
    await manual_clock.advance(120.0)  # whatever the register tries again
    with pytest.raises(LakebedError) as unknown:
        await putting
    store.away = False

    assert getattr(unknown.value, "retry_after_s", 0.0) > 0.0
    named = (await register_of(context, OF).read()).value.parts["1"]
    assert data == (await store.get(named.key)).data


async def test_a_part_that_is_refused_for_certain_leaves_no_bytes(manual_clock: ManualClock) -> None:
    """Another part of the same number was there first: the refused one is deleted, the first one stays."""

    class Rival(MemoryStore):
        """Another replica takes a part of this number while ours is being uploaded."""

        taken = False

        async def upload(self, key: str, chunks: AsyncIterator[bytes]) -> ObjectInfo:
            if not self.taken:
                self.taken = True
                await Receiver(context).put(OF, 1, sha(first), of(first))
            return await super().upload(key, chunks)

    of = chunks
    first, second = parquet([1]), parquet([2])
    store = Rival(clock=manual_clock)
    context = context_of(store, clock=manual_clock)

    with pytest.raises(Conflict):
        await Receiver(context).put(OF, 1, sha(second), chunks(second))

    named = (await register_of(context, OF).read()).value.parts["1"]
    stored = [info.key async for info in store.list("") if "/parts/" in info.key]
    assert [named.key] == stored
