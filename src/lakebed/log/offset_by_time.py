"""Finds an offset by time: by that of the append, or by the timestamps of the records."""

from __future__ import annotations

from lakebed.core.errors import Unavailable
from lakebed.log import codec
from lakebed.log.model import IndexSpan, TopicPartition
from lakebed.log.reader import READS_MAX, BlobGone, LogReader, pending_span
from lakebed.log.records import Records


class OffsetByTime:
    def __init__(self, records: Records, reader: LogReader) -> None:
        self._records, self._reader = records, reader

    async def at(self, tp: TopicPartition, at_ms: int) -> int:
        """The first offset appended at that time or later; the end of the log when there is none.

        Raises Unavailable when compactions kept replacing blobs: to return the end would make a consumer skip records.
        """
        for _ in range(READS_MAX):
            try:
                return await self._first_at(tp, at_ms)
            except BlobGone:
                continue  # compacted or trimmed meanwhile
        raise Unavailable(f"the blobs of {tp} were replaced {READS_MAX} times during the search for an offset")

    async def _first_at(self, tp: TopicPartition, at_ms: int) -> int:
        now = (await self._records.control(tp)).value
        async for span in self._records.all_spans(tp, now.log_start_offset):
            if span.entry.appended_at_ms < at_ms:
                continue
            if span.entry.type == "WAL":
                return max(span.start_offset, now.log_start_offset)
            first = (await self._reader.batch(span)).first_at(at_ms)
            if first is not None:
                return max(span.start_offset + first, now.log_start_offset)
        if now.pending is not None and now.pending.created_at_ms >= at_ms:
            return now.pending.start_offset
        return now.next_offset

    async def stamped(self, tp: TopicPartition, timestamp_ms: int) -> tuple[int, int] | None:
        """The first offset with that timestamp or a later one, and its timestamp; None when there is none.

        A record has its producer's timestamp, and without one that of its append. Raises as `at` does.
        """
        for _ in range(READS_MAX):
            try:
                return await self._first_stamped(tp, timestamp_ms)
            except BlobGone:
                continue  # compacted or trimmed meanwhile
        raise Unavailable(f"the blobs of {tp} were replaced {READS_MAX} times during the search for an offset")

    async def _first_stamped(self, tp: TopicPartition, timestamp_ms: int) -> tuple[int, int] | None:
        now = (await self._records.control(tp)).value
        last = pending_span(now)
        async for span in self._records.all_spans(tp, now.log_start_offset):
            if last is not None and span.end_offset == last.end_offset:
                last = None
            found = await self._stamped_in(span, now.log_start_offset, timestamp_ms)
            if found is not None:
                return found
        return await self._stamped_in(last, now.log_start_offset, timestamp_ms) if last is not None else None

    async def _stamped_in(self, span: IndexSpan, log_start: int, timestamp_ms: int) -> tuple[int, int] | None:
        if span.entry.newest_ms < timestamp_ms:
            return None
        batch = await self._reader.batch(span)
        at = span.start_offset
        for part in batch.parts():
            for record in codec.decoded(part):
                if record.timestamp_ms >= timestamp_ms and at >= log_start:
                    return at, record.timestamp_ms
                at += 1
        return None
