"""The reader: what it gives while blobs move, what it refuses, and what it keeps for the next read."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lakebed.core.errors import Corrupt, NotFound
from lakebed.log import codec, control, paths, reader
from lakebed.log.codec import BatchSegment, RecordBatch, columns
from lakebed.log.fetcher import FetchRequest
from lakebed.log.model import IndexEntry, IndexSpan, PendingAppend, TopicPartition
from lakebed.log.reader import ENTRIES_FIRST, BatchCache, Fetched, stored_bytes
from lakebed.log.services import LogServices
from support.log_host import METAS, TP, Host

pytestmark = pytest.mark.metas(*METAS)


async def filled(host: Host, count: int = 4) -> list[bytes]:
    broker = host.broker()
    records = [b"%d" % number for number in range(2 * count)]
    for first in range(0, 2 * count, 2):
        await host.append(broker, *records[first : first + 2])
    return records


async def entry_at(host: Host, end_offset: int) -> IndexEntry:
    return msgspec.json.decode(await host.meta_value(paths.index(TP, end_offset)), type=IndexEntry)


async def set_entry(host: Host, end_offset: int, **changed: Any) -> None:
    after = msgspec.structs.replace(await entry_at(host, end_offset), **changed)
    await host.meta_put(paths.index(TP, end_offset), msgspec.json.encode(after))


async def test_a_fetch_says_where_it_started_where_to_go_on_and_how_far_the_log_reaches(host: Host) -> None:
    """Offsets of the records given, and both ends of the log, after a trim."""
    await filled(host)
    broker = host.broker()
    await broker.admin.trim(TP, 3)

    found, one = await broker.reader.read_many([(TP, 4, 1000), (TP, 4, 1)], bytes_max=2000)

    assert (4, 9, 8, 3) == (found.start_offset, found.next_offset, found.high_watermark, found.log_start_offset)
    assert (5, 5) == (found.count, found.size)
    assert [b"3", b"4", b"5", b"6", b"7"] == [record for part in found.parts for record in part]
    assert (4, 5, 8, 3) == (one.start_offset, one.next_offset, one.high_watermark, one.log_start_offset)


async def test_blobs_that_are_compacted_during_a_read_are_found_in_their_new_place(host: Host) -> None:
    """The plan names WAL blobs; they are gone at the download: the index is read again and gives the compacted one."""
    records, services = await filled(host), host.services()
    broker = host.broker()
    get_range = host.store.get_range

    async def overtaken(key: str, start: int, length: int) -> bytes:
        host.store.get_range = get_range  # type: ignore[method-assign]
        assert "compacted" == await services.compactor.compact_once(TP)
        for wal in await host.objects(paths.SHARED):
            await host.store.delete(wal)
        raise NotFound("gone")

    host.store.get_range = overtaken  # type: ignore[method-assign]

    assert records == await host.read(broker, 1)


async def test_records_that_are_nowhere_are_corrupt_and_the_blob_is_named(host: Host) -> None:
    """Neither an empty answer nor an endless loop: the missing blob is in the error."""
    await filled(host, 1)
    (key,) = await host.objects()
    await host.store.delete(key)

    with pytest.raises(Corrupt) as found:
        await host.read(host.broker(), 1)

    assert "offset 1 of orders/0 is committed, but no index entry with a blob covers it" == found.value.message


async def test_a_committed_offset_without_an_index_entry_is_corrupt(host: Host) -> None:
    """The end of the log is not reported where records are missing."""
    await filled(host, 2)
    broker = host.broker()
    await broker.records.change(TP, control.cleared)
    await host.meta_remove(paths.index(TP, 4))

    assert [b"0", b"1"] == await host.read(broker, 1)
    with pytest.raises(Corrupt) as found:
        await host.read(broker, 3)
    assert "offset 3 of orders/0" in found.value.message


@pytest.mark.parametrize(
    ("changed", "output"),
    [
        ({"encoding": "bytes-batch-v9"}, "bytes-batch-v9"),
        ({"byte_length": 10_000}, "byte"),
        ({"byte_offset": 3}, "batch"),
    ],
)
async def test_an_index_entry_that_does_not_fit_its_blob_is_corrupt(
    host: Host, changed: dict[str, Any], output: str
) -> None:
    """Another encoding or another place in the blob gives an error, never other records."""
    await filled(host, 1)
    await host.broker().records.change(TP, control.cleared)
    await set_entry(host, 2, **changed)

    with pytest.raises(Corrupt, match=output):
        await host.read(host.broker(), 1)


async def test_an_index_entry_with_another_count_is_corrupt(host: Host) -> None:
    """The blob holds two records; an entry of three would shift every offset."""
    await filled(host, 2)
    await host.broker().records.change(TP, control.cleared)
    await set_entry(host, 4, msg_count=3)
    await host.meta_remove(paths.index(TP, 2))

    with pytest.raises(Corrupt, match="holds 2 records, but the index has 3"):
        await host.read(host.broker(), 3)


async def test_a_shared_download_checks_that_each_slice_lies_inside_the_blob(host: Host) -> None:
    """Two spans of one blob are cut from one download: a slice that reaches over its end is corrupt."""
    await filled(host, 2)
    await host.broker().records.change(TP, control.cleared)
    first = await entry_at(host, 2)
    await set_entry(host, 4, data_key=first.data_key, byte_offset=first.byte_offset, byte_length=10_000)

    with pytest.raises(Corrupt, match="before"):
        await host.read(host.broker(), 1)


async def test_more_leftover_entries_than_one_page_do_not_hide_a_record(host: Host) -> None:
    """Entries inside a compacted range that a slow writer put there are read past."""
    broker, services, count = host.broker(), host.services(compact_max_entries=100), 2 * ENTRIES_FIRST
    for number in range(count):
        await host.append(broker, b"%d" % number)
    left = {end: await entry_at(host, end) for end in range(2, count)}
    assert "compacted" == await services.compactor.compact_once(TP)
    for end, entry in left.items():
        await host.meta_put(paths.index(TP, end), msgspec.json.encode(entry))

    assert [b"%d" % number for number in range(count)] == await host.read(host.broker(), 1)


async def test_the_size_of_a_span_is_that_of_its_slice_or_of_its_blob(host: Host) -> None:
    """By its entry; a compacted blob of older versions by the object, and 0 when that is gone."""
    await filled(host, 2)
    services = host.services()
    wal = (await services.records.spans(TP, 1, limit=1))[0]
    assert wal.entry.byte_length == await services.reader.size(wal)
    await services.compactor.compact_once(TP)
    (compacted,) = await services.records.spans(TP, 1, limit=5)
    (key,) = [key for key in await host.objects() if "/compacted/" in key]

    compacted = msgspec.structs.replace(compacted, entry=msgspec.structs.replace(compacted.entry, byte_length=None))
    assert (await host.store.head(key)).size == await stored_bytes(host.store, services.uris, compacted)
    await host.store.delete(key)
    assert 0 == await stored_bytes(host.store, services.uris, compacted)


async def test_a_batch_that_was_read_is_kept_for_the_next_reader(host: Host) -> None:
    """The second read of a broker queries the bucket for nothing; a reader without room queries again."""
    await filled(host, 1)
    context = host.context()
    keeping = LogServices(context, host.meta()).reader  # keeps nothing
    broker = host.broker()
    for _ in range(2):
        await broker.reader.read(TP, 1, bytes_max=10)
        await keeping.read(TP, 1, bytes_max=10)

    assert 2 == context.metrics.value("lakebed_log_reads_total")
    assert [] != await host.meta_keys()
    (key,) = await host.objects()
    await host.store.delete(key)
    assert 2 == (await broker.reader.read(TP, 1, bytes_max=10)).count


def made(count: int) -> RecordBatch:
    return codec.decode(b"".join(codec.encode([columns([b"x"] * count)], [BatchSegment(count, 1)])))


def test_the_batch_that_was_unused_for_longest_is_dropped_first() -> None:
    """The limit is in bytes, a use counts, and one batch that is larger than the limit drops nothing."""
    kept, one = BatchCache(100), made(1)
    for name in ("a", "b"):
        kept.keep((name, 0), one, 50)
    kept.keep(("b", 0), one, 50)  # known already: not counted twice
    assert kept.get(("a", 0)) is one

    kept.keep(("c", 0), one, 50)
    kept.keep(("d", 0), one, 101)

    assert [True, False, True, False] == [kept.get((name, 0)) is not None for name in "abcd"]
    kept.keep(("e", 0), one, 100)
    assert [False, False, True] == [kept.get((name, 0)) is not None for name in "ace"]
    kept.keep(("e", 8), one, 0)  # another slice of the same blob
    assert kept.get(("e", 8)) is one and kept.get(("e", 9)) is None


def span(start: int, end: int, kind: str = "WAL", *, key: str = "", size: int | None = 100) -> IndexSpan:
    entry = IndexEntry(kind, end - start + 1, key or f"s3://b/{start}", "bytes-batch-v1", 1, 0, size)  # type: ignore[arg-type]
    return IndexSpan(start, end, entry)


def ends(found: tuple[list[IndexSpan], int]) -> tuple[list[tuple[int, int]], int]:
    return [(one.start_offset, one.end_offset) for one in found[0]], found[1]


def test_a_chain_takes_compacted_spans_first_and_stops_at_a_gap_or_at_the_end() -> None:
    """Each offset once; a leftover entry inside a compacted range is passed over."""
    now = msgspec.structs.replace(control.opened(1), sequence_counter=9)
    spans = [span(1, 2), span(1, 6, "COMPACTED", size=None), span(7, 7), span(9, 9)]

    assert ([(1, 6), (7, 7)], 8) == ends(reader.chain_spans(1, spans, now))
    assert ([(9, 9)], 10) == ends(reader.chain_spans(9, spans, now))
    assert ([], 8) == ends(reader.chain_spans(8, spans, now))
    assert ([], 10) == ends(reader.chain_spans(10, spans, now))


def test_of_two_wal_spans_the_one_that_reaches_further_is_read_and_an_avoided_blob_is_not() -> None:
    """A vanished blob is not planned again, so that a reader continues with what is there."""
    now = msgspec.structs.replace(control.opened(1), sequence_counter=4)
    short, long, packed = span(1, 2, key="a"), span(1, 4, key="b"), span(1, 4, "COMPACTED", key="c")

    assert [long] == reader.chain_spans(1, [short, long], now)[0]
    assert [packed] == reader.chain_spans(1, [short, long, packed], now)[0]
    assert [long] == reader.chain_spans(1, [short, long, packed], now, avoid=frozenset("c"))[0]
    assert [short] == reader.chain_spans(1, [short, long, packed], now, avoid=frozenset("bc"))[0]


def test_the_pending_append_is_the_readable_tail() -> None:
    """It is committed, so a chain reaches to its end although the index does not know it yet."""
    pending = PendingAppend("p", 3, 4, 2, "WAL", "s3://b/p", "bytes-batch-v1", 7, 40, 60)
    now = msgspec.structs.replace(control.opened(1), sequence_counter=4, pending=pending)
    tail = reader.pending_span(now)

    assert tail is not None and (3, 4, pending.entry()) == (tail.start_offset, tail.end_offset, tail.entry)
    assert (40, 60, 7, 2) == (
        tail.entry.byte_offset,
        tail.entry.byte_length,
        tail.entry.created_at_ms,
        tail.entry.msg_count,
    )
    assert ([(1, 2), (3, 4)], 5) == ends(reader.chain_spans(1, [span(1, 2)], now))
    assert reader.pending_span(control.opened(1)) is None


def test_only_as_many_spans_are_downloaded_as_fill_an_answer() -> None:
    """At least one; a span without a length, a whole blob, fills the answer alone."""
    spans = [span(1, 1), span(2, 2), span(3, 3, "COMPACTED", size=None), span(4, 4)]

    assert [1, 1, 2, 3, 3] == [len(reader.within(spans, limit)) for limit in (1, 100, 200, 201, 900)]
    assert [] == reader.within([], 10)


async def test_a_consume_of_many_partitions_shares_its_limit(host: Host) -> None:
    """Read from the bucket, all answers together have no more bytes than were requested, and each has some."""
    broker = host.broker()
    tps = [TopicPartition("orders", number) for number in range(4)]
    for tp in tps:
        await host.append(broker, *[b"x" * 100] * 50, tp=tp)

    found = await host.broker().consume(
        [FetchRequest(tp, 1, 1 << 20) for tp in tps], bytes_max=4000, bytes_min=1, wait_s=0
    )

    sizes = [answer.size for answer in found if isinstance(answer, Fetched)]
    assert 4 == len(sizes) and all(sizes)
    assert sum(sizes) <= 4000
