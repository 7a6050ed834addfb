"""The registry of brokers: who is alive, where each is reached, and which of them a partition is best sent to.

A broker's record is an ephemeral entry in meta, so it ends with its process. Nothing depends on it for correctness: any
broker serves any partition and any group. A client that sends a partition's requests to one broker gets larger batches
and warmer caches, and brokers find each other through it. HTTP and Kafka clients share it.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections.abc import Sequence

import msgspec

from lakebed.core.errors import LakebedError
from lakebed.core.logs import logger
from lakebed.core.retry import until_available
from lakebed.core.runtime import Runtime
from lakebed.log.model import TopicPartition
from lakebed.meta.model import prefix_end
from lakebed.meta.protocol import Meta, MetaSession

BROKERS = "log-brokers/"  # outside the log's own folder, where every name may be a topic's
GROUP = "log-brokers"  # the partition key of all records: one range reads them
BROKERS_MAX = 1000  # records that one range reads
LEASE_S = 9.0  # others see a broker end this long after its last heartbeat
REFRESH_S = LEASE_S / 3
FRESH_S = 0.5  # how old the list may be that Kafka clients get: they ask for it when a broker does not respond
OWNERS_MAX = 16_384  # partitions whose owner is remembered

log = logger("log")


class BrokerRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One living broker, with where clients reach it: `http` is a URL, `kafka` HOST:PORT; empty where it is not.

    `kafka_id` is its number for Kafka clients. `token` is what other brokers send with a notice: who can read meta
    belongs to the lake. `writes`, `reads`: which requests it serves (`log.roles`).
    """

    id: str
    http: str = ""
    kafka: str = ""
    kafka_id: int = 0
    zone: str = ""
    token: str = ""
    writes: bool = True
    reads: bool = True

    @property
    def kafka_host(self) -> str:
        return self.kafka.rpartition(":")[0]

    @property
    def kafka_port(self) -> int:
        return int(self.kafka.rpartition(":")[2])


def key_of(broker_id: str) -> str:
    return f"{BROKERS}{broker_id}"


def preferred(key: str, brokers: Sequence[BrokerRecord], *, zone: str = "") -> BrokerRecord | None:
    """The broker for this key, by rendezvous hashing: when one comes or goes, only its own keys move.

    Among those of `zone`, where there are any. None without brokers.
    """
    near = [broker for broker in brokers if zone and broker.zone == zone] or brokers
    return max(near, key=lambda broker: _weight(key, broker.id), default=None)


def _weight(key: str, broker_id: str) -> tuple[bytes, str]:
    return hashlib.blake2b(f"{broker_id}\0{key}".encode(), digest_size=8).digest(), broker_id


class BrokerRegistry:
    """Keeps this broker's record alive and a list of all of them, at most REFRESH_S old."""

    def __init__(self, runtime: Runtime, meta: Meta, me: BrokerRecord) -> None:
        self.me = me
        self._runtime, self._meta, self._clock = runtime, meta, runtime.clock
        self._session: MetaSession | None = None
        self._registered: BrokerRecord | None = None
        self._refreshing = asyncio.Lock()
        self._running: asyncio.Task[None] | None = None
        self._living: tuple[BrokerRecord, ...] = (me,)
        self._read_s = float("-inf")
        self._owners: dict[tuple[TopicPartition, bool], BrokerRecord | None] = {}
        runtime.metrics.gauge("lakebed_log_brokers").set_function(lambda: len(self._living))

    @property
    def living(self) -> tuple[BrokerRecord, ...]:
        """All living brokers as last read, this one always among them, sorted by id."""
        return self._living

    @property
    def others(self) -> tuple[BrokerRecord, ...]:
        """The other brokers that serve HTTP."""
        return tuple(broker for broker in self._living if broker.id != self.me.id and broker.http)

    def owner(self, tp: TopicPartition, *, writes: bool = True) -> BrokerRecord | None:
        """The broker that HTTP clients best send this partition's records to, or get them from; from memory."""
        key = (tp, writes)
        if key not in self._owners:
            if len(self._owners) >= OWNERS_MAX:
                self._owners.clear()
            able = [one for one in self._living if one.http and (one.writes if writes else one.reads)]
            self._owners[key] = preferred(str(tp), able)
        return self._owners[key]

    async def kafka_brokers(self) -> list[BrokerRecord]:
        """The living brokers that serve Kafka clients, in the order of their numbers; at most FRESH_S old.

        While meta is away, the last list stays.
        """
        if self._clock.monotonic_s() - self._read_s > FRESH_S:
            try:
                await self._read()
            except LakebedError as error:
                log.warning("the registry of brokers is not reachable", code=error.code, error=error.message)
        by_number = {broker.kafka_id: broker for broker in self._living if broker.kafka}
        return [by_number[number] for number in sorted(by_number)]  # one record each: a killed one may be there still

    async def serve_kafka(self, host: str, port: int) -> None:
        """Registers where Kafka clients reach this broker, under a number made of its address: the same one after a
        restart. Waits while meta is unavailable."""
        await until_available(self._runtime, lambda: self._claim(f"{host}:{port}"))
        self.start()

    async def _claim(self, address: str) -> None:
        number = zlib.crc32(address.encode()) & 0x3FFFFFFF
        taken = {broker.kafka_id for broker in await living(self._meta) if broker.kafka not in ("", address)}
        while number in taken:
            number += 1
        self.me = msgspec.structs.replace(self.me, kafka=address, kafka_id=number)
        await self.refresh()

    def start(self) -> None:
        """Registers and refreshes from now on, until `close`. While meta is away, the last list stays."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            try:
                await self.refresh()
            except LakebedError as error:
                log.warning("the registry of brokers is not reachable", code=error.code, error=error.message)
            await self._clock.sleep(REFRESH_S)

    async def refresh(self) -> None:
        """Registers this broker where its lease is new or lost, or its record has changed, and reads all of them."""
        async with self._refreshing:
            if self._session is None or not self._session.alive:
                self._session = await self._meta.open_session(timeout_s=LEASE_S)
                self._registered = None
            if self._registered != self.me:
                me = self.me
                await self._meta.put(key_of(me.id), msgspec.json.encode(me), session=self._session, partition_key=GROUP)
                self._registered = me
        await self._read()

    async def close(self) -> None:
        """Removes this broker's record. Idempotent."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.wait([running])
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _read(self) -> None:
        asked_s = self._clock.monotonic_s()
        found = await living(self._meta)
        others = [broker for broker in found if broker.id != self.me.id]
        now = tuple(sorted([*others, self.me], key=lambda broker: broker.id))
        self._read_s = asked_s
        if now != self._living:
            self._living, self._owners = now, {}


async def living(meta: Meta) -> list[BrokerRecord]:
    """The records of all living brokers, in one range. A record that does not decode is left out."""
    found: list[BrokerRecord] = []
    for entry in await meta.range(BROKERS, prefix_end(BROKERS), limit=BROKERS_MAX, partition_key=GROUP):
        try:
            found.append(msgspec.json.decode(entry.value, type=BrokerRecord))
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
            log.warning("a broker's record does not decode", key=entry.key)
    return found
