"""Reads accepted batches back from the bucket, checked against their hash, and finds them by hour of acceptance."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

from lakebed.batches import paths
from lakebed.batches.codec.frame import decode
from lakebed.batches.model import AcceptedBatch, AcceptedByTime, Batch, BatchIdentity, FrameLimits, read_record
from lakebed.core.cache import ByteCache
from lakebed.core.errors import Corrupt, Invalid, NotFound
from lakebed.store.protocol import Store

READS_MAX = 16  # reads in progress at once for one caller
HOURS_UNASKED = 24  # for a longer span, the days that exist are listed first
CACHE_BYTES_MAX = 32 * 1024 * 1024  # decoded batches kept for the next query, by the size of their frames

ANY_FRAME = FrameLimits(frame_bytes=256 * 1024**2, body_bytes=1024**3, samples=50_000_000, series=10_000_000)


class RawBatches:
    """The accepted batches of a bucket. What was accepted under larger limits than today's is still read."""

    def __init__(self, store: Store, *, cache_bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._store = store
        self._cache: ByteCache[Batch] = ByteCache(cache_bytes_max)
        self._gate = asyncio.Semaphore(READS_MAX)

    async def manifest(self, identity: BatchIdentity) -> AcceptedBatch:
        """The manifest of an accepted batch. Raises NotFound when it is not accepted, Corrupt."""
        return read_record(await self._store.get(paths.accepted_key(identity)), AcceptedBatch)

    async def batch(self, sha256: str) -> Batch:
        """The batch in a blob, verified. Raises NotFound, or Corrupt when its bytes are not what their name says."""
        known = self._cache.get(sha256)
        if known is not None:
            return known
        async with self._gate:
            frame = (await self._store.get(paths.blob_key(sha256))).data
        batch = verified(frame, sha256)
        self._cache.put(sha256, len(frame), batch)
        return batch

    async def entry(self, key: str) -> AcceptedByTime | None:
        """A by-time entry, or None when it went away since it was listed, or is damaged: it is derived."""
        try:
            async with self._gate:
                return read_record(await self._store.get(key), AcceptedByTime)
        except (NotFound, Corrupt):
            return None

    async def first_ns(self, now_ns: int) -> int:
        """The beginning of the first day in the by-time index; `now_ns` when there is none."""
        for day in await self._store.children(paths.ACCEPTED_BY_TIME):
            try:
                return paths.day_ns(day)
            except Invalid:
                continue
        return now_ns

    async def entries(self, from_ns: int, to_ns: int) -> AsyncIterator[tuple[str, str]]:
        """Keys and manifest ids of the by-time index with acceptance in [from_ns, to_ns], in order of acceptance."""
        for hour in await self._hours(from_ns, to_ns):
            async for info in self._store.list(f"{paths.ACCEPTED_BY_TIME}{hour}/"):
                try:
                    manifest_id, at_ns = paths.parse_by_time(info.key)
                except Invalid:
                    continue  # not ours; the audit reports it
                if from_ns <= at_ns <= to_ns:
                    yield info.key, manifest_id

    async def _hours(self, from_ns: int, to_ns: int) -> list[str]:
        """The hours of the span, less those of days in which nothing was accepted if it is long."""
        hours = list(paths.hours(from_ns, to_ns))
        if len(hours) <= HOURS_UNASKED:
            return hours
        days = set(await self._store.children(paths.ACCEPTED_BY_TIME))
        return [hour for hour in hours if hour.partition("/")[0] in days]


def verified(frame: bytes, sha256: str) -> Batch:
    """The batch in these bytes. Raises Corrupt unless they have this hash and are a frame."""
    if hashlib.sha256(frame).hexdigest() != sha256:
        raise Corrupt(f"blob {sha256} holds bytes with another hash", hint="lakebed batches reconcile --cold")
    try:
        return decode(frame, ANY_FRAME)
    except Invalid as error:
        raise Corrupt(f"blob {sha256} is not a frame: {error.message}") from error
