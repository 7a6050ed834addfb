"""The parts of `lakebed bench queue` that need no bucket: what an append costs behind a backlog, and many gateways.

Appends are measured on a bucket in memory, so that CPU and bytes are the queue's own. A queue of 10 million batches is
made by writing the head that such a queue has: an append reads nothing else. Its first segment is stored too, to show
that a collector begins there. The gateways share a bucket whose every request takes 20 ms, as a distant one does; each
has its own clients and manifests in memory, as processes would.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from statistics import quantiles

import msgspec

from lakebed.bench.harness import BenchEnvironment, Check, at_most, measured
from lakebed.core.clock import Clock, SystemClock
from lakebed.core.errors import OutcomeUnknown
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.queue import paths
from lakebed.queue.model import SEALED_VERSION, Append, PendingBatch, ProducerManifest
from lakebed.queue.roles import Queue
from lakebed.queue.segments import Segment
from lakebed.queue.settings import QueueSettings
from lakebed.store.memory import MemoryBucket, MemoryStore
from lakebed.store.model import StoredObject, Version, Written
from lakebed.store.runtime import StoreRuntime

BACKLOGS = (50, 50_000, 10_000_000)
REAL_MAX = 50_000  # longer queues are made by writing their head
APPENDS = 256  # four whole cycles of sealing
BACKLOG_BAR = 1.3
GATEWAYS = 50
CHANGES_PER_S = 50
REQUEST_S = 0.02
P99_BAR_S = 1.0
BATCH_BYTES = 1_000_000


class CountedStore(MemoryStore):
    """Counts the bytes that are written."""

    written = 0

    async def create(self, key: str, data: bytes) -> Written:
        self.written += len(data)
        return await super().create(key, data)

    async def replace(self, key: str, data: bytes, etag: Version) -> Written:
        self.written += len(data)
        return await super().replace(key, data, etag)


class DistantBucket(MemoryBucket):
    """Every request takes 20 ms, half of them on the way."""

    async def get(self, key: str) -> StoredObject:
        await asyncio.sleep(REQUEST_S / 2)
        found = await super().get(key)
        await asyncio.sleep(REQUEST_S / 2)
        return found

    async def put(self, key: str, data: bytes, instead_of: Version | None) -> Version:
        await asyncio.sleep(REQUEST_S / 2)
        version = await super().put(key, data, instead_of)
        await asyncio.sleep(REQUEST_S / 2)
        return version


async def backlog_checks(environment: BenchEnvironment) -> Sequence[Check]:
    clock = SystemClock()
    environment.report(f"{APPENDS} appends behind {', '.join(f'{count:,}' for count in BACKLOGS)} pending batches")
    queues = {count: await _queue_of(clock, count) for count in BACKLOGS}
    cpu: dict[int, list[float]] = {count: [] for count in BACKLOGS}
    written: dict[int, list[float]] = {count: [] for count in BACKLOGS}
    for number in range(environment.rounds):
        for count in BACKLOGS if number % 2 == 0 else reversed(BACKLOGS):
            used = await _append(queues[count], f"round-{number}")
            cpu[count].append(used[0])
            written[count].append(used[1])
    few = BACKLOGS[0]
    checks = [
        measured("append behind 50 pending, CPU", [1e6 * one for one in cpu[few]], "µs"),
        measured("append behind 50 pending, written", written[few], "bytes"),
    ]
    for count in BACKLOGS[1:]:
        checks.append(at_most(f"append CPU, {count:,} pending ÷ {few}", cpu[count], cpu[few], BACKLOG_BAR))
        checks.append(at_most(f"append bytes, {count:,} pending ÷ {few}", written[count], written[few], BACKLOG_BAR))
    for shards in (1, 8):
        checks += await _gateways(environment, clock, shards)
    return checks


def _runtime(clock: Clock, store: MemoryStore, seed: int = 0) -> StoreRuntime:
    return StoreRuntime(clock=clock, ids=Ids.seeded(seed) if seed else Ids(), metrics=Metrics(), store=store)


async def _queue_of(clock: Clock, pending: int) -> Queue:
    """A queue with so many pending batches."""
    store = CountedStore(clock=clock)
    settings = QueueSettings()
    queue = Queue("bench", settings, _runtime(clock, store))
    if pending > REAL_MAX:
        await _forge(queue, pending)
        return queue
    for first in range(1, pending + 1, settings.segment_batches):
        last = min(first + settings.segment_batches, pending + 1)
        await queue.producer.append([_batch(queue, "fill", number) for number in range(first, last)])
        await queue.producer.settled()
    return queue


async def _forge(queue: Queue, pending: int) -> None:
    block, folder = queue.settings.segment_batches, "forged"
    sealed = pending // block * block
    head = ProducerManifest(
        version=SEALED_VERSION,
        next_sequence=sealed,
        floor=1,
        sealed=sealed,
        segments=folder,
        block=block,
        sealed_bytes=sealed * BATCH_BYTES,
    )
    entries = {_batch(queue, "old", n).location: PendingBatch(n, BATCH_BYTES, 1000, 1) for n in range(1, block)}
    manifest_path = queue.settings.manifest_path
    await queue.store.create(paths.segment(manifest_path, folder, 0), msgspec.json.encode(Segment(0, entries)))
    await queue.store.create(manifest_path, msgspec.json.encode(head))
    view = await queue.producer.view(1)
    assert view.entries[view.pending[0]].sequence == 1, "a collector does not begin with the oldest batch"


def _batch(queue: Queue, ingestor: str, number: int) -> Append:
    return Append(ingestor, number, 0, queue.settings.location(0, f"{ingestor}-{number:032d}"), BATCH_BYTES, 1000)


async def _append(queue: Queue, ingestor: str) -> tuple[float, float]:
    """CPU seconds and bytes of one append, sealing included."""
    store = queue.store
    assert isinstance(store, CountedStore)
    batches = [_batch(queue, ingestor, number) for number in range(1, APPENDS + 1)]
    before, written = time.process_time(), store.written
    for batch in batches:
        await queue.producer.append([batch])
        await queue.producer.settled()
    return (time.process_time() - before) / APPENDS, (store.written - written) / APPENDS


async def _gateways(environment: BenchEnvironment, clock: Clock, shards: int) -> list[Check]:
    """Each gateway appends once a second, spread over it; how long that takes, and how many outcomes are unknown."""
    environment.report(f"{GATEWAYS} gateways, {CHANGES_PER_S} appends a second, {shards} shards, 20 ms a request")
    bucket, seconds = DistantBucket(clock=clock), 5 if environment.quick else 15
    settings = QueueSettings(shards=shards)
    took: list[float] = []
    unknown = 0

    async def gateway(number: int) -> None:
        nonlocal unknown
        queue = Queue("bench", settings, _runtime(clock, MemoryStore(clock=clock, bucket=bucket), seed=number + 1))
        producer = queue.shard(number % shards).producer
        for turn in range(1, seconds * CHANGES_PER_S // GATEWAYS + 1):
            due_s = began_s + turn + number / GATEWAYS
            await clock.sleep(max(0.0, due_s - clock.monotonic_s()))
            try:
                await producer.append([_batch(queue, f"gateway-{number}", turn)])
            except OutcomeUnknown:
                unknown += 1
            took.append(clock.monotonic_s() - due_s)

    began_s = clock.monotonic_s()
    await asyncio.gather(*(gateway(number) for number in range(GATEWAYS)))
    name = f"{GATEWAYS} gateways, {shards} shard{'s' if shards > 1 else ''}"
    p99_s = quantiles(took, n=100)[98]
    # One key takes at most 1 / 20 ms changes a second, so a single shard is saturated here: shards are the answer.
    bar = P99_BAR_S if shards > 1 else None
    return [
        Check(f"{name}: unknown outcomes", unknown, "outcomes", 0, unknown == 0),
        Check(f"{name}: append p99", round(p99_s, 3), "s", bar, bar is None or p99_s < bar),
    ]
