"""Exceptions waiting for their due instant: a log of small segments with tombstones, folded in memory.

Only late changes of predicates come here, so it is small; when it is not, the action is demoted to scans instead of
growing. Segments are created, never changed; compaction writes one that carries everything and then removes the rest.
"""

from __future__ import annotations

from collections.abc import Iterable

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

    async def load(self, ref: ActionRef) -> PendingLog:
        log = PendingLog()
        async for info in self._store.list(pending_folder(ref)):
            number = int(info.key.rsplit("/", 1)[1][:12])
            log = log.after(_decoded(info.key, (await self._store.get(info.key)).data), number)
        return log

    async def upsert(self, ref: ActionRef, items: Iterable[PendingItem]) -> None:
        """Adds or renews. Raises PendingFull before anything is written when it would pass the cap."""
        wanted = {item.id: item for item in items}
        log = await self.load(ref)
        if all(log.items.get(ident) == item for ident, item in wanted.items()):
            return
        if len(log.items | wanted) > self._items_max:
            raise PendingFull(f"{ref} has {len(log.items)} exceptions waiting, the most allowed is {self._items_max}")
        await self._append(ref, log, PendingSegment(upserts=tuple(wanted.values())))

    async def remove(self, ref: ActionRef, idents: Iterable[str]) -> None:
        """Tombstones these; compacts when most of the log is tombstones."""
        log = await self.load(ref)
        gone = tuple(ident for ident in idents if ident in log.items)
        if gone:
            log = await self._append(ref, log, PendingSegment(tombstones=gone))
        if log.wants_compaction:
            await self._compact(ref, log)

    async def _append(self, ref: ActionRef, log: PendingLog, segment: PendingSegment) -> PendingLog:
        number = log.last + 1
        await self._store.create(pending_segment(ref, number, self._ids.token()), msgspec.json.encode(segment))
        return log.after(segment, number)

    async def _compact(self, ref: ActionRef, log: PendingLog) -> None:
        """Folds what was read into one segment. Segments of other writers that came meanwhile are kept."""
        old = [info.key async for info in self._store.list(pending_folder(ref))]
        fresh = PendingLog()
        for key in old:
            fresh = fresh.after(_decoded(key, (await self._store.get(key)).data), int(key.rsplit("/", 1)[1][:12]))
        if fresh.items:
            whole = PendingSegment(upserts=tuple(fresh.items.values()))
            await self._store.create(pending_segment(ref, fresh.last, self._ids.token()), msgspec.json.encode(whole))
        for key in old:
            await self._store.delete(key)


def _decoded(key: str, data: bytes) -> PendingSegment:
    try:
        return _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise Corrupt(
            f"{key!r} does not decode: {error}", hint="move the object away; the next scan finds what it held"
        ) from error
