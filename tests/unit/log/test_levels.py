"""Compaction makes fewer objects: partitions share blobs, small entries are compacted again, sources are read once."""

from __future__ import annotations

from typing import Any

import pytest

from lakebed.core.errors import OutcomeUnknown, Unavailable
from lakebed.log import compaction, paths
from lakebed.log.compaction import CompactionRun
from lakebed.log.model import IndexEntry, IndexSpan, TopicConfig, TopicPartition
from lakebed.log.services import LogServices
from lakebed.log.settings import LogSettings
from lakebed.meta.model import MetaEntry
from support.log_host import TP, Host

DEFAULTS = LogSettings()


def tps(count: int) -> list[TopicPartition]:
    return [TopicPartition("orders", number) for number in range(count)]


def defaults(**other: Any) -> dict[str, Any]:
    return {"compact_min_entries": DEFAULTS.compact_min_entries, **other}


def span(start: int, end: int, size: int, level: int) -> IndexSpan:
    kind = "COMPACTED" if level else "WAL"
    entry = IndexEntry(kind, end - start + 1, f"s3://b/{start}", "bytes-batch-v1", 1, 0, size, 1, level)  # type: ignore[arg-type]
    return IndexSpan(start, end, entry)


async def compacted_objects(host: Host) -> list[str]:
    return [key for key in await host.objects() if "compacted/" in key]


async def run_for(host: Host, services: LogServices, *, hours: float, every_s: float, period: int, of: int) -> int:
    """Each partition gets a record every `period` passes, in turn; a pass every `every_s`. The blobs of compaction."""
    made: set[str] = set()
    broker = host.broker()
    for number in range(round(hours * 3600 / every_s)):
        due = [tp for tp in tps(of) if tp.partition % period == number % period]
        await host.append_all(broker, {tp: [b"%d" % number] for tp in due})
        await host.clock.advance(every_s)
        await services.scheduler.pass_once()
        made.update(await compacted_objects(host))
    return len(made)


@pytest.mark.parametrize(
    "partitions, hours, every_s",
    [pytest.param(128, 3, 15, marks=[pytest.mark.full, pytest.mark.timeout(300)]), (16, 2, 30)],
)
async def test_partitions_with_a_trickle_make_tens_of_objects_an_hour(
    host: Host, partitions: int, hours: int, every_s: float
) -> None:
    """A record each every two minutes, never two at the same time: few compacted blobs, short indexes, no loss."""
    services = host.services(**defaults())
    period = round(120 / every_s)

    made = await run_for(host, services, hours=hours, every_s=every_s, period=period, of=partitions)

    assert 1 <= made <= hours * 60, made
    for tp in tps(partitions)[::7]:
        assert len(await services.records.spans(tp, 1, limit=512)) < 20
        assert hours * 30 == len(await host.read_all(host.broker(), tp))


async def test_objects_do_not_pile_up_behind_a_trickle(host: Host) -> None:
    """After the vacuum, hours of small appends leave fewer objects than one hour made, and every record is there."""
    services = host.services(**defaults(compact_fan_in=4))
    await run_for(host, services, hours=8, every_s=600, period=1, of=12)
    before = {tp: await host.read_all(host.broker(), tp) for tp in tps(12)}

    await host.clock.advance(1000)
    await services.sweeper.sweep_once()

    assert before == {tp: await host.read_all(host.broker(), tp) for tp in tps(12)}
    assert 48 == len(before[TP])
    assert len(await host.objects()) < 20


async def test_partitions_share_a_blob_and_a_source_is_read_once_for_all_of_them(host: Host) -> None:
    """Eight WAL blobs of 32 partitions each become one blob, with eight downloads."""
    broker, context = host.broker(), host.context(**defaults(compact_min_entries=8))
    services = LogServices(context, host.meta())
    for number in range(8):
        await host.append_all(broker, {tp: [b"%d-%s" % (number, str(tp).encode())] for tp in tps(32)})

    assert dict.fromkeys(tps(32), "compacted") == await services.scheduler.pass_once()

    (shared,) = await compacted_objects(host)
    assert shared.startswith(paths.COMPACTED)
    assert 8 == context.metrics.value("lakebed_log_reads_total")
    assert [b"%d-orders/31" % number for number in range(8)] == await host.read_all(host.broker(), tps(32)[31])


