"""The log as people look at it: segments, records and topics, read without changing anything."""

from __future__ import annotations

import msgspec
import pytest

from lakebed.core.clock import ManualClock, now_ms
from lakebed.core.context import Context
from lakebed.core.errors import NotFound
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.core.settings import load
from lakebed.log import paths
from lakebed.log import view as views
from lakebed.log.broker import Broker
from lakebed.log.codec import columns
from lakebed.log.cost import StorageUsage, storage_dollars_month
from lakebed.log.model import TopicPartition
from lakebed.log.producers import RecordChunk
from lakebed.log.services import LogServices
from lakebed.log.view import LogView
from lakebed.log.writer import PartitionAppend
from lakebed.meta.memory import MemoryMeta, MemoryState
from lakebed.store.memory import MemoryStore
from lakebed.wiring.parts import sections

TP = TopicPartition("orders", 0)


class Lake:
    def __init__(self) -> None:
        self.clock, self.state = ManualClock(), MemoryState()
        store = MemoryStore(clock=self.clock)
        flags = {"store.url": "memory:", "log.compact_min_entries": 2}
        self.context = Context(
            node="n",
            settings=load(sections(), flags=flags),
            store=store,
            clock=self.clock,
            ids=Ids.seeded(1),
            metrics=Metrics(),
        )
        self.broker = Broker(self.context, self.meta("broker"))
        self.window = LogView(self.context, self.meta("window"))

    def meta(self, name: str) -> MemoryMeta:
        return MemoryMeta(Runtime(self.clock, Ids.seeded(name), Metrics()), self.state)

    async def append(self, *records: bytes, tp: TopicPartition = TP) -> None:
        await self.broker.writer.append_shared([PartitionAppend(tp, (RecordChunk(columns(records)),))])
        await self.broker.writer.drain()


async def test_segments_tell_what_is_compacted_and_what_is_trimmed() -> None:
    """A start of the log behind the cursor counts: nothing before it is left to compact."""
    lake = Lake()
    for number in range(3):
        await lake.append(b"a%d" % number, b"b%d" % number)
    fresh = await lake.window.segments("orders", 0)
    await lake.broker.admin.trim(TP, 5)
    trimmed = await lake.window.segments("orders", 0)
    (described,) = await views.partitions(lake.window.admin, "orders")
    await LogServices(lake.context, lake.meta("shop")).compactor.compact_once(TP)
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
    await lake.broker.admin.trim(TP, 3)

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

    found = {row.topic: (row.partitions, row.records, row.uncompacted) for row in await views.topics(lake.window.admin)}

    assert {"clicks": (1, 1, 1), "orders": (2, 3, 3)} == found


@pytest.mark.parametrize(
    ("appends", "shown", "complete"),
    [(119, 119, True), (120, 120, True), (121, 121, True), (240, 240, True), (241, 240, False)],
)
async def test_a_partition_says_whether_all_of_its_segments_are_shown(appends: int, shown: int, complete: bool) -> None:
    """The first 120 and the last 120 index entries are shown; `complete` is False when one between them is not."""
    lake = Lake()
    for _ in range(appends):
        await lake.append(b"a")

    found = await lake.window.segments("orders", 0)

    assert (shown, complete) == (len(found.segments), found.complete)
    assert (1, appends) == (found.segments[0].start_offset, found.segments[-1].end_offset)
    assert found.segments == sorted(found.segments, key=lambda one: one.start_offset)


async def test_the_last_segments_are_shown_though_each_holds_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """More entries lie in the last records than one range returns: the entries at the end are shown all the same."""
    monkeypatch.setattr(views, "SEGMENTS_MAX", 4)
    lake = Lake()
    for _ in range(40):
        await lake.append(b"a")

    found = await lake.window.segments("orders", 0)

    assert [1, 2, 39, 40] == [one.start_offset for one in found.segments]
    assert not found.complete


async def test_a_segment_says_where_its_records_are_and_since_when() -> None:
    """Each field is that of the index entry: its blob, its bytes and the time of its append."""
    lake = Lake()
    await lake.clock.advance(7.0)
    await lake.append(b"abc", b"de")

    (one,) = (await lake.window.segments("orders", 0)).segments
    entry = (await lake.window.records.spans(TP, 1, limit=1))[0].entry

    assert (now_ms(lake.clock), entry.byte_length, entry.data_key) == (one.created_at_ms, one.bytes, one.data_key)
    assert one.data_key and one.bytes and one.bytes > len(b"abcde")
    assert entry.type == one.type != "COMPACTED"


