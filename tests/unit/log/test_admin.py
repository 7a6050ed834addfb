"""What operators read and do: descriptions, segments, offsets by time, settings of a topic, delete."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from lakebed.core.clock import now_ms
from lakebed.core.errors import Invalid, OutcomeUnknown, Unavailable
from lakebed.log import paths
from lakebed.log.codec import columns
from lakebed.log.model import (
    Control,
    IndexSpan,
    LogDeleted,
    LogFenced,
    TopicConfig,
    TopicPartition,
    UnknownTopicPartition,
)
from lakebed.log.producers import RecordChunk, Stamp
from lakebed.log.reader import BlobGone
from lakebed.log.writer import PartitionAppend
from support.log_host import METAS, TP, Host

pytestmark = pytest.mark.metas(*METAS)

SECOND = TopicPartition("orders", 10)


async def left_pending(host: Host, broker: Any, *records: bytes) -> None:
    """An append that is committed, by a broker that stopped before the index entry: put back as it was."""
    await broker.writer.append_shared([PartitionAppend(TP, (RecordChunk(columns(records)),))])
    found = await broker.records.control(TP)
    assert found.value.pending is not None
    await broker.writer.drain()
    await host.meta_remove(paths.index(TP, found.value.sequence_counter))
    await host.meta_put(paths.control(TP), msgspec.json.encode(found.value))


async def test_a_description_counts_records_and_what_is_not_compacted(host: Host) -> None:
    """After appends, a compaction, a trim and a fence each field reports what is true."""
    broker, services = host.broker(), host.services()
    for number in range(3):
        await host.append(broker, b"a%d" % number, b"b%d" % number, stamp=Stamp("p", number))
    await services.compactor.compact_once(TP)
    await host.append(broker, b"c", b"d", b"e")
    fresh = await broker.admin.describe(TP)
    await broker.admin.trim(TP, 8)
    await broker.admin.fence(TP, reason="moving")
    found = await broker.admin.describe(TP)

    assert (9, 3, 9, 1, 1) == (
        fresh.records,
        fresh.uncompacted,
        fresh.high_watermark,
        fresh.log_start_offset,
        fresh.producers,
    )
    assert ("OPEN", "") == (fresh.log_state, fresh.reason)
    assert ("orders", 0, "FENCED", "moving") == (found.topic, found.partition, found.log_state, found.reason)
    assert (2, 2, 9, 8) == (found.records, found.uncompacted, found.high_watermark, found.log_start_offset)


async def test_a_partition_that_was_never_compacted_is_uncompacted_as_a_whole(host: Host) -> None:
    """And one that is trimmed to its end has nothing left to compact."""
    broker = host.broker()
    await host.append(broker, b"a", b"b", b"c")

    assert 3 == (await broker.admin.describe(TP)).uncompacted
    await broker.admin.trim(TP, 4)
    assert (0, 0) == ((await broker.admin.describe(TP)).uncompacted, (await broker.admin.describe(TP)).records)
    with pytest.raises(UnknownTopicPartition):
        await broker.admin.describe(SECOND)


async def test_a_pending_append_is_the_last_segment_once(host: Host) -> None:
    """It is committed and in no index yet: type PENDING, behind the others; once it is in the index it is WAL."""
    broker = host.broker()
    await host.append(broker, b"a", b"b")
    await left_pending(host, broker, b"c")

    found = await host.broker().admin.segments(TP)
    behind = await host.broker().admin.segments(TP, from_offset=3)
    beyond = await host.broker().admin.segments(TP, from_offset=4)
    described = await host.broker().admin.describe(TP)

    assert [("WAL", 1, 2, 2), ("PENDING", 3, 3, 1)] == [
        (row.type, row.start_offset, row.end_offset, row.records) for row in found.segments
    ]
    assert ["PENDING"] == [row.type for row in behind.segments]
    assert [] == beyond.segments
    assert found.segments[1].bytes > 0 and found.next_offset is None and found.compacted_to == 0
    assert described.pending
    await host.services().compactor.compact_once(TP)
    assert not (await host.broker().admin.describe(TP)).pending
    assert "PENDING" not in [row.type for row in (await host.broker().admin.segments(TP)).segments]


async def test_a_full_page_of_segments_leaves_the_pending_one_to_the_next(host: Host) -> None:
    """Following next_offset gives each segment once, and ends."""
    broker = host.broker()
    for number in range(3):
        await host.append(broker, b"%d" % number)
    await left_pending(host, broker, b"last")
    admin, at, rows = host.broker().admin, 0, []
    for _ in range(10):
        page = await admin.segments(TP, from_offset=at, limit=3)
        rows += [(row.type, row.end_offset) for row in page.segments]
        if page.next_offset is None:
            break
        at = page.next_offset

    assert [("WAL", 1), ("WAL", 2), ("WAL", 3), ("PENDING", 4)] == rows


async def test_segments_begin_at_the_start_of_the_log(host: Host) -> None:
    """What is trimmed is not shown; what was compacted is reported as the last offset of it."""
    broker, services = host.broker(), host.services(compact_max_entries=2)
    for number in range(4):
        await host.append(broker, b"%d" % number)
    await services.compactor.compact_once(TP)
    await broker.admin.trim(TP, 4)

    found = await broker.admin.segments(TP)

    assert [(4, 4)] == [(row.start_offset, row.end_offset) for row in found.segments]
    assert (2, 4, 4) == (found.compacted_to, found.log_start_offset, found.high_watermark)


async def test_partitions_are_listed_in_order_and_by_topic(host: Host) -> None:
    """By topic, then by number; a topic whose name begins alike is another one; a deleted one is not listed."""
    broker = host.broker()
    names = [TopicPartition(*one) for one in (("orders", 2), ("orders", 10), ("orders-eu", 0), ("a", 1))]
    for tp in [*names, TP]:
        await host.append(broker, b"x", tp=tp)

    assert [TP, names[0], names[1]] == await broker.admin.partitions("orders")
    assert [names[3], TP, names[0], names[1], names[2]] == await broker.admin.partitions()
    for name in ("../x", ""):
        with pytest.raises(Invalid):
            await broker.admin.partitions(name)
        with pytest.raises(Invalid):
            await broker.admin.delete(name, reason="old")
    assert [TP, names[0], names[1]] == await broker.admin.delete("orders", reason="old")
    assert [names[3], names[2]] == await broker.admin.partitions()


@pytest.mark.parametrize("fails_at", range(8))
async def test_a_delete_that_failed_is_repeated_and_leaves_nothing_to_the_next_topic(host: Host, fails_at: int) -> None:
    """Whichever of its writes is not made: a topic that is created again has neither old offsets nor old retention."""
    broker, writes = host.broker(), list[str]()
    for tp in (TP, SECOND):
        await host.append(broker, b"a", tp=tp)
        await broker.groups.commit("g", tp, 1)
    await broker.admin.configure("orders", TopicConfig(retention_s=5))
    put, delete = broker.meta.put, broker.meta.delete

    def failing(call: Any) -> Any:
        async def made(key: str, *arguments: Any, **options: Any) -> Any:
            writes.append(key)
            if len(writes) == fails_at + 1:
                raise Unavailable("meta is away")
            return await call(key, *arguments, **options)

        return made

    broker.meta.put, broker.meta.delete = failing(put), failing(delete)  # type: ignore[method-assign]
    try:
        await broker.admin.delete("orders", reason="old")
    except Unavailable:
        await broker.admin.delete("orders", reason="old")
    broker.meta.put, broker.meta.delete = put, delete  # type: ignore[method-assign]
    for tp in (TP, SECOND):
        await host.append(broker, b"b", tp=tp)

    assert None is await broker.admin.config("orders")
    assert [] == await broker.groups.progress("orders")
    assert [b"b"] == await host.read_all(host.broker()) == await host.read_all(host.broker(), SECOND)


async def test_an_offset_that_is_committed_while_its_topic_is_deleted_goes_with_it(host: Host) -> None:
    """After the other offsets went, and before the log itself: the next topic of that name is read from its begin."""
    broker, member = host.broker(), host.broker()
    await host.append(broker, b"a", b"b", b"c")
    put = broker.meta.put

    async def behind_a_commit(key: str, *arguments: Any, **options: Any) -> Any:
        if key == paths.control(TP):
            await member.groups.commit("g", TP, 3)
        return await put(key, *arguments, **options)

    broker.meta.put = behind_a_commit  # type: ignore[method-assign]
    await broker.admin.delete("orders", reason="old")

    assert [] == await host.meta_keys("/groups/")


@pytest.mark.metas("memory")  # its meta takes the time of the clock
async def test_partitions_are_looked_at_side_by_side(host: Host) -> None:
    """A list of 200 of them over a meta store that takes 25 ms for each get: each of Metadata's answers needs one."""
    broker = host.broker()
    for number in range(200):
        await broker.writer.ensure(TopicPartition("wide", number))
    get = broker.meta.get

    async def slow(*arguments: Any, **options: Any) -> Any:
        await host.clock.sleep(0.025)
        return await get(*arguments, **options)

    broker.meta.get = slow  # type: ignore[method-assign]
    listing = asyncio.ensure_future(broker.admin.partitions())
    for _ in range(20):
        await host.clock.advance(0.025)

    assert listing.done() and 200 == len(listing.result())


