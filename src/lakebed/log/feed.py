"""A topic as a feed for bulk readers such as Spark. The feed's offsets are those of the log, one for each partition.

Planning reads meta and gives slices of blobs; reading fetches those ranges, and needs meta only when a compaction has
moved the records meanwhile. Records that were trimmed before they were read are skipped.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from lakebed.core.context import Context
from lakebed.core.errors import Invalid, NotFound
from lakebed.core.feed import FeedFilter, FeedSlice, Limit, Offset
from lakebed.log.codec import RecordBatch, RecordColumns
from lakebed.log.kafka_batch import KafkaRecords
from lakebed.log.model import Control, IndexSpan, OffsetOutOfRange, TopicPartition, check_topic
from lakebed.log.paths import LAST_OFFSET, Uris
from lakebed.log.reader import BlobGone, LogReader, chain_spans
from lakebed.log.records import PAGE, Records
from lakebed.log.services import LogReadServices

MOVES_MAX = 4  # compactions that may overtake one read
TIME_MS_MAX = 2**63 // 1000  # in microseconds, a column has 64 bits


class RecordRange(msgspec.Struct, frozen=True):
    """The records [first, last] of a partition, and the stored batch they are in."""

    tp: TopicPartition
    first: int
    last: int
    span: IndexSpan


def open_feed(context: Context, options: Mapping[str, str]) -> TopicFeed:
    """`topic`; `start` and `end` (offsets: of all partitions, or JSON by partition; end exclusive)."""
    if "topic" not in options:
        raise Invalid("option topic is missing", hint='.option("topic", "orders")')
    services = LogReadServices(context)
    bounds = [_bounds(name, options.get(name, "")) for name in ("start", "end")]
    return TopicFeed(
        check_topic(options["topic"]),
        services.records,
        services.reader,
        services.uris,
        start=bounds[0],
        end=bounds[1],
    )


class TopicFeed:
    def __init__(
        self, topic: str, records: Records, reader: LogReader, uris: Uris, *, start: Offset, end: Offset
    ) -> None:
        """`start` and `end` by partition; "" applies to all others."""
        self._topic, self._records, self._reader, self._uris = topic, records, reader, uris
        self._start, self._end = start, end

    def schema(self) -> Any:
        import pyarrow as pa

        return pa.schema(
            [
                pa.field("topic", pa.string()),
                pa.field("partition", pa.int32()),
                pa.field("offset", pa.int64()),
                pa.field("time", pa.timestamp("us", "UTC")),
                pa.field("key", pa.binary()),
                pa.field("value", pa.binary()),
                pa.field("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
            ]
        )

    async def begin(self) -> Offset:
        return {str(n): _of(self._start, n, control.log_start_offset) - 1 for n, control in await self._controls()}

    async def reach(self, start: Offset, limit: Limit) -> Offset:
        """A limit of rows is exact: records are counted without being read. One of bytes counts each record as large as
        those stored with it are on average, so it also ends inside a compacted entry."""
        before: Offset = {}
        ends: Offset = {}
        for n, control in await self._controls():
            before[str(n)] = self._from(start, n, control) - 1
            wanted = min(control.sequence_counter, _of(self._end, n, control.next_offset) - 1)
            ends[str(n)] = max(wanted, before[str(n)])
        kept = {n: at for n, at in start.items() if n not in ends}  # deleted since: no more records
        if not limit:
            return {**kept, **ends}
        pieces = _oldest_first(await self._planned(start, ends, FeedFilter(), limit))
        reached = {n: min(ends[n], before[n]) for n in ends} | kept
        rows = size_bytes = 0
        for objects, piece in enumerate(pieces, 1):
            place = _place(piece)
            taken = _fitting(piece, limit, rows, size_bytes)
            if not taken or (objects > 1 and limit.exceeded(objects, 0, 0)):
                break
            reached[str(place.tp.partition)] = place.first + taken - 1
            rows, size_bytes = rows + taken, size_bytes + piece.size_bytes * taken // piece.rows
        return reached

    async def slices(self, start: Offset, end: Offset, wanted: FeedFilter) -> list[FeedSlice]:
        return await self._planned(start, end, wanted, Limit())

    async def _planned(self, start: Offset, end: Offset, wanted: FeedFilter, limit: Limit) -> list[FeedSlice]:
        """Of each partition no more than the limit could ever take."""
        found: list[FeedSlice] = []
        for n, control in await self._controls():
            first, last = self._from(start, n, control), end.get(str(n), 0)
            first = max(first, wanted.low.get("offset", first))
            last = min(last, wanted.high.get("offset", last))
            if first > last or not wanted.takes("partition", n):
                continue
            tp = TopicPartition(self._topic, n)
            mine: list[FeedSlice] = []
            rows = size_bytes = 0
            async for span in self._spans(tp, first, last, control):
                if "time" in wanted.low and span.entry.newest_ms < wanted.low["time"].timestamp() * 1000 - 1:
                    continue
                piece = self._piece(tp, span, first, last, await self._reader.size(span))
                mine.append(piece)
                rows, size_bytes = rows + piece.rows, size_bytes + piece.size_bytes
                if len(mine) > 1 and limit.exceeded(len(mine), rows, size_bytes):
                    break
            found += mine
        return found

    async def described(self, piece: FeedSlice) -> FeedSlice:
        return piece

    async def load(self, piece: FeedSlice, columns: Sequence[str], wanted: FeedFilter) -> Any:
        import pyarrow as pa

        place = _place(piece)
        batches = [self._rows(place, span, batch, columns) for span, batch in await self._batches(place)]
        if len(batches) == 1:
            return batches[0]
        return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]

    async def high_watermark(self) -> Offset:
        """The last offset of each partition."""
        return {str(n): control.sequence_counter for n, control in await self._controls()}

    async def _batches(self, place: RecordRange) -> list[tuple[IndexSpan, RecordBatch]]:
        try:
            return [(place.span, await self._reader.batch(place.span))]
        except BlobGone as gone:
            avoid = {gone.data_key}
        for _ in range(MOVES_MAX):
            try:
                spans = await self._moved(place, frozenset(avoid))
                return [(span, await self._reader.batch(span)) for span in spans]
            except BlobGone as gone:
                avoid.add(gone.data_key)
            except OffsetOutOfRange as error:
                raise NotFound(f"{place.tp}: trimmed before the read: {error.message}") from error
        raise NotFound(f"{place.tp}: records {place.first} to {place.last} are not in the bucket")

    async def _moved(self, place: RecordRange, avoid: frozenset[str]) -> list[IndexSpan]:
        """Where the records are now."""
        spans: list[IndexSpan] = []
        at = place.first
        while at <= place.last:
            _, more = await self._reader.plan(place.tp, at, LAST_OFFSET, avoid)
            if not more:
                break
            spans += more
            at = more[-1].end_offset + 1
        return [span for span in spans if span.start_offset <= place.last]

    def _rows(self, place: RecordRange, span: IndexSpan, batch: RecordBatch, columns: Sequence[str]) -> Any:
        import pyarrow as pa

        count, schema = batch.records.count, self.schema()
        made: dict[str, Callable[[], Any]] = {
            "topic": lambda: pa.repeat(self._topic, count),
            "partition": lambda: pa.repeat(pa.scalar(place.tp.partition, pa.int32()), count),
            "offset": lambda: pa.array(np.arange(span.start_offset, span.end_offset + 1, dtype=np.int64)),
            **(_columns(batch, schema) if isinstance(batch.records, RecordColumns) else _fields(batch.records, schema)),
        }
        rows = pa.record_batch([made[name]() for name in columns], schema=pa.schema([schema.field(n) for n in columns]))
        first, last = max(place.first, span.start_offset), min(place.last, span.end_offset)
        return rows.slice(first - span.start_offset, last - first + 1)

    async def _controls(self) -> list[tuple[int, Control]]:
        found: list[tuple[int, Control]] = []
        async for tp in self._records.partitions(self._topic):
            control = (await self._records.control(tp)).value
            if control.log_state != "DELETED":
                found.append((tp.partition, control))
        return sorted(found, key=lambda one: one[0])

    async def _spans(self, tp: TopicPartition, first: int, last: int, control: Control) -> AsyncIterator[IndexSpan]:
        """What holds [first, last], page by page of the index."""
        at = first
        while at <= last:
            found, behind = chain_spans(at, await self._records.spans(tp, at, limit=PAGE), control)
            if not found:  # behind entries that a compaction has not deleted yet: the reader skips them
                _, found = await self._reader.plan(tp, at, LAST_OFFSET)
                behind = found[-1].end_offset + 1 if found else last + 1
            for span in found:
                if span.start_offset <= last:
                    yield span
            at = behind

    def _from(self, start: Offset, partition: int, control: Control) -> int:
        """The first offset after `start` that still exists. A partition that is not in `start` is read whole."""
        known = start.get(str(partition), _of(self._start, partition, control.log_start_offset) - 1)
        return max(known + 1, control.log_start_offset)

    def _piece(self, tp: TopicPartition, span: IndexSpan, first: int, last: int, size_bytes: int) -> FeedSlice:
        first, last = max(first, span.start_offset), min(last, span.end_offset)
        encoded = msgspec.json.encode(RecordRange(tp, first, last, span))
        key = f"{self._uris.key(span.entry.data_key)} ({tp} {first}-{last})"
        rows = last - first + 1
        return FeedSlice(key, rows, size_bytes * rows // span.entry.msg_count, encoded)


def _oldest_first(pieces: Sequence[FeedSlice]) -> list[FeedSlice]:
    """By the time of their appends; those of a partition stay in their order, also where brokers' clocks differ."""
    reached_ms: dict[int, int] = {}
    ordered: list[tuple[int, FeedSlice]] = []
    for piece in pieces:
        place = _place(piece)
        n = place.tp.partition
        reached_ms[n] = max(reached_ms.get(n, 0), place.span.entry.appended_at_ms)
        ordered.append((reached_ms[n], piece))
    return [piece for _, piece in sorted(ordered, key=lambda one: one[0])]


