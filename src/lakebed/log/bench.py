"""`lakebed bench log`: durable produce against raw puts and against a plain broker, consume against produce, latency.

Brokers run as processes with default settings; this process generates the load. Contenders take turns in the same run,
on one bucket, with the same number of concurrent uploads and blobs of the same size.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from lakebed.bench.harness import BenchEnvironment, Check, Contender, at_least, measured, rounds_of
from lakebed.bench.load import LoadConnection, LoadRequest, LoadResult, post, send_load, tree_cpu_s
from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.errors import Unavailable
from lakebed.core.ids import Ids
from lakebed.core.settings import env_name
from lakebed.embedded.ports import HOST, HeldPorts
from lakebed.log import bench_peers, blob, codec, contracts
from lakebed.log.bench_latency import latency_checks
from lakebed.log.bench_peers import peer_checks
from lakebed.log.codec import RecordColumns
from lakebed.log.kafka.bench import LibrdkafkaLoad, librdkafka
from lakebed.log.model import TopicPartition
from lakebed.log.settings import LogSettings
from lakebed.store.settings import StoreSettings

READY_S = 60.0
SERVE = ("lakebed", "serve", "--parts", "log", "--port", "0", "--log", "warning")

KIB, MIB = 1024, 1024 * 1024
DEFAULTS = LogSettings()
LARGE = 1000  # records of 1 KiB in a request where bandwidth counts: four requests fill a blob of 4 MiB
FEW, MANY = 4, 128  # partitions: where bandwidth counts, and where every flush commits many
SMALL = 10  # records per request where requests are many
TINY = 100  # bytes of a record where records are counted: with 1 KiB the bucket's put would be half of what is measured
LANES = 128
HOT_BLOBS = 24  # what is certainly still in a tail cache of the default size
SYNCS = 50
RAW_BAR, PLAIN_BAR, CONSUME_BAR, KAFKA_BAR = 0.7, 5.0, 10.0, 0.85
KAFKA_RATIO = "produce with librdkafka, 1 KiB records ÷ raw puts"
Rates = dict[str, list[float]]  # of each contender, one number a round


@asynccontextmanager
async def process(
    environment: BenchEnvironment,
    arguments: Sequence[str],
    settings: Mapping[str, str],
    *,
    started: Callable[[int], None] = lambda _: None,
    log: Path | None = None,
) -> AsyncIterator[str]:
    """Runs `python -m <arguments>` on the environment's bucket until the block ends; gives the URL that it prints.

    Its stderr goes to the file `log`, if given.
    """
    stderr = log.open("wb") if log is not None else None
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *arguments,
        env={**os.environ, **variables_of(environment), **_named(settings)},
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
    )
    if stderr is not None:
        stderr.close()
    started(child.pid)
    try:
        assert child.stdout is not None
        async with asyncio.timeout(READY_S):
            line = await child.stdout.readline()
        if not line:
            raise Unavailable(f"{arguments[0]} did not start")
        yield msgspec.json.decode(line)["url"]
    finally:
        if child.returncode is None:
            child.terminate()
            await child.wait()


def variables_of(environment: BenchEnvironment) -> dict[str, str]:
    """The settings of the environment's bucket, as environment variables of a child process."""
    store = environment.settings.of(StoreSettings)
    return _named(
        {
            "store.url": store.url,
            "store.prefix": store.prefix,
            "store.endpoint": store.endpoint,
            "store.region": store.region,
            "store.access_key_id": store.access_key_id.reveal(),
            "store.secret_access_key": store.secret_access_key.reveal(),
        }
    )


def _named(settings: Mapping[str, str]) -> dict[str, str]:
    return {env_name(key): value for key, value in settings.items() if value}


class CpuMeter:
    """The CPU time of each contender, over all processes, per unit of its work."""

    def __init__(self) -> None:
        self.costs_ms: dict[str, list[float]] = {}
        self.fired: dict[str, list[LoadResult]] = {}

    def of(self, name: str, units: float, work: Callable[[], Awaitable[float]]) -> Contender:
        async def measured() -> float:
            before = tree_cpu_s()
            value = await work()
            self.costs_ms.setdefault(name, []).append((tree_cpu_s() - before) / units * 1e3)
            return value

        return measured

    def checked(self, name: str, done: LoadResult) -> LoadResult:
        if done.failed:
            raise Unavailable(f"{done.failed} of {done.requests} requests failed: {done.statuses}")
        self.fired.setdefault(name, []).append(done)
        return done

    def ratio(self, name: str, cost_of: str, base: str) -> Check:
        """The base's cost divided by this one's: the ratio of their rates if CPU were the only limit."""
        return measured(
            name, [b / max(a, 1e-9) for a, b in zip(self.costs_ms[cost_of], self.costs_ms[base], strict=True)], "ratio"
        )


