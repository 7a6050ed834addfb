"""Exceptions waiting for their due instant: a log of small segments with tombstones, folded in memory.

Only what no event will bring comes here, so it is small; when it is not, the action is demoted to scans instead of
growing. Segments are created, never changed, so each is read once by a process; compaction writes one that carries
everything and then removes the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from lakebed.core.errors import Conflict, Corrupt
from lakebed.lifecycle.engine import ActionRef
from lakebed.lifecycle.paths import pending_folder, pending_segment
from lakebed.lifecycle.state import PendingItem
from lakebed.store.runtime import StoreRuntime

ITEMS_MAX = 50_000  # per action
TOMBSTONE_RATIO = 0.5
SEGMENTS_MAX = 200  # before they are compacted whatever they hold


class PendingFull(Conflict):
    """The cap on exceptions of one action is reached: demote it to scans."""

    code = "pending_full"


class PendingSegment(msgspec.Struct, frozen=True):
    """Removals first, then additions."""

    version: int = 1
    upserts: tuple[PendingItem, ...] = ()
    tombstones: tuple[str, ...] = ()


_DECODER = msgspec.json.Decoder(PendingSegment)


class PendingLog(msgspec.Struct, frozen=True):
    """The folded state of one action's log."""

    items: dict[str, PendingItem] = {}
    tombstones: int = 0
    segments: int = 0
    last: int = 0

    def after(self, segment: PendingSegment, number: int) -> PendingLog:
        items = dict(self.items)
        for ident in segment.tombstones:
            items.pop(ident, None)
        items |= {item.id: item for item in segment.upserts}
        return PendingLog(items, self.tombstones + len(segment.tombstones), self.segments + 1, max(self.last, number))

    @property
    def wants_compaction(self) -> bool:
        total = len(self.items) + self.tombstones
        return self.segments > SEGMENTS_MAX or (self.segments > 1 and self.tombstones > total * TOMBSTONE_RATIO)

    def due(self, now_ns: int) -> list[PendingItem]:
        found = [item for item in self.items.values() if item.due_at_ns <= now_ns]
        return sorted(found, key=lambda item: (item.due_at_ns, item.id))

    @property
    def next_due_ns(self) -> int | None:
        return min((item.due_at_ns for item in self.items.values()), default=None)


class PendingStore:
    """All actions' exceptions. Several writers may add at once: every segment has its own name."""

    def __init__(self, runtime: StoreRuntime, *, items_max: int = ITEMS_MAX) -> None:
        self._store, self._ids, self._items_max = runtime.store, runtime.ids, items_max
        self._segments: dict[ActionRef, dict[str, PendingSegment]] = {}  # decoded, by key

    async def load(self, ref: ActionRef) -> PendingLog:
        """What waits now: one listing, and one read of each segment that this process has not seen yet."""
        known, found = self._segments.get(ref, {}), dict[str, PendingSegment]()
        async for info in self._store.list(pending_folder(ref)):
            segment = known.get(info.key)
            if segment is None:
                segment = _decoded(info.key, (await self._store.get(info.key)).data)
            found[info.key] = segment
        if found:
            self._segments[ref] = found
        else:
            self._segments.pop(ref, None)
        return _folded(found)

    async def upsert(self, ref: ActionRef, items: Iterable[PendingItem]) -> None:
        """Adds or renews. Raises PendingFull before anything is written when it would pass the cap."""
        wanted = {item.id: item for item in items}
        log = await self.load(ref)
        if all(log.items.get(ident) == item for ident, item in wanted.items()):
            return
        if len(log.items | wanted) > self._items_max:
            raise PendingFull(f"{ref} has {len(log.items)} exceptions waiting, the most allowed is {self._items_max}")
        log = await self._append(ref, log, PendingSegment(upserts=tuple(wanted.values())))
        if log.wants_compaction:
            await self._compact(ref)

    async def remove(self, ref: ActionRef, idents: Iterable[str]) -> None:
        """Tombstones these; compacts when most of the log is tombstones."""
        log = await self.load(ref)
        gone = tuple(ident for ident in idents if ident in log.items)
        if gone:
            log = await self._append(ref, log, PendingSegment(tombstones=gone))
        if log.wants_compaction:
            await self._compact(ref)

    async def clear(self, ref: ActionRef) -> None:
        """Removes all that an action had: it left its policy for good."""
        async for info in self._store.list(pending_folder(ref)):
            await self._store.delete(info.key)
        self._segments.pop(ref, None)

    async def _append(self, ref: ActionRef, log: PendingLog, segment: PendingSegment) -> PendingLog:
        number = log.last + 1
        key = pending_segment(ref, number, self._ids.token())
        await self._store.create(key, msgspec.json.encode(segment))
        self._segments.setdefault(ref, {})[key] = segment
        return log.after(segment, number)

    async def _compact(self, ref: ActionRef) -> None:
        """Folds what is there into one segment. Segments of other writers that came meanwhile are kept."""
        fresh = await self.load(ref)
        old = list(self._segments.get(ref, {}))
        if fresh.items:
            whole = PendingSegment(upserts=tuple(fresh.items.values()))
            await self._store.create(pending_segment(ref, fresh.last, self._ids.token()), msgspec.json.encode(whole))
        for key in old:
            await self._store.delete(key)


def _folded(segments: Mapping[str, PendingSegment]) -> PendingLog:
    """In the order of names: the number comes first in each."""
    items: dict[str, PendingItem] = {}
    tombstones = last = 0
    for key in sorted(segments):
        for ident in segments[key].tombstones:
            items.pop(ident, None)
        items |= {item.id: item for item in segments[key].upserts}
        tombstones, last = tombstones + len(segments[key].tombstones), max(last, int(key.rsplit("/", 1)[1][:12]))
    return PendingLog(items, tombstones, len(segments), last)


def _decoded(key: str, data: bytes) -> PendingSegment:
    try:
        return _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise Corrupt(
            f"{key!r} does not decode: {error}", hint="move the object away; the next scan finds what it held"
        ) from error
