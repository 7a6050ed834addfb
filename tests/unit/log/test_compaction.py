"""Compaction, trim, retention, delete and vacuum: nothing a reader sees changes, nothing referenced goes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from lakebed.core.clock import settle
from lakebed.core.errors import LakebedError, Unavailable
from lakebed.log import compaction, control, paths
from lakebed.log.codec import columns
from lakebed.log.model import (
    Compaction,
    Cursor,
    IndexEntry,
    IndexSpan,
    OffsetOutOfRange,
    TopicConfig,
    TopicPartition,
    UnknownTopicPartition,
)
from lakebed.log.producers import RecordChunk
from lakebed.log.reader import BlobGone
from lakebed.log.sweeper import LogSweeper
from lakebed.log.writer import Appended, PartitionAppend
from support.log_host import METAS, TP, Host

pytestmark = pytest.mark.metas(*METAS)

OTHER = TopicPartition("clicks", 0)


def test_only_the_entry_that_was_compacted_is_overwritten_and_never_with_an_old_blob() -> None:
    """Another entry at the end key, none at all, or a vacuum since then: the compaction is given up."""
    record = Compaction("c", "WRITING_COMPACTED_INDEX", 1, 9, 9, "s3://b/c", "bytes-batch-v1", 50, 4, 9)
    now = control.opened(1)

    assert compaction.may_overwrite(record, span(4, 9), now)
    assert not compaction.may_overwrite(record, span(5, 9), now)
    assert not compaction.may_overwrite(record, span(4, 9, "COMPACTED"), now)
    assert not compaction.may_overwrite(record, None, now)
    assert not compaction.may_overwrite(record, span(4, 9), control.sweep_announced(now, 50))


async def fill(host: Host, count: int = 5) -> Any:
    broker = host.broker()
    for number in range(count):
        await host.append(broker, b"a%d" % number, b"b%d" % number)
    return broker


def span(start: int, end: int, kind: str = "WAL", size: int | None = 100) -> IndexSpan:
    entry = IndexEntry(kind, end - start + 1, f"s3://b/{start}", "bytes-batch-v1", 1, 0, size)  # type: ignore[arg-type]
    return IndexSpan(start, end, entry)


def test_a_selection_is_one_gapless_run_of_wal_entries_from_the_cursor() -> None:
    """It starts exactly at the cursor, stops at a gap or a compacted entry, and keeps to its limits."""
    spans = [span(1, 2), span(3, 3), span(4, 9), span(11, 12), span(13, 14, "COMPACTED", None)]

    def select(at: int, least: int = 2, most: int = 10, size: int = 1000) -> list[int]:
        chosen = compaction.select(at, spans, entries_min=least, entries_max=most, bytes_max=size)
        return [one.start_offset for one in chosen]

    assert select(1) == [1, 3, 4]
    assert select(1, most=2) == [1, 3]
    assert select(1, least=3, size=250) == [1, 3]
    assert select(2) == []
    assert select(1, least=4) == []
    assert select(11) == []


def test_the_cursor_is_aligned_past_what_is_compacted_or_trimmed() -> None:
    """A cursor that stayed behind, or a start of the log that moved, never blocks compaction."""
    spans = [span(1, 4, "COMPACTED", None), span(5, 6), span(7, 9)]

    assert compaction.aligned(1, 1, spans) == 5
    assert compaction.aligned(5, 1, spans[1:]) == 5
    assert compaction.aligned(5, 8, spans[1:]) == 7
    assert compaction.aligned(1, 7, [span(7, 9)]) == 7


async def test_compaction_changes_nothing_for_readers(host: Host) -> None:
    """Five WAL entries become one; every offset gives the record it gave before; the cursor moves behind them."""
    broker, services = await fill(host), host.services()
    before = await host.read_all(broker)

    assert await services.compactor.compact_once(TP) == "compacted"

    reader = host.broker()
    assert before == await host.read_all(reader)
    assert [[record] for record in before] == [await host.read(reader, at, bytes_max=1) for at in range(1, 11)]
    assert [paths.index(TP, 10)] == await host.meta_keys("/index/")
    entry = msgspec.json.decode(await host.meta_value(paths.index(TP, 10)), type=IndexEntry)
    assert (entry.type, entry.msg_count, entry.byte_offset) == ("COMPACTED", 10, None)
    assert "/data/compacted/" in entry.data_key
    cursor = msgspec.json.decode(await host.meta_value(paths.cursor(TP)), type=Cursor)
    assert cursor.offset == 11
    assert await host.meta_keys("meta/compaction") == [paths.cursor(TP)]
    assert await services.compactor.compact_once(TP) == "idle"


@pytest.mark.parametrize("verb", ["put", "delete_range", "delete"])
@pytest.mark.parametrize("nth", range(6))
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_compactor_that_dies_at_any_step_is_finished_by_another(
    host: Host, verb: str, nth: int, when: str
) -> None:
    """Whatever was done and whatever not, the next compactor brings it to the same end."""
    broker, dying, successor = await fill(host), host.services(), host.services()
    before = await host.read_all(broker)
    _die_at(dying, verb, nth, when)
    task = asyncio.ensure_future(dying.compactor.compact_once(TP))
    for _ in range(200):
        await asyncio.sleep(0)

    found = await successor.records.find(TP, paths.compaction(TP), Compaction)
    seen = found.value.state if found else "none"
    assert before == await host.read_all(host.broker()), f"unreadable in state {seen}"
    for _ in range(3):
        await successor.compactor.compact_once(TP)
    task.cancel()

    assert before == await host.read_all(host.broker())
    assert [paths.index(TP, 10)] == await host.meta_keys("/index/")
    assert await host.meta_keys("meta/compaction") == [paths.cursor(TP)]


def _die_at(services: Any, verb: str, nth: int, when: str) -> None:
    """The nth call of a verb never comes back, having been done or not."""
    call, count = getattr(services.meta, verb), [0]

    async def dying(*arguments: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] - 1 != nth:
            return await call(*arguments, **options)
        if when == "after":
            await call(*arguments, **options)
        return await asyncio.get_running_loop().create_future()

    setattr(services.meta, verb, dying)


async def test_a_writer_that_was_held_up_cannot_undo_a_compaction(host: Host) -> None:
    """Its late index entry neither replaces the compacted one nor hides records from readers."""
    broker, services = await fill(host, 2), host.services()
    late = msgspec.json.decode(await host.meta_value(paths.index(TP, 2)), type=IndexEntry)
    end = msgspec.json.decode(await host.meta_value(paths.index(TP, 4)), type=IndexEntry)
    before = await host.read_all(broker)
    await services.compactor.compact_once(TP)

    await host.meta_put(paths.index(TP, 2), msgspec.json.encode(late))
    for key, entry in ((paths.index(TP, 4), end),):
        with pytest.raises(LakebedError):
            await broker.records.create(TP, key, entry)

    assert before == await host.read_all(host.broker())
    await host.clock.advance(1000)
    await services.sweeper.sweep_once()
    assert before == await host.read_all(host.broker())
    assert [paths.index(TP, 4)] == await host.meta_keys("/index/")


async def test_trim_hides_records_at_once_and_frees_them_later(host: Host) -> None:
    """Below the start is out of range; index entries and compacted blobs go, the highest index key stays."""
    broker, services = await fill(host), host.services()
    await services.compactor.compact_once(TP)
    await host.append(broker, b"c0", b"d0")
    await broker.admin.trim(TP, 12)

    with pytest.raises(OffsetOutOfRange):
        await host.read(broker, 11)
    assert await host.read(broker, 12) == [b"d0"]
    assert await services.retention.apply_once(TP) == 1
    assert [paths.index(TP, 12)] == await host.meta_keys("/index/")
    await broker.admin.trim(TP, 13)
    await services.retention.apply_once(TP)
    assert [paths.index(TP, 12)] == await host.meta_keys("/index/")
    assert not [key for key in await host.objects() if "compacted" in key]


async def test_retention_trims_by_age_and_by_size(host: Host) -> None:
    """A topic's own retention wins over the settings'; whole appends go, the newest stay."""
    broker, services = await fill(host, 3), host.services()
    await host.clock.advance(60)
    await host.append(broker, b"new")
    await broker.admin.configure("orders", TopicConfig(retention_s=30))

    await services.retention.apply_once(TP)
    assert await host.read_all(broker) == [b"new"]

    await host.append(broker, b"x" * 1000)
    await broker.admin.configure("orders", TopicConfig(retention_bytes=500))
    await services.retention.apply_once(TP)
    assert await host.read_all(broker) == []


async def test_with_two_limits_the_one_that_removes_more_holds(host: Host) -> None:
    """Records are removed when they are too old or too many, whichever comes first."""
    broker, services = host.broker(), host.services()
    for _ in range(3):
        await host.append(broker, b"x" * 100)
    await host.clock.advance(60)
    await host.append(broker, b"new")
    size = (await services.reader.size((await services.records.spans(TP, 1, limit=1))[0]),)[0]

    await broker.admin.configure("orders", TopicConfig(retention_s=30, retention_bytes=3 * size))
    await services.retention.apply_once(TP)

    assert await host.read_all(broker) == [b"new"]


async def test_retention_by_age_counts_from_the_append_not_from_a_later_compaction(host: Host) -> None:
    """Records that are old are removed although the blob that holds them was made a moment ago; young ones stay."""
    broker, services = await fill(host, 3), host.services()
    await broker.admin.configure("orders", TopicConfig(retention_s=30))
    await host.clock.advance(29)
    assert await services.compactor.compact_once(TP) == "compacted"
    await host.append(broker, b"new")

    await services.retention.apply_once(TP)
    assert len(await host.read_all(broker)) == 7
    await host.clock.advance(2)
    await services.retention.apply_once(TP)

    assert await host.read_all(broker) == [b"new"]


async def test_a_deleted_topic_leaves_nothing_and_comes_back_behind_its_offsets(host: Host) -> None:
    """Nothing is readable any more, nothing leaks, and an offset is never given out twice."""
    broker, services = await fill(host), host.services()
    await services.compactor.compact_once(TP)
    await broker.groups.commit("g", TP, 4)
    await broker.admin.delete("orders", reason="test")

    assert await broker.admin.partitions() == []
    again = await host.append(broker, b"new")
    assert isinstance(again, Appended) and again.start_offset == 11
    assert await host.read_all(broker) == [b"new"]
    await broker.admin.delete("orders", reason="test")
    for _ in range(3):
        await host.clock.advance(200)
        await services.retention.apply_once(TP)
        await services.sweeper.sweep_once()
    await services.retention.apply_once(TP)

    assert await host.meta_keys() == []
    assert await host.objects() == []


async def test_the_vacuum_takes_only_what_nothing_refers_to_and_is_old(host: Host) -> None:
    """Orphans past the horizon go; young ones, pending ones and a blob that one of two partitions needs stay."""
    broker, services = host.broker(), host.services()
    await broker.writer.append_shared(
        [PartitionAppend(TP, (RecordChunk(columns([b"a"])),)), PartitionAppend(OTHER, (RecordChunk(columns([b"b"])),))]
    )
    await broker.writer.drain()
    await host.append(broker, b"c")
    await host.store.create("llog/wal-shared/orphan", b"x")
    await services.compactor.compact_once(TP)
    await host.clock.advance(140)
    assert (await services.sweeper.sweep_once()).orphans == []
    await host.clock.advance(20)
    await host.store.create("llog/wal-shared/young", b"x")

    dry = await services.sweeper.sweep_once(dry_run=True)
    done = await services.sweeper.sweep_once()

    assert dry.orphans == done.orphans and "llog/wal-shared/orphan" in done.orphans and len(done.orphans) == 2
    left = await host.objects()
    assert "llog/wal-shared/young" in left and len([key for key in left if "wal-shared" in key]) == 2
    assert await host.read_all(host.broker()) == [b"a", b"c"]
    assert await host.read_all(host.broker(), OTHER) == [b"b"]


def small_sweeper(host: Host, services: Any, **limits: int) -> LogSweeper:
    return LogSweeper(services.runtime, services.records, services.uris, horizon_s=100.0, **limits)


async def live_blobs(host: Host, services: Any, partitions: int) -> None:
    """Each partition gets one live compacted blob and two orphans of the shared WAL."""
    broker = host.broker()
    for number in range(partitions):
        for _ in range(2):
            await host.append(broker, b"x", tp=TopicPartition("a", number))
        await services.compactor.compact_once(TopicPartition("a", number))


async def test_the_vacuum_gets_past_more_live_objects_than_it_holds_at_once(host: Host) -> None:
    """Live blobs that are listed first do not keep it from the orphans behind them."""
    services = host.services()
    await live_blobs(host, services, 8)
    await host.clock.advance(1000)
    vacuum = small_sweeper(host, services, candidates_max=3)

    dry, done = await vacuum.sweep_once(dry_run=True), await vacuum.sweep_once()

    assert dry == done and (24, 16) == (done.candidates, len(done.orphans))
    assert 8 == len(await host.objects()) and all("compacted" in key for key in await host.objects())
    assert [b"x", b"x"] == await host.read_all(host.broker(), TopicPartition("a", 7))


@pytest.mark.parametrize("partitions", [8, 24])
async def test_a_vacuum_that_stopped_goes_on_behind_its_cursor_in_any_process(host: Host, partitions: int) -> None:
    """More live objects than a pass looks at cost more passes, not longer ones; every object is reached."""
    services = host.services()
    await live_blobs(host, services, partitions)
    for key in ("llog/a/partitions/3/data/wal/old", "llog/_compacted/orphan", "llog/zebra/left"):
        await host.store.create(key, b"x")
    await host.clock.advance(1000)
    starts, listed = list[str](), list[int]()
    listing = host.store.list

    async def seen(prefix: str, *, after: str = "") -> Any:
        starts.append(after)
        listed.append(0)
        async for info in listing(prefix, after=after):
            listed[-1] += 1
            yield info

    host.store.list = seen  # type: ignore[method-assign]
    passes = 0
    while passes < 100 and (passes == 0 or await host.meta_keys("_vacuum")):
        passes += 1
        await small_sweeper(host, host.services(), candidates_max=3, listed_max=3).sweep_once()

    assert partitions + 1 + 1 == passes  # three objects for each partition, three others, three a pass, and the end
    assert starts == sorted(set(starts)) and "" == starts[0] and 3 == max(listed)
    host.store.list = listing  # type: ignore[method-assign]
    assert partitions == len(await host.objects()) and all("/compacted/" in key for key in await host.objects())


async def test_a_compaction_left_by_a_crash_is_finished_while_the_first_vacuum_runs(host: Host) -> None:
    """Its blob is old and in no index yet when the vacuum looks: it is referred to all the same, and stays."""
    broker, dying, successor, services = await fill(host), host.services(), host.services(), host.services()
    before = await host.read_all(broker)
    _die_at(dying, "put", 1, "before")  # its record stands; the end key was not overwritten
    crashed = asyncio.ensure_future(dying.compactor.compact_once(TP))
    await settle(200)
    await host.clock.advance(1000)
    going, put = asyncio.Event(), successor.meta.put

    async def held(key: str, *more: Any, **options: Any) -> Any:
        await going.wait()
        return await put(key, *more, **options)

    successor.meta.put = held  # type: ignore[method-assign]
    finishing = asyncio.ensure_future(
        successor.compactor.compact_once(TP)
    )  # it has read the control record, and goes on
    await settle(200)
    swept = await services.sweeper.sweep_once()
    going.set()

    assert await finishing == "recovered" and swept.candidates == 6
    crashed.cancel()
    assert before == await host.read_all(host.broker())


async def test_a_writer_overtaken_by_the_vacuum_writes_its_records_again(host: Host) -> None:
    """It may not commit a blob that may be gone; the caller notices nothing."""
    broker, services = await fill(host, 1), host.services()
    create = host.store.create

    async def slow(key: str, data: bytes) -> Any:
        host.store.create = create  # type: ignore[method-assign]
        done = await create(key, data)
        await host.clock.advance(1000)
        await services.sweeper.sweep_once()
        return done

    host.store.create = slow  # type: ignore[method-assign]
    outcome = await host.append(broker, b"late")

    assert isinstance(outcome, Appended)
    assert await host.read_all(host.broker()) == [b"a0", b"b0", b"late"]


async def test_offsets_are_found_by_time_also_after_compaction(host: Host) -> None:
    """The first record appended at a time or later, wherever it is by now."""
    broker, services = host.broker(), host.services()
    times = []
    for number in range(4):
        times.append(host.clock.now_ns() // 1_000_000)
        await host.append(broker, b"%d" % number, b"x")
        await host.clock.advance(10)
    wanted = [broker.admin.offsets.at(TP, at) for at in (0, times[1], times[1] + 1, times[3], times[3] + 1)]
    before = [await one for one in wanted]
    await services.compactor.compact_once(TP)

    after = [await broker.admin.offsets.at(TP, at) for at in (0, times[1], times[1] + 1, times[3], times[3] + 1)]

    assert [1, 3, 5, 7, 9] == before == after


async def test_an_offset_by_time_that_cannot_be_found_is_not_the_end_of_the_log(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blobs that keep vanishing under the search are Unavailable: the end would make a consumer skip records."""
    broker, services = await fill(host), host.services()
    await services.compactor.compact_once(TP)

    async def gone(span: IndexSpan) -> Any:
        raise BlobGone(span.entry.data_key)

    monkeypatch.setattr(broker.reader, "batch", gone)
    with pytest.raises(Unavailable):
        await broker.admin.offsets.at(TP, 0)


