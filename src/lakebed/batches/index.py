"""The index of accepted batches by time of acceptance: the one way to write it, and the one way to read it.

A collector writes a segment for all batches of a flush; earlier versions wrote one object for each batch under
accepted-by-time/v1/, which is read too. A batch may be in several segments, and in both layouts: it is returned once,
with the row that was stored last, or else with its single object. Everything here is derived: the reconciler writes
what is missing.
"""

from __future__ import annotations

import asyncio
import heapq
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

from lakebed.batches import paths
from lakebed.batches.codec.index import (
    ROWS_MAX,
    IndexSegment,
    OrphanRow,
    decode_segment,
    encode_segment,
    manifest_id_of,
)
from lakebed.batches.model import AcceptedByTime
from lakebed.core.cache import ByteCache
from lakebed.core.errors import AlreadyExists, Corrupt, Invalid, NotFound, Stale
from lakebed.core.feed import ahead
from lakebed.store.model import read_record
from lakebed.store.protocol import Store

READS_MAX = 16  # requests in progress at once for one reader
HOURS_UNASKED = 24  # for a longer span, the days that exist are listed first
GROUP = 5_000  # rows of an hour that are returned together
CACHE_BYTES_MAX = 32 * 1024 * 1024  # decoded segments, by their size before compression


class IndexedBatch(NamedTuple):
    """A batch of the index. `entry` is None for a single object, whose content is not read yet, and for a note."""

    manifest_id: str
    entry: AcceptedByTime | None = None

    @property
    def at_ns(self) -> int:
        return paths.parse_by_time(self.manifest_id)[1]


class SegmentInfo(NamedTuple):
    first_ns: int
    last_ns: int
    modified_ms: int
    key: str


async def write_rows(
    store: Store, rows: Sequence[AcceptedByTime], orphans: Sequence[OrphanRow] = (), *, writer: str
) -> None:
    """Stores the rows as segments of one hour each. Idempotent by content; raises what the store raises."""
    found: dict[str, tuple[list[AcceptedByTime], list[OrphanRow]]] = {}
    for row in rows:
        found.setdefault(paths.hour_of(row.accepted_at_unix_ns), ([], []))[0].append(row)
    for orphan in orphans:
        found.setdefault(paths.hour_of(orphan.at_unix_ns), ([], []))[1].append(orphan)
    for _, (some, lost) in sorted(found.items()):
        for at in range(0, max(len(some), 1), ROWS_MAX):
            await _store(store, *encode_segment(writer, some[at : at + ROWS_MAX], lost if at == 0 else ()))


async def _store(store: Store, key: str, data: bytes) -> None:
    try:
        await store.create(key, data)
    except AlreadyExists as error:  # the key is the hash of these bytes: what is there is damaged
        with suppress(Stale):  # another process has replaced it
            await store.replace(key, data, error.current.etag)


