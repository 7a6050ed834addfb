"""The log for console and CLI: topics, partitions, segments, records with their payloads, groups, cost."""

from __future__ import annotations

from itertools import islice, pairwise
from typing import Any
from urllib.parse import urlencode

import msgspec

from lakebed.console.runs import RecordedRuns
from lakebed.core.context import Context
from lakebed.core.payload import Payload, payload
from lakebed.core.runs import ActiveRun, RecordedRun, Work
from lakebed.log import paths
from lakebed.log.admin import PartitionDescription, TopicAdmin
from lakebed.log.codec import decoded
from lakebed.log.cost import StorageUsage, storage_dollars_month
from lakebed.log.groups import GroupProgress, Groups
from lakebed.log.kafka_batch import KafkaRecord
from lakebed.log.model import Control, Cursor, IndexSpan, TopicPartition, topic_partition
from lakebed.log.records import Records
from lakebed.log.scheduler import COMPACTION
from lakebed.log.services import LogReadServices, LogServices
from lakebed.log.settings import LogSettings
from lakebed.meta.protocol import Meta

SEGMENTS_MAX = 240  # drawn of one partition: half from its start, half from its end
TAIL_RECORDS = 4000  # how far from the end the last segments are looked for
RECORDS_MAX = 50  # shown at once
HEADERS_MAX = 20  # shown of one record
READ_BYTES_MAX = 256 * 1024
SEARCHED_MAX = 50_000  # records read by one search
COUNTED_MAX = 500  # partitions counted for the charts
MEASURED_MAX = 100_000  # objects counted for the cost; for a larger log see its metrics
BODIES_BYTES = 4 * 1024 * 1024


class TopicRow(msgspec.Struct, frozen=True):
    topic: str
    partitions: int
    records: int
    uncompacted: int


class SegmentRow(msgspec.Struct, frozen=True):
    """One index entry: where the records [start, end] are. `bytes` is known for slices of shared blobs."""

    type: str
    start_offset: int
    end_offset: int
    records: int
    bytes: int | None
    created_at_ms: int
    data_key: str


class SegmentOverview(msgspec.Struct, frozen=True):
    """`complete` is False when entries between the first and the last are left out."""

    topic: str
    partition: int
    log_start_offset: int
    high_watermark: int
    compacted_to: int
    segments: list[SegmentRow]
    complete: bool


class HeaderRow(msgspec.Struct, frozen=True):
    name: str
    value: str


class RecordRow(msgspec.Struct, frozen=True):
    """`at_ms` is the timestamp of the record, or the time of its append; 0 where neither is known."""

    offset: int
    payload: Payload
    key: Payload | None = None
    headers: tuple[HeaderRow, ...] = ()
    at_ms: int = 0