async def test_a_partition_that_is_half_as_old_joins_the_blob_of_one_that_is_due(host: Host) -> None:
    """A young one waits for its own turn."""
    broker, services = host.broker(), host.services(**defaults(compact_after_s=100.0))
    old, half, young = tps(3)
    await host.append(broker, b"a", tp=old)
    await host.clock.advance(45)
    await host.append(broker, b"b", tp=half)
    await host.clock.advance(45)
    await host.append(broker, b"c", tp=young)
    assert {"idle"} == set((await services.scheduler.pass_once()).values())
    await host.clock.advance(11)

    found = await services.scheduler.pass_once()

    assert {old: "compacted", half: "compacted", young: "idle"} == found
    assert 1 == len(await compacted_objects(host))


@pytest.mark.parametrize("kind", ["bytes", "age", "count"])
async def test_a_partition_is_due_by_bytes_by_age_or_by_count(host: Host, kind: str) -> None:
    """Each alone starts a compaction; without any of them it waits."""
    broker = host.broker()
    services = host.services(compact_min_entries=4, compact_min_bytes=1000, compact_after_s=60.0)
    for _ in range(2):
        await host.append(broker, b"x")
    assert "idle" == await services.compactor.compact_once(TP)
    if kind == "bytes":
        await host.append(broker, b"x" * 1000)
    elif kind == "age":
        await host.clock.advance(60)
    else:
        for _ in range(2):
            await host.append(broker, b"x")

    assert "compacted" == await services.compactor.compact_once(TP)


async def test_compacted_entries_are_compacted_again_and_nothing_changes_for_readers(host: Host) -> None:
    """Three of the first level become one of the second; a trim and a read at every offset find the same records."""
    broker, services = host.broker(), host.services(compact_max_entries=2, compact_fan_in=3)
    for number in range(12):
        await host.append(broker, b"a%d" % number, b"b%d" % number)
    before = await host.read_all(broker)
    while "compacted" == await services.compactor.compact_once(TP):
        assert before == await host.read_all(host.broker())

    spans = await services.records.spans(TP, 1, limit=9)
    assert [(1, 24, 2)] == [(one.start_offset, one.end_offset, one.entry.level) for one in spans]
    assert [[record] for record in before] == [await host.read(broker, at, bytes_max=1) for at in range(1, 25)]
    await broker.admin.trim(TP, 20)
    await services.retention.apply_once(TP)
    assert before[19:] == await host.read_all(host.broker())


async def test_retention_leaves_a_blob_that_other_partitions_share(host: Host) -> None:
    """One of two partitions is trimmed: its entry goes, the shared blob stays until nothing refers to it."""
    broker, services = host.broker(), host.services()
    one, other = tps(2)
    for _ in range(2):
        await host.append_all(broker, {one: [b"x"], other: [b"y"]})
    await services.scheduler.pass_once()
    await host.append(broker, b"z", tp=one)
    await broker.admin.configure("orders", TopicConfig())
    await broker.admin.trim(one, 3)

    assert 0 == await services.retention.apply_once(one)
    await host.clock.advance(1000)
    await services.sweeper.sweep_once()
    assert [b"y", b"y"] == await host.read_all(host.broker(), other)
    await broker.admin.trim(other, 3)
    await host.append(broker, b"z", tp=other)
    await services.retention.apply_once(other)
    await host.clock.advance(1000)
    await services.sweeper.sweep_once()
    assert [] == await compacted_objects(host)


async def test_a_source_that_vanished_gives_up_its_run_alone(host: Host) -> None:
    """The other partitions of the blob are compacted."""
    broker, services = host.broker(), host.services()
    one, other = tps(2)
    for tp in (one, other):
        for _ in range(2):
            await host.append(broker, b"x", tp=tp)
    gone = (await services.records.spans(one, 1, limit=1))[0]
    await host.store.delete(services.uris.key(gone.entry.data_key))

    assert {one: "abandoned", other: "compacted"} == await services.scheduler.pass_once()
    assert [b"x", b"x"] == await host.read_all(host.broker(), other)


def test_merges_take_neighbours_of_the_lowest_level_and_leave_full_ones() -> None:
    """Enough next to each other, no gap between them, and never beyond the limit."""

    def merged(*spans: IndexSpan, fan_in: int = 3) -> list[list[int]]:
        runs = compaction.select_merges(spans, lambda one: one.entry.byte_length or 0, fan_in=fan_in, bytes_max=100)
        return [[one.start_offset for one in run] for run in runs]

    ones = [span(number, number, 10, 1) for number in range(1, 7)]
    assert [[1, 2, 3, 4, 5, 6]] == merged(*ones)
    assert [] == merged(*ones[:2])
    assert [] == merged(ones[0], ones[1], ones[3], ones[4])
    assert [[4, 5, 6]] == merged(*ones[:2], span(3, 3, 60, 1), *ones[3:])
    assert [[1, 2, 3], [4, 5, 6]] == merged(*[span(n, n, 30, 1) for n in range(1, 7)])
    twos = [span(number, number, 10, 2) for number in range(1, 4)]
    assert [[4, 5, 6]] == merged(*twos, *ones[3:])
    assert [[1, 2, 3, 4, 5]] == merged(*twos, *ones[3:5])
    assert [] == merged(span(1, 1, 10, 0), span(2, 2, 10, 0), span(3, 3, 10, 0))


