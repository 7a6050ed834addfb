"""The registry of brokers: who is alive, where each is reached, and which of them a partition is best sent to.

A broker's record is an ephemeral entry in meta, so it ends with its process. Nothing depends on it for correctness: any
broker serves any partition. A client that sends a partition's requests to one broker gets larger batches and warmer
caches, and brokers find each other through it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from lakebed.core.errors import LakebedError
from lakebed.core.logs import logger
from lakebed.core.runtime import Runtime
from lakebed.log.model import TopicPartition
from lakebed.meta.model import prefix_end
from lakebed.meta.protocol import Meta, MetaSession

BROKERS = "log-brokers/"  # outside the log's own folder, where every name may be a topic's
GROUP = "log-brokers"  # the partition key of all records: one range reads them
BROKERS_MAX = 1000  # records that one range reads
LEASE_S = 15.0  # others see a broker end this long after its last heartbeat
REFRESH_S = LEASE_S / 3
OWNERS_MAX = 16_384  # partitions whose owner is remembered

log = logger("log")


class BrokerRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One living broker. `token` is what other brokers send with a notice: who can read meta belongs to the lake."""

    id: str
    http: str
    kafka: str = ""
    zone: str = ""
    token: str = ""


def key_of(broker_id: str) -> str:
    return f"{BROKERS}{broker_id}"


def owner(tp: TopicPartition, brokers: Sequence[BrokerRecord], *, zone: str = "") -> BrokerRecord | None:
    """The broker that a partition is best sent to, by rendezvous hashing: when one comes or goes, only its own
    partitions move. Among those of `zone`, where there are any. None without brokers.
    """
    near = [broker for broker in brokers if zone and broker.zone == zone] or brokers
    return max(near, key=lambda broker: _weight(tp, broker.id), default=None)


def _weight(tp: TopicPartition, broker_id: str) -> tuple[bytes, str]:
    return hashlib.blake2b(f"{broker_id}\0{tp}".encode(), digest_size=8).digest(), broker_id


class BrokerRegistry:
    """Keeps this broker's record alive and a list of all of them, at most REFRESH_S old."""

    def __init__(self, runtime: Runtime, meta: Meta, me: BrokerRecord) -> None:
        self.me = me
        self._meta, self._clock = meta, runtime.clock
        self._session: MetaSession | None = None
        self._living: tuple[BrokerRecord, ...] = (me,)
        self._owners: dict[TopicPartition, BrokerRecord | None] = {}
        runtime.metrics.gauge("lakebed_log_brokers").set_function(lambda: len(self._living))

    @property
    def living(self) -> tuple[BrokerRecord, ...]:
        """All living brokers as last read, this one always among them, sorted by id."""
        return self._living

    @property
    def others(self) -> tuple[BrokerRecord, ...]:
        return tuple(broker for broker in self._living if broker.id != self.me.id)

    def owner(self, tp: TopicPartition) -> BrokerRecord | None:
        """The owner of a partition among the living, from memory."""
        if tp not in self._owners:
            if len(self._owners) >= OWNERS_MAX:
                self._owners.clear()
            self._owners[tp] = owner(tp, self._living)
        return self._owners[tp]

    async def run(self) -> None:
        """Registers and refreshes until cancelled. While meta is away, the last list stays."""
        while True:
            try:
                await self.refresh()
            except LakebedError as error:
                log.warning("the registry of brokers is not reachable", code=error.code, error=error.message)
            await self._clock.sleep(REFRESH_S)

    async def refresh(self) -> None:
        """Registers this broker where its lease is new or lost, and reads all of them."""
        if self._session is None or not self._session.alive:
            self._session = await self._meta.open_session(timeout_s=LEASE_S)
            await self._meta.put(
                key_of(self.me.id), msgspec.json.encode(self.me), session=self._session, partition_key=GROUP
            )
        found = await living(self._meta)
        self._show((*[broker for broker in found if broker.id != self.me.id], self.me))

    async def close(self) -> None:
        """Removes this broker's record."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _show(self, brokers: Sequence[BrokerRecord]) -> None:
        now = tuple(sorted(brokers, key=lambda broker: broker.id))
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
