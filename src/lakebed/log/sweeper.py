"""The sweeper: deletes blobs that nothing refers to and that nothing can refer to later.

Four steps in this order make it safe beside writers and compactors, however slow they are:

1. candidates: objects that are older than the horizon (by twice its margin for clocks that differ), page by page;
2. `vacuum_before_ms` is set in every partition's control record: from then on no commit of an older blob succeeds, and
   no older compaction overwrites the index. The swap also returns what was pending at that instant;
3. then, and only then, references are collected: pending, compaction under way, index;
4. candidates without a reference are deleted.

A partition that is created meanwhile gets only blobs that are named after it: too young to be candidates.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.traces import traced
from lakebed.log import control, paths
from lakebed.log.model import Compaction, Control, IndexSpan, TopicPartition, UnknownTopicPartition
from lakebed.log.paths import Uris
from lakebed.log.records import Records
from lakebed.store.runtime import StoreRuntime

CANDIDATES_MAX = 100_000  # old objects held at once: live ones are most of them
ORPHANS_MAX = 100_000  # deleted by one pass, about; the next pass goes on


class LogSweepReport(msgspec.Struct, frozen=True):
    """The result of one pass. `orphans` are the deleted keys, or those that would be (dry run)."""

    partitions: int
    candidates: int
    orphans: list[str]
    orphan_bytes: int


class LogSweeper:
    def __init__(self, runtime: StoreRuntime, records: Records, uris: Uris, *, horizon_s: float) -> None:
        self._store, self._records, self._uris = runtime.store, records, uris
        self._horizon_ms, self._clock = round(horizon_s * 1000), runtime.clock
        self._swept = runtime.metrics.counter("lakebed_log_swept_total").labels(reason="vacuumed")

    @traced("log vacuum")
    async def sweep_once(self, *, dry_run: bool = False) -> LogSweepReport:
        before_ms = now_ms(self._clock) - self._horizon_ms
        found, after = await self._candidates(before_ms, "")
        if not found:
            return LogSweepReport(0, 0, [], 0)
        tps = [tp async for tp in self._records.partitions()]
        referred: set[str] = set()
        for tp in tps:
            now = await self._announce(tp, before_ms) if not dry_run else await self._look(tp)
            referred |= await self._references(tp, now, dry_run)
        looked, orphans, size = 0, list[str](), 0
        while found and len(orphans) < ORPHANS_MAX:
            # Later pages hold objects of the same age: no new reference to them is possible either, see step 2.
            of_page = sorted(found.keys() - referred)
            looked, size = looked + len(found), size + sum(found[key] for key in of_page)
            orphans += of_page
            for key in of_page if not dry_run else ():
                await self._store.delete(key)
                self._swept.inc()
            found, after = await self._candidates(before_ms, after) if after else ({}, "")
        return LogSweepReport(len(tps), looked, orphans, size)

    async def _candidates(self, before_ms: int, after: str) -> tuple[dict[str, int], str]:
        """Old objects behind `after` with their sizes, at most CANDIDATES_MAX, and where to go on; "" at the end."""
        found: dict[str, int] = {}
        async for info in self._store.list(paths.ROOT, after=after):
            if info.modified_ms < before_ms - self._horizon_ms // 2:  # a writer's clock may be ahead of the store's
                found[info.key] = info.size
                if len(found) >= CANDIDATES_MAX:
                    return found, info.key
        return found, ""

    async def _announce(self, tp: TopicPartition, before_ms: int) -> Control | None:
        try:
            return (await self._records.change(tp, lambda now: control.sweep_announced(now, before_ms))).value
        except UnknownTopicPartition:
            return None  # left over of a deleted topic: retention frees it

    async def _look(self, tp: TopicPartition) -> Control | None:
        found = await self._records.find(tp, paths.control(tp), Control)
        return found.value if found is not None else None

    async def _references(self, tp: TopicPartition, now: Control | None, dry_run: bool) -> set[str]:
        """The control first, then the compaction, then the index: a reference only moves to what is read later."""
        found: set[str] = set()
        if now is not None and now.pending is not None:
            found.add(self._uris.key(now.pending.data_key))
        under_way = await self._records.find(tp, paths.compaction(tp), Compaction)
        if under_way is not None:
            found.add(self._uris.key(under_way.value.data_key))
        spans = [span async for span in self._records.all_spans(tp)]
        shadowed = [] if dry_run else shadows(spans)
        for span in shadowed:
            await self._records.meta.delete(paths.index(tp, span.end_offset), partition_key=tp.partition_key)
        return found | {self._uris.key(span.entry.data_key) for span in spans if span not in shadowed}


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