async def test_delete_takes_offsets_and_settings_with_it_and_says_why(host: Host) -> None:
    """The tombstone keeps reason and time; a topic that does not exist, or no longer, is refused."""
    broker = host.broker()
    await host.append(broker, b"x")
    await broker.admin.configure("orders", TopicConfig(5.0, 7))
    await broker.groups.commit("g", TP, 2)
    await host.clock.advance(3.0)
    await broker.admin.delete("orders", reason="no longer used")

    tombstone: Control = (await broker.records.control(TP)).value
    assert ("DELETED", "no longer used", now_ms(host.clock), 2) == (
        tombstone.log_state,
        tombstone.reason,
        tombstone.changed_at_ms,
        tombstone.log_start_offset,
    )
    assert ([], []) == (await host.meta_keys("/groups/"), await host.meta_keys("/config"))
    for topic in ("orders", "never"):
        with pytest.raises(UnknownTopicPartition):
            await broker.admin.delete(topic, reason="again")
    with pytest.raises(LogDeleted):
        await broker.admin.unfence(TP)
    with pytest.raises(LogDeleted):
        await broker.admin.fence(TP, reason="late")


async def test_a_fence_refuses_appends_with_its_reason_until_it_is_lifted(host: Host) -> None:
    """Fencing twice keeps the first reason and time; lifting clears them, and lifting twice changes nothing."""
    broker, other = host.broker(), host.broker()
    await host.append(broker, b"a")
    await host.clock.advance(1.0)
    first = await broker.admin.fence(TP, reason="moving")
    await host.clock.advance(1.0)
    again = await other.admin.fence(TP, reason="other")
    refused = await host.append(other, b"b")
    await host.clock.advance(1.0)
    lifted = await other.admin.unfence(TP)
    await host.clock.advance(1.0)

    assert first == again and ("FENCED", "moving") == (first.log_state, first.reason)
    assert isinstance(refused, LogFenced) and "moving" in refused.message and not isinstance(refused, LogDeleted)
    assert ("OPEN", "", first.changed_at_ms + 2000) == (lifted.log_state, lifted.reason, lifted.changed_at_ms)
    assert lifted == await other.admin.unfence(TP)
    assert 2 == (await host.append(broker, b"b")).start_offset


