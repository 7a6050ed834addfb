"""The queue's producing side: one producer manifest, shared by all ingestors of a process.

Appends that are requested during a write share the next one, so many ingestors cost one replace. Ingestors that share
a `Producer` never conflict with each other, and share a limit on concurrent uploads (`slots`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from lakebed.core.clock import now_ms
from lakebed.queue import appending
from lakebed.queue.model import Append, Durable, ProducerManifest
from lakebed.queue.settings import QueueSettings
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime

REGISTER = "queue_producer"


class Producer:
    def __init__(self, settings: QueueSettings, runtime: StoreRuntime) -> None:
        self._settings, self._clock = settings, runtime.clock
        self._register = Register(runtime, settings.manifest_path, ProducerManifest, ProducerManifest(), name=REGISTER)
        self.slots = asyncio.Semaphore(settings.uploads_max)
        self._generation = 0
        self._generation_until_s = 0.0

    async def append(self, batches: Sequence[Append]) -> list[Durable]:
        """Appends stored batches of one ingestor, in order; the one conditional write that accepts them.

        Idempotent by the ingestor's counters. Raises GenerationExpired, Overloaded, or an error of the register.
        """
        durable, generation = await self._register.change(lambda manifest: self._append(manifest, batches))
        self._know(generation)
        return durable

    def _append(
        self, manifest: ProducerManifest, batches: Sequence[Append]
    ) -> tuple[ProducerManifest, tuple[list[Durable], int]]:
        after, durable = appending.append(
            manifest, batches, now_ms=now_ms(self._clock), pending_max=self._settings.pending_max
        )
        return after, (durable, after.generation)

    async def split(self, location: str, pieces: Sequence[Append]) -> bool:
        """Replaces a pending batch by its pieces, at the end of the queue, in one write. Idempotent."""
        return await self._register.change(
            lambda manifest: appending.split(manifest, location, pieces, now_ms=now_ms(self._clock))
        )

    async def generation(self) -> int:
        """The generation to store a new batch in: the last known one, read again before it can be over."""
        if self._clock.monotonic_s() >= self._generation_until_s:
            await self.read()
        return self._generation

    async def read(self) -> ProducerManifest:
        """The manifest as it is now, every location with its sequence."""
        manifest = appending.complete((await self._register.read()).value)
        self._know(manifest.generation)
        return manifest

    async def remove(self, locations: Iterable[str]) -> int:
        """Takes done locations out of `pending`; returns the clean-up's number."""
        gone = frozenset(locations)
        return await self._register.change(lambda manifest: appending.remove(manifest, gone))

    async def age(self) -> ProducerManifest:
        """Raises the generation when it is due; returns the manifest after that, for the sweep."""
        horizon_ms = round(self._settings.horizon_s * 1000)
        manifest = await self._register.change(
            lambda manifest: appending.age(manifest, now_ms=now_ms(self._clock), horizon_ms=horizon_ms)
        )
        self._know(manifest.generation)
        return manifest

    def _know(self, generation: int) -> None:
        self._generation = generation
        self._generation_until_s = self._clock.monotonic_s() + self._settings.horizon_s / 2
