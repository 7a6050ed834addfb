"""The cost page's table is what the code's own counters report, operation by operation."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable

import msgspec
import pytest

from lakebed.batches.acceptor import Acceptor
from lakebed.batches.derived_writes import DerivedWrites
from lakebed.batches.incremental import IncrementalScan
from lakebed.batches.reconciler import Reconciler
from lakebed.core.clock import ManualClock, SystemClock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import Secret, Settings, load
from lakebed.gateway.app import build
from lakebed.gateway.auth import Keyring
from lakebed.gateway.health import EVERY_S as HEALTH_EVERY_S
from lakebed.gateway.key_watch import EVERY_S, KeyWatch
from lakebed.gateway.settings import GatewaySettings, KeySettings
from lakebed.gateway.state import state_of
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
from lakebed.wiring.parts import components, sections
from support.batch_frames import frame_of, submit
from support.doc_commands import ROOT
from support.runtimes import runtime_of

TP = TopicPartition("orders", 0)
FLUSH, KEPT = 100, 3_000
SHOWN = ("create", "replace", "get", "get_range", "head", "list", "delete")


class Meter:
    """A bucket whose requests are counted by the store's own metric."""

    def __init__(self) -> None:
        self.clock, self.ids, self.metrics = SystemClock(), Ids.seeded(1), Metrics()
        self.store = BucketStore(MemoryBucket(clock=self.clock), runtime_of(self.clock, self.ids, self.metrics))

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


def make_collector(meter: Meter, *, pack_s: float = 0.0) -> tuple[Acceptor, DerivedWrites]:
    derived_writes = DerivedWrites(meter.context(), waiting_max=10_000)
    derived_writes.start()
    limits = {"accepting_max": FLUSH, "known_max": 10, "timeout_s": 60.0, "retry_after_s": 2.0, "pack_s": pack_s}
    acceptor = Acceptor(
        meter.context(),
        derived_writes,
        collector_id="c",
        on_accepted=lambda *_: None,
        **limits,  # type: ignore[arg-type]
    )
    return acceptor, derived_writes


async def accepted(meter: Meter, frames: Iterable[bytes]) -> None:
    """Accepts them at a collector of their own, in one flush."""
    acceptor, derived_writes = make_collector(meter)
    for frame in frames:
        await acceptor.accept(submit(frame))
    await derived_writes.stop()


async def batch_new(meter: Meter) -> dict[str, int]:
    return await meter.of(accepted(meter, [frame_of(n, n) for n in range(FLUSH)]))


async def batches_packed(meter: Meter) -> dict[str, int]:
    async def flush() -> None:
        acceptor, derived_writes = make_collector(meter, pack_s=0.2)
        await asyncio.gather(*(acceptor.accept(submit(frame_of(agent=f"agent-{n}"))) for n in range(FLUSH)))
        await derived_writes.stop()

    return await meter.of(flush())


async def batch_again(meter: Meter) -> dict[str, int]:
    await accepted(meter, [frame_of()])
    return await meter.of(accepted(meter, [frame_of()]))  # at another collector, which has not seen it


