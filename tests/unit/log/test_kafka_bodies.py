"""Record batches in the log: the same records through every reader, before and after compaction."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lakebed.core.feed import FeedFilter
from lakebed.log import codec, kafka_batch
from lakebed.log.codec import columns
from lakebed.log.feed import TopicFeed
from lakebed.log.kafka_batch import KafkaRecord, KafkaRecords
from lakebed.log.producers import RecordChunk
from lakebed.log.writer import PartitionAppend
from support.log_host import TP, Host

KEYED = [KafkaRecord(b"v1", b"k1", (("h", b"x"),), 1_000_000), KafkaRecord(None, b"k2", (), 2_000_000)]


def keyed() -> KafkaRecords:
    return KafkaRecords(len(KEYED), kafka_batch.encode(KEYED))


async def mixed(host: Host) -> Any:
    """A log of plain records, record batches, and an append that has both."""
    broker = host.broker()
    await host.append(broker, b"plain")
    for chunks in ((RecordChunk(keyed()),), (RecordChunk(columns([b"beside"])), RecordChunk(keyed()))):
        await broker.writer.append_shared([PartitionAppend(TP, chunks)])
    await broker.writer.drain()
    return broker


async def records(broker: Any) -> list[KafkaRecord]:
    found = await broker.reader.read(TP, 1, bytes_max=1 << 20)
    return [one for part in found.parts for one in codec.decoded(part)]


async def test_compaction_changes_nothing_of_a_log_with_both_forms(host: Host) -> None:
    """Values, keys, headers and timestamps are the same before and after."""
    broker = await mixed(host)
    at_ms = (await broker.records.spans(TP, 1, limit=1))[0].entry.created_at_ms
    before = await records(broker)

    done = await host.services().compactor.compact_once(TP)
    (span,) = await broker.records.spans(TP, 1, limit=9)

    assert "compacted" == done
    assert ("COMPACTED", "kafka-batches-v1", 6) == (span.entry.type, span.entry.encoding, span.entry.msg_count)
    assert before == await records(host.broker())
    plain, beside = (KafkaRecord(value, timestamp_ms=at_ms) for value in (b"plain", b"beside"))
    assert [plain, *KEYED, beside, *KEYED] == before


async def test_record_batches_are_stored_and_compacted_as_they_came(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the offset is in the bucket byte for byte, and no record is decoded on the way."""

    def refused(*_: Any) -> Any:
        raise AssertionError("a record was decoded")

    monkeypatch.setattr(kafka_batch, "decode", refused)
    broker, sent = host.broker(), list[bytes]()
    for number in range(3):
        sent.append(kafka_batch.encode([KafkaRecord(b"v%d" % number, b"k", (("h", b"x"),), 1_000 + number)]))
        await broker.writer.append_shared([PartitionAppend(TP, (RecordChunk(KafkaRecords(1, sent[-1])),))])
    await broker.writer.drain()
    stored = [(await host.store.get(key)).data for key in await host.objects("llog/wal-shared/")]

    assert "compacted" == await host.services().compactor.compact_once(TP)

    (made,) = [(await host.store.get(key)).data for key in await host.objects() if "compacted/" in key]
    assert all(any(batch[8:] in blob for blob in stored) and batch[8:] in made for batch in sent)


async def test_the_tail_cache_gives_the_time_that_is_stored(host: Host) -> None:
    """A record's timestamp is the same from memory and from the bucket."""
    broker = host.broker()
    await host.produce(broker, b"a")

    cached = await host.fetch(broker, 1)
    stored = await host.broker().reader.read(TP, 1, bytes_max=1 << 20)

    assert cached.parts[0].at_ms == stored.parts[0].at_ms > 0


async def test_a_seek_by_timestamp_finds_the_first_record_that_is_not_older(host: Host) -> None:
    """By the record's own timestamp, or that of its append; None when all are older. Compaction changes nothing."""
    broker = await mixed(host)
    await broker.admin.trim(TP, 2)
    asked = (0, 1_000_001, 2_000_000, 2_000_001, 10**15)

    before = [await broker.admin.offsets.stamped(TP, at) for at in asked]
    await host.services(compact_min_entries=2).compactor.compact_once(TP)
    after = [await host.broker().admin.offsets.stamped(TP, at) for at in asked]

    assert before == after
    assert [(2, 1_000_000), (3, 2_000_000), (3, 2_000_000)] == before[:3]
    assert before[3] is not None and before[3][0] == 4  # a plain record has the time of its append
    assert before[4] is None


@pytest.mark.parametrize("form", ["appended", "compacted"])
async def test_the_feed_has_key_headers_and_the_records_own_time(host: Host, form: str) -> None:
    """Beside plain records, whose time is that of their append."""
    services = host.services()
    await mixed(host)
    if form == "compacted":
        assert "compacted" == await services.compactor.compact_once(TP)
    feed = TopicFeed("orders", services.records, services.reader, services.uris, start={}, end={})
    names = ["offset", "time", "key", "value", "headers"]

    pieces = await feed.slices({}, {"0": 6}, FeedFilter())
    rows = [row for piece in pieces for row in (await feed.load(piece, names, FeedFilter())).to_pylist()]

    assert [1, 2, 3, 4, 5, 6] == [row["offset"] for row in rows]
    assert [None, b"k1", b"k2", None, b"k1", b"k2"] == [row["key"] for row in rows]
    assert [b"plain", b"v1", None, b"beside", b"v1", None] == [row["value"] for row in rows]
    assert [{"key": "h", "value": b"x"}] == rows[1]["headers"]
    assert 1000.0 == rows[1]["time"].timestamp()


async def test_a_time_that_no_reader_can_hold_is_none_and_the_record_is_there(host: Host) -> None:
    """A client that gives nanoseconds for milliseconds does not keep bulk readers from its topic."""
    broker, services = host.broker(), host.services()
    odd = [KafkaRecord(b"v", None, (), at_ms) for at_ms in (1_760_000_000_000_000_000, 1_000, 2**63 - 1)]
    chunk = RecordChunk(KafkaRecords(len(odd), kafka_batch.encode(odd)))
    await broker.writer.append_shared([PartitionAppend(TP, (chunk,))])
    feed = TopicFeed("orders", services.records, services.reader, services.uris, start={}, end={})

    (piece,) = await feed.slices({}, {"0": 3}, FeedFilter())
    rows = (await feed.load(piece, ["offset", "time", "value"], FeedFilter())).to_pylist()

    assert [(1, None), (2, 1.0), (3, None)] == [
        (row["offset"], row["time"] and row["time"].timestamp()) for row in rows
    ]


async def test_dump_shows_record_batches(host: Host) -> None:
    """A shared blob names the form of each body."""
    from lakebed.log.blob import describe_blob

    await mixed(host)
    found = [describe_blob((await host.store.get(info.key)).data) async for info in host.store.list("llog/wal-shared/")]

    shown = sorted(
        (part["encoding"], part["records"], part["first"][0]) for blob in found for part in blob["partitions"]
    )
    assert [("bytes-batch-v1", 1, "plain"), ("kafka-batches-v1", 2, "v1"), ("kafka-batches-v1", 3, "beside")] == shown
    assert msgspec.json.encode(found)