def _fitting(piece: FeedSlice, limit: Limit, rows: int, size_bytes: int) -> int:
    """How many rows of a piece fit behind so many rows and bytes; at least one where there are none yet."""
    taken = min(piece.rows, limit.rows - rows) if limit.rows else piece.rows
    left = limit.size_bytes - size_bytes
    if limit.size_bytes and piece.size_bytes > left:
        taken = min(taken, max(0, piece.rows * left // piece.size_bytes))
    return max(taken, 0 if rows else 1)


def _columns(batch: RecordBatch, schema: Any) -> dict[str, Callable[[], Any]]:
    """Values as they are stored, without a copy of a single one."""
    import pyarrow as pa

    records = batch.records
    assert isinstance(records, RecordColumns)
    offsets = np.concatenate(([0], np.cumsum(np.frombuffer(records.lengths, "<u4").astype(np.int64)))).astype(np.int32)
    appended_ms = np.repeat(
        np.array([segment.created_at_ms for segment in batch.segments], np.int64),
        [segment.count for segment in batch.segments],
    )
    return {
        "time": lambda: pa.array(appended_ms * 1000).cast(schema.field("time").type),
        "key": lambda: pa.nulls(records.count, pa.binary()),
        "value": lambda: pa.Array.from_buffers(
            pa.binary(), records.count, [None, pa.py_buffer(offsets), pa.py_buffer(records.payload)]
        ),
        "headers": lambda: pa.nulls(records.count, schema.field("headers").type),
    }


def _fields(records: KafkaRecords, schema: Any) -> dict[str, Callable[[], Any]]:
    """The fields of record batches; `time` is the record's own timestamp, and null where no timestamp holds it."""
    import pyarrow as pa

    found = records.decoded()
    times_us = [one.timestamp_ms * 1000 if abs(one.timestamp_ms) < TIME_MS_MAX else None for one in found]

    def column(name: str, values: Sequence[Any]) -> Callable[[], Any]:
        return lambda: pa.array(values, schema.field(name).type)

    return {
        "time": column("time", times_us),
        "key": column("key", [record.key for record in found]),
        "value": column("value", [record.value for record in found]),
        "headers": column("headers", [[{"key": k, "value": v} for k, v in one.headers] or None for one in found]),
    }


def _place(piece: FeedSlice) -> RecordRange:
    return msgspec.json.decode(piece.locator, type=RecordRange)


def _bounds(name: str, text: str) -> Offset:
    if not text:
        return {}
    try:
        return (
            {"": int(text)} if text.isascii() and text.isdecimal() else msgspec.json.decode(text, type=dict[str, int])
        )
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Invalid(f"option {name}: {text!r} is neither an offset nor offsets by partition") from error


def _of(bounds: Offset, partition: int, otherwise: int) -> int:
    return bounds.get(str(partition), bounds.get("", otherwise))