def test_a_blob_holds_whole_partitions_and_one_kind_of_compaction() -> None:
    """What does not fit begins another blob; first compactions and merges do not share."""

    def run(number: int, size: int, level: int = 0) -> CompactionRun:
        return CompactionRun(TopicPartition("t", number), (span(1, 1, size, level),), size)

    runs = [run(0, 40), run(1, 40), run(0, 30), run(2, 40), run(3, 10, 1)]
    packed = compaction.pack(runs, 100)

    assert [[0, 0], [1, 2], [3]] == [[one.tp.partition for one in blob] for blob in packed]
    assert [] == compaction.pack([], 100)


async def test_a_partition_that_went_quiet_has_its_few_small_entries_merged_after_a_day(host: Host) -> None:
    """They would keep shared blobs alive for good."""
    broker, services = host.broker(), host.services(compact_max_entries=2)
    for _ in range(2):
        for _ in range(2):
            await host.append(broker, b"x")
        assert "compacted" == await services.compactor.compact_once(TP)
    assert "idle" == await services.compactor.compact_once(TP)
    await host.clock.advance(24 * 3600 + 1)

    assert "compacted" == await services.compactor.compact_once(TP)
    assert 1 == len(await services.records.spans(TP, 1, limit=9))


async def test_a_pass_over_quiet_partitions_writes_nothing(host: Host) -> None:
    """Neither to the bucket nor to meta: claims are taken only where there is something to compact."""
    broker, services = host.broker(), host.services(**defaults())
    for tp in tps(20):
        await host.append(broker, b"x", tp=tp)
    await services.scheduler.pass_once()
    version, objects = host.state.version, await host.objects()

    assert dict.fromkeys(tps(20), "idle") == await services.scheduler.pass_once()
    assert version == host.state.version and objects == await host.objects()


async def test_one_session_holds_the_claims_of_all_partitions(host: Host) -> None:
    """However many are compacted at once, and it stays for the next pass."""
    broker, services = host.broker(), host.services()
    for _ in range(2):
        await host.append_all(broker, {tp: [b"x"] for tp in tps(40)})

    assert dict.fromkeys(tps(40), "compacted") == await services.scheduler.pass_once()
    assert 1 == len(host.state.sessions) and [] == await host.meta_keys("compactor-claim")


@pytest.mark.parametrize("lost", ["claim", "release"])
async def test_a_claim_whose_answer_or_release_was_lost_does_not_stay(host: Host, lost: str) -> None:
    """Its process lives on, so it would never expire: no process could compact the partition any more."""
    broker, services, other = host.broker(), host.services(), host.services()
    for _ in range(2):
        await host.append(broker, b"x")
    put, delete = services.meta.put, services.meta.delete

    async def unanswered(key: str, value: bytes, **options: Any) -> MetaEntry:
        made = await put(key, value, **options)
        if key == paths.claim(TP) and lost == "claim":
            raise OutcomeUnknown("the connection was lost")
        return made

    async def unreachable(key: str, **options: Any) -> None:
        if key == paths.claim(TP) and lost == "release":
            raise Unavailable("the connection was lost")
        await delete(key, **options)

    services.meta.put, services.meta.delete = unanswered, unreachable  # type: ignore[method-assign]
    await services.scheduler.pass_once()
    for _ in range(2):
        await host.append(broker, b"y")

    assert "compacted" == (await other.scheduler.pass_once())[TP]


async def test_a_damaged_source_stops_the_compaction_of_its_partition_alone(host: Host) -> None:
    """The partitions that share its blob are compacted, and the damage is reported."""
    broker, services = host.broker(), host.services()
    damaged, *others = tps(4)
    for tp in (damaged, *others):
        for _ in range(2):
            await host.append(broker, b"some bytes", tp=tp)
    source = services.uris.key((await services.records.spans(damaged, 1, limit=1))[0].entry.data_key)
    found = await host.store.get(source)
    await host.store.replace(source, found.data[:-3] + b"???", found.info.etag)

    assert {damaged: "corrupt", **dict.fromkeys(others, "compacted")} == await services.scheduler.pass_once()
    assert 1 == len(await compacted_objects(host))
    assert "corrupt" == (await services.scheduler.pass_once())[damaged]