async def test_a_compacted_partition_says_how_far() -> None:
    lake = Lake()
    for number in range(4):
        await lake.append(b"a%d" % number)
    await LogServices(lake.context, lake.meta("shop")).compactor.compact_once(TP)

    found = await lake.window.segments("orders", 0)

    assert (5, 1) == (found.compacted_to, found.log_start_offset)
    assert ["COMPACTED"] == [one.type for one in found.segments]


async def test_a_page_never_holds_more_records_than_the_limit() -> None:
    """A larger count is cut to the limit, and a count below one is one record."""
    lake = Lake()
    await lake.append(*[b"r%d" % number for number in range(1, views.RECORDS_MAX + 11)])

    last = await lake.window.page("orders", 0, None, count=1000)
    first = await lake.window.page("orders", 0, 1)
    single = await lake.window.page("orders", 0, 5, count=0)

    assert (11, 61, views.RECORDS_MAX) == (last.offset, last.next_offset, len(last.records))
    assert (1, 51, views.RECORDS_MAX) == (first.offset, first.next_offset, len(first.records))
    assert [5] == [row.offset for row in single.records]
    assert (1, 60) == (last.log_start_offset, last.high_watermark)


async def test_a_topic_that_does_not_exist_is_not_found_with_where_to_look() -> None:
    lake = Lake()
    await lake.append(b"a")
    await lake.append(b"b", tp=TopicPartition("orders", 1))

    with pytest.raises(NotFound, match="clicks") as refused:
        await views.partitions(lake.window.admin, "clicks")

    assert "lakebed topics list" == refused.value.hint
    assert [0, 1] == [one.partition for one in await views.partitions(lake.window.admin, "orders")]


async def test_the_report_counts_what_the_log_stores_and_each_groups_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored bytes and objects are those under the log's own root, at most MEASURED_MAX of them."""
    lake = Lake()
    await lake.append(b"a" * 1000, b"b")
    await lake.append(b"c", tp=TopicPartition("clicks", 0))
    await lake.context.store.create("tables/other", b"x" * 5000)
    await lake.window.groups.commit("readers", TP, 1)

    found = await lake.window.report()
    stored = [info async for info in lake.context.store.list(paths.ROOT)]
    monkeypatch.setattr(views, "MEASURED_MAX", 1)
    bounded = await lake.window.report()

    assert 2 == found["topics"]
    assert (sum(info.size for info in stored), len(stored)) == (found["stored_bytes"], found["stored_objects"])
    assert 1 == bounded["stored_objects"] < len(stored)
    large = await views.report(lake.window.admin, lake.window.groups, StorageUsage(3 * 1024**3, 7))
    assert (3 * 1024**3, 7) == (large["stored_bytes"], large["stored_objects"])
    assert round(storage_dollars_month(StorageUsage(3 * 1024**3, 7)), 6) == large["storage_dollars_month"] > 0
    assert [("readers", "orders", 2)] == [(one.group, one.topic, one.lag) for one in found["groups"]]


@pytest.mark.parametrize(("kept", "expected"), [(1024, 1024), (views.BODIES_BYTES * 2, views.BODIES_BYTES)])
def test_a_look_keeps_few_batches_whatever_the_broker_keeps(kept: int, expected: int) -> None:
    lake = Lake()
    settings = load(sections(), flags={"store.url": "memory:", "log.bodies_bytes": kept})
    window = LogView(msgspec.structs.replace(lake.context, settings=settings), lake.meta("other"))

    assert expected == window.reader._bodies._bytes_max


async def test_a_search_that_filled_its_page_goes_on_behind_the_last_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page after page gives every match once, also where a page ends inside an append."""
    monkeypatch.setattr(views, "RECORDS_MAX", 2)
    lake = Lake()
    await lake.append(*[b"match %d" % number if number % 2 else b"other" for number in range(1, 10)])

    pages, at = list[list[int]](), 0
    while not pages or pages[-1]:
        found = await lake.window.search("orders", 0, at, "MATCH")
        pages.append([row.offset for row in found.records])
        at = found.next_offset

    assert [[1, 3], [5, 7], [9], []] == pages
    assert 10 == at


async def test_what_was_appended_is_counted_since_the_partitions_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what was trimmed since, so that the count never goes back; of so many partitions at most."""
    lake = Lake()
    for number, count in enumerate((5, 3, 2)):
        await lake.append(*[b"r"] * count, tp=TopicPartition("orders", number))
    await lake.broker.admin.trim(TP, 4)

    assert 10 == await views.appended(lake.window.records)
    monkeypatch.setattr(views, "COUNTED_MAX", 2)
    assert 8 == await views.appended(lake.window.records)
