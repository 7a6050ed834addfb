"""The loops that `lakebed bench scale` measures, each on the part's own roles. See `scale.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cache

from lakebed.batches import acceptance, paths
from lakebed.batches.acceptor import Acceptor
from lakebed.batches.codec.frame import columns_of, decode, encode
from lakebed.batches.derived_writes import DerivedWrites
from lakebed.batches.feed import BatchesFeed
from lakebed.batches.incremental import IncrementalScan
from lakebed.batches.index import write_rows
from lakebed.batches.live import Follower, LiveBatches
from lakebed.batches.model import AcceptedBatch, BatchIdentity, Sample, SampleColumns, write_record
from lakebed.batches.reader import RawBatches
from lakebed.batches.reconciler import Reconciler
from lakebed.batches.retention import BatchRetention
from lakebed.batches.settled import WAIT_S
from lakebed.core.context import Context
from lakebed.core.feed import FeedFilter, Limit, ahead
from lakebed.lifecycle.enforcer import Enforcer
from lakebed.lifecycle.memory import MemoryLake
from lakebed.lifecycle.model import Rule
from lakebed.lifecycle.policy import render_xml
from lakebed.lifecycle.reserved import ReservedKeys
from lakebed.lifecycle.resolver import Seams
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.state import LifecycleState
from lakebed.log.broker import Broker
from lakebed.log.codec import columns
from lakebed.log.model import TopicPartition
from lakebed.log.producers import RecordChunk
from lakebed.log.services import LogServices
from lakebed.log.settings import LogSettings
from lakebed.log.writer import PartitionAppend
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.roles import Queue
from lakebed.queue.settings import QueueSettings
from lakebed.rollups.local_job import LocalJob
from lakebed.rollups.model import RollupInput, RollupInputReport, StoredChunk
from lakebed.rollups.roller import Roller
from lakebed.store.model import StoredObject
from lakebed.ticks import commit_times
from lakebed.ticks.adapters import open_audit, open_queue
from lakebed.ticks.audit import AuditRow
from lakebed.ticks.auditor import DispatchAuditor
from lakebed.ticks.dispatcher import DONE
from lakebed.ticks.model import TickId
from lakebed.ticks.settings import TicksSettings
from lakebed.wiring.scale import Loop, LoopRun, Size, Testbed, batches_s, few, gateways

SAMPLES, SERIES = 700, 20  # of a batch: some 11 KB
UPLOADS = 64  # in progress at one gateway
RANGES_MAX = 16  # hash ranges that reconcilers share
SHARDS_MAX = 16  # of the lifecycle log
WINDOWS_S = (60, 300, 3600)
DAY_S = 20.0


def frame_of(agent: str, number: int, at_ns: int, samples: int = SAMPLES) -> bytes:
    start = number * samples
    return encode(BatchIdentity(agent, "boot", start, start + samples - 1), _columns(at_ns, samples))


@cache
def _columns(at_ns: int, samples: int) -> SampleColumns:
    made = [Sample("cpu", at_ns + n * 1_000_000, float(n), labels={"core": str(n % SERIES)}) for n in range(samples)]
    return columns_of(made)


async def in_lanes(lanes: int, work: Sequence[Callable[[], Awaitable[object]]]) -> None:
    async for _ in ahead(work, lambda each: each(), lanes):
        pass


def enough(bed: Testbed) -> tuple[int, int]:
    """Agents, and batches of each: what M delivers in 4 s, or in 10 s."""
    return (1_000, 4) if bed.quick else (1_000, 10)


_STORED: dict[tuple[int, int, int], tuple[list[AcceptedBatch], dict[str, StoredObject]]] = {}


async def stored(bed: Testbed, agents: int, each: int, samples: int = SAMPLES) -> list[AcceptedBatch]:
    """Accepted and indexed batches, as collectors leave them; this takes no time. They are made once for all loops."""
    wanted = (agents, each, samples)
    if wanted not in _STORED:
        bed.bucket.free = True
        _STORED[wanted] = await _made(bed, *wanted), dict(bed.bucket.objects)
        bed.bucket.free = False
    made, objects = _STORED[wanted]
    bed.bucket.take(objects)
    return made


async def _made(bed: Testbed, agents: int, each: int, samples: int) -> list[AcceptedBatch]:
    context = bed.context()
    made: list[AcceptedBatch] = []
    entries = []
    for number in range(each):
        for agent in range(agents):
            frame = frame_of(f"agent-{agent:06d}", number, bed.clock.now_ns(), samples)
            submitted = acceptance.submission(frame, decode(frame))
            accepted = acceptance.manifest(
                submitted, at_ns=bed.clock.now_ns() + len(made), collector_id="c", attempt_id=context.ids.token()
            )
            await context.store.create(submitted.blob_key, frame)
            await context.store.create(paths.accepted_key(accepted.identity), write_record(accepted))
            made.append(accepted)
            entries.append(acceptance.entry_of(accepted, acceptance.span_of(submitted.batch)))
    for at in range(0, len(entries), 40):  # a flush of 2 s at 20 batches a second
        await write_rows(context.store, entries[at : at + 40], writer="c")
    return made


async def accept(bed: Testbed, size: Size, *, pack_s: float = 0.0) -> LoopRun:
    """One gateway: frames are decoded and accepted, with their index."""
    context, count = bed.context(), 300 if bed.quick else 1_500
    derived = DerivedWrites(context, waiting_max=10_000)
    derived.start()
    acceptor = Acceptor(
        context,
        derived,
        collector_id="c",
        on_accepted=lambda *_: None,
        accepting_max=256,
        known_max=100_000,
        timeout_s=25.0,
        retry_after_s=2.0,
        pack_s=pack_s,
    )
    frames = [frame_of(f"agent-{number}", 0, bed.clock.now_ns()) for number in range(count)]

    async def one(frame: bytes) -> None:
        await acceptor.accept(acceptance.submission(frame, decode(frame)))

    bed.begin()
    await in_lanes(UPLOADS, [lambda frame=frame: one(frame) for frame in frames])  # type: ignore[misc]
    await derived.drain()
    return bed.end(count)


async def accept_packed(bed: Testbed, size: Size) -> LoopRun:
    """The same with packs of 100 ms."""
    return await accept(bed, size, pack_s=0.1)


async def derived_writes(bed: Testbed, size: Size) -> LoopRun:
    count = 4_000 if bed.quick else 20_000
    derived = DerivedWrites(bed.context(), waiting_max=count)
    made = (await stored(bed, 1, 1))[0]
    span = acceptance.SampleSpan(SAMPLES, 1, 2)
    bed.begin()
    derived.start()
    for number in range(count):
        identity = BatchIdentity(f"agent-{number}", "boot", 0, 1)
        place = acceptance.whole_place(made.frame_sha256, made.frame_bytes)
        derived.put(
            acceptance.manifest_of(
                identity, made.frame_sha256, place, at_ns=bed.clock.now_ns(), collector_id="c", attempt_id="a"
            ),
            span,
        )
    await derived.drain()
    return bed.end(count)


async def live_query(bed: Testbed, size: Size) -> LoopRun:
    """One look of a query collector at what all others accepted since its last one."""
    made = await stored(bed, *enough(bed))
    context = bed.context()
    live = LiveBatches(context, bytes_max=1 << 30, window_s=3600.0)
    follower = Follower(
        RawBatches(context.store), live, window_s=3600.0, overlap_s=120.0, interval_s=2.0, clock=bed.clock
    )
    bed.begin()
    seen = await follower.poll()
    assert seen == len(made), (seen, len(made))
    return bed.end(seen)


async def reconciler(bed: Testbed, size: Size) -> LoopRun:
    """One pass over what agents delivered in an interval of the steady scan: 30 batches each."""
    agents = min(size.agents, 200 if bed.quick else 600)
    made = await stored(bed, agents, 30, samples=5)  # frames are not read: their rows are in the index
    await bed.clock.sleep(60.0)
    context = bed.context()
    scan = IncrementalScan(
        context, Reconciler(context, overlap_s=900.0, concurrency=8), interval_s=300.0, owner="scale"
    )
    bed.begin()
    report = await scan.scan()
    assert report.checked == len(made), (report.checked, len(made))
    return bed.end(report.checked)


async def retention(bed: Testbed, size: Size) -> LoopRun:
    """Both passes over an hour of accepted batches: the first settles it, the second removes it."""
    made = await stored(bed, 300, 20 if bed.quick else 60, samples=5)
    await bed.clock.sleep(3 * 86_400.0)
    role = BatchRetention(bed.context(), retention_days=1.0, owner="scale")
    bed.begin()
    await role.run()
    await bed.skip(WAIT_S)
    report = await role.run()
    assert report.removed_batches == len(made), report
    return bed.end(report.removed_batches)


class TimedJob(LocalJob):
    """The engine of a roller, with the time that Spark's tasks would share."""

    def __init__(self, bed: Testbed, context: Context) -> None:
        super().__init__(context.store)
        self._bed, self.spent_s = bed, 0.0

    async def read(self, inputs: list[RollupInput], windows_s: tuple[int, ...]) -> list[RollupInputReport]:
        began_s = self._bed.spent_s()
        done = await super().read(inputs, windows_s)
        self.spent_s += self._bed.spent_s() - began_s
        return done

    async def write(self, generation_id: str) -> list[StoredChunk]:
        began_s = self._bed.spent_s()
        done = await super().write(generation_id)
        self.spent_s += self._bed.spent_s() - began_s
        return done


