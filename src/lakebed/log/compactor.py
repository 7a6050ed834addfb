"""The compactor: many small WAL entries of a partition become one compacted blob. A reader never sees a difference.

`meta/compaction` records the compaction in progress, and every step is idempotent: any compactor that finds the record,
after a crash or beside a slow compactor, finishes it. The one conditional write is the swap of the end key's index
entry; the highest index key of a partition is never deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import AlreadyExists, NotFound, Stale
from lakebed.log import codec, control, paths
from lakebed.log.model import (
    ENCODING,
    FIRST_OFFSET,
    Compaction,
    Control,
    Cursor,
    IndexEntry,
    IndexSpan,
    TopicPartition,
)
from lakebed.log.paths import Uris
from lakebed.log.reader import BlobGone, LogReader
from lakebed.log.records import Records, Versioned
from lakebed.log.settings import LogSettings
from lakebed.store.runtime import StoreRuntime

CompactionOutcome = Literal["compacted", "recovered", "abandoned", "idle"]


class Compactor:
    def __init__(
        self, runtime: StoreRuntime, records: Records, reader: LogReader, uris: Uris, settings: LogSettings
    ) -> None:
        self._store, self._records, self._reader, self._uris = runtime.store, records, reader, uris
        self._settings, self._clock, self._ids = settings, runtime.clock, runtime.ids
        metrics = runtime.metrics
        self._outcomes = metrics.counter("lakebed_log_compactions_total")
        self._bytes = metrics.counter("lakebed_log_compacted_bytes_total")
        self._seconds = metrics.histogram("lakebed_log_compaction_seconds")

    async def compact_once(self, tp: TopicPartition) -> CompactionOutcome:
        """Recovers what a crash left, or else compacts one range. Safe beside writers, readers and other compactors."""
        done = await self._compact_once(tp)
        self._outcomes.labels(outcome=done).inc()
        return done

    async def lag(self, tp: TopicPartition) -> int:
        """Records that are not compacted yet."""
        now = (await self._records.control(tp)).value
        cursor = await self._records.find(tp, paths.cursor(tp), Cursor)
        at = max(cursor.value.offset if cursor else FIRST_OFFSET, now.log_start_offset)
        return max(0, now.next_offset - at)

    async def _compact_once(self, tp: TopicPartition) -> CompactionOutcome:
        now = await self._recover_pending(tp)
        if now.log_state == "DELETED":
            return "idle"
        under_way = await self._records.find(tp, paths.compaction(tp), Compaction)
        if under_way is not None:
            return "recovered" if await self._finish(tp, under_way) else "abandoned"
        chosen = await self._select(tp, now)
        if not chosen:
            return "idle"
        record = await self._rewrite(tp, chosen)
        if record is None:
            return "abandoned"
        try:
            created = await self._records.create(tp, paths.compaction(tp), record)
        except AlreadyExists:
            return "abandoned"  # another compactor was faster; a sweep deletes our blob
        return "compacted" if await self._finish(tp, created) else "abandoned"

    async def _recover_pending(self, tp: TopicPartition) -> Control:
        found = await self._records.control(tp)
        if found.value.pending is None:
            return found.value
        await self._records.materialise(tp, found.value)
        try:
            cleared = control.cleared(found.value)
            return (await self._records.swap(tp, paths.control(tp), cleared, found.version)).value
        except Stale:
            return (await self._records.control(tp)).value  # a writer has appended meanwhile

    async def _select(self, tp: TopicPartition, now: Control) -> list[IndexSpan]:
        cursor = await self._records.find(tp, paths.cursor(tp), Cursor)
        at = cursor.value.offset if cursor is not None else FIRST_OFFSET
        spans = await self._records.spans(tp, at, limit=self._settings.compact_max_entries + 1)
        begin = aligned(at, now.log_start_offset, spans)
        if begin > at:
            await self._advance(tp, begin)
        return select(
            begin,
            spans,
            entries_min=self._settings.compact_min_entries,
            entries_max=self._settings.compact_max_entries,
            bytes_max=self._settings.compact_max_bytes,
        )

    async def _rewrite(self, tp: TopicPartition, chosen: list[IndexSpan]) -> Compaction | None:
        """Writes the compacted blob. None when a source vanished: another process has compacted or trimmed it."""
        with self._seconds.labels(stage="rewrite").time():
            try:
                batches = [await self._reader.batch(span) for span in chosen]
            except BlobGone:
                return None
            segments = [segment for batch in batches for segment in batch.segments]
            body = b"".join(codec.encode([batch.records for batch in batches], segments))
            made_at_ms = now_ms(self._clock)
            key = paths.compacted_blob(tp, self._ids.uuid())
            await self._store.create(key, body)
        self._bytes.inc(len(body))
        return Compaction(
            compaction_id=self._ids.uuid(),
            state="WRITING_COMPACTED_INDEX",
            start_offset=chosen[0].start_offset,
            end_offset=chosen[-1].end_offset,
            msg_count=chosen[-1].end_offset - chosen[0].start_offset + 1,
            data_key=self._uris.uri(key),
            encoding=ENCODING,
            created_at_ms=made_at_ms,
            tail_start_offset=chosen[-1].start_offset,
            last_append_at_ms=segments[-1].created_at_ms,
        )

    async def _finish(self, tp: TopicPartition, record: Versioned[Compaction]) -> bool:
        """Continues from the state of the record. False when its range can no longer be compacted."""
        try:
            if record.value.state == "WRITING_COMPACTED_INDEX":
                if not await self._overwrite_end(tp, record.value):
                    await self._records.meta.delete(
                        paths.compaction(tp), expected=record.version, partition_key=tp.partition_key
                    )
                    return False
                record = await self._enter(tp, record, "DELETING_OLD")
            if record.value.state == "DELETING_OLD":
                await self._records.meta.delete_range(
                    paths.index(tp, record.value.start_offset),
                    paths.index(tp, record.value.end_offset),
                    partition_key=tp.partition_key,
                )
                record = await self._enter(tp, record, "UPDATING_CURSOR")
            await self._advance(tp, record.value.end_offset + 1)
            await self._records.meta.delete(
                paths.compaction(tp), expected=record.version, partition_key=tp.partition_key
            )
        except Stale:
            return True  # another compactor is finishing this compaction
        return True

    async def _overwrite_end(self, tp: TopicPartition, record: Compaction) -> bool:
        key = paths.index(tp, record.end_offset)
        found = await self._records.find(tp, key, IndexEntry)
        if found is not None and overwritten(record, found.value):
            return True
        now = (await self._records.control(tp)).value  # after the record is written: see the sweeper
        end = _span(record.end_offset, found.value) if found is not None else None
        if found is None or not may_overwrite(record, end, now):
            return False
        try:
            await self._store.head(self._uris.key(record.data_key))
            await self._records.swap(tp, key, record.entry(), found.version)
        except NotFound:
            return False
        except Stale as error:
            return error.current is not None and overwritten(
                record, msgspec.json.decode(error.current.value, type=IndexEntry)
            )
        return True

    async def _enter(
        self, tp: TopicPartition, record: Versioned[Compaction], state: Literal["DELETING_OLD", "UPDATING_CURSOR"]
    ) -> Versioned[Compaction]:
        after = msgspec.structs.replace(record.value, state=state)
        return await self._records.swap(tp, paths.compaction(tp), after, record.version)

    async def _advance(self, tp: TopicPartition, offset: int) -> None:
        """The cursor never moves back."""
        found = await self._records.find(tp, paths.cursor(tp), Cursor)
        if found is not None and found.value.offset >= offset:
            return
        try:
            if found is None:
                await self._records.create(tp, paths.cursor(tp), Cursor(offset))
            else:
                await self._records.swap(tp, paths.cursor(tp), Cursor(offset), found.version)
        except (AlreadyExists, Stale):
            return  # another compactor moved it; a cursor that stays behind is aligned by the next pass


def _span(end_offset: int, entry: IndexEntry) -> IndexSpan:
    return IndexSpan(end_offset - entry.msg_count + 1, end_offset, entry)


def aligned(cursor: int, log_start_offset: int, spans: Sequence[IndexSpan]) -> int:
    """Where to go on from: the cursor, moved past what is trimmed or already compacted.

    `spans` are those that end at the cursor or above. A span that the start of the log cuts through stays whole.
    """
    at = cursor
    for span in spans:
        if span.end_offset < log_start_offset or (span.entry.type == "COMPACTED" and span.covers(at)):
            at = max(at, span.end_offset + 1)
        elif span.start_offset <= at:
            continue
        elif span.covers(log_start_offset):
            at = max(at, span.start_offset)
    return at


def select(
    at: int, spans: Sequence[IndexSpan], *, entries_min: int, entries_max: int, bytes_max: int
) -> list[IndexSpan]:
    """One gapless run of WAL entries that starts exactly at `at`; empty when it is not worth the work."""
    chosen: list[IndexSpan] = []
    size = 0
    for span in spans:
        if span.end_offset < at:
            continue
        size += span.entry.byte_length or 0
        if span.entry.type != "WAL" or span.start_offset != at or (chosen and size > bytes_max):
            break
        chosen.append(span)
        at = span.end_offset + 1
        if len(chosen) == entries_max:
            break
    full = len(chosen) == entries_max or size > bytes_max
    return chosen if len(chosen) >= entries_min or (full and len(chosen) > 1) else []


def may_overwrite(record: Compaction, end: IndexSpan | None, control: Control) -> bool:
    """Whether the end key still is the entry that was compacted, and no sweep can have deleted the compacted blob."""
    return (
        end is not None
        and end.entry.type == "WAL"
        and end.start_offset == record.tail_start_offset
        and record.created_at_ms > control.vacuum_before_ms
    )


def overwritten(record: Compaction, end: IndexEntry | None) -> bool:
    return end is not None and end.type == "COMPACTED" and end.data_key == record.data_key
