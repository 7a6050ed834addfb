"""One queue, opened: its name, its two manifests shared by all roles of this process, and the roles themselves."""

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
from lakebed.queue.model import PendingBatch, QueueStatus, status_of
from lakebed.queue.producer import Producer
from lakebed.queue.settings import QueueSettings
from lakebed.queue.sweeper import QueueSweeper
from lakebed.store.protocol import Store
from lakebed.store.runtime import StoreRuntime


class Queue:
    """A queue by its name. Its roles share one producer and one consumer manifest, so their writes are grouped."""

    def __init__(self, name: str, settings: QueueSettings, runtime: StoreRuntime) -> None:
        self.name = name
        self.settings = settings = settings.of_queue(paths.check_name(name))
        self.store, self._runtime = runtime.store, runtime
        self.producer = Producer(settings, runtime)
        self.consumer = Consumer(settings, runtime)
        self.dead_letters = DeadLetters(settings, runtime, producer=self.producer, consumer=self.consumer)
        self.sweeper = QueueSweeper(
            settings, runtime, producer=self.producer, consumer=self.consumer, dead_letters=self.dead_letters
        )

    @classmethod
    def of(cls, context: Context, name: str = paths.DEFAULT) -> Queue:
        return cls(name, context.settings.of(QueueSettings), context)

    def ingestor(self) -> Ingestor:
        return Ingestor(self.settings, self._runtime, producer=self.producer)

    def collector(self, name: str = "") -> Collector:
        return Collector(self.settings, self._runtime, producer=self.producer, consumer=self.consumer, name=name)

    async def exists(self) -> bool:
        try:
            await self.store.head(self.settings.manifest_path)
        except NotFound:
            return False
        return True

    async def waiting(self) -> AsyncIterator[tuple[str, PendingBatch, str]]:
        """Every batch that is not done: location, its entry, and the collector that claimed it ('' for none)."""
        producer, consumer = await self.producer.read(), await self.consumer.read()
        done = set(consumer.done)
        for location in producer.pending:
            if location not in done:
                claim = consumer.claims.get(location) if location in consumer.claimed else None
                yield location, producer.entries[location], claim.collector if claim else ""

    async def status(self) -> QueueStatus:
        """The queue's status now; also sets the gauges."""
        producer, consumer = await self.producer.read(), await self.consumer.read()
        dead = await self.dead_letters.count()
        timeout_ms = round(self.settings.heartbeat_timeout_s * 1000)
        status = status_of(
            self.name, producer, consumer, dead=dead, timeout_ms=timeout_ms, now_ms=now_ms(self._runtime.clock)
        )
        self._show(status)
        return status

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
