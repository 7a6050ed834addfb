"""The queue's world: ingestors and collectors that pause, fail and die on one queue, beside a sweeper.

A collector's process applies each batch to a table that remembers the batch's sequence, as an exactly-once consumer
does. After every step: durable entries are stored until they are applied or a dead letter. At each delivery: the
claim is the one in the manifest. At the end: everything durable is in the table, once, in order, except entries
that cannot be processed, which are dead letters alone, and the rest of their batches, which comes later.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from lakebed.core.errors import Fenced, LakebedError, NotFound, OutcomeUnknown, Overloaded, Unavailable
from lakebed.queue.collector import Collector
from lakebed.queue.ingestor import Ingestor
from lakebed.queue.model import (
    Append,
    CollectedBatch,
    Durable,
    KeyValueEntry,
)
from lakebed.queue.roles import Queue
from lakebed.queue.settings import QueueSettings
from lakebed.queue.simulation_table import ConsumerTable
from lakebed.sim.faults import CALM
from lakebed.sim.world import Process, World

CRASH = 0.003  # per await at the store
SLOW, SLOW_S = 0.02, 12.0  # some operations take longer than a claim lasts
TIMEOUT_S = 6.0
SKEW_S = 0.5
SETTLE_S = 600.0  # virtual seconds in which a world without faults must finish
POISON = b"poison"
NEIGHBOURS = 0.25  # of the worlds have a second queue over the same data prefix
ABSENT = 0.15  # of the lives of a collector begin with a long absence
DROPPED = 0.03  # of the polls: the collector is dropped without being closed
KEYED = 0.4  # of the calls carry an idempotency key, and are repeated
BAD = 0.04  # of the entries: no consumer can process them


async def queue(world: World) -> None:
    rng = world.rng
    ordered = rng.random() < 0.75
    settings = QueueSettings(
        flush_interval_s=0.05,
        flush_size_bytes=100,
        flush_timeout_s=rng.choice((5.0, 60.0)),
        max_unflushed_bytes=400,
        uploads_max=rng.randint(1, 3),
        heartbeat_timeout_s=TIMEOUT_S,
        done_cleanup_threshold=rng.randint(1, 4),
        prefetch_batches=rng.randint(1, 3),
        rejections_max=2,
        redelivery_delay_s=rng.choice((0.001, 1.0, 8.0)),
        segment_batches=rng.choice((1, 2, 4, 64)),
        silences_max=rng.choice((3, 20)),
        horizon_s=rng.choice((0.5, 3.0, 60.0)),
        parallel=not ordered,
        batch_format=rng.choice(("binary", "json")),
    )
    world.faults = msgspec.structs.replace(world.faults, crash=CRASH, slow=SLOW, slow_s=SLOW_S)
    beside = msgspec.structs.replace(settings, manifest_path="other/manifest.json")
    stalling = asyncio.ensure_future(_stall(world))
    plays = [_Play(world, settings, 2, ordered)]
    if rng.random() < NEIGHBOURS:
        plays.append(_Play(world, beside, 1, ordered))
    await asyncio.gather(*[play.produced() for play in plays])
    stalling.cancel()
    world.heal(CALM)
    for play in plays:
        await play.finished()


class _Play:
    """One queue with its producers, collectors and sweeper; several may share a data prefix."""

    def __init__(self, world: World, settings: QueueSettings, count: int, ordered: bool) -> None:
        self._world, self._settings, self._count = world, settings, count
        self.table, tag = ConsumerTable(world, settings), "" if count > 1 else "-beside"
        collect = [
            world.keep(
                f"collect{n}{tag}",
                lambda process: _consume(world, process, settings, self.table, ordered=ordered),
                skew_s=world.rng.uniform(-SKEW_S, SKEW_S),
            )
            for n in range(count)
        ]
        sweep = world.keep(f"sweeper{tag}", lambda process: _sweep(process, settings))
        self._others = [asyncio.ensure_future(work) for work in (*collect, sweep)]
        self._ingest = [
            world.keep(f"ingest{n}{tag}", lambda process: _produce(world, process, settings, self.table))
            for n in range(count)
        ]

    async def produced(self) -> None:
        await asyncio.gather(*self._ingest)

    async def finished(self) -> None:
        await _rest(self._world, self.table)
        for task in self._others:
            task.cancel()
        self.table.verdict()


async def writers(world: World, count: int) -> None:
    """More ingestors than a manifest records, each a process, append to one queue: all are told, and all is there."""
    settings = QueueSettings(segment_batches=16, horizon_s=600.0)
    unknown: list[str] = []
    durable: list[int] = []
    world.faults = CALM

    async def body(process: Process) -> None:
        ingestor = _open(process, settings).ingestor()
        await process.clock.sleep(world.rng.uniform(0.0, count / 20))
        for _ in range(2):
            try:
                watcher = await ingestor.ingest([KeyValueEntry(process.node.encode(), b"v")])
                durable.append((await watcher.await_durable()).sequence)
            except OutcomeUnknown:
                unknown.append(process.node)
        await ingestor.close()

    await asyncio.gather(*(world.keep(f"p{number}", body) for number in range(count)))
    table = ConsumerTable(world, settings)
    world.check(not unknown, f"no answer was lost, and {len(unknown)} outcomes are unknown")
    world.check(len(set(durable)) == 2 * count == len(table.pending()), f"{len(table.pending())} batches are pending")


async def _stall(world: World) -> None:
    """Now and then a process pauses for longer than a claim lasts."""
    while True:
        await asyncio.sleep(world.rng.uniform(0.2, 4.0))
        alive = [process for process in world.processes if process.alive]
        world.pause(world.rng.choice(alive), world.rng.uniform(0.5, 2 * TIMEOUT_S))


async def crash(world: World, victim: str, at_await: int) -> bool:
    """One ingestor, one collector and a sweeper without faults; the victim dies at that await and starts again.

    Returns whether the victim reached it.
    """
    settings = QueueSettings(
        flush_interval_s=0.05,
        heartbeat_timeout_s=TIMEOUT_S,
        done_cleanup_threshold=2,
        prefetch_batches=2,
        horizon_s=0.5,
        rejections_max=2,
        redelivery_delay_s=0.05,
        segment_batches=2,
    )
    table = ConsumerTable(world, settings)
    world.faults = CALM
    reached = False

    def alive(name: str, body: Any) -> asyncio.Future[None]:
        async def lives() -> None:
            nonlocal reached
            process = world.process(name, crash_at_await=at_await if name == victim else 0)
            if not await process.spawn(body(process)):
                reached = True
                await world.keep(name, body, down_s=0.5)

        return asyncio.ensure_future(lives())

    ingest = alive("ingest", lambda process: _produce(world, process, settings, table))
    others = [
        alive("collect", lambda process: _consume(world, process, settings, table, ordered=True)),
        alive("sweeper", lambda process: _sweep(process, settings)),
    ]
    await ingest
    await _rest(world, table)
    for task in others:
        task.cancel()
    table.verdict()
    return reached


async def _rest(world: World, table: ConsumerTable) -> None:
    """Without faults, everything pending is finished: nothing waits behind a dead process."""
    deadline_s = world.loop.time() + SETTLE_S
    while world.loop.time() < deadline_s:
        done = table.consumer().done
        if all(location in done for location in table.pending()):
            return
        await asyncio.sleep(1.0)
    world.check(False, f"still pending after {SETTLE_S:.0f} s: {table.pending()[:3]}")


def _open(process: Process, settings: QueueSettings) -> Queue:
    return Queue("default", settings, process.runtime)


async def _produce(world: World, process: Process, settings: QueueSettings, table: ConsumerTable) -> None:
    rng, queue = world.rng, _open(process, settings)

    async def one(number: int, ingestor: Ingestor) -> None:
        place = 0
        watching: list[Any] = []
        for _ in range(rng.randint(1, 4)):
            names = [f"{process.node}-{number}-{place + n}" for n in range(rng.randint(1, 3))]
            for name in names:
                table.ingested[name] = (ingestor.id, place)
                place += 1
                if rng.random() < BAD:
                    table.bad.add(name)
            entries = [KeyValueEntry(name.encode(), b"v" * rng.randint(0, 60)) for name in names]
            key = names[0] if rng.random() < KEYED else ""
            if key:
                keyed.append((key, names, entries))
            watching.append(asyncio.ensure_future(_watch(table, names, await ingestor.ingest(entries, key=key))))
            await process.clock.sleep(rng.choice((0.0, 0.04, 0.2, 2.0)))
        await asyncio.gather(*watching)
        await ingestor.close()

    async def again() -> None:
        """The caller repeats calls whose answers it may not have got, at another ingestor."""
        ingestor, place = queue.ingestor(), 0
        for key, names, entries in keyed:
            if not table.first.keys() & set(names):
                table.ingested |= {name: (ingestor.id, place + n) for n, name in enumerate(names)}
                place += len(names)
            table.refused -= set(names)
            await _watch(table, names, await ingestor.ingest(entries, key=key))
        await ingestor.close()

    keyed: list[tuple[str, list[str], list[KeyValueEntry]]] = []
    await asyncio.gather(*(one(number, queue.ingestor()) for number in range(rng.randint(1, 2))))
    await again()
    if rng.random() < 0.4:
        await _poison(process, settings, queue, table)


async def _watch(table: ConsumerTable, names: list[str], watcher: Any) -> None:
    try:
        durable = await watcher.await_durable()
    except OutcomeUnknown:
        return
    except (Unavailable, Overloaded):
        table.refused.update(names)
        return
    if not durable.repeated:
        table.durable |= dict.fromkeys(names, durable.location)


async def _poison(process: Process, settings: QueueSettings, queue: Queue, table: ConsumerTable) -> None:
    """A batch that does not decode, enqueued like any other."""
    try:
        generation = await queue.producer.generation()
        location = settings.location(generation, process.ids.uuid(), "binary")
        await process.store.create(location, b"LBQ1 and then nothing that makes sense")
        answered: list[Durable] = await queue.producer.append(
            [Append(f"poison-{process.node}", 1, generation, location, 38, 1)]
        )
    except LakebedError:
        return
    table.poison.add(answered[0].location)


async def _consume(
    world: World, process: Process, settings: QueueSettings, table: ConsumerTable, *, ordered: bool
) -> None:
    rng, queue = world.rng, _open(process, settings)
    collector = queue.shard_collector(queue, process.node, alone=True)
    if rng.random() < ABSENT:
        await process.clock.sleep(rng.uniform(10.0, 60.0))
    while True:
        if rng.random() < DROPPED:  # nobody closes it: its claims must go stale
            collector = queue.shard_collector(queue, process.node, alone=True)
        try:
            batch = await collector.next_batch()
        except (Unavailable, Overloaded):
            await process.clock.sleep(0.2)
            continue
        if batch is None:
            await process.clock.sleep(0.3)
            continue
        table.delivered(collector, batch)
        await process.clock.sleep(rng.choice((0.0, 0.0, 0.1, TIMEOUT_S * 1.5)))
        try:
            if rng.random() < 0.05 or any(entry.key.decode() in table.bad for entry in batch.entries):
                await collector.reject(batch, "rejected by chance")
                continue
            table.apply(batch, ordered=ordered)
            await _ack(process, collector, batch)
            table.acked(batch)
        except Fenced:
            continue
        except (Unavailable, Overloaded):
            await process.clock.sleep(0.2)


async def _ack(process: Process, collector: Collector, batch: CollectedBatch) -> None:
    for _ in range(100):
        try:
            return await collector.ack(batch)
        except (Unavailable, Overloaded):
            await process.clock.sleep(0.2)
    raise Fenced("ack failed 100 times")


async def _sweep(process: Process, settings: QueueSettings) -> None:
    queue = _open(process, settings)
    while True:
        try:
            await queue.sweeper.sweep_done()
            await queue.sweeper.sweep_orphans()
        except (Unavailable, Overloaded, NotFound):
            pass
        await process.clock.sleep(0.7)
