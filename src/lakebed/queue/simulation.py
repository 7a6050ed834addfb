"""The queue's world: ingestors and collectors that pause, fail and die on one queue, beside a sweeper.

A collector's process applies each batch to a table that remembers the batch's sequence, as an exactly-once consumer
does. After every step: durable entries are stored until they are applied or a dead letter. At each delivery: the
claim is the one in the manifest. At the end: everything durable is in the table, once, in order, except entries
that cannot be processed, which are dead letters alone, and the rest of their batches, which comes later.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgspec

from lakebed.core.errors import Corrupt, Fenced, LakebedError, NotFound, OutcomeUnknown, Overloaded, Unavailable
from lakebed.queue import codec, paths
from lakebed.queue.collector import Collector
from lakebed.queue.ingestor import Ingestor
from lakebed.queue.model import Append, CollectedBatch, ConsumerManifest, Durable, KeyValueEntry, ProducerManifest
from lakebed.queue.roles import Queue
from lakebed.queue.settings import QueueSettings
from lakebed.sim.faults import CALM
from lakebed.sim.world import Process, World
from lakebed.store.runtime import StoreRuntime

CRASH = 0.003  # per await at the store
SLOW, SLOW_S = 0.02, 12.0  # some operations take longer than a claim lasts
READS = frozenset({"get", "get_range", "head", "list", "children", "boot"})
TIMEOUT_S = 6.0
SKEW_S = 0.5
SETTLE_S = 600.0  # virtual seconds in which a world without faults must finish
POISON = b"poison"
BAD = 0.04  # of the entries: no consumer can process them

_PRODUCER = msgspec.json.Decoder(ProducerManifest)
_CONSUMER = msgspec.json.Decoder(ConsumerManifest)


class ConsumerTable:
    """What the consumers applied, and what the producers were promised."""

    def __init__(self, world: World, settings: QueueSettings) -> None:
        self._world, self._settings = world, settings
        self.ingested: dict[str, tuple[str, int]] = {}  # entry → its ingestor, and its place there
        self.durable: dict[str, str] = {}  # entry → location
        self.refused: set[str] = set()  # entries whose caller got an error: they are not in the queue
        self.poison: set[str] = set()  # locations that can only become dead letters
        self.bad: set[str] = set()  # entries that no consumer can process
        self.first: dict[str, str] = {}  # entry → the batch in which it was first enqueued
        self._inside: dict[str, frozenset[str]] = {}  # location → its entries; a batch never changes
        self.applied: dict[int, tuple[str, list[str]]] = {}  # sequence → location and entries, in order of applying
        self.acks: set[str] = set()
        self.epochs: dict[str, int] = {}  # location → the newest claim under which it was delivered
        world.invariant("queue", self.complaint)

    def producer(self) -> ProducerManifest:
        stored = self._world.peek(self._settings.manifest_path)
        return _PRODUCER.decode(stored.data) if stored else ProducerManifest()

    def consumer(self) -> ConsumerManifest:
        stored = self._world.peek(paths.consumer_manifest(self._settings.manifest_path))
        return _CONSUMER.decode(stored.data) if stored else ConsumerManifest()

    def dead(self) -> set[str]:
        found = set()
        for info in self._world.keys(paths.dead_folder(self._settings.manifest_path)):
            stored = self._world.peek(info.key)
            assert stored is not None
            found.add(msgspec.json.decode(stored.data)["location"])
        return found

    def inside(self, location: str) -> frozenset[str]:
        """The entries of a batch that is stored now, or was when it was last looked at."""
        stored = self._world.peek(location)
        if location not in self._inside and stored is not None:
            with suppress(Corrupt):
                self._inside[location] = frozenset(entry.key.decode() for entry in codec.decode(stored.data))
        return self._inside.get(location, frozenset())

    def complaint(self) -> str | None:
        if self._world.trace[-1][3] in READS:
            return None
        producer, consumer = self.producer(), self.consumer()
        dead = self.dead()
        finished = {location for location, _ in self.applied.values()} | dead
        if dead & self.acks:
            return f"{min(dead & self.acks)} was acked, and is a dead letter"
        if len(set(producer.pending)) != len(producer.pending):
            return "a location is pending twice"
        for location in producer.pending:
            if location not in consumer.done and self._world.peek(location) is None:
                return f"{location} is pending and its data is gone"
        for location in producer.pending:
            for entry in self.inside(location):
                self.first.setdefault(entry, location)
        places = [*producer.pending, *dead]
        held = frozenset().union(*map(self.inside, places)) if places else frozenset()
        for entry, location in self.durable.items():
            if location not in finished and location not in producer.pending and not self._rests(entry, held):
                return f"{entry} was called durable, but {location} is neither pending nor finished"
        return None

    def _rests(self, entry: str, held: frozenset[str]) -> bool:
        """Whether an entry whose batch was split is in the queue, a dead letter or applied."""
        return entry in held or any(entry in entries for _, entries in self.applied.values())

    def acked(self, batch: CollectedBatch) -> None:
        newest = self.epochs[batch.location]
        self._world.check(newest == batch.claimed.epoch, f"{batch.location} was acked by a collector that had lost it")
        self.acks.add(batch.location)

    def delivered(self, collector: Collector, batch: CollectedBatch) -> None:
        self._world.check(batch.location not in self.acks, f"{batch.location} was acked, and is delivered again")
        self.epochs[batch.location] = max(batch.claimed.epoch, self.epochs.get(batch.location, 0))
        claim = self.consumer().claims.get(batch.location)
        self._world.check(
            claim is not None and claim.epoch == batch.claimed.epoch,
            f"{collector.id} got {batch.location}, claimed by {claim.collector if claim else 'no collector'}",
        )

    def apply(self, batch: CollectedBatch, *, ordered: bool) -> None:
        """The consumer's transaction: the entries and the sequence together, or nothing when it has them."""
        if batch.sequence in self.applied:
            same = self.applied[batch.sequence][0] == batch.location
            self._world.check(same, f"sequence {batch.sequence} names two batches")
            return
        newest = max(self.applied, default=0)
        late = batch.location not in self.producer().pending  # another has buried or split it since it was claimed
        self._world.check(
            late or not ordered or batch.sequence > newest, f"sequence {batch.sequence} is applied first after {newest}"
        )
        if late:
            return  # a consumer in order knows a later sequence; one in parallel has to check
        self.applied[batch.sequence] = (batch.location, [entry.key.decode() for entry in batch.entries])

    def verdict(self) -> None:
        dead = self.dead()
        applied = [entry for _, (_, entries) in sorted(self.applied.items()) for entry in entries]
        self._world.check(len(set(applied)) == len(applied), "an entry is applied twice")
        buried = frozenset().union(*map(self.inside, dead)) if dead else frozenset()
        missing = {entry for entry, location in self.durable.items() if location not in dead} - set(applied) - buried
        self._world.check(not missing, f"durable and never applied: {sorted(missing)[:5]}")
        self._world.check(self.poison <= dead, "a batch that nobody can read is neither delivered nor a dead letter")
        self._world.check(not self.refused & set(applied), "an entry is applied though its caller got an error")
        self._world.check(self.bad.isdisjoint(applied), "an entry that nobody can process is applied")
        mixed = [location for location in dead if len(self.inside(location)) > 1]
        self._world.check(not mixed, f"entries became dead letters with their neighbours: {mixed[:3]}")
        last: dict[str, int] = {}
        moved = {entry for place, entries in self.applied.values() for entry in entries if self.first[entry] != place}
        for entry in applied:
            if entry in moved:
                continue  # its batch was split: it comes later than its order says
            ingestor, place = self.ingested[entry]
            self._world.check(last.get(ingestor, -1) < place, f"{entry} is out of its ingestor's order")
            last[ingestor] = place


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
        silences_max=rng.choice((3, 20)),
        horizon_s=rng.choice((0.5, 3.0, 60.0)),
        parallel=not ordered,
        batch_format=rng.choice(("binary", "json")),
    )
    table = ConsumerTable(world, settings)
    world.faults = msgspec.structs.replace(world.faults, crash=CRASH, slow=SLOW, slow_s=SLOW_S)
    producing = [world.keep(f"ingest{n}", lambda process: _produce(world, process, settings, table)) for n in range(2)]
    consuming = [
        asyncio.ensure_future(
            world.keep(
                f"collect{n}",
                lambda process: _consume(world, process, settings, table, ordered=ordered),
                skew_s=rng.uniform(-SKEW_S, SKEW_S),
            )
        )
        for n in range(2)
    ]
    sweeping = asyncio.ensure_future(world.keep("sweeper", lambda process: _sweep(process, settings)))
    stalling = asyncio.ensure_future(_stall(world))
    await asyncio.gather(*producing)
    stalling.cancel()
    world.heal(CALM)
    await _rest(world, table)
    for task in (*consuming, sweeping):
        task.cancel()
    table.verdict()


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
        if all(location in done for location in table.producer().pending):
            return
        await asyncio.sleep(1.0)
    world.check(False, f"still pending after {SETTLE_S:.0f} s: {table.producer().pending[:3]}")


def _open(process: Process, settings: QueueSettings) -> Queue:
    runtime = StoreRuntime(clock=process.clock, ids=process.ids, metrics=process.metrics, store=process.store)
    return Queue("default", settings, runtime)


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
            watcher = await ingestor.ingest([KeyValueEntry(name.encode(), b"v" * rng.randint(0, 60)) for name in names])
            watching.append(asyncio.ensure_future(_watch(table, names, watcher)))
            await process.clock.sleep(rng.choice((0.0, 0.04, 0.2, 2.0)))
        await asyncio.gather(*watching)
        await ingestor.close()

    await asyncio.gather(*(one(number, queue.ingestor()) for number in range(rng.randint(1, 2))))
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
    for name in names:
        table.durable[name] = durable.location


async def _poison(process: Process, settings: QueueSettings, queue: Queue, table: ConsumerTable) -> None:
    """A batch that does not decode, enqueued like any other."""
    try:
        generation = await queue.producer.generation()
        location = paths.batch(settings.data_path_prefix, generation, process.ids.uuid(), "binary")
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
    collector = queue.collector(process.node)
    while True:
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