class AcceptedIndex:
    def __init__(self, store: Store, *, cache_bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._store = store
        self._cache: ByteCache[dict[str, AcceptedByTime]] = ByteCache(cache_bytes_max)
        self._gate = asyncio.Semaphore(READS_MAX)

    async def entries(
        self, from_ns: int, to_ns: int, damaged: list[Corrupt] | None = None, *, seen: dict[str, int] | None = None
    ) -> AsyncIterator[IndexedBatch]:
        """Batches with acceptance in [from_ns, to_ns], each once, in order of acceptance.

        Segments that cannot be read go into `damaged`: their batches are missing until the reconciler has found them.
        Segments in `seen` are passed over; those of which all rows were returned are put there, with their end.
        """
        for hour in await self._hours(from_ns, to_ns):
            async for found in self._of_hour(hour, from_ns, to_ns, damaged, seen):
                yield found

    async def find(
        self, ids: Iterable[str], *, singles: bool = True, damaged: list[Corrupt] | None = None
    ) -> dict[str, AcceptedByTime]:
        """The entries of these manifest ids; those that are missing or damaged are left out.

        What could not be read goes into `damaged`: an entry that was left out may be there. Without `singles`, those
        that only a single object has are left out too.
        """
        lost = [] if damaged is None else damaged
        wanted = sorted(set(ids))
        found: dict[str, AcceptedByTime] = {}
        for hour, some in groupby(wanted, lambda each: paths.hour_of(paths.parse_by_time(each)[1])):
            names = list(some)
            times = [paths.parse_by_time(name)[1] for name in names]
            segments = [
                each
                for each in sorted(await self._segments(hour, times[0]), key=lambda each: (each.modified_ms, each.key))
                if _between(times, each.first_ns, each.last_ns)
            ]
            async for rows in ahead(segments, lambda one: self._rows_or_none(one, lost)):
                found |= {name: rows[name] for name in names if name in rows}
        lacking = [name for name in wanted if name not in found] if singles else []
        for name, entry in zip(
            lacking, await asyncio.gather(*(self._single(name, lost) for name in lacking)), strict=True
        ):
            if entry is not None:
                found[name] = entry
        return found

    async def orphans(self, to_ns: int) -> AsyncIterator[OrphanRow]:
        """Blobs that collectors left without a decision, up to this time."""
        for shard in paths.INDEX_SHARDS:
            async for info in self._store.list(shard):
                try:
                    if paths.parse_segment(info.key)[0] > to_ns:
                        continue
                    segment = await self._segment(info.key)
                except (Invalid, Corrupt, NotFound):
                    continue
                for orphan in segment.orphans:
                    if orphan.at_unix_ns <= to_ns:
                        yield orphan

    async def hours_before(self, end_ns: int) -> list[str]:
        """The hours of the index that end up to then, oldest first. For retention."""
        found = []
        for day in sorted(await self._days()):
            for hour in sorted(await self._children(day)):
                try:
                    if paths.hour_ns(f"{day}/{hour}") + paths.HOUR_NS <= end_ns:
                        found.append(f"{day}/{hour}")
                except Invalid:
                    continue  # not ours; the audit reports it
        return found

    async def rows_of_hour(
        self, hour: str, seen: dict[str, int] | None = None
    ) -> AsyncIterator[Sequence[AcceptedByTime]]:
        """Everything that the index says of an hour, group by group; the segments of it are put into `seen`. For
        retention. Raises Corrupt when a part of it cannot be read."""
        begin_ns, damaged = paths.hour_ns(hour), list[Corrupt]()
        group: list[IndexedBatch] = []
        async for each in self._of_hour(hour, begin_ns, begin_ns + paths.HOUR_NS - 1, damaged, seen):
            group.append(each)
            if damaged:
                break
            if len(group) >= GROUP:
                yield await self._content(hour, group)
                group = []
        if damaged:
            raise damaged[0]
        if group:
            yield await self._content(hour, group)

    async def _content(self, hour: str, group: list[IndexedBatch]) -> Sequence[AcceptedByTime]:
        sought = await self.find(each.manifest_id for each in group if each.entry is None)
        rows = [each.entry or sought.get(each.manifest_id) for each in group]
        if None in rows:
            raise Corrupt(f"an entry of {hour} cannot be read", hint="lakebed batches reconcile --cold")
        return [row for row in rows if row is not None]

    async def singles_of_hour(self, hour: str) -> frozenset[str]:
        """Manifest ids of the hour's single objects."""
        return frozenset(await self._names(hour, 0, 2**62))

    async def damaged_segments(self) -> list[str]:
        """Keys of the segments that cannot be read; all are read. For the cold audit."""
        found = []
        for shard in paths.INDEX_SHARDS:
            async for info in self._store.list(shard):
                try:
                    await self._segment(info.key)
                except Corrupt:
                    found.append(info.key)
                except NotFound:
                    continue
        return found

    async def first_ns(self, now_ns: int) -> int:
        """The beginning of the first day in the index; `now_ns` when there is none."""
        days = []
        for day in await self._days():
            try:
                days.append(paths.day_ns(day))
            except Invalid:
                continue  # not ours; the audit reports it
        return min(days, default=now_ns)

    async def newest(self, limit: int, *, hours_max: int, now_ns: int) -> list[IndexedBatch]:
        """The last batches, the newest first. Only the newest hours are looked at, each from its end."""
        found: list[IndexedBatch] = []
        hours = [
            (day, hour)
            for day in sorted(await self._days(), reverse=True)[:hours_max]
            for hour in sorted(await self._children(day), reverse=True)
        ]
        for day, hour in hours[:hours_max]:
            try:
                begin_ns = paths.day_ns(day) + int(hour.removeprefix("hour=")) * paths.HOUR_NS
            except (Invalid, ValueError):
                continue
            end_ns = begin_ns + paths.HOUR_NS - 1
            some: list[IndexedBatch] = []
            for step_ns in (60 * 10**9, 600 * 10**9, paths.HOUR_NS):
                from_ns = max(begin_ns, min(now_ns, end_ns) - step_ns)
                some = [each async for each in self.entries(from_ns, end_ns)]
                if len(found) + len(some) >= limit:
                    break
            found += some[::-1]
            if len(found) >= limit:
                break
        return found[:limit]

    async def _of_hour(
        self,
        hour: str,
        from_ns: int,
        to_ns: int,
        damaged: list[Corrupt] | None,
        seen: dict[str, int] | None = None,
    ) -> AsyncIterator[IndexedBatch]:
        """Rows and single objects of an hour, merged: what is before the next segment's first row is complete."""
        listed, names = await asyncio.gather(self._segments(hour, from_ns), self._names(hour, from_ns, to_ns))
        segments = sorted(each for each in listed if each.first_ns <= to_ns and each.key not in (seen or ()))
        # A row of the segment that was stored last comes first, and a single object last.
        heap: list[tuple[str, int, int, AcceptedByTime | None]] = [(name, 1, 0, None) for name in names]
        heapq.heapify(heap)
        last, at = "", 0

        async def load(one: SegmentInfo) -> dict[str, AcceptedByTime] | Corrupt:
            try:
                return await self._rows(one.key)
            except Corrupt as error:
                return error
            except NotFound:
                return {}  # removed by retention since it was listed

        async for rows in ahead(segments, load):
            at += 1
            if isinstance(rows, Corrupt):
                if damaged is not None:
                    damaged.append(rows)
                rows = {}
            elif seen is not None and segments[at - 1].first_ns >= from_ns and segments[at - 1].last_ns <= to_ns:
                seen[segments[at - 1].key] = segments[at - 1].last_ns
            for name, entry in rows.items():
                if from_ns <= entry.accepted_at_unix_ns <= to_ns:
                    heapq.heappush(heap, (name, -segments[at - 1].modified_ms, at, entry))
            bound = f"{segments[at].first_ns:020d}" if at < len(segments) else ""
            while heap and (not bound or heap[0][0] < bound):
                name, _, _, found = heapq.heappop(heap)
                if name != last:
                    yield IndexedBatch(name, found)
                last = name
        while heap:
            name, _, _, found = heapq.heappop(heap)
            if name != last:
                yield IndexedBatch(name, found)
            last = name

    async def _segments(self, hour: str, from_ns: int) -> list[SegmentInfo]:
        """Segments of an hour that end at `from_ns` or later."""

        async def listed(shard: str) -> list[SegmentInfo]:
            folder, found = f"{shard}{hour}/", []
            async for info in self._store.list(folder, after=f"{folder}{max(0, from_ns):020d}"):
                try:
                    found.append(SegmentInfo(*paths.parse_segment(info.key)[:2], info.modified_ms, info.key))
                except Invalid:
                    continue  # not ours; the audit reports it
            return found

        return [each for some in await asyncio.gather(*map(listed, paths.INDEX_SHARDS)) for each in some]

    async def _names(self, hour: str, from_ns: int, to_ns: int) -> list[str]:
        """Manifest ids of the single objects of an hour."""
        folder, found = f"{paths.ACCEPTED_BY_TIME}{hour}/", []
        async for info in self._store.list(folder, after=f"{folder}{max(0, from_ns):020d}"):
            try:
                name, at_ns = paths.parse_by_time(info.key)
            except Invalid:
                continue  # not ours; the audit reports it
            if at_ns > to_ns:
                break
            found.append(name)
        return found

    async def _hours(self, from_ns: int, to_ns: int) -> list[str]:
        """The hours of the span; of a long one, those in which something was accepted."""
        if to_ns - from_ns < HOURS_UNASKED * paths.HOUR_NS:
            return paths.hours(from_ns, to_ns)
        found = []
        for day in sorted(await self._days()):
            try:
                begin_ns = paths.day_ns(day)
            except Invalid:
                continue  # not ours; the audit reports it
            if begin_ns > to_ns or begin_ns + 24 * paths.HOUR_NS <= from_ns:
                continue
            first, last = max(from_ns, begin_ns), min(to_ns, begin_ns + 24 * paths.HOUR_NS - 1)
            there = await self._children(day)
            found += [hour for hour in paths.hours(first, last) if hour.partition("/")[2] in there]
        return found

    async def _children(self, day: str) -> set[str]:
        folders = [f"{folder}{day}/" for folder in self._folders()]
        return {hour for some in await asyncio.gather(*map(self._store.children, folders)) for hour in some}

    async def _days(self) -> set[str]:
        return {day for some in await asyncio.gather(*map(self._store.children, self._folders())) for day in some}

    def _folders(self) -> tuple[str, ...]:
        return (paths.ACCEPTED_BY_TIME, *paths.INDEX_SHARDS)

    async def _rows_or_none(self, one: SegmentInfo, lost: list[Corrupt]) -> dict[str, AcceptedByTime]:
        try:
            return await self._rows(one.key)
        except Corrupt as error:
            lost.append(error)
        except NotFound:
            pass  # removed by retention since it was listed
        return {}

    async def _rows(self, key: str) -> dict[str, AcceptedByTime]:
        known = self._cache.get(key)
        if known is not None:
            return known
        segment = await self._segment(key)
        rows = {}
        for row in segment.rows:
            try:
                rows[manifest_id_of(row)] = row
            except Invalid as error:
                raise Corrupt(f"a row of segment {key!r} names no batch: {error.message}", key=key) from error
        self._cache.put(key, 500 * len(rows), rows)
        return rows

    async def _segment(self, key: str) -> IndexSegment:
        async with self._gate:
            stored = await self._store.get(key)
        return decode_segment(key, stored.data)

    async def _single(self, manifest_id: str, lost: list[Corrupt]) -> AcceptedByTime | None:
        try:
            async with self._gate:
                return read_record(await self._store.get(paths.by_time_of(manifest_id)), AcceptedByTime)
        except Corrupt as error:
            lost.append(error)
        except NotFound:
            pass
        return None


def _between(times: Sequence[int], first_ns: int, last_ns: int) -> bool:
    """Whether one of these sorted times is in the span."""
    at = bisect_left(times, first_ns)
    return at < len(times) and times[at] <= last_ns