async def test_the_schedule_discovers_claims_and_compacts(host: Host) -> None:
    """Every partition is found by its control record; one that another process has claimed is left alone."""
    broker, one, two = await fill(host), host.services(), host.services()
    await host.append(broker, b"x", tp=OTHER)
    session = await two.meta.open_session(timeout_s=15)
    await two.meta.put(paths.claim(OTHER), b"{}", session=session, partition_key=OTHER.partition_key)

    assert await one.scheduler.pass_once() == {TP: "compacted", OTHER: "busy"}
    await session.close()
    assert await one.scheduler.pass_once() == {TP: "idle", OTHER: "idle"}
    assert await host.meta_keys("compactor-claim") == []


async def test_a_buried_partition_is_forgotten_by_the_schedule(host: Host) -> None:
    """A deleted topic is swept, buried and then no longer looked at."""
    broker, services = await fill(host), host.services()
    await broker.admin.delete("orders", reason="test")
    first = await services.scheduler.pass_once()
    await host.clock.advance(200)

    second, third = await services.scheduler.pass_once(), await services.scheduler.pass_once()

    assert (list(first.values()), list(second.values()), third) == (["idle"], ["gone"], {})


async def test_groups_commit_offsets_and_show_their_lag(host: Host) -> None:
    """Lag counts what is left to read; a commit past the end or to an unknown partition is refused."""
    broker = await fill(host)
    await broker.groups.commit("g", TP, 4)

    (row,) = await broker.groups.progress("orders")

    assert (row.group, row.offset, row.high_watermark, row.lag) == ("g", 4, 10, 7)
    with pytest.raises(OffsetOutOfRange):
        await broker.groups.commit("g", TP, 12)
    with pytest.raises(UnknownTopicPartition):
        await broker.groups.commit("g", OTHER, 1)
    await broker.admin.trim(TP, 8)
    assert (await broker.groups.progress("orders", "g"))[0].lag == 3
