"""Administration of topics: fence, trim, delete, configure, describe."""

from __future__ import annotations

from typing import Literal

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import NotFound
from lakebed.core.runtime import Runtime
from lakebed.log import control, paths, producers
from lakebed.log.groups import Groups
from lakebed.log.model import (
    Control,
    Cursor,
    IndexSpan,
    TopicConfig,
    TopicPartition,
    UnknownTopicPartition,
    check_topic,
)
from lakebed.log.offset_by_time import OffsetByTime
from lakebed.log.reader import LogReader, gather_all, pending_span
from lakebed.log.records import Records, decoded

LOOKS_MAX = 64  # control records that are read side by side


class PartitionDescription(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    log_state: str
    log_start_offset: int
    high_watermark: int
    records: int
    uncompacted: int
    pending: bool
    producers: int
    reason: str = ""


class LogSegment(msgspec.Struct, frozen=True):
    """Where the records [start_offset, end_offset] are stored. PENDING: committed, and not in the index yet."""

    type: Literal["WAL", "COMPACTED", "PENDING"]
    start_offset: int
    end_offset: int
    records: int
    bytes: int
    created_at_ms: int
    data_key: str
    byte_offset: int | None = None


class SegmentPage(msgspec.Struct, frozen=True):
    """Some of a partition's segments; `next_offset` is where the next page starts, None at the end."""

    topic: str
    partition: int
    log_start_offset: int
    high_watermark: int
    compacted_to: int
    segments: list[LogSegment]
    next_offset: int | None


class TopicAdmin:
    def __init__(self, runtime: Runtime, records: Records, reader: LogReader, groups: Groups) -> None:
        self._records, self._reader, self._groups, self._clock = records, reader, groups, runtime.clock
        self.offsets = OffsetByTime(records, reader)

    async def partitions(self, topic: str | None = None) -> list[TopicPartition]:
        """Every partition that exists, of one topic or of all. Raises Invalid for an empty name, which is not all."""
        found = [tp async for tp in self._records.partitions("" if topic is None else check_topic(topic))]
        there: list[TopicPartition] = []
        for some in (found[at : at + LOOKS_MAX] for at in range(0, len(found), LOOKS_MAX)):
            exist = await gather_all([self._exists(tp) for tp in some])
            there += [tp for tp, exists in zip(some, exist, strict=True) if exists]
        return sorted(there)

    async def existing(self, topic: str) -> list[TopicPartition]:
        """The partitions of a topic. Raises UnknownTopicPartition when there is none."""
        if found := await self.partitions(topic):
            return found
        raise UnknownTopicPartition(f"topic {topic} does not exist", hint="lakebed topics list")

    async def describe(self, tp: TopicPartition) -> PartitionDescription:
        now = (await self._records.control(tp)).value
        cursor = await self._records.find(tp, paths.cursor(tp), Cursor)
        compacted_to = max(cursor.value.offset if cursor else 1, now.log_start_offset)
        return PartitionDescription(
            topic=tp.topic,
            partition=tp.partition,
            log_state=now.log_state,
            log_start_offset=now.log_start_offset,
            high_watermark=now.sequence_counter,
            records=now.next_offset - now.log_start_offset,
            uncompacted=max(0, now.next_offset - compacted_to),
            pending=now.pending is not None,
            producers=len(producers.expanded(await self._records.producers(tp, now) or {}, now.producers)),
            reason=now.reason,
        )

    async def segments(self, tp: TopicPartition, *, from_offset: int = 0, limit: int = 100) -> SegmentPage:
        """The partition's segments from that offset on, lowest first; the pending one comes last."""
        now = (await self._records.control(tp)).value
        cursor = await self._records.find(tp, paths.cursor(tp), Cursor)
        start = max(from_offset, now.log_start_offset)
        spans = await self._records.spans(tp, start, limit=limit)
        rows = [await self._segment(span, span.entry.type) for span in spans]
        more = len(spans) == limit
        tail = pending_span(now)
        known = more or tail is None or any(span.end_offset == tail.end_offset for span in spans)
        if tail is not None and not known and tail.end_offset >= start:
            rows.append(await self._segment(tail, "PENDING"))
        return SegmentPage(
            topic=tp.topic,
            partition=tp.partition,
            log_start_offset=now.log_start_offset,
            high_watermark=now.sequence_counter,
            compacted_to=(cursor.value.offset if cursor else 1) - 1,
            segments=rows,
            next_offset=spans[-1].end_offset + 1 if more else None,
        )

    async def _segment(self, span: IndexSpan, type: Literal["WAL", "COMPACTED", "PENDING"]) -> LogSegment:
        return LogSegment(
            type=type,
            start_offset=span.start_offset,
            end_offset=span.end_offset,
            records=span.entry.msg_count,
            bytes=await self._reader.size(span),
            created_at_ms=span.entry.created_at_ms,
            data_key=span.entry.data_key,
            byte_offset=span.entry.byte_offset,
        )

    async def fence(self, tp: TopicPartition, *, reason: str) -> Control:
        """From now on every append is refused, by every broker. Atomic: no append commits after this returns."""
        at = now_ms(self._clock)
        return (await self._records.change(tp, lambda now: control.fenced(now, tp, reason=reason, now_ms=at))).value

    async def unfence(self, tp: TopicPartition) -> Control:
        at = now_ms(self._clock)
        return (await self._records.change(tp, lambda now: control.unfenced(now, tp, now_ms=at))).value

    async def trim(self, tp: TopicPartition, before_offset: int) -> Control:
        """Records below the offset are gone at once for readers; retention frees their space later."""
        return (await self._records.change(tp, lambda now: control.trimmed(now, tp, before_offset))).value

    async def delete(self, topic: str, *, reason: str) -> list[TopicPartition]:
        """Deletes every partition of the topic. A produce opens it again, after the old offsets.

        One partition stays until the groups' offsets and the configuration are gone: a delete that fails in the middle
        is repeated and finds what it has left.
        """
        tps = await self.existing(topic)
        at = now_ms(self._clock)
        *others, last = tps
        for tp in others:
            await self._records.change(tp, lambda now: control.deleted(now, reason=reason, now_ms=at))
        await self._groups.forget(topic)
        await self._records.meta.delete(paths.config(topic), partition_key=topic)
        await self._records.change(last, lambda now: control.deleted(now, reason=reason, now_ms=at))
        await self._groups.forget(topic)  # of members that committed meanwhile
        return tps

    async def config(self, topic: str) -> TopicConfig | None:
        try:
            return decoded(await self._records.meta.get(paths.config(topic), partition_key=topic), TopicConfig).value
        except NotFound:
            return None

    async def configure(self, topic: str, config: TopicConfig) -> None:
        check_topic(topic)
        await self._records.meta.put(paths.config(topic), msgspec.json.encode(config), partition_key=topic)

    async def _exists(self, tp: TopicPartition) -> bool:
        found = await self._records.find(tp, paths.control(tp), Control)
        return found is not None and found.value.log_state != "DELETED"
