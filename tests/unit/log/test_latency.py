"""A store that takes 25 ms for each get: reads and compactions wait for many gets at once, not for each in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from lakebed.log import paths
from lakebed.log.model import IndexEntry, IndexSpan, TopicPartition
from lakebed.log.reader import GAP_BYTES_MAX, GETS_MAX, together
from support.log_host import TP, Host

GET_S = 0.025
OLD_BYTES_PER_S = 37_000  # one get after another: ten records of 100 bytes each 25 ms


class Gets:
    """Makes each get of the host's store take GET_S, and counts those under way."""

    def __init__(self, host: Host) -> None:
        self._host, self.most, self.count, self._now = host, 0, 0, 0
        for verb in ("get", "get_range"):
            setattr(host.store, verb, self._slow(getattr(host.store, verb)))

    def _slow(self, call: Any) -> Any:
        async def slow(*arguments: Any) -> Any:
            self._now += 1
            self.count, self.most = self.count + 1, max(self.most, self._now)
            try:
                await self._host.clock.sleep(GET_S)
                return await call(*arguments)
            finally:
                self._now -= 1

        return slow

    async def elapsed_s(self, work: Awaitable[Any]) -> float:
        began = self._host.clock.monotonic_s()
        task = asyncio.ensure_future(work)
        while not task.done():
            await self._host.clock.advance(GET_S / 5)
        await task
        return self._host.clock.monotonic_s() - began


@pytest.fixture
async def appended(host: Host) -> Host:
    """1000 appends of ten records of 100 bytes, each in a blob of its own."""
    broker = host.broker()
    for number in range(1000):
        await host.append(broker, *[b"%0100d" % (number * 10 + i) for i in range(10)])
    return host


async def test_a_cold_catch_up_is_fifty_times_faster_than_one_get_after_another(appended: Host) -> None:
    """Every record is read, in order, with as many gets at once as a reader may have."""
    gets, broker = Gets(appended), appended.broker()
    found: list[bytes] = []

    async def catch_up() -> None:
        found.extend(await appended.read_all(broker))

    seconds = await gets.elapsed_s(catch_up())

    assert [b"%0100d" % number for number in range(10_000)] == found
    assert 1_000_000 / seconds >= 50 * OLD_BYTES_PER_S
    assert GETS_MAX == gets.most


async def test_a_compaction_reads_its_sources_side_by_side(appended: Host) -> None:
    """1000 appends take about as long as sixteen gets: fifty times faster than one get after another."""
    gets, services = Gets(appended), appended.services(compact_max_entries=1000)

    seconds = await gets.elapsed_s(services.compactor.compact_once(TP))

    assert 1_000_000 / seconds >= 50 * OLD_BYTES_PER_S
    assert 1000 == gets.count and GETS_MAX == gets.most
    assert 1 == len(await services.records.spans(TP, 1, limit=9))


async def test_a_consume_of_many_partitions_waits_for_one_get(host: Host) -> None:
    """Forty partitions in forty blobs: as long as one."""
    broker = host.broker()
    tps = [TopicPartition("orders", number) for number in range(40)]
    for tp in tps:
        await host.append(broker, b"x", tp=tp)
    gets, reader = Gets(host), host.broker().reader

    seconds = await gets.elapsed_s(reader.read_many([(tp, 1, 100) for tp in tps], bytes_max=4000))

    assert 40 == gets.count and seconds < 3 * GET_S


async def test_a_get_that_fails_leaves_no_other_behind(appended: Host) -> None:
    """One blob is gone: the read ends before its records, when the other gets have ended too."""
    broker = appended.broker()
    spans = await broker.records.spans(TP, 1, limit=30)
    await appended.store.delete(broker.uris.key(spans[20].entry.data_key))
    gets = Gets(appended)
    counts: list[int] = []

    async def read() -> None:
        counts.append((await broker.reader.read(TP, 195, bytes_max=5000)).count)

    await gets.elapsed_s(read())

    assert [6] == counts and 0 == gets._now


def test_slices_of_one_blob_are_read_together_unless_much_lies_between_them() -> None:
    """Neighbours and small gaps are one get; an entry without a length is the whole blob."""

    def span(offset: int, length: int | None) -> IndexSpan:
        return IndexSpan(1, 1, IndexEntry("WAL", 1, f"s3://b/{paths.SHARED}x", "bytes-batch-v1", 1, offset, length))

    def groups(*spans: IndexSpan) -> list[list[int | None]]:
        return [[one.entry.byte_offset for one in group] for group in together(spans)]

    assert [[0, 10, 30]] == groups(span(30, 5), span(0, 10), span(10, 20))
    assert [[0], [GAP_BYTES_MAX + 11]] == groups(span(0, 10), span(GAP_BYTES_MAX + 11, 5))
    assert [[0, GAP_BYTES_MAX + 10]] == groups(span(0, 10), span(GAP_BYTES_MAX + 10, 5))
    assert [[0]] == groups(span(0, None))
