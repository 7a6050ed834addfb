"""`lakebed bench queue`: durable entries through ingestors, beside raw puts of the same blobs in the same run.

Every batch is one blob of about 1 MiB, 1,024 entries of 1 KiB that do not compress. Raw puts have no manifest, no
order and no checksum. Ingestors of one process share a producer, as they do in a gateway. What a backlog and many
gateways cost is measured in `bench_backlog`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import obstore

from lakebed.bench.harness import BenchEnvironment, Check, at_least, measured, rate, rounds_of
from lakebed.core.context import Context
from lakebed.queue import codec
from lakebed.queue.bench_backlog import backlog_checks
from lakebed.queue.consumer import REGISTER as CONSUMER
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.producer import REGISTER as PRODUCER
from lakebed.queue.roles import Queue
from lakebed.queue.settings import QueueSettings
from lakebed.store.bench import spread
from lakebed.store.obstore_client import open_bucket
from lakebed.store.settings import StoreSettings

ENTRIES = 1024
ENTRY_BYTES = 1000
RAW_LANES = 8  # the concurrency at which raw puts of 1 MiB are fastest here
BANDWIDTH_BAR = 0.85
COLLECT_BAR = 1.0
SIXTEEN_BAR = 0.95  # not slower; the rest allows for noise between rounds
FLEETS = (1, 4, 16)


async def bench(environment: BenchEnvironment) -> Sequence[Check]:
    context = environment.context()
    blobs = 28 if environment.quick else 160
    settings = QueueSettings(flush_size_bytes=ENTRIES * ENTRY_BYTES)
    entries = _entries()
    raw = _raw(environment, context, codec.encode(entries), blobs)
    fleets = {f"{count}": _fleet(context, settings, entries, blobs, count) for count in FLEETS}
    environment.report(f"{blobs} blobs of 1 MiB per turn: raw puts and 1, 4 and 16 ingestors")
    # Each fleet runs next to raw puts, and 4 and 16 run next to each other in both orders: the speed of a machine
    # changes within a round.
    turns = {"raw 1": raw, "1": fleets["1"], "raw 4": raw, "4": fleets["4"], "16": fleets["16"], "raw 16": raw}
    again = {"16 again": fleets["16"], "4 again": fleets["4"]}
    seen = await rounds_of(environment.rounds, turns | again)
    producing = _per_commit(context, PRODUCER)
    environment.report("a collector claims, prefetches and acks")
    turns_both = [await _produce_and_collect(context, settings, entries, blobs) for _ in range(3)]
    produced, collecting = [one for one, _ in turns_both], [other for _, other in turns_both]
    contended = await _contended(environment, settings)
    await _clear(context)
    return [
        measured("raw puts of 1 MiB", [one for name in fleets for one in seen[f"raw {name}"]], "MiB/s"),
        *[measured(f"durable, {name} ingestors", seen[name], "MiB/s") for name in fleets],
        *[
            measured(f"durable, {name} ingestors", [one * ENTRIES for one in seen[name]], "entries/s")
            for name in fleets
        ],
        *[
            at_least(f"bandwidth, {name} ingestors ÷ raw", seen[name], seen[f"raw {name}"], BANDWIDTH_BAR)
            for name in fleets
        ],
        at_least("16 ingestors ÷ 4 ingestors", seen["16"] + seen["16 again"], seen["4"] + seen["4 again"], SIXTEEN_BAR),
        measured("batches per producer commit", [producing["batches"]], "batches"),
        measured("conflicts per commit, producer manifest", [producing["conflicts"]], "conflicts"),
        measured("conflicts per commit, 4 separate producers", [contended], "conflicts"),
        measured("collected and acknowledged", collecting, "MiB/s"),
        at_least("collected and acknowledged ÷ produced", collecting, produced, COLLECT_BAR),
        measured("claims and acks per consumer commit", [_per_commit(context, CONSUMER)["changes"]], "changes"),
        *await backlog_checks(environment),
    ]


def _entries() -> list[KeyValueEntry]:
    rng = Random(4)
    return [KeyValueEntry(b"key-%012d" % n, rng.randbytes(ENTRY_BYTES)) for n in range(ENTRIES)]


def _raw(environment: BenchEnvironment, context: Context, blob: bytes, blobs: int) -> Callable[[], Awaitable[float]]:
    bare = open_bucket(environment.settings.of(StoreSettings))

    async def put(key: str) -> Any:
        return await obstore.put_async(bare, key, blob, use_multipart=False)

    async def measured() -> float:
        jobs = [partial(put, f"bench-queue/raw/{context.ids.token()}") for _ in range(blobs)]
        return await rate(context.clock, blobs, lambda: spread(RAW_LANES, jobs)) * len(blob) / 2**20

    return measured


def _fleet(
    context: Context, settings: QueueSettings, entries: list[KeyValueEntry], blobs: int, count: int
) -> Callable[[], Awaitable[float]]:
    async def measured() -> float:
        queue = _queue(context, settings)
        fleet = [queue.ingestor() for _ in range(count)]

        async def produce(ingestor: Any, share: int) -> None:
            for _ in range(share):
                await ingestor.ingest(entries)
            await ingestor.close()

        async def all_of_them() -> None:
            shares = [blobs // count + (n < blobs % count) for n in range(count)]
            await asyncio.gather(*(produce(one, share) for one, share in zip(fleet, shares, strict=True)))

        done = await rate(context.clock, blobs, all_of_them)
        waiting = (await queue.producer.read()).waiting
        assert waiting == blobs, f"{waiting} of {blobs} batches are pending"
        return done * codec.size_of(entries) / 2**20

    return measured


async def _produce_and_collect(
    context: Context, settings: QueueSettings, entries: list[KeyValueEntry], blobs: int
) -> tuple[float, float]:
    """The bandwidth of one ingestor, then of one collector on what it produced."""
    queue = _queue(context, settings)

    async def produce() -> None:
        ingestor = queue.ingestor()
        for _ in range(blobs):
            await ingestor.ingest(entries)
        await ingestor.close()

    async def drain() -> None:
        collector = queue.collector()
        while (batch := await collector.next_batch()) is not None:
            await collector.ack(batch)
        await collector.close()

    size = codec.size_of(entries) / 2**20
    return await rate(context.clock, blobs, produce) * size, await rate(context.clock, blobs, drain) * size


async def _contended(environment: BenchEnvironment, settings: QueueSettings) -> float:
    """Four producers that share nothing but the bucket, as four processes would: what grouping saves."""
    contexts = [environment.context() for _ in range(4)]
    name = f"bench-{contexts[0].ids.token()}"

    async def produce(context: Context) -> None:
        ingestor = _queue(context, settings, name).ingestor()
        for _ in range(5):
            await (await ingestor.ingest([KeyValueEntry(b"k", b"v")])).await_durable()
        await ingestor.close()

    await asyncio.gather(*(produce(context) for context in contexts))
    await _clear(contexts[0])
    return sum(_per_commit(context, PRODUCER)["conflicts"] for context in contexts) / 4


def _queue(context: Context, settings: QueueSettings, name: str = "") -> Queue:
    name = name or f"bench-{context.ids.token()}"
    return Queue(name, settings, context)


def _per_commit(context: Context, register: str) -> dict[str, float]:
    value = context.metrics.value
    writes = value("lakebed_register_writes_total", register=register) or 1.0
    return {
        "changes": value("lakebed_register_changes_total", register=register) / writes,
        "batches": value("lakebed_queue_batches_total") / writes,
        "conflicts": value("lakebed_register_conflicts_total", register=register) / writes,
    }


async def _clear(context: Context) -> None:
    for folder in ("bench-queue/", "ingest/"):
        doomed = [info.key async for info in context.store.list(folder) if "bench-" in info.key]
        await spread(16, [partial(context.store.delete, key) for key in doomed])
