"""A topic in bulk: the feed's offsets are the log's, over WAL slices and compacted blobs alike."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lakebed.core.errors import Invalid
from lakebed.core.feed import FeedFilter, Limit, Offset, SliceRead, read_all
from lakebed.log import paths
from lakebed.log.feed import TopicFeed, open_feed
from lakebed.log.model import TopicConfig, TopicPartition
from lakebed.log.services import LogServices
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


async def test_bounds_and_filters_leave_out_slices(host: Host) -> None:
    """Options by offset, filters by partition, offset and time: what cannot matter is not planned."""
    services = host.services()
    bounded = feed_of(services, start={"": 2, "3": 2}, end={"0": 5})
    feed = feed_of(services)

    assert [*ALL[1:4], (3, 2, b"")] == await rows(bounded, await bounded.begin(), await bounded.reach({}, Limit()))
    everything = ({"0": 0, "3": 0}, {"0": 9, "3": 2})
    assert 1 == len(await feed.slices(*everything, FeedFilter(among={"partition": frozenset({3})})))
    assert 1 == len(await feed.slices(*everything, FeedFilter(low={"offset": 8})))


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