async def test_settings_of_a_topic_are_given_back_and_absent_until_set(host: Host) -> None:
    """A name that is no topic's is refused."""
    broker = host.broker()
    assert await broker.admin.config("orders") is None
    await broker.admin.configure("orders", TopicConfig(2.5, 9))
    assert TopicConfig(2.5, 9) == await broker.admin.config("orders")
    assert await broker.admin.config("orders-eu") is None
    with pytest.raises(Invalid):
        await broker.admin.configure("a/b", TopicConfig())


async def test_an_offset_by_time_is_never_below_the_start_of_the_log(host: Host) -> None:
    """A trim inside an append, in a WAL entry and in a compacted one."""
    broker, services = host.broker(), host.services()
    await host.append(broker, b"a", b"b", b"c")
    await host.append(broker, b"d")
    await broker.admin.trim(TP, 2)

    assert 2 == await broker.admin.offsets.at(TP, 0)
    await services.compactor.compact_once(TP)
    assert 2 == await broker.admin.offsets.at(TP, 0)


async def test_an_offset_by_timestamp_is_never_below_the_start_of_the_log(host: Host) -> None:
    """A client that begins there must not be told an offset that is out of range; pending, in the index, compacted."""
    broker, services = host.broker(), host.services()
    await host.append(broker, b"a", b"b", b"c")
    await host.append(broker, b"d")
    last = host.clock.now_ns() // 1_000_000
    for start, settle in ((2, False), (3, True), (4, True)):
        await broker.admin.trim(TP, start)
        found = await host.broker().admin.offsets.stamped(TP, 0)

        assert found is not None and (start, last) == (found[0], found[1])
        if settle:
            await services.compactor.compact_once(TP)
    await broker.admin.trim(TP, 5)
    assert await broker.admin.offsets.stamped(TP, 0) is None


