"""The cost page's table is what the code's own counters say, operation by operation."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import pytest

from lakebed.batches.acceptor import Acceptor
from lakebed.batches.derived_writes import DerivedWrites
from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import Settings
from lakebed.log.broker import Broker
from lakebed.log.codec import columns
from lakebed.log.model import TopicPartition
from lakebed.log.producers import RecordChunk
from lakebed.log.settings import LogSettings
from lakebed.log.writer import PartitionAppend
from lakebed.meta.settings import MetaSettings
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.roles import Queue
from lakebed.queue.settings import QueueSettings
from lakebed.store.bucket import VERBS, BucketStore
from lakebed.store.lease import Lease
from lakebed.store.memory import MemoryBucket
from lakebed.store.prices import dollars
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime
from support.batch_frames import frame_of, submit
from support.doc_commands import ROOT

TP = TopicPartition("orders", 0)
SHOWN = ("create", "replace", "get", "get_range", "head", "list", "delete")


class Meter:
    """A bucket whose requests are counted by the store's own metric."""

    def __init__(self) -> None:
        self.clock, self.ids, self.metrics = SystemClock(), Ids.seeded(1), Metrics()
        self.store = BucketStore(MemoryBucket(clock=self.clock), clock=self.clock, ids=self.ids, metrics=self.metrics)

    def counts(self) -> dict[str, int]:
        value = self.metrics.value
        return {verb: int(value("lakebed_store_requests_total", verb=verb)) for verb in VERBS}

    async def of(self, work: Awaitable[object]) -> dict[str, int]:
        before = self.counts()
        await work
        return {verb: count - before[verb] for verb, count in self.counts().items()}

    def context(self, *sections: object) -> Context:
        settings = Settings({type(each): each for each in sections}, {})  # type: ignore[misc]
        return Context(
            node="node", settings=settings, store=self.store, clock=self.clock, ids=self.ids, metrics=self.metrics
        )


async def batch_new(meter: Meter, *, again: bool = False) -> dict[str, int]:
    async def accept(acceptor: Acceptor, derived_writes: DerivedWrites) -> None:
        await acceptor.accept(submit(frame_of()))
        await derived_writes.drain()

    def make() -> tuple[Acceptor, DerivedWrites]:
        derived_writes = DerivedWrites(meter.context(), waiting_max=100, writers=1)
        derived_writes.start()
        limits = {"accepting_max": 10, "known_max": 10, "timeout_s": 5.0, "retry_after_s": 2.0}
        acceptor = Acceptor(
            meter.context(),
            derived_writes,
            collector_id="c",
            on_accepted=lambda *_: None,
            **limits,  # type: ignore[arg-type]
        )
        return acceptor, derived_writes

    first = make()
    counted = await meter.of(accept(*first))
    await first[1].stop()
    if again:  # at another collector, which has not seen it
        second = make()
        counted = await meter.of(accept(*second))
        await second[1].stop()
    return counted


async def batch_again(meter: Meter) -> dict[str, int]:
    return await batch_new(meter, again=True)


async def register_change(meter: Meter) -> dict[str, int]:
    register: Register[dict[str, int]] = Register(meter, "r.json", dict[str, int], {}, name="cost")
    for n in range(2):
        await register.change(lambda _, n=n: ({"n": n}, None))  # type: ignore[misc]
    return await meter.of(register.change(lambda _: ({"n": 9}, None)))


async def lease_round(meter: Meter) -> dict[str, int]:
    async def work() -> None:
        lease = Lease(meter, "l.json", owner="o", lease_s=30.0)
        held = await lease.acquire()
        await lease.release(await lease.renew(held))

    return await meter.of(work())


def queue_of(meter: Meter) -> Queue:
    settings = QueueSettings(flush_interval_s=0.001, prefetch_batches=1)
    runtime = StoreRuntime(clock=meter.clock, ids=meter.ids, metrics=meter.metrics, store=meter.store)
    return Queue("cost", settings, runtime)


