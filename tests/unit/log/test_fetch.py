"""Reading: ceiling, forward, pending, legacy blobs; the tail cache; the long poll."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

import lakebed.log.cache
from lakebed.core.clock import settle
from lakebed.core.errors import Corrupt, LakebedError
from lakebed.core.settings import Settings
from lakebed.log import codec, paths
from lakebed.log.broker import Broker
from lakebed.log.cache import SharedTail
from lakebed.log.codec import BatchSegment, columns
from lakebed.log.fetcher import FetchRequest
from lakebed.log.model import IndexEntry, OffsetOutOfRange, TopicPartition, UnknownTopicPartition
from lakebed.log.producers import RecordChunk
from lakebed.log.reader import Fetched
from lakebed.log.settings import LogSettings
from lakebed.log.writer import PartitionAppend
from lakebed.store.settings import StoreSettings
from support.log_host import TP, Host

OTHER = TopicPartition("clicks", 0)


async def produce(host: Host, broker: Any, *records: bytes, tp: TopicPartition = TP) -> None:
    working = asyncio.ensure_future(broker.produce([(tp, RecordChunk(columns(list(records))))]))
    await host.clock.advance(0.02)
    await working


async def fetch(broker: Any, offset: int, *, wait_s: float = 0.0, bytes_min: int = 1, tp: TopicPartition = TP) -> Any:
    (found,) = await broker.consume(
        [FetchRequest(tp, offset, 1 << 20)], bytes_max=1 << 20, bytes_min=bytes_min, wait_s=wait_s
    )
    return found


async def test_any_offset_is_found_through_the_sparse_index(host: Host) -> None:
    """Every offset of batches of different sizes gives its record and those behind it."""
    broker = host.broker()
    records = [b"%d" % number for number in range(10)]
    for first, last in ((0, 1), (1, 5), (5, 7), (7, 10)):
        await host.append(broker, *records[first:last])

    assert [records[at:] for at in range(10)] == [await host.read(broker, at + 1) for at in range(10)]
    with pytest.raises(OffsetOutOfRange):
        await host.read(broker, 12)
    with pytest.raises(OffsetOutOfRange):
        await host.read(broker, 0)
    assert await host.read(broker, 11) == []
    with pytest.raises(UnknownTopicPartition):
        await host.read(broker, 1, OTHER)


async def test_a_limit_on_bytes_cuts_between_records_and_always_gives_one(host: Host) -> None:
    """A reader is never stuck behind a record that is larger than it requested."""
    broker = host.broker()
    await host.append(broker, b"aaaa", b"bbbb", b"c" * 100, b"d")

    assert await host.read(broker, 1, bytes_max=8) == [b"aaaa", b"bbbb"]
    assert await host.read(broker, 1, bytes_max=7) == [b"aaaa"]
    assert await host.read(broker, 3, bytes_max=1) == [b"c" * 100]


@pytest.mark.parametrize("form", ["appended", "compacted"])
async def test_a_limit_on_bytes_holds_over_several_spans(host: Host, form: str) -> None:
    """A fetch that takes records of many appends gives no more bytes in all than were requested."""
    broker = host.broker()
    records = [b"%03d" % number * 200 for number in range(12)]  # 600 bytes each
    for first in range(0, 12, 2):
        await host.append(broker, *records[first : first + 2])
    if form == "compacted":
        assert "compacted" == await host.services(compact_max_entries=3).compactor.compact_once(TP)
        assert "COMPACTED" == (await broker.records.spans(TP, 1, limit=1))[0].entry.type

    assert records[:4] == await host.read(broker, 1, bytes_max=2900)  # of three spans
    assert [[limit // 600 for limit in range(600, 7200, 100)]] == [
        [len(await host.read(broker, 1, bytes_max=limit)) for limit in range(600, 7200, 100)]
    ]


async def test_a_blob_that_several_partitions_need_is_downloaded_once(host: Host) -> None:
    """One ranged get over both slices instead of two."""
    broker = host.broker()
    await broker.writer.append_shared([PartitionAppend(tp, (RecordChunk(columns([b"x"])),)) for tp in (TP, OTHER)])
    requested: list[str] = []
    store = host.store
    get, get_range = store.get, store.get_range

    async def seen_get(key: str) -> Any:
        requested.append("get")
        return await get(key)

    async def seen_range(key: str, start: int, length: int) -> Any:
        requested.append("range")
        data = (await get(key)).data
        return data[start : start + length]

    store.get, store.get_range = seen_get, seen_range  # type: ignore[method-assign]
    await host.broker().reader.read_many([(TP, 1, 1000), (OTHER, 1, 1000)], bytes_max=2000)
    await host.broker().reader.read_many([(TP, 1, 10)], bytes_max=10)
    store.get, store.get_range = get, get_range  # type: ignore[method-assign]

    assert requested == ["range", "range"]


async def consumed(broker: Broker, *tps: TopicPartition, bytes_max: int) -> list[Fetched]:
    wants = [FetchRequest(tp, 1, 1 << 20) for tp in tps]
    found = await broker.consume(wants, bytes_max=bytes_max, bytes_min=1, wait_s=0.0)
    assert all(isinstance(one, Fetched) for one in found), found
    return found  # type: ignore[return-value]


WIDE = [TopicPartition("wide", number) for number in range(8)]


@pytest.mark.parametrize("bodies_bytes", [0, 1 << 20])
@pytest.mark.parametrize("bytes_max", [1, 2_500, 3_500])
async def test_a_consume_of_many_partitions_gives_no_more_than_its_limit(
    host: Host, bytes_max: int, bodies_bytes: int
) -> None:
    """A record is given even if it is larger, but not one of each partition: Kafka clients do not take such an answer.
    The others have their ends, and get their records with later requests."""
    for tp in WIDE:
        await host.append(host.broker(), b"x" * 1000, tp=tp)
    broker, left = host.broker(bodies_bytes=bodies_bytes), WIDE

    first = await consumed(broker, *WIDE, bytes_max=bytes_max)
    for _ in WIDE:
        found = await consumed(broker, *left, bytes_max=bytes_max)
        left = [tp for tp, one in zip(left, found, strict=True) if not one.count]

    most = max(1, bytes_max // 1000)
    assert [1] * most + [0] * (8 - most) == [one.count for one in first]
    assert {(1, 1)} == {(one.high_watermark, one.log_start_offset) for one in first}
    assert [] == left


async def test_the_limit_of_a_consume_holds_beside_a_partition_that_does_not_exist(host: Host) -> None:
    """That one has an error; the others share the limit, and those without records have their ends."""
    for tp in WIDE[1:]:
        await host.append(host.broker(), b"x" * 1000, tp=tp)

    wants = [FetchRequest(tp, 1, 1 << 20) for tp in WIDE]
    error, *others = await host.broker().consume(wants, bytes_max=2_500, bytes_min=1, wait_s=0.0)

    found = [one for one in others if isinstance(one, Fetched)]
    assert isinstance(error, UnknownTopicPartition)
    assert [1, 1, 1, 0, 0, 0, 0] == [one.count for one in found]  # one after another: the last may be larger
    assert {(1, 1)} == {(one.high_watermark, one.log_start_offset) for one in found}


@pytest.mark.parametrize(("bodies_bytes", "partitions"), [(0, 1), (6_000, 1), (11_000, 2), (1 << 20, 8)])
async def test_a_consume_holds_no_more_of_large_entries_than_it_may(
    host: Host, bodies_bytes: int, partitions: int
) -> None:
    """An entry is downloaded whole, for whichever record. Of those that are held, as much is given as may be."""
    for tp in WIDE:
        await host.append(host.broker(), *[b"x" * 1000] * 5, tp=tp)
    downloaded: list[int] = []
    get_range = host.store.get_range

    async def counted(key: str, start: int, length: int) -> bytes:
        downloaded.append(length)
        return await get_range(key, start, length)

    host.store.get_range = counted  # type: ignore[method-assign]
    found = await consumed(host.broker(bodies_bytes=bodies_bytes), *WIDE, bytes_max=5_000)
    host.store.get_range = get_range  # type: ignore[method-assign]

    assert partitions == len(downloaded)
    assert min(partitions, 5) == sum(bool(one.count) for one in found)
    assert 4_000 <= sum(one.size for one in found) <= 5_000


async def test_older_wal_blobs_of_one_partition_are_readable(host: Host) -> None:
    """An entry without a slice names a whole object under the partition's own folder."""
    broker = host.broker()
    await host.append(broker, b"a", b"b")
    key = f"{paths.data_folder(TP)}wal/old"
    await host.store.create(key, b"".join(codec.encode([columns([b"a", b"b"])], [BatchSegment(2, 1)])))
    old = IndexEntry("WAL", 2, f"s3://lakebed/{key}", "bytes-batch-v1", 1)
    host.state.store(paths.index(TP, 2), msgspec.json.encode(old), None)

    assert await host.read(host.broker(), 1) == [b"a", b"b"]


