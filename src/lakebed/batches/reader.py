"""Reads accepted batches back from the bucket, checked against their hash, and finds them by hour of acceptance."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable

from lakebed.batches import paths
from lakebed.batches.codec.frame import decode
from lakebed.batches.index import AcceptedIndex, IndexedBatch
from lakebed.batches.model import (
    AcceptedBatch,
    AcceptedByTime,
    Batch,
    BatchIdentity,
    FrameLimits,
    FramePlace,
    RetentionState,
    SettledBoot,
)
from lakebed.core.cache import ByteCache
from lakebed.core.errors import Corrupt, Invalid, NotFound
from lakebed.rollups.paths import ROLLUP_WORK
from lakebed.store.model import read_record
from lakebed.store.protocol import Store

READS_MAX = 256  # reads in progress at once; a caller that holds what it reads asks for fewer
CACHE_BYTES_MAX = 32 * 1024 * 1024  # decoded batches kept for the next query, by the size of their frames

ANY_FRAME = FrameLimits(frame_bytes=256 * 1024**2, body_bytes=1024**3, samples=50_000_000, series=10_000_000)


class RawBatches:
    """The accepted batches of a bucket. What was accepted under larger limits than today's is still read."""

    def __init__(self, store: Store, *, cache_bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._store = store
        self._cache: ByteCache[Batch] = ByteCache(cache_bytes_max)
        self._gate = asyncio.Semaphore(READS_MAX)
        self.index = AcceptedIndex(store)

    async def manifest(self, identity: BatchIdentity) -> AcceptedBatch:
        """The manifest of an accepted batch. Raises NotFound when it is not accepted, Corrupt."""
        return read_record(await self._store.get(paths.accepted_key(identity)), AcceptedBatch)

    async def batch(self, sha256: str, place: FramePlace | None = None) -> Batch:
        """A batch, verified. Without a place it is the blob under its hash. Raises NotFound, or Corrupt when its bytes
        are not what their name says."""
        known = self._cache.get(sha256)
        if known is not None:
            return known
        async with self._gate:
            frame = await read_frame(self._store, place or FramePlace(paths.blob_key(sha256), 0, 0))
        batch = verified(frame, sha256)
        self._cache.put(sha256, len(frame), batch)
        return batch

    async def removed_ns(self) -> int:
        """Batches accepted before were removed by retention; 0: none."""
        try:
            return read_record(await self._store.get(paths.RETENTION_STATE), RetentionState).removed_ns
        except NotFound:
            return 0

    async def settled(self) -> AsyncIterator[tuple[str, str, SettledBoot]]:
        """Every boot of which retention removes batches: agent, boot, and the numbers."""
        async for info in self._store.list(paths.SETTLED):
            try:
                boot = paths.boot_of_settled(info.key)
            except Invalid:
                continue  # not ours
            yield *boot, read_record(await self._store.get(info.key), SettledBoot)

    async def find(self, ids: Iterable[str], damaged: list[Corrupt] | None = None) -> dict[str, AcceptedByTime]:
        """The index entries of these batches; one that is missing or damaged is left out: it is derived."""
        return await self.index.find(ids, damaged=damaged)

    async def first_ns(self, now_ns: int) -> int:
        """The beginning of the first day in the index; `now_ns` when there is none."""
        return await self.index.first_ns(now_ns)

    def entries(
        self, from_ns: int, to_ns: int, damaged: list[Corrupt] | None = None, *, seen: dict[str, int] | None = None
    ) -> AsyncIterator[IndexedBatch]:
        """The batches of the index with acceptance in [from_ns, to_ns], in order of acceptance."""
        return self.index.entries(from_ns, to_ns, damaged, seen=seen)

    async def late_entries(self, from_ns: int, to_ns: int) -> AsyncIterator[IndexedBatch]:
        """The same of the batches that were indexed late, by the notes that say so. A note precedes its entry."""
        for hour in paths.hours(from_ns, to_ns):
            folder = f"{ROLLUP_WORK}{hour}/"
            async for info in self._store.list(folder, after=f"{folder}{max(0, from_ns):020d}"):
                try:
                    manifest_id, at_ns = paths.parse_by_time(info.key)
                except Invalid:
                    continue  # not ours; the audit reports it
                if from_ns <= at_ns <= to_ns:
                    yield IndexedBatch(manifest_id)


async def read_frame(store: Store, place: FramePlace) -> bytes:
    """The bytes of a frame, from its own blob or out of a pack. Raises NotFound, or Corrupt when it is too short."""
    if place.offset:
        return await store.get_range(place.key, place.offset, place.length)
    return (await store.get(place.key)).data


def verified(frame: bytes, sha256: str) -> Batch:
    """The batch in these bytes. Raises Corrupt unless they have this hash and are a frame."""
    if hashlib.sha256(frame).hexdigest() != sha256:
        raise Corrupt(f"blob {sha256} holds bytes with another hash", hint="lakebed batches reconcile --cold")
    try:
        return decode(frame, ANY_FRAME)
    except Invalid as error:
        raise Corrupt(f"blob {sha256} is not a frame: {error.message}") from error