class RecordsPage(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    offset: int
    next_offset: int
    log_start_offset: int
    high_watermark: int
    records: list[RecordRow]


class LogRuns(RecordedRuns):
    """Compactions and vacuums."""

    part, right, again_right, repeats = "log", "log:read", "log:admin:*", (COMPACTION,)

    def href(self, run: RecordedRun) -> str:
        topic, _, rest = run.subject.partition("/")
        return f"/log?{urlencode({'topic': topic, 'partition': rest.partition(' ')[0]})}" if rest else "/log"

    def work(self, run: RecordedRun) -> Work:
        async def compacted(run: ActiveRun) -> None:
            services = LogServices(self.context)
            try:
                await services.scheduler.work(run)
            finally:
                await services.scheduler.close()
                await services.close()

        return compacted


class LogView(LogReadServices):
    """Reads the log and changes nothing. Keeps only a few decoded batches."""

    def __init__(self, context: Context, meta: Meta | None = None) -> None:
        bodies_bytes = min(BODIES_BYTES, context.settings.of(LogSettings).bodies_bytes)
        super().__init__(context, meta, bodies_bytes=bodies_bytes)

    async def report(self) -> dict[str, Any]:
        return await report(self.admin, self.groups, await self._measure())

    async def _measure(self) -> StorageUsage:
        """The scan itself does not count towards the log's cost."""
        size = count = 0
        async for info in self._context.store.list(paths.ROOT):
            size, count = size + info.size, count + 1
            if count >= MEASURED_MAX:
                break
        return StorageUsage(size, count)

    async def segments(self, topic: str, partition: int) -> SegmentOverview:
        """The first and the last index entries of a partition."""
        tp = topic_partition(topic, partition)
        now = (await self.records.control(tp)).value
        cursor = await self.records.find(tp, paths.cursor(tp), Cursor)
        half = SEGMENTS_MAX // 2
        spans = {span.end_offset: span for span in await self.records.spans(tp, now.log_start_offset, limit=half)}
        if len(spans) >= half:
            spans |= {span.end_offset: span for span in await self._last(tp, now, half)}
        ordered = [span for _, span in sorted(spans.items())]
        return SegmentOverview(
            topic=topic,
            partition=partition,
            log_start_offset=now.log_start_offset,
            high_watermark=now.sequence_counter,
            compacted_to=max(cursor.value.offset if cursor else 1, now.log_start_offset),
            segments=[_segment(span) for span in ordered],
            complete=all(one.end_offset + 1 >= after.start_offset for one, after in pairwise(ordered)),
        )

    async def _last(self, tp: TopicPartition, now: Control, count: int) -> list[IndexSpan]:
        """The last index entries of a partition."""
        limit = SEGMENTS_MAX * 4
        found: list[IndexSpan] = []
        for records in (TAIL_RECORDS, limit):  # a span holds at least one record: the second range ends with the log
            found = await self.records.spans(tp, max(now.log_start_offset, now.next_offset - records), limit=limit)
            if len(found) < limit:
                break
        return found[-count:]

    async def page(self, topic: str, partition: int, offset: int | None, *, count: int = RECORDS_MAX) -> RecordsPage:
        """Records from an offset on; without one, the last of the partition."""
        tp = topic_partition(topic, partition)
        now = (await self.records.control(tp)).value
        count = max(1, min(count, RECORDS_MAX))
        at = now.next_offset - count if offset is None else offset
        at = max(now.log_start_offset, min(at, now.next_offset))
        found = await self.reader.read(tp, at, bytes_max=READ_BYTES_MAX)
        taken = islice((record for part in found.parts for record in decoded(part)), count)
        rows = [_record(at + number, record) for number, record in enumerate(taken)]
        return RecordsPage(topic, partition, at, at + len(rows), found.log_start_offset, found.high_watermark, rows)

    async def search(self, topic: str, partition: int, offset: int | None, text: str) -> RecordsPage:
        """Records from an offset on whose key or value holds the text, whatever its case; without one, from the start.

        Reads at most SEARCHED_MAX records: `next_offset` is where a further search begins.
        """
        tp = topic_partition(topic, partition)
        now = (await self.records.control(tp)).value
        at = first = max(now.log_start_offset, min(offset or 0, now.next_offset))
        rows, wanted = list[RecordRow](), text.casefold().encode()
        while at < now.next_offset and at - first < SEARCHED_MAX and len(rows) < RECORDS_MAX:
            found = await self.reader.read(tp, at, bytes_max=READ_BYTES_MAX * 4)
            records = [record for part in found.parts for record in decoded(part)]
            if not records:
                break
            for record in records:
                if wanted in _folded(record.value) or wanted in _folded(record.key):
                    rows.append(_record(at, record))
                at += 1
                if len(rows) == RECORDS_MAX:
                    break
        return RecordsPage(topic, partition, first, at, now.log_start_offset, now.sequence_counter, rows)


def _folded(data: bytes | None) -> bytes:
    return bytes(data).decode(errors="replace").casefold().encode() if data else b""


def _record(offset: int, record: KafkaRecord) -> RecordRow:
    headers = tuple(HeaderRow(name, payload(value or b"").text) for name, value in record.headers[:HEADERS_MAX])
    key = None if record.key is None else payload(bytes(record.key))
    return RecordRow(offset, payload(bytes(record.value or b"")), key, headers, max(0, record.timestamp_ms))


async def topics(admin: TopicAdmin) -> list[TopicRow]:
    """Every topic with its partitions and records."""
    rows: dict[str, TopicRow] = {}
    for tp in await admin.partitions():
        seen = await admin.describe(tp)
        row = rows.get(tp.topic, TopicRow(tp.topic, 0, 0, 0))
        rows[tp.topic] = TopicRow(
            tp.topic, row.partitions + 1, row.records + seen.records, row.uncompacted + seen.uncompacted
        )
    return list(rows.values())


async def appended(records: Records) -> int:
    """Records appended to all partitions since they exist, from their control records."""
    total = count = 0
    async for tp in records.partitions(""):
        found = await records.find(tp, paths.control(tp), Control)
        total += found.value.sequence_counter if found is not None else 0
        count += 1
        if count >= COUNTED_MAX:
            break
    return total


async def partitions(admin: TopicAdmin, topic: str) -> list[PartitionDescription]:
    """A topic's partitions. Raises UnknownTopicPartition when there is none."""
    return [await admin.describe(tp) for tp in await admin.existing(topic)]


async def report(admin: TopicAdmin, groups: Groups, usage: StorageUsage) -> dict[str, Any]:
    """Groups and their lag in every topic, and what the log stores and would cost."""
    found = sorted({tp.topic for tp in await admin.partitions()})
    progress: list[GroupProgress] = [row for topic in found for row in await groups.progress(topic)]
    return {
        "topics": len(found),
        "stored_bytes": usage.stored_bytes,
        "stored_objects": usage.stored_objects,
        "storage_dollars_month": round(storage_dollars_month(usage), 6),
        "groups": progress,
    }


def _segment(span: IndexSpan) -> SegmentRow:
    entry = span.entry
    return SegmentRow(
        entry.type,
        span.start_offset,
        span.end_offset,
        entry.msg_count,
        entry.byte_length,
        entry.appended_at_ms,
        entry.data_key,
    )