async def test_damaged_bytes_are_said_to_be_corrupt(host: Host) -> None:
    """A slice that does not match its checksum, or an index that is wrong, is never given to a reader."""
    broker = host.broker()
    await host.append(broker, b"a" * 50)
    (key,) = await host.objects()
    stored = (await host.store.get(key)).data
    await host.store.delete(key)
    await host.store.create(key, stored[:-5] + b"XXXXX")

    with pytest.raises(Corrupt, match="checksum"):
        await host.read(host.broker(), 1)


async def test_hot_records_come_from_the_cache_and_gaps_from_the_reader(host: Host) -> None:
    """The broker's own appends need neither meta nor bucket; another broker's do."""
    one, two = host.broker(), host.broker()
    await produce(host, one, b"a", b"b")
    await produce(host, two, b"c")
    await produce(host, one, b"d")

    gets = host.store.get_range
    host.store.get_range = None  # type: ignore[method-assign, assignment]
    hot, tail = await fetch(one, 2), await fetch(one, 4)
    host.store.get_range = gets  # type: ignore[method-assign]
    gap = await fetch(one, 3)

    assert [list(part) for part in hot.parts] == [[b"b"]] and hot.next_offset == 3
    assert [list(part) for part in tail.parts] == [[b"d"]]
    assert list(gap.parts[0]) == [b"c"]


