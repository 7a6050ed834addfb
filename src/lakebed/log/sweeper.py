"""The sweeper: deletes blobs that nothing refers to and that nothing can refer to later.

Four steps in this order make it safe beside writers and compactors, however slow they are:

1. candidates: objects that are older than the horizon (by twice its margin for clocks that differ), page by page;
2. `vacuum_before_ms` is set in every partition's control record: from then on no commit of an older blob succeeds, and
   no older compaction overwrites the index. The swap also returns what was pending at that instant;
3. then, and only then, references are collected: pending, compaction under way, index;
4. candidates without a reference are deleted.

A partition that is created meanwhile gets only blobs that are named after it: too young to be candidates.

A pass ends at the end of the bucket or after enough deletes. Where it stopped is a cursor in meta, and the next pass of
any process continues there: every object is reached, however many live ones are listed before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import NotFound
from lakebed.core.traces import traced
from lakebed.log import control, paths
from lakebed.log.model import (
    Compaction,
    Control,
    IndexSpan,
    ProducersSnapshot,
    TopicPartition,
    UnknownTopicPartition,
    VacuumCursor,
)
from lakebed.log.paths import Uris
from lakebed.log.records import Records, decoded
from lakebed.meta.model import MetaEntry, prefix_end
from lakebed.store.runtime import StoreRuntime

CANDIDATES_MAX = 100_000  # old objects held at once: live ones are most of them
ORPHANS_MAX = 100_000  # deleted by one pass, about; the next pass goes on
SNAPSHOTS_MAX = 100  # of the producers of one partition, looked at in one pass
LISTED_MAX = 1_000_000  # looked at by one pass, about: a thousand LIST requests


class LogSweepReport(msgspec.Struct, frozen=True):
    """The result of one pass. `orphans` are the deleted keys, or those that would be (dry run)."""

    partitions: int
    candidates: int
    orphans: list[str]
    orphan_bytes: int


class _CandidatePage(msgspec.Struct, frozen=True):
    """Old objects with their sizes, how many objects were listed for them, and where to go on; "" at the end."""

    found: dict[str, int]
    listed: int
    after: str


class LogSweeper:
    def __init__(
        self,
        runtime: StoreRuntime,
        records: Records,
        uris: Uris,
        *,
        horizon_s: float,
        candidates_max: int = CANDIDATES_MAX,
        orphans_max: int = ORPHANS_MAX,
        listed_max: int = LISTED_MAX,
    ) -> None:
        self._store, self._records, self._uris = runtime.store, records, uris
        self._horizon_ms, self._clock = round(horizon_s * 1000), runtime.clock
        self._candidates_max, self._orphans_max, self._listed_max = candidates_max, orphans_max, listed_max
        self._swept = runtime.metrics.counter("lakebed_log_swept_total").labels(reason="vacuumed")

    @traced("log vacuum")
    async def sweep_once(self, *, dry_run: bool = False) -> LogSweepReport:
        """One pass from the cursor on. A dry run looks at everything from the beginning, and changes nothing."""
        before_ms = now_ms(self._clock) - self._horizon_ms
        begin = "" if dry_run else await self._cursor()
        page = await self._candidates(before_ms, begin)
        if not page.found and not page.after and not begin:
            return LogSweepReport(0, 0, [], 0)
        tps = await self._partitions(dry_run)
        referred: set[int] = set()
        for tp in tps:
            now = await self._announce(tp, before_ms) if not dry_run else await self._look(tp)
            referred |= await self._references(tp, now, dry_run)
        looked, listed, orphans, size = 0, 0, list[str](), 0
        while True:
            # Later pages hold objects of the same age: no new reference to them is possible either, see step 2.
            of_page = sorted(key for key in page.found if hash(key) not in referred)
            looked, listed = looked + len(page.found), listed + page.listed
            orphans, size = orphans + of_page, size + sum(page.found[key] for key in of_page)
            if not dry_run:
                await self._delete(of_page)
                await self._stop_at(page.after)
            if not page.after or (not dry_run and (len(orphans) >= self._orphans_max or listed >= self._listed_max)):
                return LogSweepReport(len(tps), looked, orphans, size)
            page = await self._candidates(before_ms, page.after)

    async def _partitions(self, dry_run: bool) -> list[TopicPartition]:
        """By a full scan, because a reference that is missed is a blob that is lost. Registers what is not registered:
        a process of an older version may have created it."""
        found = [tp async for tp in self._records.scan()]
        registry = self._records.registry
        if registry.needed and not dry_run and await registry.complete():
            registered = {tp async for tp in registry.partitions("")}
            for tp in found:
                if tp not in registered:
                    await registry.add(tp)
        return found

    async def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            await self._store.delete(key)
            self._swept.inc()

    async def _candidates(self, before_ms: int, after: str) -> _CandidatePage:
        """Old objects behind `after`, at most `candidates_max` of them."""
        found: dict[str, int] = {}
        listed = 0
        async for info in self._store.list(paths.ROOT, after=after):
            listed += 1
            if info.modified_ms < before_ms - self._horizon_ms // 2:  # a writer's clock may be ahead of the store's
                found[info.key] = info.size
            if len(found) >= self._candidates_max or listed >= self._listed_max:
                return _CandidatePage(found, listed, info.key)
        return _CandidatePage(found, listed, "")

    async def _cursor(self) -> str:
        try:
            return decoded(await self._records.meta.get(paths.VACUUM_CURSOR), VacuumCursor).value.after
        except NotFound:
            return ""

    async def _stop_at(self, after: str) -> None:
        """A pass that reached the end leaves no cursor: the next one begins at the beginning."""
        if after:
            await self._records.meta.put(paths.VACUUM_CURSOR, msgspec.json.encode(VacuumCursor(after)))
        else:
            await self._records.meta.delete(paths.VACUUM_CURSOR)

    async def _sweep_snapshots(self, tp: TopicPartition, now: Control) -> None:
        """Snapshots of producers whose commit failed. `now` is the control record as it was announced to."""
        folder = paths.producers_folder(tp)
        for entry in await self._records.meta.range(
            folder, prefix_end(folder), limit=SNAPSHOTS_MAX, partition_key=tp.partition_key
        ):
            if _old_snapshot(entry, now):
                await self._records.meta.delete(entry.key, partition_key=tp.partition_key)

    async def _announce(self, tp: TopicPartition, before_ms: int) -> Control | None:
        try:
            return (await self._records.change(tp, lambda now: control.sweep_announced(now, before_ms))).value
        except UnknownTopicPartition:
            return None  # left over of a deleted topic: retention frees it

    async def _look(self, tp: TopicPartition) -> Control | None:
        found = await self._records.find(tp, paths.control(tp), Control)
        return found.value if found is not None else None

    async def _references(self, tp: TopicPartition, now: Control | None, dry_run: bool) -> set[int]:
        """The control first, then the compaction, then the index: a reference only moves to what is read later.

        By their hashes, which take a third of the memory: two keys of one hash at worst keep an orphan.
        """
        found: set[str] = set()
        if now is not None and not dry_run:
            await self._sweep_snapshots(tp, now)
        if now is not None and now.pending is not None:
            found.add(now.pending.data_key)
        under_way = await self._records.find(tp, paths.compaction(tp), Compaction)
        if under_way is not None:
            found.add(under_way.value.data_key)
        spans = [span async for span in self._records.all_spans(tp)]
        shadowed = [] if dry_run else shadows(spans)
        for span in shadowed:
            await self._records.meta.delete(paths.index(tp, span.end_offset), partition_key=tp.partition_key)
        gone = {span.end_offset for span in shadowed}
        found |= {span.entry.data_key for span in spans if span.end_offset not in gone}
        return {hash(self._uris.key(uri)) for uri in found}


def _old_snapshot(entry: MetaEntry, now: Control) -> bool:
    """Whether nothing names this snapshot of producers, and nothing can: its append would be refused as too old."""
    snapshot = decoded(entry, ProducersSnapshot).value
    return not entry.key.endswith(f"/{now.producers_key}") and snapshot.created_at_ms <= now.vacuum_before_ms


def shadows(spans: Sequence[IndexSpan]) -> list[IndexSpan]:
    """WAL entries inside a compacted range: put there too late by a slow writer, or not deleted yet."""
    found: list[IndexSpan] = []
    start, end = 0, 0
    for span in reversed(spans):
        if span.entry.type == "COMPACTED":
            start, end = span.start_offset, span.end_offset
        elif start <= span.start_offset and span.end_offset < end:
            found.append(span)
    return found
