"""The batching producer: what it takes, what it refuses, and in which order it answers."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec

from lakebed.core.clock import settle
from lakebed.core.errors import Unavailable
from lakebed.core.settings import Settings
from lakebed.log.batching import CHUNK_OVERHEAD_BYTES
from lakebed.log.broker import Broker
from lakebed.log.cache import SharedTail
from lakebed.log.codec import columns
from lakebed.log.cost import batching_dollars_month
from lakebed.log.model import BackPressureRejected, TopicPartition
from lakebed.log.producers import RecordChunk
from lakebed.log.settings import LogSettings
from lakebed.log.writer import Appended
from lakebed.meta.settings import MetaSettings
from lakebed.store.settings import StoreSettings
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
    reported: list[Any] = []
    for _ in range(2):
        broker.producer.append([(TP, RecordChunk(columns([b"x" * 10])))], reported.extend)
    assert 2 * size == broker.producer.held_bytes == context.metrics.value("lakebed_log_buffered_bytes")
    broker.producer.append([(TP, RecordChunk(columns([b""])))], reported.extend)

    assert isinstance(reported[0], BackPressureRejected) and 0.5 == reported[0].retry_after_s
    assert 1 == context.metrics.value("lakebed_log_refused_total")
    await host.clock.advance(1.0)
    assert [1, 2] == [one.start_offset for one in reported[1:]]
    assert 0 == broker.producer.held_bytes


async def test_outcomes_of_a_request_come_in_its_order_and_once(host: Host) -> None:
    """Also when one of them is refused at once and the others are appended later."""
    broker = host.broker()
    other = TopicPartition("clicks", 3)
    reported: list[Any] = []
    broker.producer.append(
        [(tp, RecordChunk(columns([name]))) for tp, name in ((TP, b"a"), (other, b"b"), (TP, b"c"))],
        lambda outcomes: reported.append(list(outcomes)),
    )
    await host.clock.advance(0.1)

    ((one, two, three),) = reported
    assert [(1, "orders"), (1, "clicks"), (2, "orders")] == [
        (each.start_offset, each.index_key.split("/")[1]) for each in (one, two, three)
    ]
    assert [b"a", b"c"] == await host.read_all(broker)


async def test_the_oldest_files_of_a_shared_tail_go_first(tmp_path: Path) -> None:
    """Until what is left fits the limit, exactly; what was just published stays for the others."""
    held = columns([b"x" * 72])  # 104 bytes with its header, segment and length
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


class Uploads:
    """Blobs that a broker has begun to write, each held until it is let go."""

    def __init__(self, host: Host) -> None:
        self.sizes: list[int] = []
        self._held: list[asyncio.Event] = []
        create = host.store.create

        async def held(key: str, data: bytes) -> Any:
            self.sizes.append(len(data))
            self._held.append(asyncio.Event())
            await self._held[-1].wait()
            return await create(key, data)

        host.store.create = held  # type: ignore[method-assign]

    async def finish(self, index: int) -> None:
        self._held[index].set()
        await settle(60)


async def sent(broker: Broker, size: int = 10, count: int = 1) -> list[Any]:
    reported: list[Any] = []
    for _ in range(count):
        broker.producer.append([(TP, RecordChunk(columns([b"x" * size])))], reported.extend)
    await settle(60)
    return reported


def local(host: Host, **settings: Any) -> Broker:
    """On a store of one's own, where requests cost nothing."""
    context = host.context(**settings)
    layers = {LogSettings: context.settings.of(LogSettings), StoreSettings: StoreSettings(url="memory:")}
    return Broker(msgspec.structs.replace(context, settings=Settings(layers, {})), host.meta())


async def test_a_record_leaves_at_once_when_nothing_is_under_way(host: Host) -> None:
    """No time passes, whatever the delay: one request is one blob, and requests of one moment share it."""
    uploads, broker = Uploads(host), local(host, batch_max_delay_ms=1000.0)
    await sent(broker, count=3)
    assert 1 == len(uploads.sizes)
    await uploads.finish(0)
    reported = await sent(broker)

    assert 2 == len(uploads.sizes) and uploads.sizes[0] > uploads.sizes[1]
    await uploads.finish(1)
    assert [4] == [one.start_offset for one in reported]


async def one_blob_of_20_ms(host: Host, uploads: Uploads, broker: Broker, requests: int = 2) -> None:
    await sent(broker, count=requests)
    await host.clock.advance(0.02)
    await uploads.finish(0)


async def test_requests_that_have_arrived_leave_together_over_several_turns_of_the_loop(host: Host) -> None:
    """As long as each turn of the event loop brings another one; the first turns without any end it."""
    uploads, broker = Uploads(host), local(host, batch_max_delay_ms=1000.0)
    await one_blob_of_20_ms(host, uploads, broker)
    reported: list[Any] = []
    for _ in range(10):
        broker.producer.append([(TP, RecordChunk(columns([b"x"])))], reported.extend)
        await asyncio.sleep(0)
    assert 1 == len(uploads.sizes)
    await settle()

    assert 2 == len(uploads.sizes)
    await uploads.finish(1)
    assert [*range(3, 13)] == [one.start_offset for one in reported]


