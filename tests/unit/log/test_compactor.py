"""The compactor's service and the vacuum: what a crash left, what is given up, what is counted, when they run."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from lakebed.core.clock import now_ms, settle
from lakebed.core.errors import Fenced, OutcomeUnknown, Unavailable
from lakebed.core.runs import RunReader
from lakebed.log import control, paths
from lakebed.log.codec import columns
from lakebed.log.compaction import RUNS_MAX, CompactionRun
from lakebed.log.model import Cursor, IndexEntry, IndexSpan, TopicPartition, UnknownTopicPartition
from lakebed.log.producers import RecordChunk
from lakebed.log.services import LogServices
from lakebed.log.sweeper import LogSweepReport, shadows
from lakebed.log.workers import LogSchedule, PassTime, StoredBytesScan, _vacuum, workers
from lakebed.log.writer import PartitionAppend
from lakebed.meta.model import MetaEntry
from support.log_host import METAS, TP, WITH_REGISTRY, Host

pytestmark = pytest.mark.metas(*METAS)


async def fill(host: Host, count: int = 5) -> Any:
    broker = host.broker()
    for number in range(count):
        await host.append(broker, b"a%d" % number, b"b%d" % number)
    return broker


async def vacuuming(services: LogServices) -> None:
    await LogSchedule(services, "vacuum", 60.0).run(services.sweeper.sweep_once)


async def cursor(host: Host) -> int:
    found = await host.services().records.find(TP, paths.cursor(TP), Cursor)
    return found.value.offset if found is not None else 0


async def pending_again(host: Host, broker: Any, *records: bytes) -> None:
    """Committed, and its broker stopped before the index entry."""
    await broker.writer.append_shared([PartitionAppend(TP, (RecordChunk(columns(records)),))])
    found = (await broker.records.control(TP)).value
    await broker.writer.drain()
    await host.meta_remove(paths.index(TP, found.sequence_counter))
    await host.meta_put(paths.control(TP), msgspec.json.encode(found))


async def test_a_compactor_finishes_the_append_of_a_broker_that_died(host: Host) -> None:
    """The pending append gets its index entry and is compacted with the others."""
    broker = await fill(host, 2)
    await pending_again(host, broker, b"last")
    services = host.services()

    assert "compacted" == await services.compactor.compact_once(TP)
    assert (await services.records.control(TP)).value.pending is None
    assert [paths.index(TP, 5)] == await host.meta_keys("/index/")
    assert [b"a0", b"b0", b"a1", b"b1", b"last"] == await host.read_all(host.broker())


async def test_the_vacuum_leaves_the_blob_of_a_pending_append(host: Host) -> None:
    """Nothing but the control record refers to it, however old it is; a dry run reports the same."""
    broker = await fill(host, 1)
    await pending_again(host, broker, b"last")
    await host.clock.advance(10_000)
    services = host.services()

    assert [] == (await services.sweeper.sweep_once(dry_run=True)).orphans
    assert [] == (await services.sweeper.sweep_once()).orphans
    assert [b"a0", b"b0", b"last"] == await host.read_all(host.broker())


async def test_the_vacuum_reports_and_counts_what_it_deletes(host: Host) -> None:
    """Partitions, candidates, orphans and their bytes; a dry run deletes nothing and announces nothing."""
    await fill(host, 2)
    for name, size in (("x", 3), ("y", 40)):
        await host.store.create(f"{paths.SHARED}{name}", b"z" * size)
    await host.clock.advance(10_000)
    context = host.context()
    services = LogServices(context, host.meta())
    before = await host.meta_value(paths.control(TP))

    dry = await services.sweeper.sweep_once(dry_run=True)
    assert before == await host.meta_value(paths.control(TP)) and 4 == len(await host.objects())
    assert 0 == context.metrics.value("lakebed_log_swept_total", reason="vacuumed")
    done = await services.sweeper.sweep_once()

    assert LogSweepReport(1, 4, [f"{paths.SHARED}x", f"{paths.SHARED}y"], 43) == dry == done
    assert 2 == context.metrics.value("lakebed_log_swept_total", reason="vacuumed")
    assert 2 == len(await host.objects())
    assert now_ms(host.clock) - 100_000 == (await services.records.control(TP)).value.vacuum_before_ms


async def test_a_dry_run_leaves_entries_that_a_compaction_has_replaced(host: Host) -> None:
    """A slow writer put an entry back that is compacted already: the vacuum removes it, a dry run only looks."""
    await fill(host, 3)
    late = await host.meta_value(paths.index(TP, 2))
    services = host.services()
    assert "compacted" == await services.compactor.compact_once(TP)
    await host.meta_put(paths.index(TP, 2), late)
    await host.clock.advance(10_000)
    before = await host.meta_keys("/index/")

    await services.sweeper.sweep_once(dry_run=True)
    assert before == await host.meta_keys("/index/")
    await services.sweeper.sweep_once()

    assert [paths.index(TP, 6)] == await host.meta_keys("/index/")
    assert 6 == len(await host.read_all(host.broker()))


def test_only_wal_entries_inside_a_compacted_range_are_shadows() -> None:
    """Before it, behind it and across its start they are read; the compacted entry itself is never one."""

    def span(start: int, end: int, kind: str = "WAL") -> IndexSpan:
        return IndexSpan(start, end, IndexEntry(kind, end - start + 1, "s3://b/x", "bytes-batch-v1", 1))  # type: ignore[arg-type]

    spans = [span(1, 2), span(2, 3), span(3, 3), span(4, 6), span(3, 8, "COMPACTED"), span(9, 9)]

    assert [(4, 6), (3, 3)] == [(one.start_offset, one.end_offset) for one in shadows(spans)]
    assert [] == shadows([span(1, 2), span(3, 4)])


@pytest.mark.parametrize("kind", ["gone", "vacuumed", "blob"])
async def test_a_compaction_that_cannot_be_finished_is_given_up_and_leaves_no_record(host: Host, kind: str) -> None:
    """Its end entry, its right to commit or its blob is gone: the next pass starts anew, nothing is lost."""
    broker, context = await fill(host, 3), host.context()
    services = LogServices(context, host.meta())
    before = await host.read_all(broker)
    spans = await services.records.spans(TP, 1, limit=9)
    (record,) = await services.compactor._write([CompactionRun(TP, tuple(spans), 0)])
    assert record is not None
    await services.records.create(TP, paths.compaction(TP), record)
    if kind == "gone":
        await host.append(broker, b"x")
        await host.meta_put(paths.compaction(TP), msgspec.json.encode(msgspec.structs.replace(record, end_offset=5)))
    elif kind == "vacuumed":
        await services.records.change(TP, lambda now: control.sweep_announced(now, record.created_at_ms))
    else:
        await host.store.delete(services.uris.key(record.data_key))

    assert "abandoned" == await services.compactor.compact_once(TP)
    assert 1 == context.metrics.value("lakebed_log_compactions_total", outcome="abandoned")
    assert [paths.cursor(TP)] == await host.meta_keys("meta/compaction")
    assert before == (await host.read_all(host.broker()))[:6]
    await host.clock.advance(1.0)
    assert "compacted" == await services.compactor.compact_once(TP)
    assert before == (await host.read_all(host.broker()))[:6]


async def test_a_compaction_record_carries_what_a_successor_needs(host: Host) -> None:
    """Range, count, the last source's start, the time of the last append and of the blob."""
    broker = host.broker()
    for number in range(3):
        await host.append(broker, b"a%d" % number, b"b%d" % number)
        await host.clock.advance(1.0)
    context = host.context()
    services = LogServices(context, host.meta())
    spans = await services.records.spans(TP, 1, limit=9)
    (record,) = await services.compactor._write([CompactionRun(TP, tuple(spans), 0)])

    assert record is not None
    at_ms = now_ms(host.clock)
    assert (1, 6, 6, 5) == (record.start_offset, record.end_offset, record.msg_count, record.tail_start_offset)
    assert (at_ms, at_ms - 1000) == (record.created_at_ms, record.last_append_at_ms)
    size = (await host.store.head(services.uris.key(record.data_key))).size
    assert size == context.metrics.value("lakebed_log_compacted_bytes_total")
    assert "WRITING_COMPACTED_INDEX" == record.state


