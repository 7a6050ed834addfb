"""Segments: the batches of a long queue, in objects that never change.

Sequences are cut into blocks of one size, which the manifest records. The segment of a block lists the batches whose
sequences are in it. It is created before the producer manifest gives them up (`appending.seal`), so a batch is always
in one of the two. Its key follows from the block, so the manifest needs no list of segments, and its size does not
depend on the backlog.

Idempotency keys have segments of their own, numbered from 0, because keys are kept after their batches are removed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from lakebed.core.errors import AlreadyExists, Corrupt
from lakebed.queue import paths
from lakebed.queue.model import VERSION, EnqueuedKey, PendingBatch, ProducerManifest
from lakebed.store.protocol import Store

KEYS_BLOCK = 256  # idempotency keys of one key segment
CACHED_MAX = 64  # segments kept in memory

S = TypeVar("S", "Segment", "KeySegment")


class Segment(msgspec.Struct, frozen=True):
    """The batches of one block that were not removed when it was sealed: location → its entry, in order."""

    block: int
    entries: dict[str, PendingBatch]
    version: int = VERSION

    def __post_init__(self) -> None:
        _check(self.version)


class KeySegment(msgspec.Struct, frozen=True):
    keys: tuple[EnqueuedKey, ...]
    version: int = VERSION

    def __post_init__(self) -> None:
        _check(self.version)


def _check(version: int) -> None:
    if version != VERSION:
        raise ValueError(f"segment version {version} is unknown; this Lakebed reads {VERSION}")


_SEGMENT = msgspec.json.Decoder(Segment)
_KEYS = msgspec.json.Decoder(KeySegment)


def due(manifest: ProducerManifest, block: int) -> bool:
    """Whether the manifest lists a whole block, so that a segment should hold it."""
    return len(manifest.pending) >= block and end(manifest, block) > manifest.sealed


def end(manifest: ProducerManifest, block: int) -> int:
    """Every block below this sequence is complete: no batch is ever appended to it."""
    return manifest.next_sequence // block * block


class Segments:
    """The segments of one manifest."""

    def __init__(self, store: Store, manifest_path: str) -> None:
        self._store, self._manifest_path = store, manifest_path
        self._cached: OrderedDict[str, Segment] = OrderedDict()

    async def read(self, folder: str, block: int) -> Segment:
        """Raises NotFound when it was swept: read the manifest again."""
        key = paths.segment(self._manifest_path, folder, block)
        if key not in self._cached:
            stored = await self._store.get(key)
            self._cached[key] = _decoded(_SEGMENT, stored.data, key)
            while len(self._cached) > CACHED_MAX:
                self._cached.popitem(last=False)
        self._cached.move_to_end(key)
        return self._cached[key]

    async def seal(self, folder: str, block: int, manifest: ProducerManifest) -> frozenset[str]:
        """Creates the segments of all complete blocks of the manifest; returns the locations that they hold."""
        until = end(manifest, block)
        blocks: dict[int, dict[str, PendingBatch]] = {}
        for location in manifest.pending:
            entry = manifest.entries[location]
            if entry.sequence < until:
                blocks.setdefault(entry.sequence // block, {})[location] = entry
        held: set[str] = set()
        for number, entries in blocks.items():
            held.update(await self._create(folder, number, entries))
        return frozenset(held)

    async def _create(self, folder: str, block: int, entries: Mapping[str, PendingBatch]) -> frozenset[str]:
        key = paths.segment(self._manifest_path, folder, block)
        made = Segment(block, dict(entries))
        try:
            await self._store.create(key, msgspec.json.encode(made))
        except AlreadyExists as error:  # of another process, when more or fewer batches were removed
            made = _decoded(_SEGMENT, error.current.data, key)
        return frozenset(place for place, entry in made.entries.items() if entries.get(place) == entry)

    async def read_keys(self, folder: str, number: int) -> Sequence[EnqueuedKey]:
        key = paths.key_segment(self._manifest_path, folder, number)
        return _decoded(_KEYS, (await self._store.get(key)).data, key).keys

    async def seal_keys(self, folder: str, number: int, keys: Sequence[EnqueuedKey]) -> Sequence[EnqueuedKey]:
        """Creates a key segment; returns the keys that it holds: another process may have created it."""
        key = paths.key_segment(self._manifest_path, folder, number)
        try:
            await self._store.create(key, msgspec.json.encode(KeySegment(tuple(keys))))
        except AlreadyExists as error:
            return _decoded(_KEYS, error.current.data, key).keys
        return keys


def _decoded(decoder: msgspec.json.Decoder[S], data: bytes, key: str) -> S:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise Corrupt(f"{key!r} does not decode: {error}", hint="nothing was changed; inspect it", key=key) from error
