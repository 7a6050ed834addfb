"""The queue's producing side: one producer manifest, shared by all ingestors of a process, and its segments.

Appends that are requested during a write share the next one, so many ingestors cost one replace. Ingestors that share
a `Producer` never conflict with each other, and share a limit on concurrent uploads (`slots`).

The manifest is kept short: the process whose append completes a block stores its segment and lets the manifest give
the block up. That is a second, derived write: when it fails, the manifest is longer until the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from msgspec.structs import replace

from lakebed.core.clock import now_ms
from lakebed.core.errors import Corrupt, LakebedError, NotFound, Unavailable
from lakebed.core.logs import logger
from lakebed.queue import appending, segments
from lakebed.queue.model import Append, Durable, KeysUnread, PendingBatch, PendingView, ProducerManifest
from lakebed.queue.segments import KEYS_BLOCK, Segments
from lakebed.queue.settings import SEED_PENDING_MAX, QueueSettings
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime

REGISTER = "queue_producer"
READS_MAX = 5  # of a manifest whose segments are swept while it is read
TAIL_BLOCKS_MAX = 8  # blocks in the manifest before an append waits for their segments

log = logger("queue")


class Producer:
    """`first` is the producer of the queue's first shard, which records how many shards there are."""

    def __init__(self, settings: QueueSettings, runtime: StoreRuntime, *, first: Producer | None = None) -> None:
        self._settings, self._clock, self._ids = settings, runtime.clock, runtime.ids
        self._first = first or self
        self._recorded = settings.shards == 1
        self._register = Register(runtime, settings.manifest_path, ProducerManifest, ProducerManifest(), name=REGISTER)
        self._segments = Segments(runtime.store, settings.manifest_path)
        self._index = appending.KeyIndex()
        self._plain = settings.format == "seed"
        self._pending_max = min(settings.pending_max, SEED_PENDING_MAX) if self._plain else settings.pending_max
        self._sealing: asyncio.Task[None] | None = None
        self.slots = asyncio.Semaphore(settings.uploads_max)
        self._generation = 0
        self._generation_until_s = 0.0

    async def append(self, batches: Sequence[Append]) -> list[Durable]:
        """Appends stored batches of one ingestor, in order; the one conditional write that accepts them.

        Idempotent by the ingestor's counters. Raises GenerationExpired, KeysEnqueued, Overloaded, or an error of the
        register.
        """
        if not self._recorded:  # before the first batch: collectors must know of this shard
            await self._first.widen(self._settings.shards)
            self._recorded = True
        while True:
            try:
                durable, head = await self._register.change(lambda manifest: self._append(manifest, batches))
                break
            except KeysUnread:
                await self._read_keys()
        self._know(head.generation)
        await self._shorten(head, batches)
        return durable

    def _append(
        self, manifest: ProducerManifest, batches: Sequence[Append]
    ) -> tuple[ProducerManifest, tuple[list[Durable], ProducerManifest]]:
        after, durable = appending.append(
            manifest, batches, now_ms=now_ms(self._clock), pending_max=self._pending_max, index=self._index
        )
        return after, (durable, after)

    async def split(self, sequence: int, size_bytes: int, pieces: Sequence[Append]) -> bool:
        """Replaces a pending batch by its pieces, at the end of the queue, in one write. Idempotent."""
        return await self._register.change(
            lambda manifest: appending.split(manifest, sequence, size_bytes, pieces, now_ms=now_ms(self._clock))
        )

    async def generation(self) -> int:
        """The generation to store a new batch in: the last known one, read again before it can be over."""
        if self._clock.monotonic_s() >= self._generation_until_s:
            await self.read()
        return self._generation

    async def read(self) -> ProducerManifest:
        """The head of the queue as it is now: its newest batches, each with its sequence, and its numbers."""
        manifest = appending.complete((await self._register.read()).value)
        self._know(manifest.generation)
        return manifest

    async def view(self, count: int) -> PendingView:
        """The first `count` batches that were not removed, at least, as of one read of the head."""
        missing: NotFound | None = None
        for _ in range(READS_MAX):
            head = await self.read()
            entries: dict[str, PendingBatch] = {}
            try:
                async for location, entry in self._rows(head, 0):
                    entries[location] = entry
                    if len(entries) >= count and entry.sequence < head.sealed:
                        return PendingView(tuple(entries), entries, head.cleanups, head, whole=False)
                return PendingView(tuple(entries), entries, head.cleanups, head)
            except NotFound as error:
                missing = error  # it was swept, and the head has moved on
        raise Unavailable("a segment of the queue cannot be read", hint="lakebed queue dump shows it") from missing

    async def pending(self, first: int = 0) -> AsyncIterator[tuple[str, PendingBatch]]:
        """Every batch from this sequence on, in order, as the queue was when this began; swept ones are skipped."""
        head = await self.read()
        first = max(first, head.floor)
        while True:
            try:
                async for location, entry in self._rows(head, first):
                    yield location, entry
                    first = entry.sequence + 1
                return
            except NotFound as error:
                now = await self.read()
                if now.floor <= first:
                    raise Corrupt(f"a segment is missing: {error.message}", hint="restore it from a backup") from error
                first = now.floor

    async def _rows(self, head: ProducerManifest, first: int) -> AsyncIterator[tuple[str, PendingBatch]]:
        first = max(first, head.floor)
        size = head.block or 1
        for block in range(first // size, -(-head.sealed // size)):
            if head.are_removed(max(first, block * size), min((block + 1) * size, head.sealed) - 1):
                continue  # it may have no segment
            for location, entry in (await self._segments.read(head.segments, block)).entries.items():
                if first <= entry.sequence < head.sealed and not head.is_removed(entry.sequence):
                    yield location, entry
        for location in head.pending:
            if head.entries[location].sequence >= first:
                yield location, head.entries[location]

    async def remove(self, finished: Mapping[str, tuple[int, int]]) -> int:
        """Removes done batches (location → sequence and bytes); returns the clean-up's number."""
        return await self._register.change(lambda manifest: appending.remove(manifest, finished))

    async def age(self) -> ProducerManifest:
        """Raises the generation when it is due and forgets old keys; returns the manifest after that, for the sweep."""
        horizon_ms = round(self._settings.horizon_s * 1000)
        keys_first = await self._keys_in_use()
        since_ms = self._keys_since_ms() if self._plain else 0  # otherwise they go with their segments

        def aged(manifest: ProducerManifest) -> tuple[ProducerManifest, ProducerManifest]:
            return appending.age(
                appending.complete(manifest),
                now_ms=now_ms(self._clock),
                horizon_ms=horizon_ms,
                keys_first=keys_first,
                keys_since_ms=since_ms,
            )

        manifest = await self._register.change(aged)
        self._know(manifest.generation)
        return manifest

    async def forget_replay(self, letter_id: str) -> None:
        await self._register.change(lambda manifest: appending.forget_replay(manifest, letter_id))

    async def widen(self, shards: int) -> int:
        """Records that the queue has at least so many shards; returns how many it has."""

        def widened(manifest: ProducerManifest) -> tuple[ProducerManifest, int]:
            if manifest.shards >= shards:
                return manifest, manifest.shards
            return replace(manifest, shards=shards), shards

        return await self._register.change(widened)

    async def settled(self) -> None:
        """Waits until the segments that were due are stored."""
        if self._sealing is not None:
            await asyncio.shield(self._sealing)

    async def _shorten(self, head: ProducerManifest, batches: Sequence[Append]) -> None:
        """Starts to seal what this append completed, or what another process left; waits when it is too much."""
        if self._plain:
            return
        block = head.block or self._settings.segment_batches
        full = len(head.pending) >= 2 * block or head.next_sequence % block < len(batches)
        if (segments.due(head, block) and full) or len(head.keys) >= KEYS_BLOCK:
            if self._sealing is None or self._sealing.done():
                self._sealing = asyncio.create_task(self._seal(head))
            if len(head.pending) >= TAIL_BLOCKS_MAX * block:
                await asyncio.shield(self._sealing)

    async def _seal(self, head: ProducerManifest) -> None:
        folder, block = head.segments or self._ids.token(), head.block or self._settings.segment_batches
        try:
            if segments.due(head, block):
                until, held = segments.end(head, block), await self._segments.seal(folder, block, head)
                await self._register.change(lambda manifest: appending.seal(manifest, folder, block, until, held))
            if len(head.keys) >= KEYS_BLOCK:
                number = head.keys_next
                keys = await self._segments.seal_keys(folder, number, head.keys[:KEYS_BLOCK])
                await self._register.change(lambda manifest: appending.seal_keys(manifest, folder, number, keys))
        except LakebedError as error:
            log.warning("the manifest could not be shortened; the next append tries again", error=error.message)

    async def _read_keys(self) -> None:
        """Reads the key segments that the index does not have."""
        head = (await self._register.read()).value
        oldest_ms = self._keys_since_ms()
        sequences = {key: one for key, one in self._index.sequences.items() if one.at_ms >= oldest_ms}
        for number in range(max(self._index.upto, head.keys_first), head.keys_next):
            try:
                keys = await self._segments.read_keys(head.segments, number)
            except NotFound:
                continue  # swept: its keys are too old
            sequences |= {one.key: one for one in keys if one.at_ms >= oldest_ms}
        self._index.sequences, self._index.upto = sequences, head.keys_next

    async def _keys_in_use(self) -> int:
        """The first key segment with a key that is young enough to be refused."""
        head = (await self._register.read()).value
        oldest_ms = self._keys_since_ms()
        for number in range(head.keys_first, head.keys_next):
            try:
                keys = await self._segments.read_keys(head.segments, number)
            except NotFound:
                continue
            if any(one.at_ms >= oldest_ms for one in keys):
                return number
        return head.keys_next

    def _keys_since_ms(self) -> int:
        """Keys from before this time may be forgotten."""
        return now_ms(self._clock) - round(self._settings.idempotency_s * 1000)

    def _know(self, generation: int) -> None:
        self._generation = generation
        self._generation_until_s = self._clock.monotonic_s() + self._settings.horizon_s / 2