async def test_a_source_that_vanished_before_it_was_read_gives_the_compaction_up(host: Host) -> None:
    """Another compactor was faster: nothing is written."""
    await fill(host, 3)
    (first, *_) = await host.objects(paths.SHARED)
    await host.store.delete(first)
    services = host.services()

    assert "abandoned" == await services.compactor.compact_once(TP)
    assert [paths.cursor(TP)] == await host.meta_keys("meta/compaction")
    assert [] == [key for key in await host.objects() if "/compacted/" in key]


async def test_the_lag_counts_what_is_neither_compacted_nor_trimmed(host: Host) -> None:
    """All at first, what came since afterwards, and nothing of what a trim removed."""
    broker, services = await fill(host, 2), host.services()
    lags = [await services.compactor.lag(TP)]
    await services.compactor.compact_once(TP)
    lags.append(await services.compactor.lag(TP))
    await host.append(broker, b"x", b"y", b"z")
    lags.append(await services.compactor.lag(TP))
    await broker.admin.trim(TP, 7)
    lags.append(await services.compactor.lag(TP))

    assert [4, 0, 3, 1] == lags


async def test_a_trim_past_the_cursor_moves_it(host: Host) -> None:
    """What was trimmed is not compacted, and the cursor does not stay below the start of the log."""
    broker, services = await fill(host, 4), host.services()
    await broker.admin.trim(TP, 5)
    await services.retention.apply_once(TP)

    assert "compacted" == await services.compactor.compact_once(TP)
    assert 9 == await cursor(host)
    (span,) = await services.records.spans(TP, 1, limit=9)
    assert (5, 8) == (span.start_offset, span.end_offset)


