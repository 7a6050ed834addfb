"""The registry of partitions: one small entry each, all in one folder of meta, so that one range finds them all.

An entry is put after a partition was found missing or deleted and before it is created, and removed after its control
record, by the version that was read before that. So whatever order two processes act in, a partition that exists has
an entry. Partitions of older versions have none until a full scan has registered them; then the registry is complete.

A backend that can name its groups (GroupedMeta) needs no registry.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from lakebed.core.errors import AlreadyExists, NotFound, Stale
from lakebed.log import paths
from lakebed.log.model import TopicPartition
from lakebed.meta.model import ABSENT, RANGE_LIMIT_MAX, prefix_end
from lakebed.meta.protocol import GroupedMeta, Meta

GROUP = "log-partitions"  # the partition key of all entries: one shard holds them


class RegisteredPartition(msgspec.Struct, frozen=True):
    """The value of an entry. Its key has the same, encoded to sort by topic."""

    topic: str
    partition: int


class PartitionRegistry:
    def __init__(self, meta: Meta) -> None:
        self._meta = meta
        self.needed = not isinstance(meta, GroupedMeta)
        self._complete = False

    async def register(self, tp: TopicPartition) -> None:
        """Puts the entry of a partition that is about to be created. Overwrites, so that its new version keeps it."""
        if self.needed:
            await self._meta.put(paths.registered(tp), _encoded(tp), partition_key=GROUP)

    async def add(self, tp: TopicPartition) -> None:
        """Puts the entry of a partition that exists, where it is missing."""
        if self.needed:
            try:
                await self._meta.put(paths.registered(tp), _encoded(tp), expected=ABSENT, partition_key=GROUP)
            except AlreadyExists:
                return

    async def version(self, tp: TopicPartition) -> str | None:
        """Read it before the control record is deleted, and give it to `remove`."""
        if not self.needed:
            return None
        try:
            return (await self._meta.get(paths.registered(tp), partition_key=GROUP)).version
        except NotFound:
            return None

    async def remove(self, tp: TopicPartition, version: str | None) -> None:
        if version is not None:
            try:
                await self._meta.delete(paths.registered(tp), expected=version, partition_key=GROUP)
            except Stale:
                return  # the partition is being created again

    async def complete(self) -> bool:
        """Whether every partition has an entry. Asked of meta until it is so."""
        if self.needed and not self._complete:
            try:
                await self._meta.get(paths.REGISTRY_COMPLETE, partition_key=GROUP)
                self._complete = True
            except NotFound:
                return False
        return self._complete

    async def mark_complete(self) -> None:
        """After a full scan has added what was missing."""
        if self.needed and not await self.complete():
            await self._meta.put(paths.REGISTRY_COMPLETE, b"{}", partition_key=GROUP)

    async def partitions(self, topic: str) -> AsyncIterator[TopicPartition]:
        """Every registered partition, of one topic or of all, in one range (of a few pages)."""
        start, end = (
            (f"{paths.REGISTRY}{topic}:", f"{paths.REGISTRY}{topic};")
            if topic
            else (paths.REGISTRY, prefix_end(paths.REGISTRY))
        )
        while True:
            page = await self._meta.range(start, end, limit=RANGE_LIMIT_MAX, partition_key=GROUP)
            for entry in page:
                found = msgspec.json.decode(entry.value, type=RegisteredPartition)
                yield TopicPartition(found.topic, found.partition)
            if len(page) < RANGE_LIMIT_MAX:
                return
            start = page[-1].key + "\0"


def _encoded(tp: TopicPartition) -> bytes:
    return msgspec.json.encode(RegisteredPartition(tp.topic, tp.partition))
