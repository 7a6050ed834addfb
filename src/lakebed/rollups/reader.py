"""Reads what the roller has covered: which chunks count, which batches are in them, and where samples lie.

A look is a snapshot. Chunks and batches of generations that are committed later do not count in it, so a batch is taken
from rollups or from its blob, and never from both.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec

from lakebed.batches.paths import hour_of, parse_by_time
from lakebed.batches.reader import RawBatches
from lakebed.core.cache import ByteCache
from lakebed.core.errors import Corrupt, Invalid, NotFound
from lakebed.rollups import paths
from lakebed.rollups.codec.chunk import decode_index
from lakebed.rollups.late_samples import late_batches
from lakebed.rollups.model import Generation, MergedChunks, MergedSpans, RollupManifest, RollupState
from lakebed.store.model import read_record
from lakebed.store.protocol import Store

CACHE_BYTES_MAX = 32 * 1024 * 1024  # manifests and index chunks kept, by the size of their objects


class CoverageSnapshot:
    """What was covered at one instant. `ids` are the manifest ids that recent generations cover, `damaged` the
    generations whose manifests cannot be read."""

    def __init__(self, state: RollupState, ids: frozenset[str], damaged: tuple[Corrupt, ...] = ()) -> None:
        self.state, self.ids, self.damaged = state, ids, damaged

    def holds(self, manifest_id: str) -> bool | None:
        """Whether this batch is rolled up; None when only the index knows, because it was accepted long ago or a
        manifest is damaged."""
        if manifest_id in self.ids:
            return True
        return None if self.damaged or parse_by_time(manifest_id)[1] < self.state.settled_ns else False


class RollupCoverage:
    def __init__(self, store: Store, raw: RawBatches) -> None:
        self._store, self._raw = store, raw
        self._cache: ByteCache[Any] = ByteCache(CACHE_BYTES_MAX)

    async def merged_spans(self) -> dict[str, int]:
        """Days and months whose chunks are merged, as stored now, with the generation through which they are."""
        try:
            return read_record(await self._store.get(paths.ROLLER_MERGED), MergedSpans).usable
        except NotFound:
            return {}

    def usable(self, before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
        """The merged spans that may be read with a snapshot that was taken between these two looks.

        A span in both lacks nothing that was committed in the snapshot: it would have been taken out before. And it has
        nothing that was committed later: it was merged before the snapshot.
        """
        return {span: through for span, through in before.items() if after.get(span) == through}

    async def snapshot(self) -> CoverageSnapshot:
        """The state as it is now, with the batches of its recent generations. Raises Corrupt."""
        try:
            stored = await self._store.get(paths.ROLLER_STATE)
        except NotFound:
            return CoverageSnapshot(RollupState(), frozenset())
        return await self.covered(read_record(stored, RollupState))

    async def covered(self, state: RollupState) -> CoverageSnapshot:
        ids: set[str] = set()
        damaged = []
        for each in state.recent:
            try:
                ids.update((await self.manifest(each)).covers)
            except Corrupt as error:
                damaged.append(error)
        return CoverageSnapshot(state, frozenset(ids), tuple(damaged))

    async def manifest(self, of: Generation) -> RollupManifest:
        """The manifest of a committed generation. Raises Corrupt when it is missing or damaged: it never goes."""
        try:
            found: RollupManifest = await self._cached(
                of.manifest_key, lambda data: msgspec.json.decode(data, type=RollupManifest)
            )
            return found
        except (NotFound, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Corrupt(
                f"the manifest of rollup generation {of.id} cannot be read: {error}",
                hint="until it is restored from a version or a copy, its batches are looked up in the index",
                key=of.manifest_key,
            ) from error

    async def chunks(self, covered: CoverageSnapshot, folder: str) -> AsyncIterator[str]:
        """Keys of the chunks in a folder that count."""
        async for info in self._store.list(folder):
            try:
                sequence = paths.sequence_of_chunk(info.key)
            except Invalid:
                continue  # not ours
            if covered.state.counts(sequence):
                yield info.key

    async def merged_chunks(self, folder: str, through: int) -> list[str]:
        """Keys of the merged chunks of a metric's folder, by the list of their span: one that the store has lost is
        missed where it is read. Raises Corrupt when the list cannot be read."""
        span, _, metric = folder.rstrip("/").rpartition("/")
        key = paths.merged_list_key(f"{span}/", through)
        try:
            found: MergedChunks = await self._cached(key, lambda data: msgspec.json.decode(data, type=MergedChunks))
        except (NotFound, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Corrupt(f"the list of merged chunks {key!r} cannot be read: {error}", key=key) from error
        return found.keys(f"{span}/", through, metric)

    async def index_chunk(self, key: str) -> tuple[Any, Any]:
        """(batches, series) of an index chunk. Raises Invalid for a damaged one."""
        found: tuple[Any, Any] = await self._cached(key, decode_index)
        return found

    async def late(self, state: RollupState) -> tuple[list[str], int | None]:
        """Batches that came out of order, see `late_samples.late_batches`."""
        return await late_batches(self._store, state)

    async def waiting(self, covered: CoverageSnapshot, ids: Iterable[str], unsure: dict[str, Corrupt]) -> list[str]:
        """Of these batches, those that are in no generation yet. Those whose coverage is unknown go into `unsure`."""
        found = []
        for manifest_id in ids:
            try:
                known = covered.holds(manifest_id)
                if not (await self.indexed(covered, manifest_id) if known is None else known):
                    found.append(manifest_id)
            except Corrupt as error:
                unsure[manifest_id] = error
        return found

    async def indexed(self, covered: CoverageSnapshot, manifest_id: str) -> bool:
        """Whether an index chunk lists this batch, in the hour of its last sample: exact, for any age.

        Retention removes the chunks of that hour last: while it has not, samples of the batch may be in chunks. Raises
        Corrupt where that cannot be read: taking it as not covered would count the batch twice.
        """
        lost: list[Corrupt] = []
        entry = (await self._raw.find([manifest_id], lost)).get(manifest_id)
        if entry is None and lost:
            raise lost[0]
        if entry is None:
            return False
        folder = paths.index_folder(hour_of(entry.last_time_unix_ns))
        async for key in self.chunks(covered, folder):
            try:
                batches, _ = await self.index_chunk(key)
            except (Invalid, NotFound) as error:
                raise Corrupt(f"index chunk {key!r} cannot be read: {error.message}", key=key) from error
            if manifest_id in batches["manifest_id"].to_pylist():
                return True
        return False

    async def _cached(self, key: str, decode: Any) -> Any:
        """A stored object that never changes, decoded."""
        known = self._cache.get(key)
        if known is not None:
            return known
        data = (await self._store.get(key)).data
        value = decode(data)
        self._cache.put(key, len(data), value)
        return value
