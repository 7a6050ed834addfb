"""One queue, opened: its name, its manifests shared by all roles of this process, and the roles themselves.

A queue has one or more shards, each with manifests of its own. `Queue` is its first shard and the way to the others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from lakebed.core.clock import now_ms
from lakebed.core.context import Context
from lakebed.core.errors import NotFound
from lakebed.queue import paths
from lakebed.queue.collector import Collector
from lakebed.queue.consumer import Consumer
from lakebed.queue.dead_letters import DeadLetters
from lakebed.queue.ingestor import Ingestor
from lakebed.queue.model import DeadLetter, PendingBatch, QueueStatus, merged, status_of
from lakebed.queue.producer import Producer
from lakebed.queue.settings import QueueSettings
from lakebed.queue.shards import ShardedCollector
from lakebed.queue.sweeper import QueueSweeper
from lakebed.store.protocol import Store
from lakebed.store.runtime import StoreRuntime


class QueueShard:
    """One shard of a queue. Its roles share one producer and one consumer manifest, so their writes are grouped."""

    def __init__(
        self, settings: QueueSettings, runtime: StoreRuntime, *, number: int = 0, first: Producer | None = None
    ) -> None:
        self.number, self.settings = number, settings
        self.producer = Producer(settings, runtime, first=first)
        self.consumer = Consumer(settings, runtime)
        self.dead_letters = DeadLetters(settings, runtime, producer=self.producer, consumer=self.consumer)
        self.sweeper = QueueSweeper(
            settings, runtime, producer=self.producer, consumer=self.consumer, dead_letters=self.dead_letters
        )


class Queue(QueueShard):
    """A queue by its name. `producer`, `consumer`, `dead_letters` and `sweeper` are those of its first shard."""

    def __init__(self, name: str, settings: QueueSettings, runtime: StoreRuntime) -> None:
        settings = settings.of_queue(paths.check_name(name))
        super().__init__(settings, runtime)
        self.name = name
        self.store, self._runtime = runtime.store, runtime
        self._others: dict[int, QueueShard] = {}

    @classmethod
    def of(cls, context: Context, name: str = paths.DEFAULT) -> Queue:
        return cls(name, context.settings.of(QueueSettings), context)

    def ingestor(self, shard: int | None = None) -> Ingestor:
        """An ingestor for one shard: the one given, or any; its entries stay in order."""
        if shard is None:
            shard = int(self._runtime.ids.token(), 16) % self.settings.shards if self.settings.shards > 1 else 0
        return Ingestor(self.settings, self._runtime, producer=self.shard(shard).producer, shard=shard)

    def collector(self, name: str = "") -> Collector | ShardedCollector:
        if self.settings.shards == 1:
            return self.shard_collector(self, name, alone=True)
        return ShardedCollector(self.shards, lambda shard: self.shard_collector(shard, name))

    def shard_collector(self, shard: QueueShard, name: str = "", *, alone: bool = False) -> Collector:
        return Collector(
            shard.settings,
            self._runtime,
            producer=shard.producer,
            consumer=shard.consumer,
            name=name,
            shard=None if alone else shard.number,
        )

    def shard(self, number: int) -> QueueShard:
        if number == 0:
            return self
        if number not in self._others:
            settings = self.settings.of_shard(number)
            self._others[number] = QueueShard(settings, self._runtime, number=number, first=self.producer)
        return self._others[number]

    async def shards(self) -> list[QueueShard]:
        """Every shard that may hold batches: as many as are set now, or were ever."""
        count = max(self.settings.shards, (await self.producer.read()).shards)
        return [self.shard(number) for number in range(count)]

    async def letters_of(self, letter_id: str) -> DeadLetters:
        """The dead letters of the shard that has this one. Raises NotFound."""
        for shard in await self.shards():
            try:
                await shard.dead_letters.show(letter_id)
                return shard.dead_letters
            except NotFound:
                continue
        raise NotFound(f"no dead letter {letter_id}", hint="lakebed queue dlq list shows them")

    async def letters(self) -> AsyncIterator[DeadLetter]:
        """Every dead letter, shard by shard, oldest sequence first."""
        for shard in await self.shards():
            async for letter in shard.dead_letters.letters():
                yield letter

    async def exists(self) -> bool:
        try:
            await self.store.head(self.settings.manifest_path)
        except NotFound:
            return False
        return True

    async def waiting(self) -> AsyncIterator[tuple[str, PendingBatch, str]]:
        """Every batch that is not done: location, its entry, and the collector that claimed it ('' for none)."""
        for shard in await self.shards():
            consumer = await shard.consumer.read()
            done = set(consumer.done)
            async for location, entry in shard.producer.pending():
                if location not in done:
                    claim = consumer.claims.get(location) if location in consumer.claimed else None
                    yield location, entry, claim.collector if claim else ""

    async def status(self) -> QueueStatus:
        """The queue's status now; also sets the gauges."""
        status = merged([await self._status(shard) for shard in await self.shards()])
        self._show(status)
        return status

    async def _status(self, shard: QueueShard) -> QueueStatus:
        consumer = await shard.consumer.read()
        view = await shard.producer.view(shard.consumer.passed_over + 1)
        timeout_ms = round(self.settings.heartbeat_timeout_s * 1000)
        return status_of(
            self.name,
            view,
            consumer,
            dead=await shard.dead_letters.count(),
            timeout_ms=timeout_ms,
            now_ms=now_ms(self._runtime.clock),
        )

    def _show(self, status: QueueStatus) -> None:
        for gauge, value in (
            ("lakebed_queue_length", status.pending),
            ("lakebed_queue_bytes_waiting", status.bytes_waiting),
            ("lakebed_queue_claimed", status.claimed),
            ("lakebed_queue_done", status.done),
            ("lakebed_queue_dead_letters", status.dead),
        ):
            self._runtime.metrics.gauge(gauge).labels(queue=self.name).set(value)
        ages = self._runtime.metrics.gauge("lakebed_queue_oldest_age_seconds")
        for state, age_s in (
            ("pending", status.pending_age_s),
            ("claimed", status.claimed_age_s),
            ("done", status.done_age_s),
        ):
            ages.labels(queue=self.name, state=state).set(age_s or 0.0)


async def queue_names(store: Store, settings: QueueSettings) -> list[str]:
    """Every queue in the bucket, the default one first when it exists."""
    found: list[str] = []
    for name in (paths.DEFAULT, *await store.children(f"{paths.ROOT}/")):
        if paths.NAME.match(name):
            try:
                await store.head(settings.of_queue(name).manifest_path)
            except NotFound:
                continue
            found.append(name)
    return found
