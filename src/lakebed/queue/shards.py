"""A collector over all shards of a queue: one collector for each, asked in turn.

Order holds within a shard, and so for each ingestor, which writes to one shard. A consumer that is to be exactly-once
stores the shard with the sequence. New shards are found while the queue is polled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from lakebed.queue.collector import Collector
from lakebed.queue.model import Closed, CollectedBatch

if TYPE_CHECKING:
    from lakebed.queue.roles import QueueShard

LOOK_EVERY = 100  # batches between two looks for new shards where the known ones always have one


class ShardedCollector:
    """The interface of `Collector` over several shards."""

    def __init__(
        self, shards: Callable[[], Awaitable[Sequence[QueueShard]]], open_: Callable[[QueueShard], Collector]
    ) -> None:
        self._shards, self._open = shards, open_
        self._collectors: dict[int, Collector] = {}
        self._next = 0
        self._delivered = 0  # since the last look for shards
        self._closed = False

    async def __aenter__(self) -> ShardedCollector:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def next_batch(self) -> CollectedBatch | None:
        """The next batch of the next shard that has one, or None when none has."""
        if self._closed:
            raise Closed("the collector is closed")
        due = self._delivered >= LOOK_EVERY
        if not due and (batch := await self._from_known()) is not None:
            self._delivered += 1
            return batch
        known, self._delivered = len(self._collectors), 0
        for shard in await self._shards():
            if shard.number not in self._collectors:
                self._collectors[shard.number] = self._open(shard)
        return await self._from_known() if due or len(self._collectors) > known else None

    async def _from_known(self) -> CollectedBatch | None:
        for _ in range(len(self._collectors)):
            turn, self._next = self._next % len(self._collectors), self._next + 1
            batch = await self._collectors[turn].next_batch()
            if batch is not None:
                return batch
        return None

    async def batches(self, *, idle_s: float = 0.1) -> AsyncIterator[CollectedBatch]:
        """Every batch, as it arrives, until the collector is closed. Ack each one."""
        while not self._closed:
            batch = await self.next_batch()
            if batch is not None:
                yield batch
            elif self._collectors:
                await self._collectors[0].idle(idle_s)

    async def ack(self, batch: CollectedBatch) -> None:
        await self._collectors[batch.shard].ack(batch)

    async def ack_all(self, batches: list[CollectedBatch]) -> None:
        """Acks several batches, in one write for each shard. Raises Fenced as `Collector.ack_all` does."""
        shards = sorted({batch.shard for batch in batches})
        outcomes = await asyncio.gather(
            *[self._collectors[shard].ack_all([one for one in batches if one.shard == shard]) for shard in shards],
            return_exceptions=True,
        )
        _raise_first(outcomes)

    async def reject(self, batch: CollectedBatch, reason: str) -> bool:
        return await self._collectors[batch.shard].reject(batch, reason)

    async def heartbeat(self) -> None:
        await asyncio.gather(*[collector.heartbeat() for collector in self._collectors.values()])

    async def close(self) -> None:
        """Closes the collectors of all shards, also where one cannot give its claims back: none sends heartbeats."""
        self._closed = True
        closing = [collector.close() for collector in self._collectors.values()]
        _raise_first(await asyncio.gather(*closing, return_exceptions=True))


def _raise_first(outcomes: Sequence[object]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
