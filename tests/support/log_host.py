"""A broker and its services on one memory store and one memory meta, with a clock that moves only on request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from lakebed.core.clock import ManualClock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.core.settings import Settings
from lakebed.log.broker import Broker
from lakebed.log.codec import columns
from lakebed.log.fetcher import FetchRequest
from lakebed.log.model import TopicPartition
from lakebed.log.producers import RecordChunk, Stamp
from lakebed.log.services import LogServices
from lakebed.log.settings import LogSettings
from lakebed.log.writer import PartitionAppend
from lakebed.meta.memory import MemoryMeta, MemoryState
from lakebed.store.memory import MemoryStore

TP = TopicPartition("orders", 0)
DEFAULTS: dict[str, Any] = {"compact_min_entries": 2, "vacuum_horizon_s": 100.0, "batch_max_delay_ms": 5.0}


class Host:
    """One host: its bucket and meta, and as many brokers and workshops on them as a test wants."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(clock=self.clock)
        self.state = MemoryState()
        self.tp = TP
        self._seed = 0

    def context(self, **settings: Any) -> Context:
        self._seed += 1
        section = LogSettings(**{**DEFAULTS, **settings})
        return Context(
            node=f"node-{self._seed}",
            settings=Settings({LogSettings: section}, {}),
            store=self.store,
            clock=self.clock,
            ids=Ids.seeded(self._seed),
            metrics=Metrics(),
        )

    def meta(self) -> MemoryMeta:
        return MemoryMeta(Runtime(self.clock, Ids.seeded(f"meta-{self._seed}"), Metrics()), self.state)

    def broker(self, **settings: Any) -> Broker:
        return Broker(self.context(**settings), self.meta())

    def services(self, **settings: Any) -> LogServices:
        return LogServices(self.context(**settings), self.meta())

    async def append(self, broker: Broker, *records: bytes, tp: TopicPartition = TP, stamp: Stamp | None = None) -> Any:
        """One append, one index entry; settled before it returns."""
        ((outcome,),) = await broker.writer.append_shared(
            [PartitionAppend(tp, (RecordChunk(columns(records), stamp),))]
        )
        await broker.writer.drain()
        return outcome

    async def append_all(self, broker: Broker, records: Mapping[TopicPartition, Sequence[bytes]]) -> None:
        """One append to each partition, all in one blob; settled before it returns."""
        await broker.writer.append_shared(
            [PartitionAppend(tp, (RecordChunk(columns(of_tp)),)) for tp, of_tp in records.items()]
        )
        await broker.writer.drain()

    async def produce(self, broker: Broker, *records: bytes, tp: TopicPartition = TP) -> None:
        """As a request does: through the batching producer, so that the broker's tail cache has the records."""
        working = asyncio.ensure_future(broker.produce([(tp, RecordChunk(columns(list(records))))]))
        await self.clock.advance(0.02)
        await working

    async def fetch(self, broker: Broker, offset: int, *, wait_s: float = 0.0, tp: TopicPartition = TP) -> Any:
        (found,) = await broker.consume(
            [FetchRequest(tp, offset, 1 << 20)], bytes_max=1 << 20, bytes_min=1, wait_s=wait_s
        )
        return found

    async def read(self, broker: Broker, offset: int, tp: TopicPartition = TP, bytes_max: int = 1 << 20) -> list[bytes]:
        found = await broker.reader.read(tp, offset, bytes_max=bytes_max)
        return [record for part in found.parts for record in part]

    async def read_all(self, broker: Broker, tp: TopicPartition = TP) -> list[bytes]:
        now = await broker.reader.control(tp)
        offset, found = now.log_start_offset, []
        while offset <= now.sequence_counter:
            more = await self.read(broker, offset, tp)
            found += more
            offset += len(more)
        return found

    def meta_keys(self, part: str = "") -> list[str]:
        return [key for key in self.state.keys if part in key]

    async def objects(self, prefix: str = "llog/") -> list[str]:
        return [info.key async for info in self.store.list(prefix)]