async def queue_put(meter: Meter) -> dict[str, int]:
    ingestor = queue_of(meter).ingestor()

    async def put() -> None:
        await (await ingestor.ingest([KeyValueEntry(b"k", b"v")])).await_durable()

    await put()
    counted = await meter.of(put())
    await ingestor.close()
    return counted


async def queue_take(meter: Meter) -> dict[str, int]:
    queue = queue_of(meter)
    ingestor = queue.ingestor()
    for _ in range(2):
        await (await ingestor.ingest([KeyValueEntry(b"k", b"v")])).await_durable()
    await ingestor.close()
    collector = queue.collector("c")

    async def take() -> None:
        batch = await collector.next_batch()
        assert batch is not None
        await collector.ack(batch)

    await take()
    counted = await meter.of(take())
    await collector.close()
    return counted


async def log_append(meter: Meter, backend: str = "memory") -> dict[str, int]:
    broker = Broker(meter.context(LogSettings(), MetaSettings(backend=backend)))  # type: ignore[arg-type]

    async def append() -> None:
        await broker.writer.append_shared([PartitionAppend(TP, (RecordChunk(columns([b"record"] * 100)),))])
        await broker.writer.drain()

    for _ in range(2):
        await append()
    counted = await meter.of(append())
    await broker.stop()
    return counted


async def log_append_bucket(meter: Meter) -> dict[str, int]:
    return await log_append(meter, "bucket")


async def log_read_cold(meter: Meter) -> dict[str, int]:
    writer = Broker(meter.context(LogSettings(), MetaSettings(backend="memory")))
    await writer.writer.append_shared([PartitionAppend(TP, (RecordChunk(columns([b"record"] * 100)),))])
    await writer.writer.drain()
    reader = Broker(meter.context(LogSettings()), writer.meta)
    return await meter.of(reader.reader.read(TP, 1, bytes_max=1 << 20))


MEASURED: dict[str, Callable[[Meter], Awaitable[dict[str, int]]]] = {
    "batches: accept a batch": batch_new,
    "batches: the same batch again, at another collector": batch_again,
    "store: change a register": register_change,
    "store: take, renew and give back a lease": lease_round,
    "queue: make a batch durable": queue_put,
    "queue: take a batch and ack it": queue_take,
    "log: append a flight of one partition, meta outside the bucket": log_append,
    "log: append a flight of one partition, meta in the bucket": log_append_bucket,
    "log: read a flight that no cache holds": log_read_cold,
}


def rows() -> dict[str, list[str]]:
    """The page's measured table, by operation."""
    text = (ROOT / "docs/cost.md").read_text()
    part = text.split("<!-- measured -->", 1)[1].split("<!-- end of measured -->", 1)[0]
    cells = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in part.strip().splitlines()[2:]]
    return {row[0]: row[1:] for row in cells}


def shown(counts: dict[str, int]) -> list[str]:
    return [str(counts[verb] or "") for verb in SHOWN] + [f"{dollars(counts) * 1e6:.2f}"]


@pytest.mark.parametrize("operation", MEASURED)
async def test_the_page_says_what_the_counters_count(operation: str) -> None:
    """Requests by verb and the price of a million are those of the code as it is."""
    counts = await MEASURED[operation](Meter())

    assert shown(counts) == rows()[operation], f"| {operation} | {' | '.join(shown(counts))} |"


def test_every_row_is_measured() -> None:
    """No number of the table is only claimed."""
    assert list(MEASURED) == list(rows())


def test_the_prices_on_the_page_are_those_of_the_code() -> None:
    """The price of a thousand PUTs and GETs and of a stored GiB stand in the page as the code has them."""
    from lakebed.store import prices

    text = (ROOT / "docs/cost.md").read_text()
    found = dict(re.findall(r"^\| (.+?) \| \$([\d.]+) \|", text, flags=re.M))

    assert {
        "1,000 PUT, COPY, POST or LIST requests": prices.DOLLARS_PER_PUT_OR_LIST * 1000,
        "1,000 GET or HEAD requests": prices.DOLLARS_PER_GET * 1000,
        "a GiB stored for a month": prices.DOLLARS_PER_GIB_MONTH,
    } == {name: float(price) for name, price in found.items()}