async def batches_kept(meter: Meter) -> dict[str, int]:
    """One interval of the reconciler: 100 agents with a batch each 10 s, a collector that flushes each 2 s."""
    clock = ManualClock()
    store = BucketStore(MemoryBucket(clock=clock), runtime_of(clock, meter.ids, meter.metrics))
    meter.clock, meter.store = clock, store  # type: ignore[assignment]
    runtime = StoreRuntime(clock=clock, ids=meter.ids, metrics=meter.metrics, store=store)

    async def interval() -> None:
        for at in range(0, KEPT, 20):
            names = [(number // 100, f"agent-{number % 100}") for number in range(at, at + 20)]
            await accepted(meter, [frame_of(seq, seq, agent=agent) for seq, agent in names])
            await clock.advance(2)
        await clock.advance(20)
        scan = IncrementalScan(
            runtime, Reconciler(runtime, overlap_s=900.0, concurrency=8), interval_s=300.0, owner="o"
        )
        assert KEPT == (await scan.scan()).checked

    return await meter.of(interval())


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


async def keys_kept(meter: Meter, *keys: KeySettings) -> dict[str, int]:
    """A gateway's keys over one minute, in which each key is used."""
    clock = ManualClock()
    settings = GatewaySettings(keys=keys)
    context = msgspec.structs.replace(meter.context(settings), clock=clock)
    keyring = Keyring.of(settings, clock)
    watch = KeyWatch(context, keyring, settings)

    async def minute() -> None:
        for _ in range(round(60 / EVERY_S)):
            keyring.used |= {key.name for key in keys}
            await clock.advance(EVERY_S)

    await watch.start()
    await minute()  # the first one creates what there is not yet
    counted = await meter.of(minute())
    await watch.stop()
    return counted


async def keys_used(meter: Meter) -> dict[str, int]:
    return await keys_kept(meter, KeySettings("ann", Secret("0123456789abcdef")))


async def health_checked(meter: Meter) -> dict[str, int]:
    """Every part's health over one minute, as it is checked where there are keys."""
    clock = ManualClock()
    settings = load(sections(), flags={"meta.backend": "memory", "store.url": "memory:"})
    context = msgspec.structs.replace(meter.context(), clock=clock, settings=settings)
    checker = state_of(build(context, components(context))).health_checker

    async def minute() -> None:
        for _ in range(round(60 / HEALTH_EVERY_S)):
            await clock.advance(HEALTH_EVERY_S)

    checker.start(lambda: True)
    await clock.advance(0.1)
    counted = await meter.of(minute())
    await checker.stop()
    return counted


MEASURED: dict[str, Callable[[Meter], Awaitable[dict[str, int]]]] = {
    "batches: accept 100 batches of one flush": batch_new,
    "batches: accept 100 batches of one flush, packed": batches_packed,
    "batches: accept, index and reconcile 3,000 batches of 100 agents in 5 minutes": batches_kept,
    "batches: the same batch again, at another collector": batch_again,
    "store: change a register": register_change,
    "store: take, renew and give back a lease": lease_round,
    "queue: make a batch durable": queue_put,
    "queue: take a batch and ack it": queue_take,
    "log: append a flight of one partition, meta outside the bucket": log_append,
    "log: append a flight of one partition, meta in the bucket": log_append_bucket,
    "log: read a flight that no cache holds": log_read_cold,
    "gateway: look for keys, for a minute": keys_kept,
    "gateway: refresh keys, sessions and last use, for a minute": keys_used,
    "gateway: check the health of all parts, for a minute": health_checked,
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


async def test_a_batch_costs_two_creates_and_a_fraction() -> None:
    """At most 2.2 creates and 0.2 reads for an accepted batch, its index and its check; the page's example, whose
    batches come ten times as often, costs less than $2,900 a month in requests."""
    counts = await batches_kept(Meter())
    writes = counts["create"] + counts["replace"]
    reads = sum(counts[verb] for verb in ("get", "get_range", "head", "list"))
    month = dollars(counts) / KEPT * 100 * 2.63e6

    assert writes / KEPT <= 2.2
    assert reads / KEPT <= 0.2
    assert month < 2_900


def test_every_row_is_measured() -> None:
    """No number of the table is only claimed."""
    assert list(MEASURED) == list(rows())


def test_the_prices_on_the_page_are_those_of_the_code() -> None:
    """The price of a thousand PUTs and GETs and of a stored GiB be in the page as the code has them."""
    from lakebed.store import prices

    text = (ROOT / "docs/cost.md").read_text()
    found = dict(re.findall(r"^\| (.+?) \| \$([\d.]+) \|", text, flags=re.M))

    assert {
        "1,000 PUT, COPY, POST or LIST requests": prices.DOLLARS_PER_PUT_OR_LIST * 1000,
        "1,000 GET or HEAD requests": prices.DOLLARS_PER_GET * 1000,
        "a GiB stored for a month": prices.DOLLARS_PER_GIB_MONTH,
    } == {name: float(price) for name, price in found.items()}


async def test_what_keys_cost_a_month_is_on_the_page() -> None:
    """Dollars of a month, from the counters: of a gateway without keys, and of one whose keys are used."""
    minutes = 2.63e6 / 60
    text = (ROOT / "docs/cost.md").read_text()
    idle, used = [dollars(await measure(Meter())) * minutes for measure in (keys_kept, keys_used)]

    assert f"${idle:.2f} a month without keys, ${used:.2f} with keys in use" in text