async def test_the_cache_is_bounded_and_misses_what_it_dropped(host: Host) -> None:
    """The oldest chunks go first; what is gone comes from the bucket."""
    broker = host.broker(cache_bytes=1000)
    for number in range(5):
        await produce(host, broker, b"%d" % number * 400)

    assert broker.cache.read(TP, 1, 10) is None
    assert broker.cache.read(TP, 5, 10) is not None
    assert list((await fetch(broker, 1)).parts[0]) == [b"0" * 400]


async def test_a_long_poll_wakes_for_an_append_while_it_looks_at_another_partition(host: Host) -> None:
    """Nothing is lost between the look and the wait: the consumer has the record without another look at the clock."""
    broker = host.broker(poll_s=60.0)
    await produce(host, broker, b"a")
    await host.append(host.broker(), b"b", tp=OTHER)
    assert 0 == (await fetch(broker, 2)).count  # the end of this one is known; the other one is read
    looking, go, get = asyncio.Event(), asyncio.Event(), broker.meta.get

    async def slow(key: str, **options: Any) -> Any:
        if key == paths.control(OTHER):
            looking.set()
            await go.wait()
        return await get(key, **options)

    broker.meta.get = slow  # type: ignore[method-assign]
    polling = asyncio.ensure_future(
        broker.consume(
            [FetchRequest(TP, 2, 1 << 20), FetchRequest(OTHER, 2, 1 << 20)], bytes_max=1 << 20, bytes_min=1, wait_s=30.0
        )
    )
    await looking.wait()
    await produce(host, broker, b"new")
    go.set()
    await settle()

    assert polling.done()
    assert [1, 0] == [each.count for each in await polling]


async def test_a_long_poll_wakes_for_an_append_here_and_for_one_elsewhere(host: Host) -> None:
    """An own append wakes it at once; another broker's within poll_s; nothing until max_wait."""
    one, two = host.broker(poll_s=0.25), host.broker()
    await produce(host, one, b"a")
    waiting = asyncio.ensure_future(fetch(one, 2, wait_s=5.0))
    await host.clock.advance(0.1)
    assert not waiting.done()
    await produce(host, one, b"b")
    assert waiting.done() and list((await waiting).parts[0]) == [b"b"]

    waiting = asyncio.ensure_future(fetch(one, 3, wait_s=5.0))
    await produce(host, two, b"c")
    await host.clock.advance(0.3)
    assert waiting.done() and list((await waiting).parts[0]) == [b"c"]

    waiting = asyncio.ensure_future(fetch(one, 4, wait_s=5.0))
    await host.clock.advance(4.9)
    assert not waiting.done()
    await host.clock.advance(0.3)
    assert (await waiting).count == 0


async def test_min_bytes_keeps_a_poll_waiting_for_more(host: Host) -> None:
    """A poll that has something, but not enough, continues waiting until its time is over."""
    broker = host.broker()
    await produce(host, broker, b"a" * 10)
    waiting = asyncio.ensure_future(fetch(broker, 1, wait_s=5.0, bytes_min=15))
    await host.clock.advance(1.0)
    assert not waiting.done()
    await produce(host, broker, b"b" * 10)
    await settle()

    assert waiting.done() and (await waiting).count == 2


async def test_one_bad_partition_does_not_fail_the_others(host: Host) -> None:
    """Each want has its own answer."""
    broker = host.broker()
    await produce(host, broker, b"a")
    found = await host.broker().consume(
        [FetchRequest(TP, 1, 100), FetchRequest(TP, 9, 100), FetchRequest(OTHER, 1, 100)],
        bytes_max=100,
        bytes_min=1,
        wait_s=0,
    )

    good, beyond, unknown = found
    assert isinstance(good, Fetched) and good.count == 1
    assert isinstance(beyond, OffsetOutOfRange) and isinstance(unknown, UnknownTopicPartition)
    assert isinstance(unknown, LakebedError)