async def test_a_loop_that_is_never_quiet_holds_a_blob_no_longer_than_the_last_one_took(host: Host) -> None:
    """A record that had come a moment later would have waited as long, behind that blob."""
    uploads, broker = Uploads(host), local(host, batch_max_delay_ms=1000.0)
    await one_blob_of_20_ms(host, uploads, broker)
    began_s, left_after_s = host.clock.monotonic_s(), 0.0
    while len(uploads.sizes) < 2 and left_after_s < 1.0:
        broker.producer.append([(TP, RecordChunk(columns([b"x"])))], lambda _: None)
        host.clock._elapsed_ns += 1_000_000
        await asyncio.sleep(0)
        left_after_s = host.clock.monotonic_s() - began_s

    assert 0.02 <= left_after_s <= 0.026


async def test_behind_a_blob_of_one_request_a_record_looks_for_no_others(host: Host) -> None:
    """A client that sends one record after another does not wait for company."""
    uploads, broker = Uploads(host), local(host, batch_max_delay_ms=1000.0)
    await one_blob_of_20_ms(host, uploads, broker, requests=1)
    for _ in range(3):
        broker.producer.append([(TP, RecordChunk(columns([b"x"])))], lambda _: None)
        await asyncio.sleep(0)

    await asyncio.sleep(0)
    assert 2 == len(uploads.sizes)


async def test_a_record_waits_while_another_blob_is_under_way_and_leaves_when_it_has_landed(host: Host) -> None:
    """What came meanwhile leaves together, without waiting for the rest of the delay."""
    uploads, broker = Uploads(host), local(host, batch_max_delay_ms=1000.0)
    await sent(broker)
    for _ in range(3):
        await sent(broker)
    assert 1 == len(uploads.sizes)

    await uploads.finish(0)
    assert 2 == len(uploads.sizes)
    await uploads.finish(1)
    assert 4 == len(await host.read_all(broker))


async def test_behind_a_slow_blob_a_record_waits_no_longer_than_the_delay(host: Host) -> None:
    """Counted from the last departure."""
    uploads, broker = Uploads(host), local(host, batch_max_delay_ms=5.0)
    await sent(broker)
    await host.clock.advance(0.003)
    await sent(broker)
    await host.clock.advance(0.001)
    assert 1 == len(uploads.sizes)
    await host.clock.advance(0.0011)

    assert 2 == len(uploads.sizes)


async def test_blobs_that_are_a_fair_share_travel_side_by_side(host: Host) -> None:
    """A half of what is held beside one, a third beside two; and large enough to be worth a request of their own."""
    uploads, broker = Uploads(host), local(host, batch_max_delay_ms=1000.0)
    least = 192 * 1024
    await sent(broker)
    await sent(broker, least // 2)
    assert 1 == len(uploads.sizes)
    await sent(broker, least // 2)
    assert 2 == len(uploads.sizes)
    await sent(broker, least)
    assert 3 == len(uploads.sizes)
    await sent(broker, least, count=4)

    assert 4 == len(uploads.sizes) and uploads.sizes[3] > 4 * least
    await sent(broker, least)
    assert 4 == len(uploads.sizes), "a fifth of what is held is more than this"
    await sent(broker, least)
    assert 5 == len(uploads.sizes)


async def test_no_more_blobs_are_under_way_than_their_limit(host: Host) -> None:
    """However large the next one is; it leaves when one of them has landed."""
    uploads, broker = Uploads(host), local(host, batch_max_delay_ms=1000.0, flights_max=2)
    for _ in range(3):
        await sent(broker, 400 * 1024)
    assert 2 == len(uploads.sizes)
    await uploads.finish(0)

    assert 3 == len(uploads.sizes)


async def test_where_requests_are_billed_blobs_leave_no_more_often_than_the_delay(host: Host) -> None:
    """The first leaves at once; the next waits although nothing is under way; one that is full does not wait."""
    uploads, broker = Uploads(host), host.broker(batch_max_delay_ms=None, batch_max_bytes=100_000)
    await sent(broker)
    await uploads.finish(0)
    await sent(broker)
    await host.clock.advance(0.24)
    assert 1 == len(uploads.sizes)
    await host.clock.advance(0.011)
    assert 2 == len(uploads.sizes)
    await uploads.finish(1)
    await sent(broker, 100_000)

    assert 3 == len(uploads.sizes)


def test_the_delay_suits_the_store_and_names_its_price(host: Host) -> None:
    """5 ms on a server of one's own, for nothing; 250 ms where requests are billed; a delay that is set wins. The price
    is that of all writes of a flight: with the metadata in the bucket, its control records too."""
    own, billed = StoreSettings(endpoint="http://127.0.0.1:8333"), StoreSettings()
    aws = StoreSettings(endpoint="https://s3.eu-west-1.amazonaws.com")
    in_sqlite, other = host.context(batch_max_delay_ms=None), host.context(batch_max_delay_ms=None)
    in_bucket = msgspec.structs.replace(other, settings=other.settings.having(MetaSettings(backend="bucket")))
    for context in (in_sqlite, in_bucket):
        Broker(context, host.meta())

    assert [False, True, True, False] == [s.billed for s in (own, billed, aws, StoreSettings(url="memory:"))]
    assert [5.0, 250.0] == [LogSettings().delay_ms(billed=each) for each in (False, True)]
    assert 7.0 == LogSettings(batch_max_delay_ms=7.0).delay_ms(billed=True)
    prices = [c.metrics.value("lakebed_log_batching_cost_dollars_month") for c in (in_sqlite, in_bucket)]
    assert [53, 105] == [round(price) for price in prices]
    assert [2628, 2628, 5256] == [round(batching_dollars_month(5.0, each)) for each in ("sqlite", "oxia", "bucket")]
