"""What compactors of several processes leave to each other: cursors, tombstones and the gauges of what is gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lakebed.core.clock import now_ms
from lakebed.log import paths
from lakebed.log.codec import columns
from lakebed.log.model import Cursor, TopicConfig, TopicPartition
from lakebed.log.producers import CHANGES_MAX, RecordChunk, Stamp
from lakebed.log.services import LogServices
from lakebed.log.writer import Appended, PartitionAppend
from lakebed.meta.model import MetaEntry
from lakebed.meta.protocol import Meta
from support.counting_store import count_requests
from support.log_host import METAS, TP, Host

pytestmark = pytest.mark.metas(*METAS)


async def fill(host: Host, count: int = 5) -> Any:
    broker = host.broker()
    for number in range(count):
        await host.append(broker, b"a%d" % number, b"b%d" % number)
    return broker


async def cursor(host: Host) -> int:
    found = await host.services().records.find(TP, paths.cursor(TP), Cursor)
    return found.value.offset if found is not None else 0


class HeldUp:
    """A compactor's meta that waits before the cursor is read for its last step."""

    def __init__(self, meta: Meta) -> None:
        self.last_step = False
        self.waits, self.go = asyncio.Event(), asyncio.Event()
        self._put, self._get = meta.put, meta.get
        meta.put, meta.get = self.put, self.get  # type: ignore[method-assign]

    async def put(self, key: str, value: bytes, **options: Any) -> MetaEntry:
        made = await self._put(key, value, **options)
        self.last_step = self.last_step or b"UPDATING_CURSOR" in value
        return made

    async def get(self, key: str, *, partition_key: str = "") -> MetaEntry:
        if key == paths.cursor(TP) and self.last_step:
            self.waits.set()
            await self.go.wait()
        return await self._get(key, partition_key=partition_key)


async def test_a_compactor_that_is_late_does_not_move_the_cursor_back(host: Host) -> None:
    """Another finishes its compaction and makes the next one; then the late one takes its last step."""
    broker, late, other = await fill(host), host.services(), host.services()
    meta = HeldUp(late.meta)
    compacting = asyncio.create_task(late.compactor.compact_once(TP))
    await meta.waits.wait()

    assert "recovered" == await other.compactor.compact_once(TP)
    for _ in range(2):
        await host.append(broker, b"x", b"y")
    assert "compacted" == await other.compactor.compact_once(TP)
    meta.go.set()

    assert "compacted" == await compacting
    assert 15 == await cursor(host)


async def test_a_tombstone_stays_while_a_slow_writer_may_be_left(host: Host) -> None:
    """Within the horizon a deleted topic that is made again gives out no offset twice."""
    broker, services = await fill(host), host.services()  # the horizon is 100 s
    await broker.admin.delete("orders", reason="test")

    await host.clock.advance(99.0)
    await services.retention.apply_once(TP)
    again = await host.append(host.broker(), b"new")

    assert isinstance(again, Appended)
    assert 11 == again.start_offset


async def test_what_another_process_has_buried_is_out_of_the_gauges(host: Host) -> None:
    """The last partition goes while another process works on it: neither its lag nor its count is shown on."""
    broker, other = await fill(host), host.services()
    context = host.context(compact_min_entries=100)
    services = LogServices(context, host.meta())
    await services.scheduler.pass_once()
    assert 10 == context.metrics.value("lakebed_log_compaction_lag_records")

    await broker.admin.delete("orders", reason="test")
    await host.clock.advance(200.0)
    await other.retention.apply_once(TP)
    found = await services.scheduler.pass_once()

    assert {TP: "gone"} == found
    assert 0 == context.metrics.value("lakebed_log_compaction_lag_records")
    assert 0 == context.metrics.value("lakebed_log_known_partitions")


async def test_a_log_that_is_opened_again_while_its_tombstone_goes_stays(host: Host) -> None:
    """A produce comes between the last look at a tombstone and its removal: the new log is kept."""
    broker = await fill(host)
    await broker.admin.delete("orders", reason="test")
    await host.clock.advance(200.0)

    services, overtaken = host.services(), list[str]()
    delete = services.meta.delete

    async def late(key: str, **options: Any) -> None:
        if key == paths.control(TP) and not overtaken:
            overtaken.append(key)
            await host.append(host.broker(), b"new")
        await delete(key, **options)

    services.meta.delete = late  # type: ignore[method-assign]
    await services.retention.apply_once(TP)

    assert overtaken
    assert [b"new"] == await host.read_all(host.broker())


