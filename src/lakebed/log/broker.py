"""The broker: every role of the log in one process, wired. Keeps no durable state of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lakebed.clock import now_ms
from lakebed.context import Context
from lakebed.errors import LakebedError
from lakebed.log.batching import BatchingProducer, Landed
from lakebed.log.billing import MeteredStore
from lakebed.log.cache import TailCache
from lakebed.log.fetcher import Fetcher, Want
from lakebed.log.groups import Groups
from lakebed.log.model import TopicPartition
from lakebed.log.paths import uris
from lakebed.log.producers import Chunk
from lakebed.log.reader import Fetched, Reader
from lakebed.log.records import Records
from lakebed.log.settings import LogSettings
from lakebed.log.shared_cache import SharedTail
from lakebed.log.steward import Steward
from lakebed.log.writer import Outcome, Writer
from lakebed.meta.connect import connect
from lakebed.meta.protocol import Meta
from lakebed.meta.settings import MetaSettings
from lakebed.store.settings import StoreSettings


class Broker:
    """`meta` is given in tests and simulation; otherwise the settings name it."""

    def __init__(self, context: Context, meta: Meta | None = None) -> None:
        clock, ids, metrics = context.clock, context.ids, context.metrics
        self._clock, self._ids = clock, ids
        self.settings = context.settings.of(LogSettings)
        self.meta = meta or connect(
            context.settings.of(MetaSettings), store=context.store, clock=clock, ids=ids, metrics=metrics
        )
        where = context.settings.of(StoreSettings)
        self.uris = uris(where.url, where.prefix, where.moved_from)
        self.store = MeteredStore(context.store, metrics=metrics)
        self.records = Records(self.meta, clock=clock, ids=ids)
        self.writer = Writer(
            self.store,
            self.records,
            self.uris,
            clock=clock,
            ids=ids,
            metrics=metrics,
            producer_memory_s=self.settings.producer_memory_s,
        )
        self.cache = TailCache(self.settings.cache_bytes, metrics=metrics)
        self.shared: SharedTail | None = None
        if self.settings.tail_cache_dir is not None:
            folder, limit = self.settings.tail_cache_dir, self.settings.cache_bytes
            self.shared = SharedTail(folder, bytes_max=limit, node=context.node)
        self.producer = BatchingProducer(self.writer, self.settings, clock=clock, metrics=metrics, landed=self._landed)
        self.reader = Reader(
            self.store, self.records, self.uris, metrics=metrics, bodies_bytes=self.settings.bodies_bytes
        )
        self.fetcher = Fetcher(self.reader, self.cache, self.settings, clock=clock, shared=self.shared)
        self.groups = Groups(self.records, clock=clock)
        self.steward = Steward(self.records, self.reader, self.groups, clock=clock)
        self.started_at_ms = now_ms(clock)
        if self.settings.scenario:
            metrics.gauge("lakebed_log_scenario_info").labels(scenario=self.settings.scenario).set(1)
        counted, sized = metrics.counter("lakebed_log_records_total"), metrics.counter("lakebed_log_record_bytes_total")
        self._in, self._in_bytes = counted.labels(direction="in"), sized.labels(direction="in")
        self._out, self._out_bytes = counted.labels(direction="out"), sized.labels(direction="out")

    async def produce(self, chunks: Sequence[tuple[TopicPartition, Chunk]]) -> Sequence[Outcome]:
        """Appends all chunks; an outcome for each, in order. A caller that goes away takes none of them back."""
        told: asyncio.Future[Sequence[Outcome]] = asyncio.get_running_loop().create_future()
        self.producer.append(chunks, lambda outcomes: None if told.done() else told.set_result(outcomes))
        return await told

    async def consume(
        self, wants: Sequence[Want], *, bytes_max: int, bytes_min: int, wait_s: float
    ) -> list[Fetched | LakebedError]:
        answers = await self.fetcher.fetch(wants, bytes_max=bytes_max, bytes_min=bytes_min, wait_s=wait_s)
        for answer in answers:
            if isinstance(answer, Fetched):
                self._out.inc(answer.count)
                self._out_bytes.inc(answer.size)
        return answers

    def producer_id(self) -> str:
        """An id for a new idempotent producer: it carries the time of this broker's clock."""
        return self._ids.uuid7(now_ms(self._clock))

    async def stop(self) -> None:
        """Everything that was accepted is committed and in the index."""
        await self.producer.drain()
        if self.shared is not None:
            await self.shared.close()
        await self.meta.close()

    def _landed(self, appended: Sequence[Landed]) -> None:
        self._in.inc(sum([records.count for _, _, records in appended]))
        self._in_bytes.inc(sum([records.size for _, _, records in appended]))
        for tp, start_offset, records in appended:
            self.fetcher.appended(tp, start_offset, records)
            if self.shared is not None:
                self.shared.put(tp, start_offset, records)