async def test_an_offset_by_time_finds_the_pending_append(host: Host) -> None:
    """At its time or before it, its first record; after it, the end."""
    broker = host.broker()
    await host.append(broker, b"a", b"b")
    await host.clock.advance(10)
    at_ms = now_ms(host.clock)
    await left_pending(host, broker, b"c", b"d")
    admin = host.broker().admin

    assert [1, 3, 3, 5] == [await admin.offsets.at(TP, at) for at in (0, at_ms - 9_999, at_ms, at_ms + 1)]


async def test_an_offset_by_time_is_looked_for_again_when_a_compaction_overtook_it(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One blob that vanished under the search is no failure."""
    broker, services = host.broker(), host.services()
    for number in range(3):
        await host.append(broker, b"%d" % number)
        await host.clock.advance(1.0)
    await services.compactor.compact_once(TP)
    batch, gone = broker.reader.batch, []

    async def once(span: IndexSpan) -> Any:
        if not gone:
            gone.append(span)
            raise BlobGone(span.entry.data_key)
        return await batch(span)

    monkeypatch.setattr(broker.reader, "batch", once)
    assert 1 == await broker.admin.offsets.at(TP, 0)
    assert gone


@pytest.mark.parametrize("landed", [True, False])
@pytest.mark.parametrize("verb", ["fence", "unfence", "trim", "delete"])
async def test_what_an_operator_does_to_a_log_survives_a_lost_answer(
    host: Host, monkeypatch: pytest.MonkeyPatch, verb: str, landed: bool
) -> None:
    """Each change says what it makes of the log, whatever it was: it is made again, and ends as if once."""
    broker = host.broker()
    await host.append(broker, b"a", b"b")
    await broker.writer.drain()
    if verb == "unfence":
        await broker.admin.fence(TP, reason="why")
    meta, lost = broker.records.meta, list[str]()
    put = meta.put

    async def unanswered(key: str, value: bytes, **more: Any) -> Any:
        if key == paths.control(TP) and not lost:
            lost.append(key)
            if landed:
                await put(key, value, **more)
            raise OutcomeUnknown("the answer was lost")
        return await put(key, value, **more)

    monkeypatch.setattr(meta, "put", unanswered)
    waiting = asyncio.ensure_future(
        {
            "fence": lambda: broker.admin.fence(TP, reason="why"),
            "unfence": lambda: broker.admin.unfence(TP),
            "trim": lambda: broker.admin.trim(TP, 2),
            "delete": lambda: broker.admin.delete("orders", reason="why"),
        }[verb]()
    )
    while not waiting.done():
        await host.clock.advance(0.5)
    await waiting
    now = (await broker.records.control(TP)).value

    expected = {"fence": ("FENCED", 1), "unfence": ("OPEN", 1), "trim": ("OPEN", 2), "delete": ("DELETED", 3)}
    assert (expected[verb], [paths.control(TP)]) == ((now.log_state, now.log_start_offset), lost)