async def test_the_producers_of_a_log_that_is_opened_again_while_its_tombstone_goes_stay_known(host: Host) -> None:
    """More of them append at once than the control record takes: without their snapshot none could append again."""
    broker = await fill(host)
    await broker.admin.delete("orders", reason="test")
    await host.clock.advance(200.0)
    again, stamps = host.broker(), list[Stamp]()

    services = host.services()
    delete_range = services.meta.delete_range

    async def overtaken(start: str, end: str, **options: Any) -> None:
        if not stamps:
            await host.append(again, b"new")
            await host.clock.advance(1.0)  # ids that were issued before are refused
            stamps.extend(Stamp(again.producer_id(), 0) for _ in range(CHANGES_MAX + 1))
            chunks = tuple(RecordChunk(columns([b"new"]), stamp) for stamp in stamps)
            await again.writer.append_shared([PartitionAppend(TP, chunks)])
            await again.writer.drain()
        await delete_range(start, end, **options)

    services.meta.delete_range = overtaken  # type: ignore[method-assign]
    await services.retention.apply_once(TP)
    repeated = await host.append(host.broker(), b"new", stamp=stamps[0])

    assert isinstance(repeated, Appended), repeated
    assert repeated.duplicate and 12 == repeated.start_offset


async def test_retention_by_age_keeps_what_is_exactly_as_old_as_allowed(host: Host) -> None:
    """30 s are kept, a millisecond more is not; seconds of the setting are compared with the time of the append."""
    broker, services = await fill(host, 1), host.services()
    await host.clock.advance(0.001)
    await host.append(broker, b"x")
    await broker.admin.configure("orders", TopicConfig(retention_s=30))

    await host.clock.advance(29.999)
    await services.retention.apply_once(TP)
    assert [b"a0", b"b0", b"x"] == await host.read_all(host.broker())
    await host.clock.advance(0.001)
    await services.retention.apply_once(TP)
    assert [b"x"] == await host.read_all(host.broker())
    await host.clock.advance(0.001)
    await services.retention.apply_once(TP)
    assert [] == await host.read_all(host.broker())


