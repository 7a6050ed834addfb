"""The log as people look at it: segments, records and topics, read without changing anything."""

from __future__ import annotations

from lakebed.clock import ManualClock
from lakebed.context import Context
from lakebed.ids import Ids
from lakebed.log.broker import Broker
from lakebed.log.columns import columns
from lakebed.log.model import TopicPartition
from lakebed.log.producers import Chunk
from lakebed.log.workers import Workshop
from lakebed.log.writer import Group
from lakebed.meta.memory import MemoryMeta, MemoryState
from lakebed.metrics import Metrics
from lakebed.parts import sections
from lakebed.settings import load
from lakebed.store.memory import MemoryStore
from lakebed.views import log as views
from lakebed.views.log import LogWindow

TP = TopicPartition("orders", 0)


class Lake:
    def __init__(self) -> None:
        self.clock, self.state = ManualClock(), MemoryState()
        store = MemoryStore(clock=self.clock)
        flags = {"store.url": "memory:", "log.compact_min_entries": 2}
        self.context = Context("n", load(sections(), flags=flags), store, self.clock, Ids.seeded(1), Metrics())
        self.broker = Broker(self.context, self.meta("broker"))
        self.window = LogWindow(self.context, self.meta("window"))

    def meta(self, name: str) -> MemoryMeta:
        return MemoryMeta(self.state, clock=self.clock, ids=Ids.seeded(name))

    async def append(self, *records: bytes, tp: TopicPartition = TP) -> None:
        await self.broker.writer.append_shared([Group(tp, (Chunk(columns(records)),))])
        await self.broker.writer.drain()


async def test_segments_tell_what_is_compacted_and_what_is_trimmed() -> None:
    """A start of the log behind the cursor counts: nothing before it is left to compact."""
    lake = Lake()
    for number in range(3):
        await lake.append(b"a%d" % number, b"b%d" % number)
    fresh = await lake.window.segments("orders", 0)
    await lake.broker.steward.trim(TP, 5)
    trimmed = await lake.window.segments("orders", 0)
    (described,) = await views.partitions(lake.window.steward, "orders")
    await Workshop(lake.context, lake.meta("shop")).compactor.compact_once(TP)
    await lake.append(b"c", b"d")
    after = await lake.window.segments("orders", 0)

    assert (1, 1, 6, True) == (fresh.log_start_offset, fresh.compacted_to, fresh.high_watermark, fresh.complete)
    assert [(1, 2, 2), (3, 4, 2), (5, 6, 2)] == [
        (one.start_offset, one.end_offset, one.records) for one in fresh.segments
    ]
    assert (5, 5) == (trimmed.log_start_offset, trimmed.compacted_to)
    assert (2, 2, 6) == (described.records, described.uncompacted, described.high_watermark)
    assert (5, 8) == (after.log_start_offset, after.high_watermark)
    assert (7, 8) == (after.segments[-1].start_offset, after.segments[-1].end_offset)


async def test_records_are_those_asked_for_or_the_last_ones() -> None:
    """Without an offset the last `count` records; with one, from there on; outside the log, its nearest end."""
    lake = Lake()
    await lake.append(*[b"r%d" % number for number in range(1, 8)])
    await lake.broker.steward.trim(TP, 3)

    async def page(offset: int | None) -> tuple[int, int, list[tuple[int, str]]]:
        found = await lake.window.page("orders", 0, offset, count=3)
        return found.offset, found.next_offset, [(row.offset, row.payload.text) for row in found.records]

    assert (5, 8, [(5, "r5"), (6, "r6"), (7, "r7")]) == await page(None)
    assert (4, 7, [(4, "r4"), (5, "r5"), (6, "r6")]) == await page(4)
    assert (3, 6, [(3, "r3"), (4, "r4"), (5, "r5")]) == await page(1)
    assert (8, 8, []) == await page(99)


async def test_topics_add_up_their_partitions() -> None:
    lake = Lake()
    await lake.append(b"a", b"b")
    await lake.append(b"c", tp=TopicPartition("orders", 1))
    await lake.append(b"d", tp=TopicPartition("clicks", 0))

    found = {
        row.topic: (row.partitions, row.records, row.uncompacted) for row in await views.topics(lake.window.steward)
    }

    assert {"clicks": (1, 1, 1), "orders": (2, 3, 3)} == found
