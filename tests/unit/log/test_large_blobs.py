"""The blobs of one busy partition become large: entries in small blobs move together, each byte a few times at most."""

from __future__ import annotations

import msgspec
import pytest

from lakebed.log import compaction
from lakebed.log.compaction import QUIET_MS, CompactionRun
from lakebed.log.model import IndexEntry, IndexSpan, TopicPartition
from lakebed.log.services import LogServices
from lakebed.log.settings import LogSettings
from support.log_host import TP, Host

DEFAULTS = LogSettings()
MIB = 1024 * 1024


def span(start: int, end: int, size: int, level: int = 1, *, key: str = "", blob_bytes: int = 0) -> IndexSpan:
    entry = IndexEntry("COMPACTED", end - start + 1, key or f"s3://b/{start}", "bytes-batch-v1", 1, 0, size)
    return IndexSpan(start, end, msgspec.structs.replace(entry, level=level, blob_bytes=blob_bytes))


class CompactedPartition:
    """The compacted entries of one partition under the default sizes, and the planner that keeps on merging them."""

    def __init__(self) -> None:
        self.spans: list[IndexSpan] = []
        self.written, self.at = 0, 1

    def add(self, size: int, *, shared_with: int = 0) -> None:
        """A first compaction: one record, in a blob that other partitions may share."""
        self._write([(self.at, self.at, size, 1)], shared_with)
        self.at += 1
        while self.merge():
            pass

    def merge(self, *, quiet: bool = False) -> bool:
        runs = compaction.select_again(
            self.spans,
            lambda span: span.entry.byte_length or 0,
            fan_in=DEFAULTS.compact_fan_in,
            bytes_max=DEFAULTS.compact_max_bytes,
            blob_bytes=DEFAULTS.compact_blob_bytes,
            quiet=quiet,
        )
        made = [CompactionRun(TP, tuple(run), sum(one.entry.byte_length or 0 for one in run)) for run in runs]
        gone = {one.start_offset for run in runs for one in run}
        self.spans = [one for one in self.spans if one.start_offset not in gone]
        self._write([(run.spans[0].start_offset, run.spans[-1].end_offset, run.size, run.level) for run in made], 0)
        return bool(made)

    def _write(self, entries: list[tuple[int, int, int, int]], shared_with: int) -> None:
        size = sum(entry[2] for entry in entries)
        assert size <= DEFAULTS.compact_blob_bytes
        self.written += size
        for start, end, length, level in entries:
            assert length <= DEFAULTS.compact_max_bytes
            key = f"s3://b/{self.written}"
            self.spans.append(span(start, end, length, level, key=key, blob_bytes=size + shared_with))
        self.spans.sort(key=lambda one: one.start_offset)

    @property
    def blobs(self) -> int:
        return len({one.entry.data_key for one in self.spans})


@pytest.mark.parametrize("size_mb, count", [(5, 120), (3, 200), (1, 600), (7.9, 76)])
def test_a_busy_partition_ends_near_ten_blobs_for_600_mb_and_writes_each_byte_a_few_times(
    size_mb: float, count: int
) -> None:
    """Entries of any size, under the default settings: large blobs, and at most three compactions of each byte."""
    partition = CompactedPartition()

    for _ in range(count):
        partition.add(round(size_mb * 1_000_000))

    large = [one for one in partition.spans if one.entry.blob_bytes * 2 >= DEFAULTS.compact_blob_bytes]
    data = sum(one.entry.byte_length or 0 for one in partition.spans)
    assert round(size_mb * 1_000_000) * count == data
    assert 8 <= len({one.entry.data_key for one in large}) <= 11
    assert sum(one.entry.byte_length or 0 for one in partition.spans if one not in large) < DEFAULTS.compact_blob_bytes
    assert partition.written <= (2 if size_mb > 1 else 3) * data
    assert not partition.merge()


@pytest.mark.parametrize("size, count", [(1_000, 4000), (10_000, 4000), (100_000, 3000)])
def test_a_trickle_writes_each_byte_once_for_each_level(size: int, count: int) -> None:
    """Entries that have grown are not written again for each few small ones that come after them."""
    partition = CompactedPartition()

    for _ in range(count):
        partition.add(size)

    assert partition.written <= 5 * size * count
    assert partition.blobs < 32