async def test_retention_by_size_keeps_what_fits_exactly_and_counts_compacted_blobs(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the newest append back: as long as the stored bytes fit, none goes; one byte less and the oldest goes.
    Entries know their lengths: the bucket is asked for none.
    """
    broker, services = await fill(host, 4), host.services(compact_max_entries=2)
    assert "compacted" == await services.compactor.compact_once(TP)
    sizes = [await services.reader.size(span) for span in await services.records.spans(TP, 1, limit=9)]

    assert 3 == len(sizes)
    asked, retention = count_requests(monkeypatch, host.store), host.services().retention
    await broker.admin.configure("orders", TopicConfig(retention_bytes=sum(sizes)))
    await retention.apply_once(TP)
    assert [] == asked
    assert 8 == len(await host.read_all(host.broker()))
    await broker.admin.configure("orders", TopicConfig(retention_bytes=sum(sizes) - 1))
    asked.clear()
    assert 1 == await retention.apply_once(TP)
    assert {"delete"} == set(asked)
    assert [b"a2", b"b2", b"a3", b"b3"] == await host.read_all(host.broker())


async def test_of_age_and_size_the_stricter_one_wins(host: Host) -> None:
    """Either may be the one that trims further."""
    for config, left in ((TopicConfig(30, 10**6), 1), (TopicConfig(10**6, 1), 0), (TopicConfig(30, 1), 0)):
        own = Host()
        broker = await fill(own, 2)
        await own.clock.advance(60)
        await own.append(broker, b"new")
        await broker.admin.configure("orders", config)
        await own.services().retention.apply_once(TP)
        assert left == len(await own.read_all(own.broker()))


async def test_a_size_that_would_keep_more_does_not_bring_old_records_back(host: Host) -> None:
    """Of three appends the size keeps two and the age one: records past their age go, whatever fits."""
    broker, services = await fill(host, 2), host.services()
    await host.clock.advance(60)
    await host.append(broker, b"new")
    sizes = [await services.reader.size(span) for span in await services.records.spans(TP, 1, limit=9)]
    await broker.admin.configure("orders", TopicConfig(retention_s=30, retention_bytes=sum(sizes) - 1))

    await services.retention.apply_once(TP)

    assert [b"new"] == await host.read_all(host.broker())


async def test_the_settings_retention_holds_for_a_topic_without_its_own(host: Host) -> None:
    """A topic's own retention of 0 keeps everything, whatever the settings report."""
    broker = await fill(host, 2)
    await host.clock.advance(60)
    services = host.services(retention_s=30.0)
    await broker.admin.configure("orders", TopicConfig())
    await services.retention.apply_once(TP)
    assert 4 == len(await host.read_all(host.broker()))

    await host.meta_remove(paths.config("orders"), "orders")
    await host.services(retention_bytes=10**6).retention.apply_once(TP)
    assert 4 == len(await host.read_all(host.broker()))
    await services.retention.apply_once(TP)
    assert [] == await host.read_all(host.broker())


async def test_a_trim_frees_whole_compacted_blobs_and_counts_them(host: Host) -> None:
    """Shared blobs are left to the vacuum; an entry that the start of the log cuts through stays."""
    broker, context = await fill(host, 6), host.context(compact_max_entries=2)
    services = LogServices(context, host.meta())
    for _ in range(2):
        assert "compacted" == await services.compactor.compact_once(TP)
    shared = await host.objects(paths.SHARED)
    await broker.admin.trim(TP, 8)  # entries end at 4, 8, 10 and 12

    assert 1 == await services.retention.apply_once(TP)
    assert [8, 10, 12] == [paths.index_offset(key) for key in await host.meta_keys("/index/")]
    assert 1 == context.metrics.value("lakebed_log_swept_total", reason="trimmed")
    assert 0 == await services.retention.apply_once(TP)
    await broker.admin.trim(TP, 9)
    assert 1 == await services.retention.apply_once(TP)
    assert shared == await host.objects(paths.SHARED)
    assert [b"a4", b"b4", b"a5", b"b5"] == await host.read_all(host.broker())


async def test_a_tombstone_goes_at_the_horizon_with_what_compaction_left(host: Host) -> None:
    """Exactly at the horizon, the cursor included, and nothing of the next partition."""
    broker, services = await fill(host), host.services()  # the horizon is 100 s
    other = TopicPartition("orders", 1)
    for _ in range(2):
        await host.append(broker, b"x", tp=other)
    for tp in (TP, other):
        await services.compactor.compact_once(tp)
    kept = await host.meta_keys("/partitions/1/")
    await broker.admin.delete("orders", reason="test")
    await host.clock.advance(100.0)

    assert 1 == await services.retention.apply_once(TP)
    assert [] == await host.meta_keys("/partitions/0/")
    assert kept == await host.meta_keys("/partitions/1/")


async def test_a_late_index_entry_of_a_buried_partition_is_cleared_and_its_offsets_are_not_reused(host: Host) -> None:
    """It gets a tombstone behind its offset; a produce continues behind it; later all of it goes."""
    broker = await fill(host)
    late = await host.meta_value(paths.index(TP, 10))
    await broker.admin.delete("orders", reason="test")
    await host.clock.advance(200.0)
    services = host.services()
    await services.retention.apply_once(TP)
    assert [] == await host.meta_keys() and 0 == await services.retention.apply_once(TP)
    await host.meta_put(paths.index(TP, 10), late)

    await services.retention.apply_once(TP)
    tombstone = (await services.records.control(TP)).value

    assert ("DELETED", 10, 11, "left over", now_ms(host.clock)) == (
        tombstone.log_state,
        tombstone.sequence_counter,
        tombstone.log_start_offset,
        tombstone.reason,
        tombstone.changed_at_ms,
    )
    assert 11 == (await host.append(host.broker(), b"new")).start_offset
    await host.broker().admin.delete("orders", reason="test")
    await services.retention.apply_once(TP)
    await host.clock.advance(200.0)
    await services.retention.apply_once(TP)
    assert [] == await host.meta_keys()


async def test_a_compaction_of_a_former_life_replaces_nothing_of_a_log_that_was_made_again(host: Host) -> None:
    """Its compactor was suspended between blob and commit; the tombstone went, and the offsets begin at 1 again."""
    broker, services = await fill(host), host.services()

    suspended, waits, go = host.services(), asyncio.Event(), asyncio.Event()
    put = suspended.meta.put

    async def late(key: str, value: bytes, **options: Any) -> MetaEntry:
        if key == paths.compaction(TP):
            waits.set()
            await go.wait()
        return await put(key, value, **options)

    suspended.meta.put = late  # type: ignore[method-assign]
    compacting = asyncio.create_task(suspended.compactor.compact_once(TP))
    await waits.wait()
    await broker.admin.delete("orders", reason="test")
    await host.clock.advance(200.0)
    await services.retention.apply_once(TP)
    again = host.broker()
    for number in range(5):
        await host.append(again, b"new%d" % number, b"new")

    go.set()

    assert "abandoned" == await compacting
    assert [record for n in range(5) for record in (b"new%d" % n, b"new")] == await host.read_all(host.broker())