async def test_one_partition_that_fails_does_not_stop_a_pass(host: Host) -> None:
    """Its error's code is its result; the others are compacted, and the claim is given back."""
    broker, services = await fill(host), host.services()
    other = TopicPartition("orders", 1)
    for _ in range(2):
        await host.append(broker, b"x", tp=other)
    await host.meta_put(paths.control(other), b"not json", other.partition_key)

    assert {TP: "compacted", other: "corrupt"} == await services.scheduler.pass_once()
    assert [] == await host.meta_keys("compactor-claim")


@pytest.mark.parametrize("workers", [1, 3])
async def test_a_pass_writes_no_more_blobs_at_once_than_the_settings_allow(host: Host, workers: int) -> None:
    """Each partition fills a blob of its own here: compact_workers of them are under way, and all get their turn."""
    broker = host.broker()
    services = host.services(compact_workers=workers, compact_max_bytes=80, compact_blob_bytes=80)
    tps = [TopicPartition("orders", number) for number in range(8)]
    for tp in tps:
        for _ in range(2):
            await host.append(broker, b"x", tp=tp)
    writing: list[int] = [0]
    most: list[int] = []
    create = host.store.create

    async def slow(key: str, data: bytes) -> Any:
        writing[0] += 1
        await settle(20)  # every other worker comes as far as this
        most.append(writing[0])
        writing[0] -= 1
        return await create(key, data)

    host.store.create = slow  # type: ignore[method-assign]
    done = await services.scheduler.pass_once()

    assert dict.fromkeys(tps, "compacted") == done and 8 == len(most)
    assert workers == max(most)


async def test_one_claim_covers_several_compactions_but_not_without_end(host: Host) -> None:
    """A partition with a backlog is compacted in rounds; the gauge shows what is left."""
    broker = host.broker()
    for number in range(2 * RUNS_MAX + 4):
        await host.append(broker, b"%d" % number)
    context = host.context(compact_max_entries=2, compact_fan_in=100)
    services = LogServices(context, host.meta())

    assert {TP: "compacted"} == await services.scheduler.pass_once()
    assert 4 == context.metrics.value("lakebed_log_compaction_lag_records")
    assert 1 == context.metrics.value("lakebed_log_known_partitions")
    assert RUNS_MAX == context.metrics.value("lakebed_log_compactions_total", outcome="compacted")
    await services.scheduler.pass_once()
    assert 0 == context.metrics.value("lakebed_log_compaction_lag_records")
    assert 2 == context.metrics.value("lakebed_log_compactions_total", outcome="compacted") - RUNS_MAX


