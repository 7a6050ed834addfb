"""The sweeper: deletes batches that nothing needs any more: done ones, and ones that were stored but never enqueued.

Done batches are deleted in an order that can be broken off anywhere:

1. their locations leave the producer manifest, under a clean-up number;
2. their data is deleted (a dead letter's data is not);
3. they leave the done list, and the consumer manifest records the number.

A crash after 1 or 2 leaves done locations that are no longer pending; the next sweep goes through the same steps.
A collector that still has the producer manifest from before 1 cannot claim them again after 3: the number tells it
that what it read is outdated.

Orphans are left by ingestors that died after they stored a batch. An ingestor may also only be slow, so the sweep
first makes sure that what it deletes can no longer be enqueued: it lists only folders of generations that are over in
the producer manifest it has just read, and the manifest refuses appends from those. What is pending there, or belongs
to a dead letter, stays.
"""

from __future__ import annotations

import asyncio

from lakebed.queue import paths
from lakebed.queue.appending import is_over
from lakebed.queue.claiming import abandoned
from lakebed.queue.consumer import Consumer
from lakebed.queue.dead_letters import DeadLetters
from lakebed.queue.producer import Producer
from lakebed.queue.settings import QueueSettings
from lakebed.store.runtime import StoreRuntime

DELETES_MAX = 8  # deletes under way at once
SWEPT_AT_ONCE = 1000  # orphans held in memory between deletes


class QueueSweeper:
    def __init__(
        self,
        settings: QueueSettings,
        runtime: StoreRuntime,
        *,
        producer: Producer,
        consumer: Consumer,
        dead_letters: DeadLetters,
    ) -> None:
        self._settings, self._store = settings, runtime.store
        self._producer, self._consumer, self._dead_letters = producer, consumer, dead_letters
        self._cleaned = runtime.metrics.counter("lakebed_queue_cleaned_total")
        self._swept = runtime.metrics.counter("lakebed_queue_swept_total")

    async def sweep_done(self) -> int:
        """Deletes every batch that is done now; returns how many. Idempotent, and safe beside other sweepers."""
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
        await self._delete([location for location in manifest.done if location not in dead])
        await self._consumer.trim(manifest.done, number)
        self._cleaned.inc(len(manifest.done))
        return len(manifest.done)

    async def sweep_orphans(self, *, dry_run: bool = False) -> list[str]:
        """Raises the generation when it is due and deletes the orphans of those that are over; returns their keys."""
        manifest = await (self._producer.read() if dry_run else self._producer.age())
        over = [
            generation
            for folder in await self._store.children(f"{self._settings.data_path_prefix.rstrip('/')}/")
            if (generation := paths.generation_of(folder)) is not None and is_over(generation, manifest.generation)
        ]
        if not over:
            return []
        # Letters are listed after the manifest was read: a batch leaves it only once its letter is written.
        kept = {*manifest.pending, *[letter.location async for letter in self._dead_letters.letters()]}
        swept: list[str] = []
        for generation in over:
            folder = paths.generation_folder(self._settings.data_path_prefix, generation)
            orphans: list[str] = []
            async for info in self._store.list(folder):
                if info.key not in kept and paths.is_batch(info.key):
                    orphans.append(info.key)
                if len(orphans) >= SWEPT_AT_ONCE:
                    break  # the next round takes the rest
            if not dry_run:
                await self._delete(orphans)
                self._swept.inc(len(orphans))
            swept += orphans
        return swept

    async def _delete(self, keys: list[str]) -> None:
        slots = asyncio.Semaphore(DELETES_MAX)

        async def delete(key: str) -> None:
            async with slots:
                await self._store.delete(key)

        await asyncio.gather(*[delete(key) for key in keys])
