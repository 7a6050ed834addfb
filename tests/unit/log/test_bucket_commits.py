"""What commits cost on meta in the bucket: many control records are in one object, so a flight is a few writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lakebed.core.clock import settle
from lakebed.log.broker import Broker
from lakebed.log.codec import columns
from lakebed.log.model import TopicPartition
from lakebed.log.producers import RecordChunk
from lakebed.log.writer import Appended, PartitionAppend
from lakebed.meta.bucket.backend import BucketMeta
from support.log_host import Host

FLIGHTS = 30


class Writes:
    """Counts the writes that reach the store of a host, by the folder of their key."""

    def __init__(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_folder: Counter[str] = Counter()
        for verb in ("create", "replace"):
            monkeypatch.setattr(host.store, verb, self._counted(getattr(host.store, verb)))

    def _counted(self, write: Any) -> Any:
        async def counted(key: str, *args: Any, **options: Any) -> Any:
            self.by_folder["/".join(key.split("/")[:2])] += 1
            return await write(key, *args, **options)

        return counted


@pytest.fixture
async def writes(host: Host, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Writes]:
    yield Writes(host, monkeypatch)


async def flights(broker: Broker, partitions: int, count: int) -> None:
    groups = [PartitionAppend(TopicPartition("t", n), (RecordChunk(columns([b"x"])),)) for n in range(partitions)]
    for _ in range(count):
        outcomes = await broker.writer.append_shared(groups)
        assert all(isinstance(one, Appended) for (one,) in outcomes), outcomes
        await settle(20)


@pytest.mark.parametrize("partitions", [1, 10, 50, 100, 128, 300])
async def test_a_flight_of_p_partitions_is_at_most_two_writes_and_one_per_fifty(
    host: Host, writes: Writes, partitions: int
) -> None:
    """One blob, and one write for each bin: all control records of it, with the index entries of the flight before.

    Spills of the index are among the writes that are counted.
    """
    broker = Broker(host.context(), BucketMeta(host.context(), "llog-meta", layout="bins"))
    await flights(broker, partitions, 3)  # partitions are created, and bins split
    writes.by_folder.clear()

    await flights(broker, partitions, FLIGHTS)

    assert FLIGHTS == writes.by_folder["llog/wal-shared"]
    assert sum(writes.by_folder.values()) <= FLIGHTS * (2 + partitions / 50), writes.by_folder
    await broker.writer.drain()
    ends = [(await broker.reader.control(TopicPartition("t", number))).sequence_counter for number in range(partitions)]
    assert [FLIGHTS + 3] * partitions == ends


@pytest.mark.parametrize("partitions", [1, 50, 128])
async def test_flights_of_the_default_delay_where_requests_are_billed_keep_the_bound(
    host: Host, writes: Writes, partitions: int
) -> None:
    """250 ms apart: each flight brings the index entries of the one before, so no other write clears them. They are
    cleared when the partitions have become idle."""
    broker = Broker(host.context(batch_max_delay_ms=250.0), BucketMeta(host.context(), "llog-meta", layout="bins"))
    await flights(broker, partitions, 3)
    await host.clock.advance(10)
    writes.by_folder.clear()

    for _ in range(FLIGHTS):
        await flights(broker, partitions, 1)
        await host.clock.advance(0.25)

    assert FLIGHTS == writes.by_folder["llog/wal-shared"]
    assert sum(writes.by_folder.values()) <= FLIGHTS * (2 + partitions / 50), writes.by_folder
    await host.clock.advance(2)
    assert all([(await broker.reader.control(TopicPartition("t", n))).pending is None for n in range(partitions)])


async def test_an_old_bucket_keeps_a_head_for_each_group(host: Host, writes: Writes) -> None:
    """Nothing is moved: what was written with one head each is found and changed there."""
    old = Broker(host.context(), BucketMeta(host.context(), "llog-meta"))
    await flights(old, 3, 1)
    await old.writer.drain()
    writes.by_folder.clear()

    now = BucketMeta(host.context(), "llog-meta", layout="found")
    await flights(Broker(host.context(), now), 3, 1)

    assert {"llog/wal-shared": 1, "llog-meta/heads": 3} == writes.by_folder
    assert {"t:0", "t:1", "t:2"} <= set(await now.groups())
