"""The log as people look at it: topics, partitions, what lies where, records with their payloads, groups, cost."""

from __future__ import annotations

from typing import Any

import msgspec

from lakebed.context import Context
from lakebed.errors import Invalid
from lakebed.log import paths
from lakebed.log.billing import Usage, storage_dollars_month
from lakebed.log.groups import Groups, Progress
from lakebed.log.model import Cursor, Span, topic_partition
from lakebed.log.reader import Reader
from lakebed.log.records import Records
from lakebed.log.settings import LogSettings
from lakebed.log.steward import Described, Steward
from lakebed.meta.connect import connect
from lakebed.meta.protocol import Meta
from lakebed.meta.settings import MetaSettings
from lakebed.store.settings import StoreSettings
from lakebed.views.payload import Payload, payload

SEGMENTS_MAX = 240  # drawn of one partition: half from its start, half from its end
TAIL_RECORDS = 4000  # how far from the end the last segments are looked for
RECORDS_MAX = 50  # shown at once
READ_BYTES_MAX = 256 * 1024
MEASURED_MAX = 100_000  # objects counted for the cost; a larger log is told by its metrics
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


class Segments(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    log_start_offset: int
    high_watermark: int
    compacted_to: int
    segments: list[SegmentRow]
    complete: bool


class RecordRow(msgspec.Struct, frozen=True):
    offset: int
    payload: Payload


class RecordsPage(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    offset: int
    next_offset: int
    log_start_offset: int
    high_watermark: int
    records: list[RecordRow]


class LogWindow:
    """Reads the log and changes nothing: no producer, no cache of its own beyond a few batches."""

    def __init__(self, context: Context, meta: Meta | None = None) -> None:
        clock, ids, metrics = context.clock, context.ids, context.metrics
        where = context.settings.of(StoreSettings)
        self._context = context
        self.meta = meta or connect(
            context.settings.of(MetaSettings), store=context.store, clock=clock, ids=ids, metrics=metrics
        )
        self.records = Records(self.meta, clock=clock, ids=ids)
        self.reader = Reader(
            context.store,
            self.records,
            paths.uris(where.url, where.prefix, where.moved_from),
            metrics=metrics,
            bodies_bytes=min(BODIES_BYTES, context.settings.of(LogSettings).bodies_bytes),
        )
        self.groups = Groups(self.records, clock=clock)
        self.steward = Steward(self.records, self.reader, self.groups, clock=clock)

    async def close(self) -> None:
        await self.meta.close()

    async def report(self) -> dict[str, Any]:
        return await report(self.steward, self.groups, await self._measure())

    async def _measure(self) -> Usage:
        """Counted beside the bill: looking is not the log's own work."""
        size = count = 0
        async for info in self._context.store.list(paths.ROOT):
            size, count = size + info.size, count + 1
            if count >= MEASURED_MAX:
                break
        return Usage(size, count)

    async def segments(self, topic: str, partition: int) -> Segments:
        """The first and the last index entries of a partition."""
        tp = topic_partition(topic, partition)
        now = (await self.records.control(tp)).value
        cursor = await self.records.find(tp, paths.cursor(tp), Cursor)
        half = SEGMENTS_MAX // 2
        spans = {span.end_offset: span for span in await self.records.spans(tp, now.log_start_offset, limit=half)}
        complete = len(spans) < half
        if not complete:
            tail_from = max(now.log_start_offset, now.next_offset - TAIL_RECORDS)
            last = await self.records.spans(tp, tail_from, limit=SEGMENTS_MAX * 4)
            spans |= {span.end_offset: span for span in last[-half:]}
        return Segments(
            topic=topic,
            partition=partition,
            log_start_offset=now.log_start_offset,
            high_watermark=now.sequence_counter,
            compacted_to=max(cursor.value.offset if cursor else 1, now.log_start_offset),
            segments=[_segment(span) for _, span in sorted(spans.items())],
            complete=complete,
        )

    async def page(self, topic: str, partition: int, offset: int | None, *, count: int = RECORDS_MAX) -> RecordsPage:
        """Records from an offset on; without one, the last of the partition."""
        tp = topic_partition(topic, partition)
        now = (await self.records.control(tp)).value
        count = max(1, min(count, RECORDS_MAX))
        at = now.next_offset - count if offset is None else offset
        at = max(now.log_start_offset, min(at, now.next_offset))
        found = await self.reader.read(tp, at, bytes_max=READ_BYTES_MAX)
        rows = [
            RecordRow(at + number, payload(bytes(record)))
            for number, record in enumerate(record for part in found.parts for record in part)
            if number < count
        ]
        return RecordsPage(topic, partition, at, at + len(rows), found.log_start_offset, found.high_watermark, rows)


async def topics(steward: Steward) -> list[TopicRow]:
    """Every topic with its partitions and records."""
    rows: dict[str, TopicRow] = {}
    for tp in await steward.partitions():
        seen = await steward.describe(tp)
        row = rows.get(tp.topic, TopicRow(tp.topic, 0, 0, 0))
        rows[tp.topic] = TopicRow(
            tp.topic, row.partitions + 1, row.records + seen.records, row.uncompacted + seen.uncompacted
        )
    return list(rows.values())


async def partitions(steward: Steward, topic: str) -> list[Described]:
    """A topic's partitions. Raises Invalid when there is none."""
    found = await steward.partitions(topic)
    if not found:
        raise Invalid(f"topic {topic} does not exist", hint="lakebed topics list")
    return [await steward.describe(tp) for tp in found]


async def report(steward: Steward, groups: Groups, usage: Usage) -> dict[str, Any]:
    """Groups and their lag in every topic, and what the log stores and would cost."""
    found = sorted({tp.topic for tp in await steward.partitions()})
    progress: list[Progress] = [row for topic in found for row in await groups.progress(topic)]
    return {
        "topics": len(found),
        "stored_bytes": usage.stored_bytes,
        "stored_objects": usage.stored_objects,
        "storage_dollars_month": round(storage_dollars_month(usage), 6),
        "groups": progress,
    }


def _segment(span: Span) -> SegmentRow:
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
