"""Finding batches by hour of acceptance costs what is there, not how long the span is."""

from __future__ import annotations

from collections.abc import AsyncIterator

from lakebed.batches import acceptance, paths
from lakebed.batches.reader import RawBatches
from lakebed.core.clock import ManualClock
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo
from support.batch_frames import START_NS, frame_of, submit

HOUR_NS = 3_600_000_000_000


class Counted(MemoryStore):
    lists = 0

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        self.lists += 1
        async for info in super().list(prefix, after=after):
            yield info


async def test_a_year_with_one_day_in_it_is_one_day_s_listing() -> None:
    """Hours of days in which nothing was accepted are not requested, and nothing is missed."""
    store = Counted(clock=ManualClock())
    submitted = submit(frame_of())
    accepted = acceptance.manifest(submitted, at_ns=START_NS, collector_id="c", attempt_id="a")
    write = acceptance.by_time(accepted, acceptance.span_of(submitted.batch))
    await store.create(write.key, write.data)

    entries = RawBatches(store).entries(START_NS - HOUR_NS, START_NS + 8760 * HOUR_NS)
    found = [paths.by_time_of(each.manifest_id) async for each in entries]

    assert ([write.key], True) == (found, store.lists <= 24)
