"""The batching producer: what it takes, what it refuses, and in which order it answers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lakebed.core.errors import Unavailable
from lakebed.log.batching import CHUNK_OVERHEAD_BYTES
from lakebed.log.broker import Broker
from lakebed.log.cache import SharedTail
from lakebed.log.codec import columns
from lakebed.log.model import BackPressureRejected, TopicPartition
from lakebed.log.producers import RecordChunk
from lakebed.log.writer import Appended
from support.log_host import TP, Host


async def test_a_broker_that_stops_takes_nothing_more_and_finishes_what_it_has(host: Host) -> None:
    """What was taken is appended before stop returns; what comes later is Unavailable."""
    broker = host.broker(batch_max_delay_ms=1000.0)
    taken: list[Any] = []
    broker.producer.append([(TP, RecordChunk(columns([b"a"])))], taken.extend)
    await broker.stop()
    broker.producer.append([(TP, RecordChunk(columns([b"b"])))], taken.extend)

    assert isinstance(taken[0], Appended) and isinstance(taken[1], Unavailable)
    assert 0 == broker.producer.held_bytes
    assert [b"a"] == await host.read_all(host.broker())


async def test_what_waits_is_counted_and_bounded(host: Host) -> None:
    """Bytes, lengths and overhead; the one that fits exactly is taken, the next is refused and counted."""
    size = 10 + 4 + CHUNK_OVERHEAD_BYTES
    context = host.context(buffer_max_bytes=2 * size, record_max_bytes=100, batch_max_bytes=2 * size)
    broker = Broker(context, host.meta())
    told: list[Any] = []
    for _ in range(2):
        broker.producer.append([(TP, RecordChunk(columns([b"x" * 10])))], told.extend)
    assert 2 * size == broker.producer.held_bytes == context.metrics.value("lakebed_log_buffered_bytes")
    broker.producer.append([(TP, RecordChunk(columns([b""])))], told.extend)

    assert isinstance(told[0], BackPressureRejected) and 0.5 == told[0].retry_after_s
    assert 1 == context.metrics.value("lakebed_log_refused_total")
    await host.clock.advance(1.0)
    assert [1, 2] == [one.start_offset for one in told[1:]]
    assert 0 == broker.producer.held_bytes


async def test_outcomes_of_a_request_come_in_its_order_and_once(host: Host) -> None:
    """Also when one of them is refused at once and the others are appended later."""
    broker = host.broker()
    other = TopicPartition("clicks", 3)
    told: list[Any] = []
    broker.producer.append(
        [(tp, RecordChunk(columns([name]))) for tp, name in ((TP, b"a"), (other, b"b"), (TP, b"c"))],
        lambda outcomes: told.append(list(outcomes)),
    )
    await host.clock.advance(0.1)

    ((one, two, three),) = told
    assert [(1, "orders"), (1, "clicks"), (2, "orders")] == [
        (each.start_offset, each.index_key.split("/")[1]) for each in (one, two, three)
    ]
    assert [b"a", b"c"] == await host.read_all(broker)


async def test_the_oldest_files_of_a_shared_tail_go_first(tmp_path: Path) -> None:
    """Until what is left fits the limit, exactly; what was just published stays for the others."""
    held = columns([b"x" * 92])  # 104 bytes with its prefix and length
    tail = SharedTail(tmp_path, bytes_max=208, node="n")
    for offset in (3, 1, 2):
        tail._put(TP, offset, held)
        os.utime(tmp_path / "orders" / "0" / f"{offset:020d}-1", (100 + offset, 100 + offset))
    tail._prune()

    assert [2, 3] == sorted(int(file.name[:20]) for file in (tmp_path / "orders" / "0").iterdir())
    fresh = await SharedTail(tmp_path, bytes_max=208, node="m").new_appends(TP)
    assert [(2, 1, 102_000), (3, 1, 103_000)] == [(start, found.count, at_ms) for start, found, at_ms in fresh]
    assert [] == await tail.new_appends(TP)
    await tail.close()
