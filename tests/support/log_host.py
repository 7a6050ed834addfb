"""A broker and its services on one memory store and one meta store, with a clock that moves only on request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

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
from lakebed.meta.bucket.backend import BucketMeta
from lakebed.meta.memory import MemoryMeta, MemoryState
from lakebed.meta.model import RANGE_LIMIT_MAX, prefix_end
from lakebed.meta.oxia.backend import OxiaMeta
from lakebed.meta.protocol import Meta, put_each
from lakebed.store.memory import MemoryStore
from lakebed.store.runtime import StoreRuntime
from support import oxia_server

R = TypeVar("R")

METAS = ("memory", "bucket", *(["oxia"] if oxia_server.ADDRESS else []))  # what the log's own tests run on
WITH_REGISTRY = tuple(name for name in METAS if name != "bucket")  # a backend that names its groups needs none

TP = TopicPartition("orders", 0)
DEFAULTS: dict[str, Any] = {"compact_min_entries": 2, "vacuum_horizon_s": 100.0, "batch_max_delay_ms": 5.0}


class OxiaAtOnce(OxiaMeta):
    """A call takes no turn of the event loop, so that a clock that moves only on request cannot overtake it."""

    async def _call(self, verb: str, run: Callable[[Any], R], *, writes: bool = False) -> R:
        self._requests.labels(verb=verb).inc()
        return self._run(run, writes)


def each_put(meta: Meta) -> None:
    """From now on a put of several is several puts, so that a test that replaces `put` has them all."""
    meta.put_all = partial(put_each, meta)  # type: ignore[method-assign]


class Host:
    """One host: its bucket and meta, and as many brokers and workshops on them as a test wants."""

    def __init__(self, backend: str = "memory") -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(clock=self.clock)
        self.tp = TP
        self._backend = backend
        self._state = MemoryState()
        self._meta_store = MemoryStore(clock=self.clock)  # of its own: what a test does to the bucket, meta has not
        self._metas: list[Meta] = []
        self._seed = 0

    @property
    def state(self) -> MemoryState:
        assert self._backend == "memory", "a test that looks into the memory meta runs on no other"
        return self._state

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

    def meta(self) -> Meta:
        self._metas.append(self._opened(Runtime(self.clock, Ids.seeded(f"meta-{self._seed}"), Metrics())))
        return self._metas[-1]

    def _opened(self, runtime: Runtime) -> Meta:
        match self._backend:
            case "memory":
                return MemoryMeta(runtime, self._state)
            case "bucket":
                on_store = StoreRuntime(runtime.clock, runtime.ids, runtime.metrics, self._meta_store)
                return BucketMeta(on_store, "llog-meta", layout="bins")
            case _:
                return OxiaAtOnce(runtime, oxia_server.ADDRESS)

    async def emptied(self) -> None:
        """A server is one for all tests: what others left on it goes."""
        if self._backend == "oxia":
            await oxia_server.empty(self.looking)

    async def close(self) -> None:
        for meta in self._metas:
            await meta.close()

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

    @cached_property
    def looking(self) -> Meta:
        """The test's own client."""
        return self.meta()

    async def meta_keys(self, part: str = "") -> list[str]:
        found = [await self.looking.range(root, prefix_end(root), limit=RANGE_LIMIT_MAX) for root in oxia_server.ROOTS]
        return sorted(entry.key for entries in found for entry in entries if part in entry.key)

    async def meta_value(self, key: str, partition_key: str = TP.partition_key) -> bytes:
        return (await self.looking.get(key, partition_key=partition_key)).value

    async def meta_put(self, key: str, value: bytes, partition_key: str = TP.partition_key) -> None:
        await self.looking.put(key, value, partition_key=partition_key)

    async def meta_remove(self, key: str, partition_key: str = TP.partition_key) -> None:
        await self.looking.delete(key, partition_key=partition_key)

    async def objects(self, prefix: str = "llog/") -> list[str]:
        return [info.key async for info in self.store.list(prefix)]
