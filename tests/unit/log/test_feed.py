"""A topic in bulk: the feed's offsets are the log's, over WAL slices and compacted blobs alike."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from lakebed.core.clock import now_ms
from lakebed.core.errors import Invalid
from lakebed.core.feed import FeedFilter, Limit, Offset, SliceRead, read_all
from lakebed.log import feed as feeds
from lakebed.log import paths
from lakebed.log.feed import TopicFeed, open_feed
from lakebed.log.kafka_batch import KafkaRecord, KafkaRecords, encode
from lakebed.log.model import IndexSpan, TopicConfig, TopicPartition
from lakebed.log.producers import RecordChunk
from lakebed.log.services import LogServices
from lakebed.log.writer import PartitionAppend
from support.log_host import TP, Host

OTHER = TopicPartition("orders", 3)
COLUMNS = ["partition", "offset", "value"]


def feed_of(services: LogServices, **bounds: Offset) -> TopicFeed:
    found = {"start": {}, "end": {}, **bounds}
    return TopicFeed("orders", services.records, services.reader, services.uris, **found)


async def rows(feed: TopicFeed, start: Offset, end: Offset, wanted: FeedFilter = FeedFilter()) -> list[tuple[Any, ...]]:
    found: list[SliceRead] = [r async for r in read_all(feed, await feed.slices(start, end, wanted), COLUMNS, wanted)]
    assert [] == [read.problem for read in found if read.problem]
    return [tuple(row[name] for name in COLUMNS) for read in found for row in read.rows.to_pylist()]


@pytest.fixture
async def host() -> Host:
    """Nine records of partition 0 in three appends, two of partition 3."""
    host = Host()
    broker = host.broker()
    for n in range(3):
        await host.append(broker, *(f"r{n}{i}".encode() for i in range(3)))
    await host.append(broker, b"x", b"", tp=OTHER)
    return host


ALL = [(0, 3 * n + i + 1, f"r{n}{i}".encode()) for n in range(3) for i in range(3)]


async def test_every_record_is_given_with_its_offset(host: Host) -> None:
    """From the beginning to the end of every partition, empty records included."""
    feed = feed_of(host.services())
    start = await feed.begin()
    end = await feed.reach(start, Limit())

    assert ({"0": 0, "3": 0}, {"0": 9, "3": 2}) == (start, end)
    assert [*ALL, (3, 1, b"x"), (3, 2, b"")] == await rows(feed, start, end)
    assert end == await feed.reach(end, Limit())


async def test_compaction_changes_nothing_also_between_planning_and_reading(host: Host) -> None:
    """Pieces planned on WAL slices are read from the compacted blob when it has taken their place."""
    services = host.services()
    feed = feed_of(services)
    planned = await feed.slices({"0": 1}, {"0": 8}, FeedFilter())
    await services.compactor.compact_once(TP)
    for key in [info.key async for info in host.store.list("llog/wal-shared/")]:
        await host.store.delete(key)

    read = [r async for r in read_all(feed, planned, COLUMNS, FeedFilter())]

    assert [] == [each.problem for each in read if each.problem]
    assert [row[1] for row in ALL[1:8]] == [n for each in read for n in each.rows.column("offset").to_pylist()]
    assert ALL == await rows(feed, {"0": 0}, {"0": 9})


async def test_a_limit_of_rows_is_met_exactly(host: Host) -> None:
    """Records are counted without being read, the oldest first, until none is left."""
    feed = feed_of(host.services())
    at, found = await feed.begin(), []
    for _ in range(4):
        end = await feed.reach(at, Limit(rows=4))
        found.append(len(await rows(feed, at, end)))
        at = end

    assert [4, 4, 3, 0] == found
    assert at == await feed.reach(at, Limit(rows=4))


async def test_the_oldest_appends_of_all_partitions_come_first() -> None:
    """So no partition waits for another one's backlog: a step takes what was appended first, whatever its number."""
    host = Host()
    for number in (3, 0, 3, 0):
        await host.append(host.broker(), b"a", tp=TopicPartition("orders", number))
        await host.clock.advance(1.0)
    feed = feed_of(host.services())

    at, found = await feed.begin(), []
    for _ in range(4):
        at = await feed.reach(at, Limit(rows=1))
        found.append((at["0"], at["3"]))

    assert [(0, 1), (1, 1), (1, 2), (2, 2)] == found


