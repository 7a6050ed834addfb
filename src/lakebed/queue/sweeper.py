"""The sweeper: deletes batches that were stored but never enqueued, because their ingestor died in between.

An ingestor may also only be slow. So the sweep first makes sure that what it deletes can no longer be enqueued: it
looks only at folders of generations that are over in the producer manifest it has just read, and the manifest refuses
appends from those. What is pending there, or belongs to a dead letter, stays.
"""

from __future__ import annotations

from lakebed.metrics import Metrics
from lakebed.queue import paths
from lakebed.queue.appending import is_over
from lakebed.queue.cleaner import delete_all
from lakebed.queue.dead_letters import DeadLetters
from lakebed.queue.producer import Producer
from lakebed.queue.settings import QueueSettings
from lakebed.store.protocol import Store

SWEPT_AT_ONCE = 1000  # orphans held in memory between deletes


class Sweeper:
    def __init__(
        self, settings: QueueSettings, store: Store, producer: Producer, dead_letters: DeadLetters, metrics: Metrics
    ) -> None:
        self._settings, self._store = settings, store
        self._producer, self._dead_letters = producer, dead_letters
        self._swept = metrics.counter("lakebed_queue_swept_total")

    async def sweep(self, *, dry_run: bool = False) -> list[str]:
        """Raises the generation when it is due and deletes the orphans of those that are over; answers which."""
        manifest = await (self._producer.read() if dry_run else self._producer.age())
        over = [
            generation
            for folder in await self._store.children(f"{self._settings.data_path_prefix.rstrip('/')}/")
            if (generation := paths.generation_of(folder)) is not None and is_over(generation, manifest.generation)
        ]
        if not over:
            return []
        # Letters are listed after the manifest was read: a batch leaves it only once its letter stands.
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
                await delete_all(self._store, orphans)
                self._swept.inc(len(orphans))
            swept += orphans
        return swept