async def test_brokers_of_one_host_share_their_tail_through_a_folder(host: Host, tmp_path: Path) -> None:
    """A read broker gives what a write broker has just appended, without the bucket; a damaged file is passed over."""
    writing, reading = host.broker(tail_cache_dir=tmp_path), host.broker(tail_cache_dir=tmp_path)
    await produce(host, writing, b"a", b"b")
    assert (await fetch(reading, 1)).count == 2
    await produce(host, writing, b"c")
    await published(writing)

    gets, host.store.get_range = host.store.get_range, None  # type: ignore[method-assign, assignment]
    hot = await fetch(reading, 3)
    host.store.get_range = gets  # type: ignore[method-assign]
    (tmp_path / "orders" / "0" / "00000000000000000004-1").write_bytes(b"LLT1 nonsense")

    assert [b"c"] == list(hot.parts[0])
    assert (await fetch(reading, 4)).count == 0
    await produce(host, writing, b"d")
    await published(writing)
    assert [b"d"] == list((await fetch(host.broker(tail_cache_dir=tmp_path), 4)).parts[0])


async def published(writing: Broker) -> None:
    """Whatever this broker wanted to publish is in the folder: its thread takes one thing after another."""
    assert writing.shared is not None
    await writing.shared.new_appends(TopicPartition("orders", 9))


async def test_a_slow_disk_holds_up_no_append(host: Host, tmp_path: Path) -> None:
    """Publishing happens beside the event loop; what waits too long in the queue is left out, not waited for."""
    writing = host.broker(tail_cache_dir=tmp_path)
    assert writing.shared is not None
    going = threading.Event()
    writing.shared._thread.submit(going.wait, 30)

    await produce(host, writing, b"a")
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    going.set()
    await published(writing)

    assert ([], 1) == (files, len([file for file in tmp_path.rglob("*") if file.is_file()]))


async def test_appends_that_wait_for_a_stuck_disk_are_bounded(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their records are in memory: beyond the limit they are not published, and later ones are again."""
    monkeypatch.setattr(lakebed.log.cache, "WAITING_MAX", 2)
    writing = host.broker(tail_cache_dir=tmp_path)
    assert writing.shared is not None
    going = threading.Event()
    writing.shared._thread.submit(going.wait, 30)
    for _ in range(5):
        await produce(host, writing, b"a")
    waiting = len(writing.shared._waiting)
    going.set()
    await published(writing)
    await produce(host, writing, b"b")
    await published(writing)

    assert 2 == waiting
    assert ["1", "2", "6"] == sorted(file.name.partition("-")[0].lstrip("0") for file in tmp_path.glob("*/*/*"))


def test_the_oldest_files_of_the_shared_folder_go_first(tmp_path: Path) -> None:
    """Whatever their partitions and names: consumers ask for what is new. No more goes than has to."""
    shared = SharedTail(tmp_path, bytes_max=250, node="n")
    for age_s, name in enumerate(("orders/0/5", "clicks/0/9", "orders/1/1", "orders/0/2")):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(100))
        os.utime(file, (10_000 - age_s, 10_000 - age_s))

    shared._prune()

    assert ["clicks/0/9", "orders/0/5"] == sorted(
        str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()
    )


async def test_a_broker_that_only_writes_forgets_the_names_it_published(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it remembers of the folder is bounded by what is in the folder, also when nobody reads here."""
    monkeypatch.setattr(lakebed.log.cache, "FILES_MAX", 5)
    writing = host.broker(tail_cache_dir=tmp_path)
    assert writing.shared is not None
    for _ in range(30):
        await produce(host, writing, b"x")
        await published(writing)
        for file in (tmp_path / "orders" / "0").iterdir():
            file.unlink()

    assert len(writing.shared._seen[TP]) <= 6


async def test_the_shared_folder_is_bounded(host: Host, tmp_path: Path) -> None:
    """The oldest files go when it grows past the cache's size."""
    writing = host.broker(tail_cache_dir=tmp_path, cache_bytes=2000)
    for number in range(70):
        await produce(host, writing, b"%d" % number * 100)
    await published(writing)

    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 6000


async def test_a_lake_that_was_copied_into_another_bucket_reads_what_was_written_in_the_first(host: Host) -> None:
    """References carry the bucket they were written in; `store.moved_from` reports that its keys are found here."""
    await host.append(host.broker(), b"before")

    def elsewhere(moved_from: str) -> Broker:
        context = host.context()
        store = StoreSettings(url="s3://copy", moved_from=moved_from)
        return Broker(
            msgspec.structs.replace(
                context, settings=Settings({LogSettings: context.settings.of(LogSettings), StoreSettings: store}, {})
            ),
            host.meta(),
        )

    with pytest.raises(Corrupt) as reported:
        await host.read(elsewhere(""), 1)
    assert "store.moved_from" in reported.value.hint

    broker = elsewhere("s3://older/prod, s3://lakebed")
    await host.append(broker, b"after")
    assert [b"before", b"after"] == await host.read_all(broker)
