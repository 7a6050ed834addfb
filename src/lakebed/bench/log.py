"""`lakebed bench log`: durable produce beside raw puts and beside a plain broker, and consume beside produce.

Brokers are processes of their own; the generator is this one. Contenders take turns in the same run, on one bucket.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from lakebed.bench.hammer import Fired, Request, fire, post
from lakebed.bench.harness import Check, Contender, Stand, at_least, rounds_of, told
from lakebed.clock import SystemClock
from lakebed.errors import Unavailable
from lakebed.log import frame
from lakebed.log.columns import Columns
from lakebed.settings import env_name
from lakebed.store.settings import StoreSettings

KIB, MIB = 1024, 1024 * 1024
BLOB = 4 * MIB
FEW, MANY = 4, 128  # partitions: where bandwidth counts, and where every flush commits many
SMALL = 10  # records per request where requests are many
LANES = 128
RAW_BAR, PLAIN_BAR, CONSUME_BAR = 0.7, 5.0, 3.0
READY_S = 60.0


async def bench(stand: Stand) -> Sequence[Check]:
    blobs = 16 if stand.quick else 48
    rounds = 3 if stand.quick else 5
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lakebed-bench-")))
        ours = await stack.enter_async_context(broker(stand, folder, "ours"))
        plain = await stack.enter_async_context(plain_broker(stand, folder))
        stand.tell("raw puts of 4 MiB, and 1 KiB records produced in blobs of 4 MiB, in turn")
        context = stand.context()
        payload = os.urandom(BLOB)
        fired: dict[str, list[Fired]] = {"produce": [], "consume": [], "binary": [], "json": [], "plain": []}

        async def raw() -> float:
            clock = SystemClock()
            waiting = iter(range(blobs))

            async def lane() -> None:
                for _ in waiting:
                    await context.store.create(f"bench/raw/{context.ids.token()}", payload)

            began = clock.monotonic_s()
            await asyncio.gather(*(lane() for _ in range(4)))
            return blobs * 4 / (clock.monotonic_s() - began)

        async def produce() -> float:
            done = await fire([ours], framed(ours, "wide", 1024, blobs * 4, FEW), lanes=36)
            fired["produce"].append(_good(done))
            return done.records_per_s / 1024

        async def consume() -> float:
            done = await fire([ours], fetches(ours, "wide", blobs * 4), lanes=2)
            fired["consume"].append(_good(done))
            return done.bytes_per_s / MIB

        wide = await rounds_of(rounds, {"raw": raw, "produce": produce})
        reading = await rounds_of(rounds, {"produce": produce, "consume": consume})
        stand.tell("requests of 10 records over 128 partitions: frames, JSON, and the plain broker, in turn")
        count = 500 if stand.quick else 3000

        def small(name: str, url: str, requests: list[Request]) -> Contender:
            async def measured() -> float:
                done = await fire([url], requests, lanes=LANES)
                fired[name].append(_good(done))
                return done.records_per_s

            return measured

        narrow = await rounds_of(
            rounds,
            {
                "binary": small("binary", ours, framed(ours, "narrow", SMALL, count, MANY)),
                "json": small("json", ours, as_json(ours, "text", count)),
                "plain": small("plain", plain, as_json(plain, "text", count)),
            },
        )
        async for info in context.store.list("bench/"):
            await context.store.delete(info.key)
    return [
        told("raw puts of 4 MiB", wide["raw"], "MiB/s"),
        told("durable produce, 1 KiB records in blobs of 4 MiB", wide["produce"], "MiB/s"),
        at_least("produce bandwidth ÷ raw puts", wide["produce"], wide["raw"], RAW_BAR),
        told("consume from cache", reading["consume"], "MiB/s"),
        at_least("consume from cache ÷ produce", reading["consume"], reading["produce"], CONSUME_BAR),
        told("produce, frames of 10 records", narrow["binary"], "records/s"),
        told("produce, JSON of 10 records", narrow["json"], "records/s"),
        told("plain broker, JSON of 10 records", narrow["plain"], "records/s"),
        at_least("produce (frames) ÷ plain broker", narrow["binary"], narrow["plain"], PLAIN_BAR),
        told("produce (JSON) ÷ plain broker", _ratios(narrow["json"], narrow["plain"]), "ratio"),
        told("median latency of a produce of 4 MiB blobs", [one.latencies_ms[0] for one in fired["produce"]], "ms"),
        told("median latency of a small produce", [one.latencies_ms[0] for one in fired["binary"]], "ms"),
        *[
            told(f"generator's CPU share, {name}", [one.cpu_seconds / one.seconds for one in some], "of a core")
            for name, some in fired.items()
        ],
    ]


def framed(url: str, topic: str, count: int, requests: int, partitions: int) -> list[Request]:
    """Frames of `count` records of 1 KiB, the partitions in turn."""
    made = [frames_of(url, topic, partition, count, KIB) for partition in range(partitions)]
    return [made[number % partitions] for number in range(requests)]


def frames_of(url: str, topic: str, partition: int, count: int, size: int) -> Request:
    """A produce of `count` records of `size` bytes, as a frame."""
    records = Columns(count, array("I", [size]).tobytes() * count, b"x" * (count * size))
    part = {"topic": topic, "partition": partition, "count": count, "payload_bytes": records.size}
    body = frame.encode({"topic_partitions": [part]}, [records])
    return post(url, "/produce", body, count, content_type=frame.MEDIA_TYPE)


def as_json(url: str, topic: str, requests: int) -> list[Request]:
    def one(partition: int) -> Request:
        part = {"topic": topic, "partition": partition, "records": ["x" * KIB] * SMALL}
        body = msgspec.json.encode({"topic_partitions": [part]})
        return post(url, "/produce", body, SMALL, content_type="application/json")

    made = [one(partition) for partition in range(MANY)]
    return [made[number % MANY] for number in range(requests)]


def fetches(url: str, topic: str, count: int) -> list[Request]:
    """Fetches of 1 MiB over the hottest records of each partition."""
    return [
        post(
            url,
            "/consume",
            msgspec.json.encode(
                {
                    "topic_partitions": [
                        {
                            "topic": topic,
                            "partition": number % FEW,
                            "fetch_offset": 1 + (number // FEW) * 1024,
                            "partition_max_bytes": MIB,
                        }
                    ],
                    "max_bytes": MIB,
                }
            ),
            1024,
            content_type="application/json",
            accept=frame.MEDIA_TYPE,
        )
        for number in range(count)
    ]


@asynccontextmanager
async def broker(stand: Stand, folder: Path, name: str, **settings: str) -> AsyncIterator[str]:
    """A gateway with the log alone, in a process of its own."""
    told = {
        "meta.path": str(folder / f"{name}.sqlite"),
        "log.batch_max_bytes": str(BLOB),
        "log.cache_bytes": str(1024 * MIB),
        **settings,
    }
    async with process(stand, ["lakebed", "serve", "--parts", "log", "--port", "0", "--log", "warning"], told) as url:
        yield url


@asynccontextmanager
async def plain_broker(stand: Stand, folder: Path) -> AsyncIterator[str]:
    arguments = ["lakebed.bench.plain_broker", str(folder / "plain.sqlite"), str(BLOB), "10"]
    async with process(stand, arguments, {}) as url:
        yield url


@asynccontextmanager
async def process(
    stand: Stand,
    arguments: Sequence[str],
    settings: dict[str, str],
    *,
    started: Callable[[int], None] = lambda _: None,
) -> AsyncIterator[str]:
    """Runs `python -m <arguments>` on the stand's bucket until the block ends; gives the address it says on stdout."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *arguments,
        env={**os.environ, **environment(stand), **_named(settings)},
        stdout=asyncio.subprocess.PIPE,
    )
    started(child.pid)
    try:
        assert child.stdout is not None
        async with asyncio.timeout(READY_S):
            said = await child.stdout.readline()
        if not said:
            raise Unavailable(f"{arguments[0]} did not start")
        yield msgspec.json.decode(said)["url"]
    finally:
        if child.returncode is None:
            child.terminate()
            await child.wait()


def environment(stand: Stand) -> dict[str, str]:
    """The stand's bucket, for a process of its own."""
    store = stand.settings.of(StoreSettings)
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


def _named(settings: dict[str, str]) -> dict[str, str]:
    return {env_name(key): value for key, value in settings.items() if value}


def _good(done: Fired) -> Fired:
    if done.failed:
        raise Unavailable(f"{done.failed} of {done.requests} requests failed: {done.statuses}")
    return done


def _ratios(some: Sequence[float], bare: Sequence[float]) -> list[float]:
    return [one / base for one, base in zip(some, bare, strict=True)]
