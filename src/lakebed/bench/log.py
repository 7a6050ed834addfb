"""`lakebed bench log`: durable produce beside raw puts and beside a plain broker, and consume beside produce.

Brokers are processes of their own with the settings they have by default; the generator is this one. Contenders take
turns in the same run, on one bucket, with as many blobs on their way at once and blobs of the same size.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from lakebed.bench.brokers import SERVE, process
from lakebed.bench.cpu import tree_cpu_s
from lakebed.bench.hammer import Connection, Fired, Request, fire, post
from lakebed.bench.harness import Check, Contender, Stand, at_least, rounds_of, told
from lakebed.clock import SystemClock
from lakebed.errors import Unavailable
from lakebed.log import blob, codec, frame
from lakebed.log.columns import Columns
from lakebed.log.model import TopicPartition
from lakebed.log.settings import LogSettings

KIB, MIB = 1024, 1024 * 1024
DEFAULTS = LogSettings()
LARGE = 1000  # records of 1 KiB in a request where bandwidth counts: four requests fill a blob of 4 MiB
FEW, MANY = 4, 128  # partitions: where bandwidth counts, and where every flush commits many
SMALL = 10  # records per request where requests are many
TINY = 100  # bytes of a record where records are counted: with 1 KiB the bucket's put would be half of what is measured
LANES = 128
HOT_BLOBS = 24  # what is certainly still in a tail cache of the default size
SYNCS = 50
RAW_BAR, PLAIN_BAR, CONSUME_BAR = 0.7, 5.0, 3.0


class Meter:
    """What each contender costs in CPU, all processes together, per unit of its work."""

    def __init__(self) -> None:
        self.costs_ms: dict[str, list[float]] = {}
        self.fired: dict[str, list[Fired]] = {}

    def of(self, name: str, units: float, work: Callable[[], Awaitable[float]]) -> Contender:
        async def measured() -> float:
            before = tree_cpu_s()
            value = await work()
            self.costs_ms.setdefault(name, []).append((tree_cpu_s() - before) / units * 1e3)
            return value

        return measured

    def shot(self, name: str, done: Fired) -> Fired:
        if done.failed:
            raise Unavailable(f"{done.failed} of {done.requests} requests failed: {done.statuses}")
        self.fired.setdefault(name, []).append(done)
        return done

    def told(self, name: str, cost_of: str, base: str) -> Check:
        """The base's cost by this one's: what the ratio of their rates would be if CPU were all that counts."""
        return told(
            name, [b / max(a, 1e-9) for a, b in zip(self.costs_ms[cost_of], self.costs_ms[base], strict=True)], "ratio"
        )


async def bench(stand: Stand) -> Sequence[Check]:
    blobs = 16 if stand.quick else 48
    count = LANES * (12 if stand.quick else 24)
    rounds = 3 if stand.quick else 7
    meter = Meter()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lakebed-bench-")))
        ours = await stack.enter_async_context(process(stand, SERVE, {"meta.path": str(folder / "ours.sqlite")}))
        yardstick = ["lakebed.bench.plain_broker", str(folder / "plain.sqlite")]
        yardstick += [str(DEFAULTS.batch_max_bytes), str(DEFAULTS.batch_max_delay_ms)]
        plain = await stack.enter_async_context(process(stand, yardstick, {}))
        context = stand.context()
        fsync_ms = synced_ms(folder)
        payload = blob_of(4 * LARGE)
        requests = framed(ours, "wide", LARGE, blobs * 4, FEW, KIB)
        stand.tell(f"raw puts of {len(payload):,} bytes, and 1 KiB records produced in such blobs, in turn")

        async def raw() -> float:
            clock = SystemClock()
            waiting = iter(range(blobs))

            async def lane() -> None:
                for _ in waiting:
                    await context.store.create(f"bench/raw/{context.ids.token()}", payload)

            began = clock.monotonic_s()
            await asyncio.gather(*(lane() for _ in range(DEFAULTS.flights_max)))
            return blobs * 4 * LARGE / 1024 / (clock.monotonic_s() - began)

        async def produce() -> float:
            return meter.shot("produce", await fire([ours], requests, lanes=36)).records_per_s / 1024

        async def consume() -> float:
            wanted = await fetches(ours, "wide", min(blobs, HOT_BLOBS))
            return meter.shot("consume", await fire([ours], wanted * 3, lanes=2)).bytes_per_s / MIB

        def small(name: str, url: str, requests: list[Request]) -> Contender:
            async def work() -> float:
                return meter.shot(name, await fire([url], requests, lanes=LANES)).records_per_s

            return meter.of(name, count, work)

        mib = blobs * 4 * LARGE / 1024
        await produce()  # what is made on first use is made now
        wide = await rounds_of(rounds, {"raw": meter.of("raw", mib, raw), "produce": meter.of("produce", mib, produce)})
        reading = await rounds_of(rounds, {"produce": produce, "consume": consume})
        stand.tell("requests of 10 records over 128 partitions: frames, JSON, and the plain broker, in turn")
        narrow = {
            "frames": small("frames", ours, framed(ours, "narrow", SMALL, count, MANY, TINY)),
            "json": small("json", ours, as_json(ours, "text", count, TINY)),
            "plain": small("plain", plain, as_json(plain, "text", count, TINY)),
        }
        heavier = {
            "frames of 1 KiB": small("frames of 1 KiB", ours, framed(ours, "narrow", SMALL, count, MANY, KIB)),
            "plain of 1 KiB": small("plain of 1 KiB", plain, as_json(plain, "text", count, KIB)),
        }
        await rounds_of(1, narrow)
        meter.costs_ms = {name: costs for name, costs in meter.costs_ms.items() if name not in narrow}
        seen = await rounds_of(rounds, narrow)
        seen |= await rounds_of(2, heavier)
        async for info in context.store.list("bench/"):
            await context.store.delete(info.key)
    fired = meter.fired
    return [
        told("raw puts of the blobs' size", wide["raw"], "MiB/s"),
        told("durable produce, 1 KiB records in blobs of 4 MiB", wide["produce"], "MiB/s"),
        at_least("produce bandwidth ÷ raw puts", wide["produce"], wide["raw"], RAW_BAR),
        meter.told("the same by CPU, all processes", "produce", "raw"),
        told("consume from cache", reading["consume"], "MiB/s"),
        at_least("consume from cache ÷ produce", reading["consume"], reading["produce"], CONSUME_BAR),
        told("produce, frames of 10 records", seen["frames"], "records/s"),
        told("produce, JSON of 10 records", seen["json"], "records/s"),
        told("plain broker, JSON of 10 records", seen["plain"], "records/s"),
        at_least("produce (frames) ÷ plain broker", seen["frames"], seen["plain"], PLAIN_BAR),
        meter.told("the same by CPU, all processes (frames)", "frames", "plain"),
        told("produce (JSON) ÷ plain broker", _ratios(seen["json"], seen["plain"]), "ratio"),
        told(
            "produce (frames) ÷ plain broker, records of 1 KiB",
            _ratios(seen["frames of 1 KiB"], seen["plain of 1 KiB"]),
            "ratio",
        ),
        told("fsync of a page: the plain broker waits for three per partition", [fsync_ms], "ms"),
        told("median latency of a produce of 1000 records", [one.latencies_ms[0] for one in fired["produce"]], "ms"),
        told("median latency of a small produce", [one.latencies_ms[0] for one in fired["frames"]], "ms"),
        *[
            told(f"generator's CPU share, {name}", [one.cpu_seconds / one.seconds for one in some], "of a core")
            for name, some in fired.items()
        ],
    ]


def synced_ms(folder: Path) -> float:
    """What it takes to make one page durable in that folder, in the middle of many."""
    clock, took = SystemClock(), []
    with (folder / "synced").open("wb") as file:
        for _ in range(SYNCS):
            file.write(bytes(4096))
            file.flush()
            began = clock.monotonic_s()
            os.fsync(file.fileno())
            took.append((clock.monotonic_s() - began) * 1e3)
    return sorted(took)[SYNCS // 2]


def blob_of(records: int) -> bytes:
    """A blob as the broker writes it for so many records of 1 KiB over the few partitions, with random bytes."""
    each = records // FEW
    parts = [Columns(each, array("I", [KIB]).tobytes() * each, os.urandom(each * KIB)) for _ in range(FEW)]
    bodies = [
        blob.Body(TopicPartition("wide", number), each, codec.encode([part], [codec.Segment(each, 1)]))
        for number, part in enumerate(parts)
    ]
    return blob.encode(bodies, 1)[0]


def framed(url: str, topic: str, count: int, requests: int, partitions: int, size: int) -> list[Request]:
    """Frames of `count` records, the partitions in turn."""
    made = [frames_of(url, topic, partition, count, size) for partition in range(partitions)]
    return [made[number % partitions] for number in range(requests)]


def frames_of(url: str, topic: str, partition: int, count: int, size: int) -> Request:
    """A produce of `count` records of `size` bytes, as a frame."""
    records = Columns(count, array("I", [size]).tobytes() * count, os.urandom(count * size))
    part = {"topic": topic, "partition": partition, "count": count, "payload_bytes": records.size}
    body = frame.encode({"topic_partitions": [part]}, [records])
    return post(url, "/produce", body, count, content_type=frame.MEDIA_TYPE)


def as_json(url: str, topic: str, requests: int, size: int) -> list[Request]:
    def one(partition: int) -> Request:
        part = {"topic": topic, "partition": partition, "records": ["x" * size] * SMALL}
        body = msgspec.json.encode({"topic_partitions": [part]})
        return post(url, "/produce", body, SMALL, content_type="application/json")

    made = [one(partition) for partition in range(MANY)]
    return [made[number % MANY] for number in range(requests)]


async def fetches(url: str, topic: str, blobs: int) -> list[Request]:
    """Fetches of 1000 records over the newest ones of each partition, as many as are in so many blobs."""
    connection = Connection(url)
    _, answer = await connection.ask(f"GET /topics/{topic} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    connection.close()
    ends = {row["partition"]: row["high_watermark"] for row in msgspec.json.decode(answer)["partitions"]}
    return [
        _fetch(url, topic, partition, ends[partition] - (back + 1) * LARGE + 1)
        for back in reversed(range(blobs))
        for partition in range(FEW)
    ]


def _fetch(url: str, topic: str, partition: int, offset: int) -> Request:
    wanted = {"topic": topic, "partition": partition, "fetch_offset": offset, "partition_max_bytes": LARGE * KIB}
    body = msgspec.json.encode({"topic_partitions": [wanted], "max_bytes": LARGE * KIB})
    return post(url, "/consume", body, LARGE, content_type="application/json", accept=frame.MEDIA_TYPE)


def _ratios(some: Sequence[float], bare: Sequence[float]) -> list[float]:
    return [one / base for one, base in zip(some, bare, strict=True)]