async def test_the_lag_of_a_partition_that_is_gone_is_not_shown(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has deleted it: nothing is behind any more."""
    await host.append(host.broker(), b"one")
    context = host.context(compact_min_entries=100)
    services = LogServices(context, host.meta())
    await services.scheduler.pass_once()
    before = context.metrics.value("lakebed_log_compaction_lag_records")

    async def gone(tp: TopicPartition) -> None:
        raise UnknownTopicPartition(f"{tp} does not exist")

    monkeypatch.setattr(services.compactor, "plan", gone)
    result = await services.scheduler.pass_once()

    assert (1, {TP: "gone"}) == (before, result)
    assert 0 == context.metrics.value("lakebed_log_compaction_lag_records")


@pytest.mark.metas("memory")  # counts the sessions
async def test_the_compactor_runs_again_after_its_pause_and_releases_its_session_at_the_end(host: Host) -> None:
    """Nothing before compact_every_s is over; a cancelled service leaves no session behind."""
    broker, services = await fill(host), host.services(compact_every_s=5.0)
    running = asyncio.create_task(services.scheduler.run())
    await settle(200)
    assert 1 == len(await host.meta_keys("/index/"))
    for _ in range(2):
        await host.append(broker, b"x")
    await host.clock.advance(4.9)
    assert 3 == len(await host.meta_keys("/index/"))
    await host.clock.advance(0.2)
    await settle(200)

    assert 2 == len(await host.meta_keys("/index/"))
    assert 1 == len(host.state.sessions)
    runs = await RunReader(host.context(), "log").latest(5)
    assert {("log compaction", "done", str(TP))} == {(run.kind, run.state, run.subject) for run in runs}
    assert [(2, 2), (10, 10)] == [(run.rows_in, run.rows_out) for run in runs]
    assert ["1 partitions, 2 entries into 1", "1 partitions, 5 entries into 1"] == [run.reason for run in runs]
    await host.clock.advance(20.0)
    await settle(200)
    assert 2 == len(await RunReader(host.context(), "log").latest(5))  # passes without work leave no record
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert {} == host.state.sessions


@pytest.mark.metas("memory")  # ends a session
async def test_a_claim_names_its_node_and_a_session_that_ended_is_replaced(host: Host) -> None:
    """After the claim's time without a heartbeat the first pass may be refused; the next one opens a session."""
    broker, services = await fill(host), host.services(claim_s=15.0)
    claimed: list[bytes] = []
    put = services.meta.put

    async def seen(key: str, value: bytes, **options: Any) -> MetaEntry:
        if key == paths.claim(TP):
            claimed.append(value)
        return await put(key, value, **options)

    services.meta.put = seen  # type: ignore[method-assign]
    await services.scheduler.pass_once()
    host.state.sessions.clear()
    for _ in range(2):
        await host.append(broker, b"x")
    results = [(await services.scheduler.pass_once())[TP] for _ in range(2)]

    assert {"compactor_id": "node-2", "claimed_at_ms": now_ms(host.clock)} == msgspec.json.decode(claimed[0])
    assert ["busy", "compacted"] == results


def test_the_workers_of_the_log_are_those_that_the_settings_ask_for(host: Host) -> None:
    """The vacuum, the retention of groups and the billing scan are off at 0 seconds."""

    def names(**settings: Any) -> list[str]:
        return [worker.name for worker in workers(host.context(**settings))]

    assert ["log-compactor", "log-vacuum", "log-groups", "log-billing"] == names()
    assert ["log-compactor", "log-billing"] == names(vacuum_every_s=0.0)
    assert ["log-compactor", "log-vacuum", "log-groups"] == names(billing_every_s=0.0)
    assert ["log-compactor", "log-vacuum", "log-billing"] == names(group_retention_s=0.0)


async def test_the_stored_bytes_are_measured_in_one_process_of_a_lake(host: Host) -> None:
    """The first to come keeps the scan until it ends; then another takes it over."""
    await fill(host, 2)
    one = host.context()
    first = StoredBytesScan(LogServices(one, host.meta()))
    other = host.context()
    second = StoredBytesScan(LogServices(other, host.meta()))
    for _ in range(2):
        assert await first.scan() is not None and await second.scan() is None
    stored = [context.metrics.value("lakebed_log_s3_stored_objects") for context in (one, other)]
    assert [2, 0] == stored

    assert first._session is not None
    await first._session.close()
    assert await second.scan() is not None and await first.scan() is None


async def test_a_process_whose_claim_of_the_scan_failed_does_not_measure(host: Host) -> None:
    """It asks again the next time, and finds that another process measures by then."""
    failing, other = LogServices(host.context(), host.meta()), host.services()
    put = failing.meta.put

    async def unanswered(*arguments: Any, **options: Any) -> MetaEntry:
        await put(*arguments, **options)
        raise OutcomeUnknown("the connection was lost")

    failing.meta.put = unanswered  # type: ignore[method-assign]
    scan = StoredBytesScan(failing)
    with pytest.raises(OutcomeUnknown):
        await scan.scan()
    failing.meta.put = put  # type: ignore[method-assign]

    assert await StoredBytesScan(other).scan() is not None
    assert await scan.scan() is None


async def test_every_stage_of_a_compaction_is_measured(host: Host) -> None:
    """Discovery, plan, read, write and commit have their times; chosen entries, blobs and bytes are counted."""
    await fill(host, 4)
    context = host.context()
    await LogServices(context, host.meta()).scheduler.pass_once()

    stages = ("discover", "plan", "read", "write", "commit")
    assert [1] * 5 == [context.metrics.value("lakebed_log_compaction_seconds_count", stage=one) for one in stages]
    assert 4 == context.metrics.value("lakebed_log_compaction_candidates")
    assert 0 == context.metrics.value("lakebed_log_compaction_pending")
    assert 1 == context.metrics.value("lakebed_log_compacted_blobs_total")
    assert 0 < context.metrics.value("lakebed_log_compacted_bytes_total")


async def test_runs_are_pending_until_their_blob_is_committed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the bucket takes the blob of two partitions, both are; afterwards none is."""
    broker, context = await fill(host, 2), host.context()
    for _ in range(2):
        await host.append(broker, b"x", tp=TopicPartition("orders", 3))
    services, create = LogServices(context, host.meta()), host.store.create
    waits, go = asyncio.Event(), asyncio.Event()

    async def held(key: str, data: bytes) -> Any:
        waits.set()
        await go.wait()
        return await create(key, data)

    monkeypatch.setattr(host.store, "create", held)
    compacting = asyncio.create_task(services.scheduler.pass_once())
    await waits.wait()

    assert 2 == context.metrics.value("lakebed_log_compaction_pending")
    go.set()
    assert ["compacted"] * 2 == [*(await compacting).values()]
    assert 0 == context.metrics.value("lakebed_log_compaction_pending")


async def test_the_vacuum_worker_waits_first_and_then_works_every_time(host: Host) -> None:
    """A process that restarts often does not scan the bucket at each start."""
    await host.store.create(f"{paths.SHARED}orphan", b"x")
    await host.clock.advance(1000)
    running = asyncio.ensure_future(vacuuming(host.services()))
    await host.clock.advance(59.0)
    assert 1 == len(await host.objects())
    await host.clock.advance(2.0)
    await settle(100)
    assert [] == await host.objects()
    running.cancel()


async def test_a_vacuum_whose_process_restarts_often_comes_all_the_same(host: Host) -> None:
    """The next process waits for the rest of the time, not for all of it again."""
    await host.store.create(f"{paths.SHARED}orphan", b"x")
    await host.clock.advance(1000)
    for _ in range(2):
        running = asyncio.ensure_future(vacuuming(host.services()))
        await host.clock.advance(40.0)
        await settle(100)
        running.cancel()

    assert [] == await host.objects()


async def test_processes_of_a_lake_share_the_passes_of_the_vacuum(host: Host) -> None:
    """However many there are, one of them works each time; also after a clock that was ahead."""
    passes: list[float] = []

    async def noted() -> None:
        passes.append(host.clock.monotonic_s())

    await host.meta_put(paths.last_pass("vacuum"), msgspec.json.encode(PassTime(now_ms(host.clock) + 10**9)), "")
    began_s = host.clock.monotonic_s()
    each = [LogSchedule(host.services(), "vacuum", 60.0) for _ in range(5)]
    running = [asyncio.ensure_future(schedule.run(noted)) for schedule in each]
    for _ in range(190):
        await host.clock.advance(1.0)
    for one in running:
        one.cancel()

    assert [60.0, 120.0, 180.0] == [round(at_s - began_s) for at_s in passes]


async def test_processes_that_find_a_pass_due_at_the_same_time_make_one(host: Host) -> None:
    """Both read the same time, and one of them stores its own: at the first start, and whenever a pass is due."""
    passes: list[float] = []

    async def noted() -> None:
        passes.append(host.clock.monotonic_s())

    async def run(services: LogServices) -> None:
        get = services.meta.get

        async def slow(key: str, **more: Any) -> MetaEntry:
            try:
                return await get(key, **more)
            finally:
                await settle(100)  # the others have read by now

        services.meta.get = slow  # type: ignore[method-assign]
        await LogSchedule(services, "vacuum", 60.0).run(noted)

    running = [asyncio.ensure_future(run(host.services())) for _ in range(3)]
    for _ in range(130):
        await host.clock.advance(1.0)
    failed = [one.exception() for one in running if one.done()]
    for one in running:
        one.cancel()

    assert (2, []) == (len(passes), failed)


async def test_the_stored_bytes_are_measured_soon_after_the_start(host: Host) -> None:
    """A process that lives for less than `log.billing_every_s` shows them too; one that fails at once costs no scan."""
    await fill(host, 2)
    context = host.context()
    running = asyncio.ensure_future(StoredBytesScan(LogServices(context, host.meta())).run(3600.0, host.clock))
    await host.clock.advance(50.0)
    before = context.metrics.value("lakebed_log_s3_stored_objects")
    await host.clock.advance(20.0)
    await settle(100)
    running.cancel()

    assert (0, 2) == (before, context.metrics.value("lakebed_log_s3_stored_objects"))


async def test_a_claim_that_another_holds_by_now_is_not_released(host: Host) -> None:
    """Ours expired while we worked and another process took the partition: its claim stays."""
    await fill(host, 2)
    services = host.services()
    compact = services.compactor.compact

    async def overtaken(runs: Any) -> Any:
        await host.meta_remove(paths.claim(TP))
        await host.meta_put(paths.claim(TP), b"another's")
        return await compact(runs)

    services.compactor.compact = overtaken  # type: ignore[method-assign]
    await services.scheduler.pass_once()

    assert b"another's" == await host.meta_value(paths.claim(TP))


async def test_a_run_behind_one_that_was_given_up_is_not_committed(host: Host) -> None:
    """The cursor does not pass records that are still in their small blobs."""
    await fill(host, 4)
    services = LogServices(host.context(), host.meta())
    spans = await services.records.spans(TP, 1, limit=9)
    await host.store.delete(services.uris.key(spans[0].entry.data_key))
    runs = [CompactionRun(TP, tuple(spans[:2]), 0), CompactionRun(TP, tuple(spans[2:]), 0)]

    before = await services.records.find(TP, paths.cursor(TP), Cursor)

    outcome = await services.compactor.compact(runs)

    assert ({TP: "abandoned"}, before) == (outcome, await services.records.find(TP, paths.cursor(TP), Cursor))


async def test_a_partition_that_fails_is_named_in_the_run_and_the_others_are_compacted(host: Host) -> None:
    """Whether or not others were compacted: the record of the pass says which failed, and why."""
    bad, context = TopicPartition("orders", 3), host.context()
    broker, services = await fill(host), LogServices(context, host.meta())
    await host.append(broker, b"x", tp=bad)
    await host.meta_put(paths.cursor(bad), b"nonsense", bad.partition_key)
    for _ in range(2):
        async with context.run_log("log").record("pass") as run:
            await services.scheduler.work(run)
        await host.clock.advance(120.0)  # a failure that repeats is recorded once a minute

    second, first = await RunReader(context, "log").latest(5)

    assert ("failed", str(TP), 10) == (first.state, first.subject, first.rows_in)
    assert ("failed", str(bad), 0) == (second.state, second.subject, second.rows_in)
    assert {"orders/3: corrupt"} == {first.reason, second.reason}


async def test_a_partition_that_another_process_claims_after_the_look_is_left_to_it(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two compactors one does the work; where the claim fails, the pass says how."""
    await fill(host)
    services = host.services()

    async def free(tp: TopicPartition) -> bool:
        await host.meta_put(paths.claim(tp), b"{}")  # right after it was looked at
        return False

    monkeypatch.setattr(services.scheduler, "_is_claimed", free)
    claimed = await services.scheduler.pass_once()
    await host.meta_remove(paths.claim(TP))
    monkeypatch.undo()

    async def away(*_: Any) -> MetaEntry:
        raise Unavailable("meta is away")

    monkeypatch.setattr(services.scheduler, "_claim", away)
    failed = await services.scheduler.pass_once()

    assert ({TP: "busy"}, {TP: "unavailable"}) == (claimed, failed)
    assert 5 == len(await host.meta_keys("/index/"))


@pytest.mark.metas(*WITH_REGISTRY)
async def test_a_lake_whose_registry_is_complete_is_not_scanned_for_partitions(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass every few seconds reads the registry; the scan of all of meta is for the first pass of an older lake."""
    await fill(host)
    scheduler, records = (services := host.services()).scheduler, services.records
    await scheduler.pass_once()
    await host.append(host.broker(), b"new", tp=TopicPartition("clicks", 1))
    monkeypatch.setattr(records, "scan", None)

    assert {TP, TopicPartition("clicks", 1)} == set(await scheduler.pass_once())


async def test_a_vacuum_is_recorded_with_what_it_deleted(host: Host) -> None:
    """Where there was something to look at; the rows are the candidates and the deleted objects."""
    context = msgspec.structs.replace(host.context(), node="worker")
    services = LogServices(context, host.meta())
    await _vacuum(context, services)
    await fill(host, 2)
    await host.store.create(f"{paths.SHARED}x", b"123")
    await host.clock.advance(10_000)

    await _vacuum(context, services)

    (run,) = await RunReader(context, "log").latest(5)
    assert ("log vacuum", "done", 3, 1) == (run.kind, run.state, run.rows_in, run.rows_out)
    assert "1 unreferenced objects deleted, 3 bytes" == run.reason


async def test_a_pass_that_finishes_what_a_crash_left_goes_on_with_the_rest(host: Host) -> None:
    """The lag counts what came after the crash, and is not nothing because something was recovered."""
    broker, context = await fill(host), host.context(compact_min_entries=3)
    crashed = LogServices(context, host.meta())
    _, plan = await crashed.compactor.plan(TP)
    (left,) = await crashed.compactor._write(plan.runs)
    assert left is not None
    await crashed.records.create(TP, paths.compaction(TP), left)
    for _ in range(2):
        await host.append(broker, b"x")

    found = await crashed.scheduler.pass_once()

    assert {TP: "recovered"} == found
    assert (11, 2) == (await cursor(host), context.metrics.value("lakebed_log_compaction_lag_records"))


@pytest.mark.parametrize("known", [False, True])
async def test_a_compactor_whose_claims_have_ended_begins_no_compaction(
    host: Host, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Another process may be at work by then. It learns that by a claim that is refused, or by its own clock."""
    other, broker, context = TopicPartition("orders", 3), await fill(host), host.context()
    services = LogServices(context, host.meta())
    for _ in range(3):
        await host.append(broker, b"x", tp=other)
    claim, claimed = services.scheduler._claim, list[TopicPartition]()

    async def late(tp: TopicPartition, session: Any) -> MetaEntry:
        made = await claim(tp, session)
        claimed.append(tp)
        if known and len(claimed) == 2:
            session._ended = True
        if not known and tp == other:
            raise Fenced("the session has ended")
        return made

    monkeypatch.setattr(services.scheduler, "_claim", late)
    before = await host.meta_keys("/index/")
    found = await services.scheduler.pass_once()

    assert ("busy" if not known else "idle", "idle") == (found[other], found[TP])
    assert before == await host.meta_keys("/index/")
    assert 0 == context.metrics.value("lakebed_log_compaction_pending")
    monkeypatch.undo()
    await services.scheduler.close()
    for tp in (TP, other):
        await host.meta_remove(paths.claim(tp), tp.partition_key)
    assert {"compacted"} == set((await services.scheduler.pass_once()).values())


@pytest.mark.parametrize("outcome", ["abandoned", "unavailable"])
async def test_a_pass_counts_no_rows_of_what_it_gave_up(
    host: Host, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    """Another compactor was faster, or the bucket is away: a pass that has failed says so."""
    await fill(host)
    context = host.context()
    services = LogServices(context, host.meta())

    async def compact(runs: Any) -> Any:
        if outcome == "unavailable":
            raise Unavailable("the bucket is away")
        return {TP: outcome}

    monkeypatch.setattr(services.compactor, "compact", compact)
    async with context.run_log("log").record("pass") as run:
        await services.scheduler.work(run)

    assert (0, 0, True) == (run.rows_in, run.rows_out, run.idle)
    assert ("orders/0: unavailable" if outcome == "unavailable" else "0 partitions, 0 entries into 0") == run.reason
    assert (0, 5) == tuple(context.metrics.value(f"lakebed_log_compaction_{n}") for n in ("pending", "candidates"))