async def bench(environment: BenchEnvironment) -> Sequence[Check]:
    meter = CpuMeter()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lakebed-bench-")))
        meta = {"meta.path": str(folder / "ours.sqlite")}
        port = stack.enter_context(HeldPorts(Ids())).take()
        serve = [*SERVE, "--kafka-port", str(port)]
        ours = await stack.enter_async_context(process(environment, serve, meta))
        other = await stack.enter_async_context(process(environment, SERVE, meta))
        baseline = ["lakebed.log.loadtest.plain_broker", str(folder / "plain.sqlite")]
        baseline += [str(DEFAULTS.batch_max_bytes), str(DEFAULTS.delay_ms(billed=False))]
        plain = await stack.enter_async_context(process(environment, baseline, {}))
        fsync_ms = synced_ms(folder)
        context = environment.context()
        latency = await latency_checks(environment, context, ours, other)
        wide, reading = await _bandwidth(environment, context, meter, ours, f"{HOST}:{port}")
        small = await _small_requests(environment, meter, ours, plain)
        ports = stack.enter_context(HeldPorts(Ids()))
        peers = await peer_checks(environment, folder, ports.take, lambda count: _lanes(meter, ours, count))
        async for info in context.store.list("bench/"):
            await context.store.delete(info.key)
    checks = [*_bandwidth_checks(meter, wide, reading), *_small_checks(meter, small), *latency, *peers]
    return [*checks, *_conditions(meter, fsync_ms)]


async def _bandwidth(
    environment: BenchEnvironment, context: Context, meter: CpuMeter, ours: str, kafka: str
) -> tuple[Rates, Rates]:
    """Raw puts, produce and, where it is installed, librdkafka in turn, then produce and consume in turn."""
    blobs = 16 if environment.quick else 48
    rounds = 3 if environment.quick else 7
    payload = blob_of(4 * LARGE)
    requests = framed(ours, "wide", LARGE, blobs * 4, FEW, KIB)
    mib = blobs * 4 * LARGE / 1024
    environment.report(f"raw puts of {len(payload):,} bytes, and 1 KiB records produced in such blobs, in turn")

    async def raw() -> float:
        clock = SystemClock()
        waiting = iter(range(blobs))

        async def put_in_turn() -> None:
            for _ in waiting:
                await context.store.create(f"bench/raw/{context.ids.token()}", payload)

        began = clock.monotonic_s()
        await asyncio.gather(*(put_in_turn() for _ in range(DEFAULTS.flights_max)))
        return mib / (clock.monotonic_s() - began)

    async def produce() -> float:
        return meter.checked("produce", await send_load([ours], requests, lanes=36)).records_per_s / 1024

    async def consume() -> float:
        wanted = await fetches(ours, "wide", min(blobs, HOT_BLOBS))
        return meter.checked("consume", await send_load([ours], wanted * 3, lanes=2)).bytes_per_s / MIB

    contenders = {"raw": meter.of("raw", mib, raw), "produce": meter.of("produce", mib, produce)}
    if (client := librdkafka()) is not None:
        load = LibrdkafkaLoad(client, kafka, "kafka", FEW)
        await load.produce(LARGE)
        contenders["librdkafka"] = meter.of("librdkafka", mib, lambda: load.produce(blobs * 4 * LARGE))
    else:
        environment.report("librdkafka is not measured: pip install confluent-kafka")
    await produce()  # warm-up: connections, topics, caches
    wide = await rounds_of(rounds, contenders)
    return wide, await rounds_of(rounds, {"produce": produce, "consume": consume})


def _lanes(meter: CpuMeter, url: str, count: int) -> Contender:
    """The load that peers get: each lane appends to a partition of its own."""
    requests = framed(url, "lanes", bench_peers.RECORDS, count, bench_peers.LANES, bench_peers.RECORD_BYTES)

    async def work() -> float:
        return meter.checked("lanes", await send_load([url], requests, lanes=bench_peers.LANES)).records_per_s

    return work


async def _small_requests(environment: BenchEnvironment, meter: CpuMeter, ours: str, plain: str) -> Rates:
    """Requests of a few records over many partitions, to the log's broker and to the plain one."""
    count = LANES * (12 if environment.quick else 24)

    def small(name: str, url: str, requests: list[LoadRequest]) -> Contender:
        async def work() -> float:
            return meter.checked(name, await send_load([url], requests, lanes=LANES)).records_per_s

        return meter.of(name, count, work)

    environment.report("requests of 10 records over 128 partitions: frames, JSON, and the plain broker, in turn")
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
    found = await rounds_of(3 if environment.quick else 7, narrow)
    return {**found, **await rounds_of(2, heavier)}