async def test_a_limit_of_objects_or_bytes_is_kept_and_every_step_goes_on(host: Host) -> None:
    """Bytes are counted over all pieces of a step; what is larger than the limit is taken record by record."""
    feed = feed_of(host.services())
    sizes = [piece.size_bytes for piece in await feed.slices({}, {"0": 9, "3": 2}, FeedFilter())]

    async def steps(limit: Limit) -> list[int]:
        at, found = await feed.begin(), []
        while (end := await feed.reach(at, limit)) != at:
            found.append(len(await rows(feed, at, end)))
            at = end
        return found

    assert [3, 3, 3, 2] == await steps(Limit(objects=1))
    assert [6, 5] == await steps(Limit(objects=2))
    assert [6, 5] == await steps(Limit(size_bytes=sizes[0] + sizes[1]))
    assert [1] * 11 == await steps(Limit(size_bytes=1))


async def test_a_step_looks_at_no_more_entries_than_its_limit_could_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that is far behind plans each step by a few entries, not by all that it has before it."""
    host = Host()
    for _ in range(20):
        await host.append(host.broker(), b"a")
    services = host.services()
    size, looked = services.reader.size, list[int]()

    async def sized(span: IndexSpan) -> int:
        looked.append(span.end_offset)
        return await size(span)

    monkeypatch.setattr(services.reader, "size", sized)

    assert {"0": 3} == await feed_of(services).reach({"0": 0}, Limit(rows=3))
    assert len(looked) < 6


async def test_planning_a_step_grows_with_its_entries_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 entries, the limit of a step, are each compared with it once or twice."""
    host, asked = Host(), list[int]()
    for _ in range(30):
        await host.append(host.broker(), b"a")
    exceeded = Limit.exceeded

    def counted(limit: Limit, objects: int, rows: int, size_bytes: int) -> bool:
        asked.append(objects)
        return exceeded(limit, objects, rows, size_bytes)

    monkeypatch.setattr(Limit, "exceeded", counted)

    assert {"0": 30} == await feed_of(host.services()).reach({"0": 0}, Limit(objects=100))
    assert len(asked) <= 2 * 30


async def test_nothing_beyond_the_end_is_planned_whatever_the_filter_allows(host: Host) -> None:
    """The records behind the end of a step are those of the next one: read twice, they would be there twice."""
    feed = feed_of(host.services())

    pieces = await feed.slices({"0": 0}, {"0": 4}, FeedFilter(high={"offset": 8}))
    assert [3, 1] == [piece.rows for piece in pieces]
    assert ALL[:4] == await rows(feed, {"0": 0}, {"0": 4}, FeedFilter(high={"offset": 8}))
    assert [3] == [piece.rows for piece in await feed.slices({"0": 0}, {"0": 9}, FeedFilter(high={"offset": 3}))]
    assert [] == await feed.slices({"0": 4}, {"0": 4}, FeedFilter())


async def test_a_deleted_topic_has_nothing_more_and_keeps_the_offsets_that_were_reached(host: Host) -> None:
    """A reader that goes on with a topic of the same name begins where that one does."""
    feed, broker = feed_of(host.services()), host.broker()
    end = await feed.reach(await feed.begin(), Limit())
    await broker.admin.delete("orders", reason="test")

    assert ({}, end) == (await feed.begin(), await feed.reach(end, Limit()))
    assert end == await feed.reach(end, Limit(rows=1))
    assert [] == await feed.slices({"0": 0}, end, FeedFilter())
    await host.append(broker, b"again")
    assert {**end, "0": 10} == (again := await feed.reach(end, Limit(rows=5)))
    assert [(0, 10, b"again")] == await rows(feed, end, again)


async def test_records_that_moved_are_read_without_those_behind_them(host: Host) -> None:
    """A compaction has taken the place of the first pieces alone; each piece gives its own records once."""
    services = host.services(compact_max_entries=2)
    feed = feed_of(services)
    planned = await feed.slices({"0": 0}, {"0": 9}, FeedFilter())
    (last,) = [span.entry.data_key for span in await services.records.spans(TP, 9, limit=1)]
    await services.compactor.compact_once(TP)
    for key in [info.key async for info in host.store.list("llog/wal-shared/")]:
        if not last.endswith(key):
            await host.store.delete(key)

    read = [r async for r in read_all(feed, planned, COLUMNS, FeedFilter())]

    assert [[1, 2, 3], [4, 5, 6], [7, 8, 9]] == [each.rows.column("offset").to_pylist() for each in read]


