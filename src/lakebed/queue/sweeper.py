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
to a dead letter, stays. A folder is named by its manifest too, and a manifest's sweep lists only its own: queues may
share a data prefix. Behind a backlog of more than `ENUMERATED_MAX` batches, orphans wait until it is shorter.

Segments and key segments are deleted when the manifest no longer needs them.
"""

from __future__ import annotations

import asyncio

from lakebed.core.errors import LakebedError
from lakebed.core.logs import logger
from lakebed.queue import paths
from lakebed.queue.appending import is_over
from lakebed.queue.claiming import abandoned
from lakebed.queue.consumer import Consumer
from lakebed.queue.dead_letters import DeadLetters
from lakebed.queue.model import ConsumerManifest, ProducerManifest
from lakebed.queue.producer import Producer
from lakebed.queue.settings import QueueSettings
from lakebed.store.runtime import StoreRuntime

DELETES_MAX = 8  # deletes under way at once
SWEPT_AT_ONCE = 1000  # orphans held in memory between deletes
ENUMERATED_MAX = 100_000  # pending batches that are compared with what is stored

log = logger("queue")


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
        self._settings, self._store, self._clock = settings, runtime.store, runtime.clock
        self._enumerate_from_s = self._orphans_from_s = 0.0
        self._producer, self._consumer, self._dead_letters = producer, consumer, dead_letters
        self._cleaned = runtime.metrics.counter("lakebed_queue_cleaned_total")
        self._swept = runtime.metrics.counter("lakebed_queue_swept_total")

    async def sweep(self) -> None:
        """Sweeps done batches, and once per horizon orphans: so that a queue is swept where no worker runs."""
        try:
            await self.sweep_done()
            if self._clock.monotonic_s() >= self._orphans_from_s:
                self._orphans_from_s = self._clock.monotonic_s() + self._settings.horizon_s
                await self.sweep_orphans()
        except LakebedError as error:
            log.warning("sweep failed; the next one continues", error=error.message)

    async def sweep_done(self) -> int:
        """Deletes every batch that is done now; returns how many. Idempotent, and safe beside other sweepers."""
        manifest = await self._consumer.read()
        if any(trouble.bury for trouble in manifest.troubles.values()):
            # The producer manifest is read after the consumer's: what is claimed there and not pending here was split.
            await self._consumer.close_abandoned(abandoned(manifest, await self._producer.read()))
            manifest = await self._consumer.read()
        if not manifest.done:
            return 0
        number = await self._producer.remove(await self._finished(manifest))
        dead = {location for location, done in manifest.finished.items() if done.dead}
        await self._delete([location for location in manifest.done if location not in dead])
        await self._consumer.trim(manifest.done, number)
        self._cleaned.inc(len(manifest.done))
        await self._sweep_segments()
        return len(manifest.done)

    async def _finished(self, manifest: ConsumerManifest) -> dict[str, tuple[int, int]]:
        """Location → sequence and bytes. Rows without a sequence were written in the seed's plain form: look it up."""
        known = {
            location: (row.sequence, row.size_bytes) for location, row in manifest.finished.items() if row.sequence
        }
        unknown = {location for location in manifest.done if location not in known}
        if unknown:
            async for location, entry in self._producer.pending():
                if location in unknown:
                    known[location] = (entry.sequence, entry.size_bytes)
                    unknown.remove(location)
                if not unknown:
                    break
        return {location: known[location] for location in manifest.done if location in known}

    async def sweep_orphans(self, *, dry_run: bool = False) -> list[str]:
        """Raises the generation when it is due and deletes the orphans of those that are over; returns their keys."""
        manifest = await (self._producer.read() if dry_run else self._producer.age())
        if not dry_run:
            await self._sweep_segments(strays=True)
        prefix, manifest_path = self._settings.data_path_prefix, self._settings.manifest_path
        over = [
            generation
            for folder in await self._store.children(f"{prefix.rstrip('/')}/")
            if (generation := paths.generation_of(folder, manifest_path)) is not None
            and is_over(generation, manifest.generation)
        ]
        if not over or manifest.waiting > ENUMERATED_MAX or self._is_too_soon(manifest, dry_run):
            return []
        # Letters are listed after the manifest was read: a batch leaves it only once its letter is written.
        pending = [location async for location, _ in self._producer.pending()]
        kept = {*pending, *[letter.location async for letter in self._dead_letters.letters()]}
        swept: list[str] = []
        for generation in over:
            folder = paths.generation_folder(prefix, manifest_path, generation)
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

    def _is_too_soon(self, manifest: ProducerManifest, dry_run: bool) -> bool:
        """Whether segments were enumerated within the last horizon: that costs a request for each."""
        if dry_run or manifest.sealed <= manifest.floor:
            return False
        now_s = self._clock.monotonic_s()
        if now_s < self._enumerate_from_s:
            return True
        self._enumerate_from_s = now_s + self._settings.horizon_s
        return False

    async def _sweep_segments(self, *, strays: bool = False) -> None:
        """Deletes segments below the floor, and key segments that are forgotten; with `strays` other folders too.

        A folder that is not the manifest's cannot become it: the first segment decides.
        """
        head = await self._producer.read()
        if not head.segments:
            return
        manifest_path = self._settings.manifest_path
        first_block = min(head.floor, head.sealed) // (head.block or 1)
        for folder, first in (
            (paths.segments_folder(manifest_path), first_block),
            (paths.keys_folder(manifest_path), head.keys_first),
        ):
            doomed = await self._below(f"{folder}{head.segments}/", first)
            for stray in await self._store.children(folder) if strays else ():
                if stray != head.segments:
                    doomed += [info.key async for info in self._store.list(f"{folder}{stray}/")]
            await self._delete(doomed)

    async def _below(self, folder: str, first: int) -> list[str]:
        found: list[str] = []
        async for info in self._store.list(folder):
            block = paths.block_of(info.key)
            if block is None or block >= first or len(found) >= SWEPT_AT_ONCE:
                break  # names are in order
            found.append(info.key)
        return found

    async def _delete(self, keys: list[str]) -> None:
        slots = asyncio.Semaphore(DELETES_MAX)

        async def delete(key: str) -> None:
            async with slots:
                await self._store.delete(key)

        await asyncio.gather(*[delete(key) for key in keys])