def test_of_a_quiet_partition_small_entries_of_different_levels_are_merged() -> None:
    """Each would keep a blob that it shares with other partitions."""
    partition = CompactedPartition()
    for _ in range(9):
        partition.add(1_000)
    assert [2, 1] == [one.entry.level for one in partition.spans]

    assert partition.merge(quiet=True)
    assert [3] == [one.entry.level for one in partition.spans]


def test_entries_in_large_blobs_are_not_moved_whoever_shares_them() -> None:
    """A partition whose blobs are large together with those of others writes nothing again."""
    partition = CompactedPartition()

    for _ in range(40):
        partition.add(5_000_000, shared_with=30 * MIB)

    assert 40 == partition.blobs and 40 * 5_000_000 == partition.written


def test_the_blobs_of_older_versions_are_as_large_as_what_the_partition_has_in_them() -> None:
    """Their entries do not know the size of their blob: one with many entries of the partition stays."""

    def again(*spans: IndexSpan) -> list[list[IndexSpan]]:
        return compaction.select_again(
            spans, lambda one: one.entry.byte_length or 0, fan_in=8, bytes_max=100, blob_bytes=400, quiet=False
        )

    alone = [span(number, number, 80) for number in range(1, 5)]

    assert [[one] for one in alone] == again(*alone)
    assert [] == again(*[span(number, number, 80, key="s3://b/joint") for number in range(1, 5)])


def test_what_a_quiet_partition_has_left_becomes_one_blob_if_all_of_it_at_least_doubles() -> None:
    """So a byte is moved a few times at most, however often the partition goes quiet."""
    partition = CompactedPartition()
    for _ in range(5):
        partition.add(5_000_000)
    assert 5 == partition.blobs and not partition.merge()

    assert partition.merge(quiet=True)
    assert 1 == partition.blobs and not partition.merge(quiet=True)
    partition.add(5_000_000)
    assert not partition.merge(quiet=True)


async def test_the_blobs_of_one_busy_partition_become_large_and_nothing_changes_for_readers(host: Host) -> None:
    """A thousandth of the default sizes: 600 KB in blobs near 64 KB, each byte compacted twice; after the vacuum
    nothing else is left."""
    kb = 1024
    context = host.context(
        compact_min_entries=100, compact_min_bytes=4 * kb, compact_max_bytes=8 * kb, compact_blob_bytes=64 * kb
    )
    broker, services = host.broker(), LogServices(context, host.meta())
    records = [b"%04d" % number + b"x" * 996 for number in range(600)]
    for number, record in enumerate(records):
        await host.append(broker, record)
        if number % 5 == 4:
            await services.scheduler.pass_once()
    while "compacted" in (await services.scheduler.pass_once()).values():
        pass

    await host.clock.advance(1000)
    await services.sweeper.sweep_once()

    assert records == await host.read_all(host.broker())
    found = [info.size async for info in host.store.list("llog/") if "compacted/" in info.key]
    assert len(found) <= 20 and 9 <= sum(1 for size in found if size > 50 * kb)
    assert context.metrics.value("lakebed_log_compacted_bytes_total") < 2.2 * sum(found)
    assert all((one.entry.byte_length or 0) <= 8 * kb for one in await services.records.spans(TP, 1, limit=512))


async def test_a_look_for_what_to_compact_again_does_not_grow_with_the_partition(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is full and in large blobs is not read again: a partition of years would be read whole after each
    compaction. Of a quiet one all of it is read."""
    monkeypatch.setattr("lakebed.log.records.PAGE", 8)
    kb = 1024
    context = host.context(
        compact_min_entries=100, compact_min_bytes=4 * kb, compact_max_bytes=8 * kb, compact_blob_bytes=64 * kb
    )
    broker, services = host.broker(), LogServices(context, host.meta())
    looks: list[tuple[int, int]] = []
    compacted = services.compactor._compacted

    async def seen(tp: TopicPartition, start: int, end: int) -> list[IndexSpan]:
        found = await compacted(tp, start, end)
        looks.append((start, len(found)))
        return found

    monkeypatch.setattr(services.compactor, "_compacted", seen)
    for number in range(900):
        await host.append(broker, b"x" * 1000)
        if number % 5 == 4:
            await services.scheduler.pass_once()
    busy = list(looks)
    looks.clear()
    await host.clock.advance(2 * QUIET_MS / 1000)
    await services.scheduler.pass_once()

    assert 150 < busy[-1][0] and max(read for _, read in busy) < 40
    assert 1 in [start for start, _ in looks] and max(read for _, read in looks) > 100
