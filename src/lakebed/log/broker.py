"""The broker: appends and reads records for any partition. Keeps no durable state of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from lakebed.core.clock import now_ms
from lakebed.core.context import Context
from lakebed.core.errors import LakebedError
from lakebed.gateway.settings import GatewaySettings
from lakebed.log.batching import AppendedRecords, BatchingProducer
from lakebed.log.brokers import BrokerRecord
from lakebed.log.cache import SharedTail, TailCache
from lakebed.log.cost import batching_dollars_month
from lakebed.log.fetcher import Fetcher, FetchRequest
from lakebed.log.model import TopicPartition
from lakebed.log.notices import BrokerPeers
from lakebed.log.producers import RecordChunk
from lakebed.log.reader import Fetched
from lakebed.log.services import LogServices
from lakebed.log.settings import LogSettings
from lakebed.log.topic_quota import TopicQuota
from lakebed.log.writer import LogWriter, Outcome
from lakebed.meta.protocol import Meta
from lakebed.meta.settings import MetaSettings
from lakebed.store.settings import StoreSettings

WILDCARDS = ("0.0.0.0", "::")


class Broker(LogServices):
    """Appends, reads, and serves consumer groups and operators."""

    def __init__(self, context: Context, meta: Meta | None = None) -> None:
        super().__init__(context, meta, bodies_bytes=context.settings.of(LogSettings).bodies_bytes)
        runtime, metrics, settings = self.runtime, context.metrics, self.settings
        billed = context.settings.of(StoreSettings).billed
        delay_ms = settings.delay_ms(billed=billed)
        self.writer = LogWriter(
            runtime,
            self.records,
            self.uris,
            horizon_s=settings.vacuum_horizon_s,
            producer_memory_s=settings.producer_memory_s,
            delay_s=delay_ms / 1000,
        )
        self.topic_quota = TopicQuota(self.admin)  # one for all protocols
        self.cache = TailCache(settings.cache_bytes, metrics=metrics)
        self.shared: SharedTail | None = None
        if settings.tail_cache_dir is not None:
            self.shared = SharedTail(settings.tail_cache_dir, bytes_max=settings.cache_bytes, node=context.node)
        cost = batching_dollars_month(delay_ms, context.settings.of(MetaSettings).backend) if billed else 0.0
        metrics.gauge("lakebed_log_batching_cost_dollars_month").set(cost)
        self.producer = BatchingProducer(runtime, self.writer, settings, billed=billed, appended=self._appended)
        self.fetcher = Fetcher(runtime, self.reader, self.cache, settings, shared=self.shared)
        if settings.scenario:
            metrics.gauge("lakebed_log_scenario_info").labels(scenario=settings.scenario).set(1)
        me = BrokerRecord(
            context.node,
            _reached(context),
            zone=settings.zone,
            token=context.ids.token(),
            writes=settings.roles != "read" and not context.settings.of(GatewaySettings).read_only,
            reads=settings.roles != "write",
        )
        self.peers = BrokerPeers(context, self.meta, me, self.fetcher.moved)
        counted, sized = metrics.counter("lakebed_log_records_total"), metrics.counter("lakebed_log_record_bytes_total")
        self._in, self._in_bytes = counted.labels(direction="in"), sized.labels(direction="in")
        self._out, self._out_bytes = counted.labels(direction="out"), sized.labels(direction="out")

    async def produce(self, chunks: Sequence[tuple[TopicPartition, RecordChunk]]) -> Sequence[Outcome]:
        """Appends all chunks; an outcome for each, in order. A caller that is cancelled cancels none of them."""
        done: asyncio.Future[Sequence[Outcome]] = asyncio.get_running_loop().create_future()
        self.producer.append(chunks, lambda outcomes: None if done.done() else done.set_result(outcomes))
        return await done

    async def consume(
        self, wants: Sequence[FetchRequest], *, bytes_max: int, bytes_min: int, wait_s: float
    ) -> list[Fetched | LakebedError]:
        answers = await self.fetcher.fetch(wants, bytes_max=bytes_max, bytes_min=bytes_min, wait_s=wait_s)
        for answer in answers:
            if isinstance(answer, Fetched):
                self._out.inc(answer.count)
                self._out_bytes.inc(answer.size)
        return answers

    def producer_id(self) -> str:
        """An id for a new idempotent producer: it carries the time of this broker's clock."""
        return self._context.ids.uuid7(now_ms(self._context.clock))

    def start(self) -> None:
        """Joins the other brokers, unless nobody can reach this one."""
        if self._context.url:
            self.peers.start()

    async def stop(self) -> None:
        """Everything that was accepted is committed and in the index."""
        await self.producer.drain()
        await self.peers.stop()
        if self.shared is not None:
            await self.shared.close()
        await self.close()

    def _appended(self, appended: Sequence[AppendedRecords]) -> None:
        self._in.inc(sum([records.count for _, _, records in appended]))
        self._in_bytes.inc(sum([records.size for _, _, records in appended]))
        if appended:
            self.peers.moved({tp: start_offset + records.count - 1 for tp, start_offset, records in appended})
        for tp, start_offset, records in appended:
            self.fetcher.appended(tp, start_offset, records)
            if self.shared is not None:
                self.shared.put(tp, start_offset, records)


def _reached(context: Context) -> str:
    """The address that other brokers use. One that listens on all addresses is reached by its host's name."""
    own = urlsplit(context.url)
    if context.settings.of(LogSettings).broker_url:
        return context.settings.of(LogSettings).broker_url
    return f"{own.scheme}://{socket.gethostname()}:{own.port}" if own.hostname in WILDCARDS else context.url