def _bandwidth_checks(meter: CpuMeter, wide: Rates, reading: Rates) -> list[Check]:
    return [
        measured("raw puts of the blobs' size", wide["raw"], "MiB/s"),
        measured("durable produce, 1 KiB records in blobs of 4 MiB", wide["produce"], "MiB/s"),
        at_least("produce bandwidth ÷ raw puts", wide["produce"], wide["raw"], RAW_BAR),
        meter.ratio("the same by CPU, all processes", "produce", "raw"),
        *([at_least(KAFKA_RATIO, wide["librdkafka"], wide["raw"], KAFKA_BAR)] if "librdkafka" in wide else []),
        measured("consume from cache", reading["consume"], "MiB/s"),
        at_least("consume from cache ÷ produce", reading["consume"], reading["produce"], CONSUME_BAR),
    ]


def _small_checks(meter: CpuMeter, small: Rates) -> list[Check]:
    heavier = _ratios(small["frames of 1 KiB"], small["plain of 1 KiB"])
    return [
        measured("produce, frames of 10 records", small["frames"], "records/s"),
        measured("produce, JSON of 10 records", small["json"], "records/s"),
        measured("plain broker, JSON of 10 records", small["plain"], "records/s"),
        at_least("produce (frames) ÷ plain broker", small["frames"], small["plain"], PLAIN_BAR),
        meter.ratio("the same by CPU, all processes (frames)", "frames", "plain"),
        measured("produce (JSON) ÷ plain broker", _ratios(small["json"], small["plain"]), "ratio"),
        measured("produce (frames) ÷ plain broker, records of 1 KiB", heavier, "ratio"),
    ]


def _conditions(meter: CpuMeter, fsync_ms: float) -> list[Check]:
    fired = meter.fired
    return [
        measured("fsync of a page: the plain broker waits for three per partition", [fsync_ms], "ms"),
        measured(
            "median latency of a produce of 1000 records", [one.latencies_ms[0] for one in fired["produce"]], "ms"
        ),
        measured("median latency of a small produce", [one.latencies_ms[0] for one in fired["frames"]], "ms"),
        *[
            measured(f"generator's CPU share, {name}", [one.cpu_seconds / one.seconds for one in some], "of a core")
            for name, some in fired.items()
        ],
    ]


def synced_ms(folder: Path) -> float:
    """Median time of an fsync of one page in that folder."""
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
    parts = [RecordColumns(each, array("I", [KIB]).tobytes() * each, os.urandom(each * KIB)) for _ in range(FEW)]
    bodies = [
        blob.PartitionBody(TopicPartition("wide", number), each, codec.encode([part], [codec.BatchSegment(each, 1)]))
        for number, part in enumerate(parts)
    ]
    return blob.encode(bodies, 1)[0]


def framed(url: str, topic: str, count: int, requests: int, partitions: int, size: int) -> list[LoadRequest]:
    """Frames of `count` records, the partitions in turn."""
    made = [frames_of(url, topic, partition, count, size) for partition in range(partitions)]
    return [made[number % partitions] for number in range(requests)]


def frames_of(url: str, topic: str, partition: int, count: int, size: int) -> LoadRequest:
    """A produce of `count` records of `size` bytes, as a frame."""
    records = RecordColumns(count, array("I", [size]).tobytes() * count, os.urandom(count * size))
    part = {"topic": topic, "partition": partition, "count": count, "payload_bytes": records.size}
    body = contracts.encode_frame({"topic_partitions": [part]}, [records])
    return post(url, "/v1/produce", body, count, content_type=contracts.FRAME_MEDIA_TYPE)


def as_json(url: str, topic: str, requests: int, size: int) -> list[LoadRequest]:
    def one(partition: int) -> LoadRequest:
        part = {"topic": topic, "partition": partition, "records": ["x" * size] * SMALL}
        body = msgspec.json.encode({"topic_partitions": [part]})
        return post(url, "/v1/produce", body, SMALL, content_type="application/json")

    made = [one(partition) for partition in range(MANY)]
    return [made[number % MANY] for number in range(requests)]


async def fetches(url: str, topic: str, blobs: int) -> list[LoadRequest]:
    """Fetches of 1000 records over the newest ones of each partition, as many as are in so many blobs."""
    connection = LoadConnection(url)
    _, answer = await connection.request(f"GET /v1/topics/{topic} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    connection.close()
    ends = {row["partition"]: row["high_watermark"] for row in msgspec.json.decode(answer)["partitions"]}
    return [
        _fetch(url, topic, partition, ends[partition] - (back + 1) * LARGE + 1)
        for back in reversed(range(blobs))
        for partition in range(FEW)
    ]


def _fetch(url: str, topic: str, partition: int, offset: int) -> LoadRequest:
    wanted = {"topic": topic, "partition": partition, "fetch_offset": offset, "partition_max_bytes": LARGE * KIB}
    body = msgspec.json.encode({"topic_partitions": [wanted], "max_bytes": LARGE * KIB})
    return post(url, "/v1/consume", body, LARGE, content_type="application/json", accept=contracts.FRAME_MEDIA_TYPE)


def _ratios(some: Sequence[float], bare: Sequence[float]) -> list[float]:
    return [one / base for one, base in zip(some, bare, strict=True)]
