"""Retention: deletes records older or larger than their limits, and frees what was trimmed or deleted.

The control record's `log_start_offset` decides; everything here is derived from it and is idempotent. Index entries are
deleted first, then the blobs that only they named, so that a crash leaves blobs for the sweeper, never an entry without
a blob. Shared blobs are always left to the sweeper: other partitions may need them.
"""

from __future__ import annotations

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import AlreadyExists, NotFound, Stale
from lakebed.log import control, paths
from lakebed.log.groups import Groups
from lakebed.log.model import Control, IndexSpan, TopicConfig, TopicPartition
from lakebed.log.paths import Uris
from lakebed.log.reader import LogReader
from lakebed.log.records import PAGE, Records, Versioned, decoded
from lakebed.log.settings import LogSettings
from lakebed.meta.model import prefix_end
from lakebed.store.runtime import StoreRuntime


class Retention:
    def __init__(
        self,
        runtime: StoreRuntime,
        records: Records,
        reader: LogReader,
        uris: Uris,
        groups: Groups,
        settings: LogSettings,
    ) -> None:
        self._store, self._records, self._reader, self._uris = runtime.store, records, reader, uris
        self._groups, self._settings, self._clock = groups, settings, runtime.clock
        self._swept = runtime.metrics.counter("lakebed_log_swept_total").labels(reason="trimmed")

    async def apply_once(self, tp: TopicPartition) -> int:
        """One pass over one partition, under the compactor's claim. Returns the number of deleted objects."""
        found = await self._records.find(tp, paths.control(tp), Control)
        if found is None:
            return await self._free_nothing(tp)
        if found.value.log_state == "DELETED":
            return await self._free_deleted(tp, found)
        before = await self._retained_from(tp, found.value)
        if before > found.value.log_start_offset:
            found = await self._records.change(tp, lambda now: control.trimmed(now, tp, min(before, now.next_offset)))
        return await self._sweep(tp, found.value.log_start_offset, keep_highest=True)

    async def _retained_from(self, tp: TopicPartition, now: Control) -> int:
        """The first offset that the topic's retention keeps."""
        config = await self._config(tp.topic)
        if not config.retention_s and not config.retention_bytes:
            return 0
        spans = [span async for span in self._records.all_spans(tp, now.log_start_offset)]
        before = 0
        if config.retention_s:
            oldest_ms = now_ms(self._clock) - round(config.retention_s * 1000)
            for span in spans:
                if span.entry.appended_at_ms >= oldest_ms:
                    break
                before = span.end_offset + 1
        if config.retention_bytes:
            kept = 0
            for span in reversed(spans):
                kept += await self._reader.size(span)
                if kept > config.retention_bytes:
                    before = max(before, span.end_offset + 1)
                    break
        return before

    async def _config(self, topic: str) -> TopicConfig:
        try:
            entry = await self._records.meta.get(paths.config(topic), partition_key=topic)
        except NotFound:
            return TopicConfig(self._settings.retention_s, self._settings.retention_bytes)
        return decoded(entry, TopicConfig).value

    async def _sweep(self, tp: TopicPartition, before_offset: int, *, keep_highest: bool) -> int:
        """Removes index entries that end below `before_offset`, then the compacted blobs they named."""
        gone: list[IndexSpan] = []
        highest: IndexSpan | None = None
        async for span in self._records.all_spans(tp):
            highest = span
            if span.end_offset < before_offset:
                gone.append(span)
            elif gone or not keep_highest:
                break
            else:
                return 0
        if keep_highest and gone and highest is not None and highest.end_offset == gone[-1].end_offset:
            gone.pop()  # the highest index key of a partition is never deleted
        if not gone:
            return 0
        await self._records.meta.delete_range(
            paths.index(tp, 0), paths.index(tp, gone[-1].end_offset + 1), partition_key=tp.partition_key
        )
        return await self._delete_own(tp, [span for span in gone if span.entry.type == "COMPACTED"])

    async def _delete_own(self, tp: TopicPartition, spans: list[IndexSpan]) -> int:
        """The blobs of this partition alone: other partitions may need those that it shares."""
        keys = [self._uris.key(span.entry.data_key) for span in spans]
        own = [key for key in keys if key.startswith(paths.data_folder(tp))]
        for key in own:
            await self._store.delete(key)
            self._swept.inc()
        return len(own)

    async def _free_deleted(self, tp: TopicPartition, tombstone: Versioned[Control]) -> int:
        """Frees a deleted partition; deletes the tombstone itself when no slow writer can be left."""
        swept = await self._sweep(tp, tombstone.value.log_start_offset, keep_highest=False)
        folder = f"{paths.folder(tp)}meta/"
        age_ms = now_ms(self._clock) - tombstone.value.changed_at_ms
        if age_ms < self._settings.vacuum_horizon_s * 1000:
            return swept
        registered = await self._records.registry.version(tp)  # before the control record goes
        snapshots = await self._snapshots(tp)  # before the look: one of a log that was opened again is not among them
        offsets = await self._groups.of_partition(tp)  # of commits that had seen the log before it was deleted
        now = await self._records.find(tp, paths.control(tp), Control)
        if now is None or now.version != tombstone.version:
            return swept  # it was opened again
        for key in snapshots:
            await self._records.meta.delete(key, partition_key=tp.partition_key)
        for each in offsets:
            await self._groups.delete(each)
        await self._records.meta.delete_range(
            f"{folder}compaction", f"{folder}compactor-claim", partition_key=tp.partition_key
        )
        try:
            await self._records.meta.delete(
                paths.control(tp), expected=tombstone.version, partition_key=tp.partition_key
            )
        except Stale:
            return swept  # it was opened again
        await self._records.registry.remove(tp, registered)
        return swept

    async def _snapshots(self, tp: TopicPartition) -> list[str]:
        """The keys of all snapshots of its producers."""
        start, end = paths.producers_folder(tp), prefix_end(paths.producers_folder(tp))
        found: list[str] = []
        while True:
            page = await self._records.meta.range(start, end, limit=PAGE, partition_key=tp.partition_key)
            found += [entry.key for entry in page]
            if len(page) < PAGE:
                return found
            start = page[-1].key + "\0"

    async def _free_nothing(self, tp: TopicPartition) -> int:
        """A partition without a control record: its entry in the registry was left by a crash, or it has index entries
        of a slow writer."""
        registered = await self._records.registry.version(tp)
        if await self._records.find(tp, paths.control(tp), Control) is None:
            await self._records.registry.remove(tp, registered)
        return await self._add_tombstone(tp)

    async def _add_tombstone(self, tp: TopicPartition) -> int:
        """Index entries without a control record, written by a slow writer after its topic was deleted: gives them a
        tombstone."""
        folder = paths.index_folder(tp)
        left = await self._records.meta.range(folder, prefix_end(folder), limit=1, partition_key=tp.partition_key)
        if not left:
            return 0
        highest = 0
        async for span in self._records.all_spans(tp):
            highest = max(highest, span.end_offset)
        horizon_ms = round(self._settings.vacuum_horizon_s * 1000)
        tombstone = msgspec.structs.replace(
            control.opened(now_ms(self._clock), horizon_ms=horizon_ms),
            sequence_counter=highest,
            log_start_offset=highest + 1,
        )
        tombstone = msgspec.structs.replace(tombstone, log_state="DELETED", reason="left over")
        await self._records.registry.register(tp)
        try:
            await self._records.create(tp, paths.control(tp), tombstone)
        except AlreadyExists:
            return 0
        return 0