async def roller(bed: Testbed, size: Size) -> LoopRun:
    """One run of the roller: its plan and commit are its own, reading and adding up are divided among tasks."""
    made = await stored(bed, *enough(bed))
    await bed.clock.sleep(1_800.0)
    context = bed.context()
    job = TimedJob(bed, context)
    role = Roller(
        context,
        job,
        windows_s=WINDOWS_S,
        overlap_s=900.0,
        batches_max=10_000,
        lease_s=600.0,
        owner="scale",
    )
    bed.begin()
    report = await role.run()
    assert report.batches == len(made), report
    return bed.end(report.batches, divided_s=job.spent_s)


async def bronze_step(bed: Testbed, size: Size) -> LoopRun:
    """What a step of bronze reads: the driver's plan, and tasks that load it into Arrow."""
    made = await stored(bed, *enough(bed))
    await bed.clock.sleep(1_800.0)
    feed = BatchesFeed(bed.context().store, now_ns=bed.clock.now_ns)
    bed.begin()
    begin = await feed.begin()
    pieces = await feed.slices(begin, await feed.reach(begin, Limit()), FeedFilter())
    names, began_s = feed.schema().names, bed.spent_s()
    rows = [table.num_rows async for table in ahead(pieces, lambda piece: feed.load(piece, names, FeedFilter()))]
    assert sum(rows) == len(made) * SAMPLES
    return bed.end(len(rows), divided_s=bed.spent_s() - began_s)


