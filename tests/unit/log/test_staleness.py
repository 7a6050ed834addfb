"""What a consumer gets is at most log.poll_s old, on every broker, whether it waits or not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lakebed.core.clock import settle
from lakebed.core.errors import Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.log import paths
from lakebed.log.broker import Broker
from lakebed.log.codec import columns
from lakebed.log.fetcher import FetchRequest
from lakebed.log.model import NAMES_MAX, OffsetOutOfRange, TopicConfig, TopicPartition, UnknownTopicPartition
from lakebed.log.reader import Fetched
from lakebed.meta.memory import MemoryMeta
from lakebed.meta.model import MetaEntry
from support.log_host import TP, Host

POLL_S = 0.25


class Watched(MemoryMeta):
    """Counts the gets of control records; on request it fails them, or holds them or their answers."""

    def __init__(self, host: Host) -> None:
        super().__init__(Runtime(host.clock, Ids.seeded("watched"), Metrics()), host.state)
        self.gets = 0
        self.away = False
        self.held: asyncio.Event | None = None
        self.answers: asyncio.Event | None = None

    async def get(self, key: str, *, partition_key: str = "") -> MetaEntry:
        if key.endswith("/control"):
            self.gets += 1
            if self.held is not None:
                await self.held.wait()
            if self.away:
                raise Unavailable("meta is away")
        found = await super().get(key, partition_key=partition_key)
        if key.endswith("/control") and self.answers is not None:
            await self.answers.wait()
        return found


def watched(host: Host, **settings: Any) -> tuple[Broker, Watched]:
    meta = Watched(host)
    return Broker(host.context(poll_s=POLL_S, **settings), meta), meta


def texts(found: Fetched) -> list[bytes]:
    return [record for part in found.parts for record in part]


async def test_a_poll_that_does_not_wait_sees_another_brokers_append(host: Host) -> None:
    """A consumer that polls with max_wait_ms 0 at a broker that never appends gets the record after poll_s."""
    writing, reading = host.broker(), host.broker(poll_s=POLL_S)
    await host.produce(writing, b"a")
    assert (await host.fetch(reading, 1)).count == 1
    assert (await host.fetch(reading, 2)).count == 0

    await host.produce(writing, b"b")
    await host.clock.advance(POLL_S)

    assert [b"b"] == texts(await host.fetch(reading, 2))


async def test_a_trim_is_in_force_at_a_broker_that_has_the_records_in_its_cache(host: Host) -> None:
    """Its hot tail is not served below the new start once poll_s is over; what is left is."""
    operating, reading = host.broker(), host.broker(poll_s=POLL_S)
    await host.produce(reading, b"a", b"b", b"c")
    assert (await host.fetch(reading, 1)).count == 3

    await operating.admin.trim(TP, 3)
    await host.clock.advance(POLL_S)

    assert isinstance(await host.fetch(reading, 1), OffsetOutOfRange)
    assert isinstance(await host.fetch(reading, 2, wait_s=2.0), OffsetOutOfRange)
    assert [b"c"] == texts(await host.fetch(reading, 3))


async def test_retention_is_in_force_at_every_broker(host: Host) -> None:
    """As a trim by hand: a worker moves the start, and brokers learn of it."""
    reading, services = host.broker(poll_s=POLL_S), host.services()
    await host.produce(reading, b"old")
    assert (await host.fetch(reading, 1)).count == 1
    await reading.admin.configure("orders", TopicConfig(retention_s=30))
    await host.clock.advance(60)

    await services.retention.apply_once(TP)
    await host.clock.advance(POLL_S)

    assert isinstance(await host.fetch(reading, 1), OffsetOutOfRange)


async def test_a_deleted_topic_is_gone_at_every_broker(host: Host) -> None:
    """Hot records and the known end of it: both are answered with UnknownTopicPartition, a waiting poll too."""
    operating, reading = host.broker(), host.broker(poll_s=POLL_S)
    await host.produce(reading, b"a")
    assert (await host.fetch(reading, 1)).count == 1
    waiting = asyncio.ensure_future(host.fetch(reading, 2, wait_s=20.0))
    await settle()

    await operating.admin.delete("orders", reason="test")
    await host.clock.advance(POLL_S)

    for offset in (1, 2):
        assert isinstance(await host.fetch(reading, offset), UnknownTopicPartition)
    assert isinstance(await waiting, UnknownTopicPartition)


async def test_a_topic_that_was_deleted_and_made_again_has_none_of_its_old_records(host: Host) -> None:
    """The same broker cached the old life; the new one continues behind its offsets."""
    operating, reading = host.broker(), host.broker(poll_s=POLL_S)
    await host.produce(reading, b"old")
    assert (await host.fetch(reading, 1)).count == 1

    await operating.admin.delete("orders", reason="test")
    await host.produce(operating, b"new")
    await host.clock.advance(POLL_S)

    assert isinstance(await host.fetch(reading, 1), OffsetOutOfRange)
    assert [b"new"] == texts(await host.fetch(reading, 2))


async def test_a_topic_that_this_broker_makes_again_is_there_at_once(host: Host) -> None:
    """What was answered a moment ago, that it does not exist, is not held against its own append or a read."""
    operating, here = host.broker(), host.broker(poll_s=10.0)
    await host.produce(here, b"old")
    await operating.admin.delete("orders", reason="test")
    await host.clock.advance(11)
    assert isinstance(await host.fetch(here, 2), UnknownTopicPartition)

    await host.produce(here, b"new")

    assert [b"new"] == texts(await host.fetch(here, 2))
    assert isinstance(await host.fetch(here, 1), OffsetOutOfRange)


@pytest.mark.parametrize("polled", [False, True])
async def test_a_topic_made_again_after_its_tombstone_went_has_none_of_its_old_records(
    host: Host, polled: bool
) -> None:
    """Its offsets begin at 1 again: what a broker cached hours ago is at the offsets of other records."""
    operating, reading, services = host.broker(), host.broker(poll_s=POLL_S), host.services()
    await host.produce(reading, b"old-1", b"old-2")
    if polled:
        assert (await host.fetch(reading, 1)).count == 2
    await operating.admin.delete("orders", reason="test")
    await host.clock.advance(200)
    await services.retention.apply_once(TP)
    assert paths.control(TP) not in host.state.keys
    fresh = host.broker()
    await host.produce(fresh, b"new-1", b"new-2", b"new-3")
    await host.clock.advance(POLL_S)

    assert [b"new-1", b"new-2", b"new-3"] == texts(await host.fetch(reading, 1))


async def test_what_was_answered_late_about_a_former_life_is_not_believed(host: Host) -> None:
    """The topic was deleted, freed and made again while the first answer about it was under way."""
    operating, services, (reading, meta) = host.broker(), host.services(), watched(host)
    await host.produce(operating, b"old-1", b"old-2")
    meta.answers = asyncio.Event()
    at_the_end = asyncio.ensure_future(host.fetch(reading, 3))
    await settle()
    await operating.admin.delete("orders", reason="test")
    await host.clock.advance(200)
    await services.retention.apply_once(TP)
    await host.produce(host.broker(), b"new")

    meta.answers.set()
    assert 2 == (await at_the_end).high_watermark
    await host.clock.advance(POLL_S)

    assert isinstance(await host.fetch(reading, 3), OffsetOutOfRange)
    assert [b"new"] == texts(await host.fetch(reading, 1))


async def test_the_shared_folder_of_a_former_life_is_not_believed(host: Host, tmp_path: Path) -> None:
    """Files that were published before the partition was made are passed over by a broker that finds them."""
    writing = host.broker(tail_cache_dir=tmp_path)
    await host.produce(writing, b"new")
    assert writing.shared is not None
    await writing.shared.close()
    (file,) = [file for file in tmp_path.rglob("*") if file.is_file()]
    old = columns([b"old"])
    file.write_bytes(b"LLT1" + (1).to_bytes(4, "little") + bytes(old.lengths) + bytes(old.payload))
    _touch(file, seconds=host.clock.now_ns() / 1e9 - 3600)

    reading = host.broker(tail_cache_dir=tmp_path, poll_s=POLL_S)

    assert [b"new"] == texts(await host.fetch(reading, 1))


def _touch(file: Path, *, seconds: float) -> None:
    import os

    os.utime(file, (seconds, seconds))


async def test_however_many_consumers_poll_there_is_one_look_per_partition_and_poll_s(host: Host) -> None:
    """Polls that wait and polls that do not, of one partition: meta is queried at most once in poll_s."""
    broker, meta = watched(host)
    await host.produce(broker, b"a")
    await host.fetch(broker, 2)
    waiting = [asyncio.ensure_future(host.fetch(broker, 2, wait_s=10.0)) for _ in range(20)]
    await settle()
    meta.gets = 0

    for _ in range(100):
        await host.clock.advance(0.05)
        assert (await host.fetch(broker, 2)).count == 0

    assert 15 <= meta.gets <= 20  # 5 seconds
    for one in waiting:
        one.cancel()


async def test_consumers_that_come_together_share_one_look(host: Host) -> None:
    """While a look is under way everybody who queries waits for it; who goes away does not end it."""
    broker, meta = watched(host)
    await host.produce(broker, b"a")
    await host.fetch(broker, 2)
    await host.clock.advance(1.0)
    meta.gets, meta.held = 0, asyncio.Event()

    polls = [asyncio.ensure_future(host.fetch(broker, 1)) for _ in range(10)]
    await settle()
    polls[0].cancel()
    await settle()
    meta.held.set()

    assert [1] * 9 == [(await poll).count for poll in polls[1:]]
    assert meta.gets == 1


async def test_a_look_that_began_too_early_is_not_taken_for_a_fresh_one(host: Host) -> None:
    """Meta is slow: who queries long after the look began gets an answer of a later one."""
    broker, meta = watched(host)
    await host.produce(broker, b"a")
    await host.fetch(broker, 2)
    await host.clock.advance(1.0)
    meta.gets, meta.held = 0, asyncio.Event()
    early = asyncio.ensure_future(host.fetch(broker, 2))
    await host.clock.advance(1.0)
    late = asyncio.ensure_future(host.fetch(broker, 2))
    await settle()

    meta.held.set()
    await asyncio.gather(early, late)

    assert meta.gets == 2


async def test_while_meta_is_away_nobody_is_told_what_was_known_before(host: Host) -> None:
    """Hot records and the known end are Unavailable; meta is still queried once in poll_s; then all is well again."""
    broker, meta = watched(host)
    await host.produce(broker, b"a")
    assert (await host.fetch(broker, 1)).count == 1
    await host.clock.advance(1.0)
    meta.away, meta.gets = True, 0

    reported = [await host.fetch(broker, offset) for offset in (1, 2) * 5]

    assert {Unavailable} == {type(one) for one in reported} and meta.gets == 1
    assert isinstance(await host.fetch(broker, 2, wait_s=5.0), Unavailable)
    meta.away = False
    await host.clock.advance(POLL_S)
    assert [b"a"] == texts(await host.fetch(broker, 1))


async def test_an_answer_that_is_full_says_where_the_other_partitions_end(host: Host) -> None:
    """A partition for which no bytes are left is answered empty, with its real start and end."""
    broker, other = host.broker(), TopicPartition("clicks", 0)
    await host.produce(broker, b"a" * 100)
    await host.produce(broker, *[b"b"] * 7, tp=other)
    await broker.admin.trim(other, 3)

    wants = [FetchRequest(TP, 1, 100), FetchRequest(other, 4, 100)]
    first, second = (
        await host.broker().consume(wants[:1], bytes_max=100, bytes_min=1, wait_s=0),
        await broker.consume(wants, bytes_max=100, bytes_min=1, wait_s=0),
    )

    full = second[1]
    assert isinstance(first[0], Fetched) and isinstance(full, Fetched)
    assert (0, 7, 3) == (full.count, full.high_watermark, full.log_start_offset)


async def test_polls_of_partitions_that_do_not_exist_leave_nothing_behind(host: Host) -> None:
    """What is kept per partition is bounded, however many names are requested."""
    broker = host.broker()
    for number in range(NAMES_MAX + 50):
        broker.cache.changes([TopicPartition("nowhere", number)])

    assert len(broker.cache._tails) <= NAMES_MAX


async def test_an_offset_out_of_range_does_not_drop_the_hot_tail_of_others(host: Host) -> None:
    """A consumer that requests nonsense costs nobody the cache."""
    broker = host.broker()
    await host.produce(broker, b"a")
    assert isinstance(await host.fetch(broker, 50), OffsetOutOfRange)

    assert broker.cache.read(TP, 1, 10) is not None