async def test_entries_that_a_compaction_has_left_do_not_hide_the_records(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compacted entry is found behind more of them than one page holds."""
    monkeypatch.setattr(feeds, "PAGE", 1)
    services = host.services()
    (second,) = await services.records.spans(TP, 4, limit=1)
    await services.compactor.compact_once(TP)
    host.state.store(paths.index(TP, second.end_offset), msgspec.json.encode(second.entry), None)

    assert ALL == await rows(feed_of(services), {"0": 0}, {"0": 9})


async def test_headers_are_a_list_of_pairs_and_null_where_there_are_none(host: Host) -> None:
    """As Spark's own source of Kafka gives them; so are the key and the time of the record."""
    at_ms, tp = now_ms(host.clock), TopicPartition("orders", 4)
    made = [KafkaRecord(b"v", b"k", (("trace", b"1"), ("empty", None)), at_ms + 5), KafkaRecord(None, timestamp_ms=1)]
    broker, columns = host.broker(), ["key", "value", "headers", "time"]
    chunk = RecordChunk(KafkaRecords(2, encode(made)))
    await broker.writer.append_shared([PartitionAppend(tp, (chunk,))])
    feed = feed_of(host.services())

    (piece,) = await feed.slices({}, {"4": 2}, FeedFilter())
    first, second = (await feed.load(piece, columns, FeedFilter())).to_pylist()

    assert (b"k", b"v") == (first["key"], first["value"])
    assert [{"key": "trace", "value": b"1"}, {"key": "empty", "value": None}] == first["headers"]
    assert at_ms + 5 == round(first["time"].timestamp() * 1000)
    assert (None, None, None) == (second["key"], second["value"], second["headers"])


async def test_bounds_and_filters_leave_out_slices(host: Host) -> None:
    """Options by offset, filters by partition, offset and time: what cannot matter is not planned."""
    services = host.services()
    bounded = feed_of(services, start={"": 2, "3": 2}, end={"0": 5})
    feed = feed_of(services)

    assert [*ALL[1:4], (3, 2, b"")] == await rows(bounded, await bounded.begin(), await bounded.reach({}, Limit()))
    everything = ({"0": 0, "3": 0}, {"0": 9, "3": 2})
    assert 1 == len(await feed.slices(*everything, FeedFilter(among={"partition": frozenset({3})})))
    assert 1 == len(await feed.slices(*everything, FeedFilter(low={"offset": 8})))


async def test_a_time_leaves_out_what_is_older_by_the_records_own_timestamps(host: Host) -> None:
    """A record may be stamped later than its append, also in a compacted blob; one without a stamp has that time."""
    stamped, broker, services = TopicPartition("orders", 4), host.broker(), host.services()
    appended_ms = now_ms(host.clock)
    for ahead_ms in (1000, 60_000, 5000):
        record = KafkaRecord(b"later", timestamp_ms=appended_ms + ahead_ms)
        chunk = RecordChunk(KafkaRecords(1, encode([record])))
        await broker.writer.append_shared([PartitionAppend(stamped, (chunk,))])
    await broker.writer.drain()

    async def planned(after_ms: int) -> list[int]:
        wanted = FeedFilter(low={"time": datetime.fromtimestamp((appended_ms + after_ms) / 1000, UTC)})
        pieces = await feed_of(services).slices({}, {"0": 9, "3": 2, "4": 3}, wanted)
        return [int(piece.key.partition("(orders/")[2].partition(" ")[0]) for piece in pieces]

    assert [0, 0, 0, 3, 4, 4, 4] == await planned(0)
    assert [4, 4] == await planned(5000)
    assert [4] == await planned(60_000)
    assert [] == await planned(61_000)
    await services.compactor.compact_once(stamped)
    assert [4] == await planned(60_000)
    assert [] == await planned(61_000)


async def test_a_limit_is_exact_where_the_clocks_of_brokers_differ() -> None:
    """An append may have an earlier time than the one before it: a partition is read in the order of its offsets."""
    host = Host()
    for ahead_s in (60, 0, 30):
        host.clock._start_ns += ahead_s * 10**9
        await host.append(host.broker(), b"a", b"b", b"c")
        host.clock._start_ns -= ahead_s * 10**9
    await host.append(host.broker(), b"x", tp=OTHER)
    feed = feed_of(host.services())

    at, found = await feed.begin(), []
    for _ in range(5):
        end = await feed.reach(at, Limit(rows=3))
        found.append(len(await rows(feed, at, end)))
        at = end

    assert [3, 3, 3, 1, 0] == found


async def test_what_was_trimmed_is_passed_over(host: Host) -> None:
    """A reader that is behind the log's start continues at the start."""
    services = host.services()
    broker = host.broker()
    await broker.admin.trim(TP, 5)
    feed = feed_of(services)

    assert [row for row in ALL if row[1] >= 5] == await rows(feed, {"0": 0, "3": 2}, {"0": 9, "3": 2})


@pytest.mark.parametrize("bound", ["²", "٣", "x", "-1x", '{"0": "2"}', "[1]"])
def test_a_bound_that_is_neither_a_number_nor_json_is_invalid(bound: str) -> None:
    """Digits that `int` does not accept, or that are not ASCII, give Invalid like any other wrong text."""
    with pytest.raises(Invalid, match="option start"):
        open_feed(Host().context(), {"topic": "orders", "start": bound})


@pytest.mark.parametrize("bound", ["", "12", '{"0": 2}'])
def test_a_bound_is_an_offset_or_json_by_partition(bound: str) -> None:
    """One offset for all partitions, or one for each."""
    assert isinstance(open_feed(Host().context(), {"topic": "orders", "start": bound}), TopicFeed)


async def test_compacted_pieces_have_their_bytes_and_a_part_of_one_its_share(host: Host) -> None:
    """So a bulk reader gives each task about as many bytes, whether or not they are compacted."""
    services = host.services()
    wal = [piece.size_bytes for piece in await feed_of(services).slices({"0": 0}, {"0": 9}, FeedFilter())]
    await services.compactor.compact_once(TP)

    (whole,) = await feed_of(services).slices({"0": 0}, {"0": 9}, FeedFilter())
    (part,) = await feed_of(services).slices({"0": 0}, {"0": 3}, FeedFilter())

    assert sum(wal) * 0.5 < whole.size_bytes <= sum(wal)
    assert whole.size_bytes // 3 == part.size_bytes


async def test_a_limit_of_bytes_holds_inside_a_compacted_entry(host: Host) -> None:
    """40 records of 1000 bytes in one entry: a step of 2500 bytes takes two of them, and one is always taken."""
    broker, services = host.broker(), host.services()
    big = TopicPartition("orders", 5)
    for _ in range(4):
        await host.append(broker, *[b"x" * 1000] * 10, tp=big)
    assert "compacted" == await services.compactor.compact_once(big)
    feed, at = feed_of(services), {"0": 9, "3": 2, "5": 0}

    assert 2 == (await feed.reach(at, Limit(size_bytes=2500)))["5"]
    assert 1 == (await feed.reach(at, Limit(size_bytes=1)))["5"]
    assert 40 == (await feed.reach(at, Limit(size_bytes=10**6)))["5"]


async def test_entries_of_older_versions_have_no_length_and_are_measured_once(host: Host) -> None:
    """They are readable, and their size is asked of the bucket one time."""
    services = host.services()
    await services.compactor.compact_once(TP)
    (entry,) = [span.entry for span in await services.records.spans(TP, 1, limit=5)]
    old = msgspec.json.encode(msgspec.structs.replace(entry, byte_length=None, level=0))
    host.state.store(paths.index(TP, 9), old, None)
    heads: list[str] = []
    head = host.store.head

    async def seen(key: str) -> Any:
        heads.append(key)
        return await head(key)

    host.store.head = seen  # type: ignore[method-assign]
    feed = feed_of(services)
    sizes = {(await feed.slices({"0": 0}, {"0": 9}, FeedFilter()))[0].size_bytes for _ in range(3)}

    assert {entry.byte_length} == sizes and 1 == len(heads)
    assert ALL == await rows(feed, {"0": 0}, {"0": 9})


async def test_retention_by_bytes_asks_the_bucket_nothing(host: Host) -> None:
    """Entries know their length, compacted ones too."""
    broker, services = host.broker(), host.services(compact_max_entries=2)
    for _ in range(6):
        await host.append(broker, b"x" * 100)
    while "compacted" == await services.compactor.compact_once(TP):
        pass
    assert {"COMPACTED", "WAL"} == {span.entry.type for span in await services.records.spans(TP, 1, limit=50)}
    await broker.admin.configure("orders", TopicConfig(retention_bytes=150))

    def refused(key: str, *arguments: Any, **options: Any) -> Any:
        raise AssertionError(key)

    for verb in ("head", "get", "get_range", "list"):
        setattr(host.store, verb, refused)
    await services.retention.apply_once(TP)

    assert 10 < (await services.records.control(TP)).value.log_start_offset