def shards(size: Size) -> int:
    """The setting `queue.shards` for a size: three gateways share a manifest."""
    return max(1, min(16, size.gateways // 3))


async def queue(bed: Testbed, size: Size) -> LoopRun:
    """Every gateway makes batches durable in one queue: they meet at its manifest."""
    writers, rounds = min(size.gateways, 50), 5 if bed.quick else 20
    settings = QueueSettings(flush_interval_s=0.05, shards=shards(size))
    ingestors = [Queue("scale", settings, bed.context()).ingestor() for _ in range(writers)]
    bed.begin()

    async def write(number: int) -> None:
        for _ in range(rounds):
            await (await ingestors[number].ingest([KeyValueEntry(b"k", b"v" * 1000)])).await_durable()

    await asyncio.gather(*map(write, range(writers)))
    done = bed.end(writers * rounds)
    await asyncio.gather(*(each.close() for each in ingestors))
    return done


def _partitions(size: Size) -> list[TopicPartition]:
    return [TopicPartition("t", number) for number in range(max(1, size.partitions // size.gateways))]


def _flight(tps: Sequence[TopicPartition]) -> list[PartitionAppend]:
    return [PartitionAppend(tp, (RecordChunk(columns([b"r" * 1000])),)) for tp in tps]


async def log_flight(bed: Testbed, size: Size) -> LoopRun:
    """One broker: flights over its partitions, two at a time, as its batching makes them."""
    tps, flights = _partitions(size), 10 if bed.quick else 40
    broker = Broker(bed.context(LogSettings()), bed.meta())
    await broker.writer.append_shared(_flight(tps))
    bed.begin()
    await in_lanes(2, [lambda: broker.writer.append_shared(_flight(tps))] * flights)
    await broker.writer.drain()
    done = bed.end(flights * len(tps))
    await broker.stop()
    return done


async def compactor(bed: Testbed, size: Size) -> LoopRun:
    """One broker compacts what it appended."""
    tps, flights = _partitions(size), 32 if bed.quick else 128
    meta = bed.meta()
    context = bed.context(LogSettings(compact_min_entries=8))
    broker = Broker(context, meta)
    bed.bucket.free = True
    for _ in range(flights):
        await broker.writer.append_shared(_flight(tps))
    await broker.writer.drain()
    services = LogServices(context, meta)
    bed.begin()
    plans = await asyncio.gather(*(services.compactor.plan(tp, force=True) for tp in tps))
    await services.compactor.compact([run for _, plan in plans for run in plan.runs])
    left = sum([await services.compactor.lag(tp) for tp in tps])
    done = bed.end(flights * len(tps) - left)
    await broker.stop()
    return done


async def tick_auditor(bed: Testbed, size: Size) -> LoopRun:
    """One measurement of what silver has not finished, over the ticks of some minutes."""
    context = bed.context(TicksSettings(pipeline="twin"))
    dispatched = open_audit(context, "dispatched")
    auditor = DispatchAuditor(
        context, queue=open_queue(context), committed=open_audit(context, "committed"), dispatched=dispatched
    )
    await auditor.measure()
    bed.bucket.free = True
    count = 100 if bed.quick else 500
    for number in range(count):
        tick = TickId("org", "project", f"tick-{number}")
        at_ms = bed.clock.now_ns() // 10**6
        expires_s = at_ms // 1000 + 86_400
        await dispatched.create(AuditRow("org", "project", tick.tick_id, DONE, "a", at_ms, expires_s))
        await commit_times.note(context, tick)
    bed.begin()
    await auditor.measure()
    return bed.end(count)


class SlowLake(MemoryLake):
    """The lake that rules work on: a look and a delete take as long as at a filer."""

    async def look(self, bucket: str, key: str, upload_id: str = ""):  # type: ignore[no-untyped-def]
        await self._clock.sleep(0.02)
        return await super().look(bucket, key, upload_id)


async def lifecycle_reader(bed: Testbed, size: Size) -> LoopRun:
    """One pass over changes of which one in a hundred is under a rule."""
    count = 5_000 if bed.quick else 30_000
    lake = SlowLake(bed.clock)
    settings = LifecycleSettings(
        day_s=DAY_S, rounding="exact", small_delay_s=0.5, flush_lag_s=0.0, lookback_s=DAY_S / 2, poll_s=3.0
    )
    state = LifecycleState(bed.context())
    worker = Enforcer(lake, Seams(lake, lake, lake), state, settings, node="n", reserved=ReservedKeys("own", "own/"))
    await lake.put("b", render_xml((Rule("old", prefix="tmp/", expiration_days=1),)))
    for _ in range(3):
        await worker.run_round()
        await bed.clock.sleep(DAY_S)
    for number in range(count):
        lake.write("b", f"{'tmp' if number % 100 == 0 else 'data'}/{number:08d}")
    await bed.clock.sleep(2 * DAY_S)
    bed.begin()
    done = await worker.run_round()
    read = sum(sweep.read for sweep in done.sweeps)
    assert read >= count, read
    return bed.end(read)


LOOPS = (
    Loop("accept", "batches/s", batches_s, gateways, accept, own=True),
    Loop("accept, packed", "batches/s", batches_s, gateways, accept_packed, own=True),
    Loop("derived writes", "batches/s", batches_s, gateways, derived_writes, own=True),
    Loop("live query", "batches/s", batches_s, few(1, 1, 1), live_query, own=True, shared=True),
    Loop("reconciler", "batches/s", batches_s, few(1, 4, RANGES_MAX), reconciler, own=True, sized=True),
    Loop("retention", "batches/s", batches_s, few(1, 1, 1), retention, own=True, shared=True),
    Loop("roller", "batches/s", batches_s, few(1, 8, 400), roller, own=True),
    Loop("bronze step", "batches/s", batches_s, few(1, 8, 400), bronze_step, own=True),
    Loop("queue", "batches/s", lambda size: float(size.gateways), gateways, queue, shared=True, sized=True),
    Loop("log flight", "appends/s", lambda size: size.appends_s, gateways, log_flight, sized=True),
    Loop("compactor", "appends/s", lambda size: size.appends_s, gateways, compactor, sized=True),
    Loop("tick auditor", "ticks/s", lambda size: size.ticks_s, few(1, 1, 1), tick_auditor, shared=True),
    Loop("lifecycle reader", "events/s", lambda size: 2.2 * size.batches_s, few(1, 8, SHARDS_MAX), lifecycle_reader),
)
