"""The compactor: many small entries of partitions become few, in few blobs. A reader never sees a difference.

Runs of several partitions share one compacted blob, and their sources are read once for all of them. Then each run
commits on its own: `meta/compaction` of its partition records the compaction in progress, and every step is idempotent.
Any compactor that finds the record, after a crash or beside a slow compactor, finishes it. The one conditional write is
the swap of the end key's index entry; the highest index key of a partition is never deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import AlreadyExists, Corrupt, LakebedError, NotFound, Stale
from lakebed.log import blob, codec, compaction, control, paths
from lakebed.log.codec import RecordBatch
from lakebed.log.compaction import RUNS_MAX, CompactionPlan, CompactionRun
from lakebed.log.model import (
    FIRST_OFFSET,
    Compaction,
    Control,
    Cursor,
    IndexEntry,
    IndexSpan,
    TopicPartition,
)
from lakebed.log.paths import Uris
from lakebed.log.reader import BlobGone, LogReader, slice_of
from lakebed.log.records import Records, Versioned
from lakebed.log.settings import LogSettings
from lakebed.store.runtime import StoreRuntime

CompactionOutcome = Literal["compacted", "recovered", "abandoned", "idle"]

COMMITS_MAX = 16  # partitions of one blob that commit at the same time
GONE_MAX = 8  # sources of one blob that may vanish while it is written, before all of it is given up


class Compactor:
    def __init__(
        self, runtime: StoreRuntime, records: Records, reader: LogReader, uris: Uris, settings: LogSettings
    ) -> None:
        self._store, self._records, self._reader, self._uris = runtime.store, records, reader, uris
        self._settings, self._clock, self._ids = settings, runtime.clock, runtime.ids
        self._merge_at_ms: dict[TopicPartition, int] = {}  # when a partition is looked through for merges again
        self._final_until: dict[TopicPartition, int] = {}  # what is not read for it until the partition is quiet
        self._committing: dict[TopicPartition, asyncio.Lock] = {}
        metrics = runtime.metrics
        self._outcomes = metrics.counter("lakebed_log_compactions_total")
        self._bytes = metrics.counter("lakebed_log_compacted_bytes_total")
        self._blobs = metrics.counter("lakebed_log_compacted_blobs_total")
        self._seconds = metrics.histogram("lakebed_log_compaction_seconds")

    async def compact_once(self, tp: TopicPartition, *, force: bool = False) -> CompactionOutcome:
        """Recovers what a crash left, or else compacts one run of the WAL, or else all that is compacted again. Safe
        beside writers, readers and other compactors.

        With `force` also a run that is not due.
        """
        recovered, plan = await self.plan(tp, force=force)
        if recovered is not None:
            return recovered
        if not plan.due:
            return self._counted("idle")
        first = plan.runs[:1] if plan.runs[0].level == 1 else plan.runs  # entries that move stay in one blob
        done = (await self.compact(first))[tp]
        if isinstance(done, LakebedError):
            raise done
        return done

    async def plan(
        self, tp: TopicPartition, *, force: bool = False
    ) -> tuple[Literal["recovered", "abandoned"] | None, CompactionPlan]:
        """Finishes what a crash left, and says how that ended; or else plans what is to do."""
        with self._seconds.labels(stage="plan").time():
            now = await self._recover_pending(tp)
            if now.log_state == "DELETED":
                return None, CompactionPlan()
            under_way = await self._records.find(tp, paths.compaction(tp), Compaction)
            if under_way is not None:
                done: Literal["recovered", "abandoned"]
                done = "recovered" if await self._finish(tp, under_way, stored=False) else "abandoned"
                self._counted(done)
                return done, CompactionPlan()
            return None, await self._planned(tp, now, force)

    async def compact(self, runs: Sequence[CompactionRun]) -> dict[TopicPartition, CompactionOutcome | LakebedError]:
        """Writes one blob with these runs, and commits each of them. The last outcome of each partition, or why it
        failed: a partition whose source is damaged, or whose commit fails, does not stop the others."""
        outcomes: dict[TopicPartition, CompactionOutcome | LakebedError] = {}
        try:
            written = await self._write(runs)
        except Corrupt:
            outcomes |= await self._damaged(runs)
            runs = [run for run in runs if run.tp not in outcomes]
            written = await self._write(runs)
        slots = asyncio.Semaphore(COMMITS_MAX)
        records: dict[TopicPartition, list[Compaction | None]] = {}
        for run, record in zip(runs, written, strict=True):
            records.setdefault(run.tp, []).append(record)

        async def of_partition(tp: TopicPartition) -> CompactionOutcome:
            """One after another, and none behind one that failed: the cursor must not pass it."""
            done: CompactionOutcome = "idle"
            async with slots, self._committing.setdefault(tp, asyncio.Lock()):
                for record in records[tp]:
                    done = self._counted(await self._commit(tp, record))
                    if done == "abandoned":
                        break
            return done

        tps = list(records)
        with self._seconds.labels(stage="commit").time():
            found = await asyncio.gather(*map(of_partition, tps), return_exceptions=True)
        for tp, one in zip(tps, found, strict=True):
            if isinstance(one, BaseException) and not isinstance(one, LakebedError):
                raise one
            outcomes[tp] = one
        for _ in (one for one in outcomes.values() if isinstance(one, LakebedError)):
            self._counted("abandoned")
        return outcomes

    async def lag(self, tp: TopicPartition) -> int:
        """Records that are not compacted yet."""
        now = (await self._records.control(tp)).value
        cursor = await self._records.find(tp, paths.cursor(tp), Cursor)
        at = max(cursor.value.offset if cursor else FIRST_OFFSET, now.log_start_offset)
        return max(0, now.next_offset - at)

    def _counted(self, outcome: CompactionOutcome) -> CompactionOutcome:
        self._outcomes.labels(outcome=outcome).inc()
        return outcome

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

    async def _planned(self, tp: TopicPartition, now: Control, force: bool) -> CompactionPlan:
        cursor = await self._records.find(tp, paths.cursor(tp), Cursor)
        at = cursor.value.offset if cursor is not None else FIRST_OFFSET
        spans = await self._records.spans(tp, at, limit=self._settings.compact_max_entries + 1)
        begin = compaction.aligned(at, now.log_start_offset, spans)
        if begin > at:
            await self._advance(tp, begin)
        lag = max(0, now.next_offset - max(begin, now.log_start_offset))
        merges = await self._merges(tp, now.log_start_offset, begin)
        due = bool(merges) or bool(self._selected(begin, spans, self._settings.compact_after_s, force))
        runs = await self._wal_runs(tp, begin, spans, force)
        return CompactionPlan((*runs, *merges), due, lag)

    def _selected(self, at: int, spans: Sequence[IndexSpan], after_s: float, force: bool) -> list[IndexSpan]:
        return compaction.select(
            at,
            spans,
            entries_min=1 if force else self._settings.compact_min_entries,
            entries_max=self._settings.compact_max_entries,
            bytes_max=self._settings.compact_max_bytes,
            bytes_min=self._settings.compact_min_bytes,
            old_ms=now_ms(self._clock) - round(after_s * 1000),
        )

    async def _wal_runs(
        self, tp: TopicPartition, at: int, spans: Sequence[IndexSpan], force: bool
    ) -> list[CompactionRun]:
        """The first run also when it is only half as old as it may get: it joins the blob of one that is due."""
        runs: list[CompactionRun] = []
        after_s, room = self._settings.compact_after_s / 2, self._settings.compact_blob_bytes
        while len(runs) < RUNS_MAX and room > 0:
            chosen = self._selected(at, spans, after_s, force and not runs)
            if not chosen:
                break
            size = sum(span.entry.byte_length or 0 for span in chosen)
            runs.append(CompactionRun(tp, tuple(chosen), size))
            at, room, after_s = chosen[-1].end_offset + 1, room - size, self._settings.compact_after_s
            spans = await self._records.spans(tp, at, limit=self._settings.compact_max_entries + 1)
        return runs

    async def _merges(self, tp: TopicPartition, start: int, end: int) -> list[CompactionRun]:
        """Looks through the compacted entries after each compaction, and once a day. Of a busy partition only those are
        read that may change, because all of them would be more with each compaction."""
        at_ms = now_ms(self._clock)
        if at_ms < self._merge_at_ms.get(tp, 0):
            return []
        begin = max(start, self._final_until.get(tp, 0) + 1)
        spans = await self._compacted(tp, begin, end)
        if begin > start and (not spans or compaction.is_quiet(spans, at_ms)):
            spans = await self._compacted(tp, start, end)
        sizes = {span.end_offset: await self._reader.size(span) for span in spans}
        bytes_max, blob_bytes = self._settings.compact_max_bytes, self._settings.compact_blob_bytes
        found = compaction.select_again(
            spans,
            lambda span: sizes[span.end_offset],
            fan_in=self._settings.compact_fan_in,
            bytes_max=bytes_max,
            blob_bytes=blob_bytes,
            quiet=compaction.is_quiet(spans, at_ms),
        )
        if not found:
            self._merge_at_ms[tp] = at_ms + compaction.QUIET_MS
            final = compaction.final_until(
                spans, lambda span: sizes[span.end_offset], bytes_max=bytes_max, blob_bytes=blob_bytes
            )
            self._final_until[tp] = final or begin - 1
        return [CompactionRun(tp, tuple(run), sum(sizes[span.end_offset] for span in run)) for run in found]

    async def _compacted(self, tp: TopicPartition, start: int, end: int) -> list[IndexSpan]:
        """The compacted entries between these offsets."""
        found: list[IndexSpan] = []
        async for span in self._records.all_spans(tp, start):
            if span.start_offset >= end:
                break
            if span.entry.type == "COMPACTED" and span.start_offset >= start:
                found.append(span)
        return found

    async def _write(self, runs: Sequence[CompactionRun]) -> list[Compaction | None]:
        """Writes the compacted blob. None for a run whose source vanished: another process compacted or trimmed it."""
        batches = await self._read([span for run in runs for span in run.spans])
        good = [run for run in runs if all(slice_of(span) in batches for span in run.spans)]
        if not good:
            return [None] * len(runs)
        with self._seconds.labels(stage="write").time():
            bodies = [_body(run, batches) for run in good]
            made_at_ms = now_ms(self._clock)
            if len(good) == 1:
                data, places = b"".join(bodies[0].buffers), [blob.BlobSlice(0, bodies[0].size)]
                key = paths.compacted_blob(good[0].tp, self._ids.uuid())
            else:
                data, places = blob.encode(bodies, made_at_ms)
                key = paths.shared_compacted_blob(self._ids.uuid())
            await self._store.create(key, data)
        self._bytes.inc(len(data))
        self._blobs.inc()
        made = {
            run.spans: self._record(run, place, key, len(data), made_at_ms, batches)
            for run, place in zip(good, places, strict=True)
        }
        return [made.get(run.spans) for run in runs]

    async def _read(self, spans: Sequence[IndexSpan]) -> Mapping[tuple[str, int], RecordBatch]:
        """What is still there of these."""
        left = list(spans)
        with self._seconds.labels(stage="read").time():
            for _ in range(GONE_MAX):
                try:
                    return await self._reader.batches(left)
                except BlobGone as gone:
                    left = [span for span in left if span.entry.data_key != gone.data_key]
        return {}

    async def _damaged(self, runs: Sequence[CompactionRun]) -> dict[TopicPartition, LakebedError]:
        """The partitions with a source that is not what was written."""
        found: dict[TopicPartition, LakebedError] = {}
        for run in runs:
            try:
                await self._read(run.spans)
            except Corrupt as error:
                found[run.tp] = error
        return found

    def _record(
        self,
        run: CompactionRun,
        place: blob.BlobSlice,
        key: str,
        blob_bytes: int,
        made_at_ms: int,
        batches: Mapping[tuple[str, int], RecordBatch],
    ) -> Compaction:
        first, last = run.spans[0], run.spans[-1]
        return Compaction(
            compaction_id=self._ids.uuid(),
            state="WRITING_COMPACTED_INDEX",
            start_offset=first.start_offset,
            end_offset=last.end_offset,
            msg_count=last.end_offset - first.start_offset + 1,
            data_key=self._uris.uri(key),
            encoding=codec.encoding_of([batches[slice_of(span)].records for span in run.spans]),
            created_at_ms=made_at_ms,
            tail_start_offset=last.start_offset,
            last_append_at_ms=batches[slice_of(last)].segments[-1].created_at_ms,
            max_timestamp_ms=max_timestamp_ms(run.spans),
            byte_offset=place.byte_offset or None,
            byte_length=place.byte_length,
            blob_bytes=blob_bytes,
            level=run.level,
            tail_level=last.entry.tier,
        )

    async def _commit(self, tp: TopicPartition, record: Compaction | None) -> CompactionOutcome:
        if record is None:
            return "abandoned"
        try:
            created = await self._records.create(tp, paths.compaction(tp), record)
        except AlreadyExists:
            return "abandoned"  # another compactor was faster; a sweep deletes our blob
        if not await self._finish(tp, created, stored=True):
            return "abandoned"
        self._merge_at_ms.pop(tp, None)
        return "compacted"

    async def _finish(self, tp: TopicPartition, record: Versioned[Compaction], *, stored: bool) -> bool:
        """Continues from the state of the record. False when its range can no longer be compacted.

        `stored`: this process has just written the blob.
        """
        try:
            if record.value.state == "WRITING_COMPACTED_INDEX":
                if not await self._overwrite_end(tp, record.value, stored):
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

    async def _overwrite_end(self, tp: TopicPartition, record: Compaction, stored: bool) -> bool:
        key = paths.index(tp, record.end_offset)
        found = await self._records.find(tp, key, IndexEntry)
        if found is not None and compaction.overwritten(record, found.value):
            return True
        now = (await self._records.control(tp)).value  # after the record is written: see the sweeper
        end = _span(record.end_offset, found.value) if found is not None else None
        if found is None or not compaction.may_overwrite(record, end, now):
            return False
        try:
            if not stored:
                await self._store.head(self._uris.key(record.data_key))
            await self._records.swap(tp, key, record.entry(), found.version)
        except NotFound:
            return False
        except Stale as error:
            return error.current is not None and compaction.overwritten(
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


def _body(run: CompactionRun, batches: Mapping[tuple[str, int], RecordBatch]) -> blob.PartitionBody:
    found = [batches[slice_of(span)] for span in run.spans]
    count = sum(batch.records.count for batch in found)
    encoding = codec.encoding_of([batch.records for batch in found])
    return blob.PartitionBody(run.tp, count, codec.join(found), encoding)


def _span(end_offset: int, entry: IndexEntry) -> IndexSpan:
    return IndexSpan(end_offset - entry.msg_count + 1, end_offset, entry)


def max_timestamp_ms(spans: Sequence[IndexSpan]) -> int:
    """The largest timestamp of these spans' records; 0 where all have the time of their append."""
    if not any(span.entry.max_timestamp_ms for span in spans):
        return 0
    return max(span.entry.newest_ms for span in spans)
