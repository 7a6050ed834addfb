"""The living brokers. Each keeps an ephemeral entry in meta; one that dies is gone when its session ends.

A broker is named for each partition and group by rendezvous hashing, so that its batches and caches serve all clients
of it. Nothing depends on it: every broker serves every partition and every group.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from lakebed.core.errors import LakebedError
from lakebed.core.logs import logger
from lakebed.core.retry import until_available
from lakebed.core.runtime import Runtime
from lakebed.log import paths
from lakebed.log.records import PAGE, decoded
from lakebed.meta.model import prefix_end
from lakebed.meta.protocol import Meta, MetaSession

SESSION_S = 6.0  # a broker that is silent for so long is no longer named to clients
CHECK_S = 1.0  # how often a broker sees that its own entry is there
FRESH_S = 0.5  # how long a list of living brokers is used
ROUTE = "kafka-brokers"

log = logger("log")


class KafkaBroker(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where Kafka clients reach a broker."""

    id: int
    host: str
    port: int
    node: str


class KafkaBrokers:
    def __init__(self, runtime: Runtime, meta: Meta, *, node: str) -> None:
        self._runtime, self._meta, self._clock, self._node = runtime, meta, runtime.clock, node
        self.own: KafkaBroker | None = None
        self._session: MetaSession | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._seen: tuple[KafkaBroker, ...] = ()
        self._seen_s = float("-inf")

    async def start(self, host: str, port: int) -> None:
        """Registers this broker under an id made of its address: the same one after a restart."""
        await until_available(self._runtime, lambda: self._claim(host, port))
        self._keeping = asyncio.create_task(self._keep())

    async def _claim(self, host: str, port: int) -> None:
        id = zlib.crc32(f"{host}:{port}".encode()) & 0x3FFFFFFF
        taken = {each.id for each in await self._read() if (each.host, each.port) != (host, port)}
        while id in taken:
            id += 1
        self.own = KafkaBroker(id, host, port, self._node)
        await self._register()

    async def stop(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        if self._session is not None:
            await self._session.close()

    async def living(self) -> Sequence[KafkaBroker]:
        """All living brokers, this one among them, in the order of their ids; at most `FRESH_S` old."""
        now_s = self._clock.monotonic_s()
        if now_s - self._seen_s > FRESH_S:
            try:
                self._seen, self._seen_s = tuple(await self._read()), now_s
            except LakebedError:
                log.warning("living brokers are not known", known=len(self._seen))
        assert self.own is not None
        others = [each for each in self._seen if each.id != self.own.id]
        return sorted([*others, self.own], key=lambda each: each.id)

    async def _register(self) -> None:
        assert self.own is not None
        self._session = await self._meta.open_session(timeout_s=SESSION_S)
        await self._meta.put(
            paths.kafka_broker(self.own.id),
            msgspec.json.encode(self.own),
            session=self._session,
            partition_key=ROUTE,
        )

    async def _keep(self) -> None:
        """Registers again after a pause in which the session has ended."""
        while True:
            await self._clock.sleep(CHECK_S)
            if self._session is not None and not self._session.alive:
                try:
                    await self._register()
                except LakebedError as error:
                    log.warning("broker is not registered", error=error.message)

    async def _read(self) -> list[KafkaBroker]:
        end = prefix_end(paths.KAFKA_BROKERS)
        found = await self._meta.range(paths.KAFKA_BROKERS, end, limit=PAGE, partition_key=ROUTE)
        return [decoded(entry, KafkaBroker).value for entry in found]


def chosen(brokers: Sequence[KafkaBroker], key: str) -> KafkaBroker:
    """The broker for this key, by rendezvous hashing: one that dies moves its own keys alone."""
    return max(brokers, key=lambda each: blake2b(f"{key}/{each.id}".encode(), digest_size=8).digest())
