"""The cleaner: removes done batches, in an order that can be broken off anywhere.

1. their locations leave the producer manifest, under a clean-up number;
2. their data is deleted (a dead letter's data is not);
3. they leave the done list, and the consumer manifest records the number.

A crash after 1 or 2 leaves done locations that are no longer pending; the next clean-up goes through the same steps.
A collector that still has the producer manifest from before 1 cannot claim them again after 3: the number tells it
that what it read is outdated.
"""

from __future__ import annotations

import asyncio

from lakebed.metrics import Metrics
from lakebed.queue.claiming import abandoned
from lakebed.queue.consumer import Consumer
from lakebed.queue.producer import Producer
from lakebed.store.protocol import Store

DELETES_MAX = 8  # deletes under way at once


class Cleaner:
    def __init__(self, store: Store, producer: Producer, consumer: Consumer, metrics: Metrics) -> None:
        self._store, self._producer, self._consumer = store, producer, consumer
        self._cleaned = metrics.counter("lakebed_queue_cleaned_total")

    async def clean(self) -> int:
        """Removes every batch that is done now; answers how many. Idempotent, and safe beside other cleaners."""
        manifest = await self._consumer.read()
        if any(trouble.bury for trouble in manifest.troubles.values()):
            # The producer manifest is read after the consumer's: what is claimed there and not pending here was split.
            pending = frozenset((await self._producer.read()).pending)
            await self._consumer.close_abandoned(abandoned(manifest, pending))
            manifest = await self._consumer.read()
        if not manifest.done:
            return 0
        number = await self._producer.remove(manifest.done)
        dead = {location for location, done in manifest.finished.items() if done.dead}
        await delete_all(self._store, [location for location in manifest.done if location not in dead])
        await self._consumer.trim(manifest.done, number)
        self._cleaned.inc(len(manifest.done))
        return len(manifest.done)


async def delete_all(store: Store, keys: list[str]) -> None:
    slots = asyncio.Semaphore(DELETES_MAX)

    async def delete(key: str) -> None:
        async with slots:
            await store.delete(key)

    await asyncio.gather(*[delete(key) for key in keys])
