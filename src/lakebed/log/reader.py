"""The reader: from an offset to its records, through control, sparse index and ranged gets.

A blob that vanishes between the index and the get was compacted or trimmed meanwhile: the index is read again. The
record at an offset never changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from lakebed.core.errors import Corrupt, NotFound
from lakebed.log import codec, control
from lakebed.log.codec import RecordBatch, RecordColumns
from lakebed.log.model import ENCODING, Control, IndexSpan, TopicPartition
from lakebed.log.paths import Uris
from lakebed.log.records import PAGE, Records
from lakebed.store.protocol import Store
from lakebed.store.runtime import StoreRuntime

READS_MAX = 4  # times the index is read again for records whose blob has vanished
ENTRIES_FIRST = 16  # index entries read for one fetch; more when none of them covers the offset
PAGES_MAX = 64  # pages of index entries looked through for one that covers an offset


class Fetched(msgspec.Struct, frozen=True):
    """Records from `start_offset` on, in pieces; `next_offset` is where to go on."""

    start_offset: int
    next_offset: int
    high_watermark: int
    log_start_offset: int
    parts: tuple[RecordColumns, ...] = ()

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def count(self) -> int:
        return self.next_offset - self.start_offset


class LogReader:
    """Reads any partition. Keeps decoded batches, up to `bodies_bytes`, for sequential readers."""

    def __init__(self, runtime: StoreRuntime, records: Records, uris: Uris, *, bodies_bytes: int) -> None:
        self._store, self._records, self._uris = runtime.store, records, uris
        self._bodies = BatchCache(bodies_bytes)
        self._gets = runtime.metrics.counter("lakebed_log_reads_total")

    async def control(self, tp: TopicPartition) -> Control:
        return (await self._records.control(tp)).value

    async def read(self, tp: TopicPartition, offset: int, *, bytes_max: int) -> Fetched:
        """Records from `offset` on, about `bytes_max` of them and at least one where there is one.

        Raises UnknownTopicPartition, OffsetOutOfRange, or Corrupt when stored bytes do not match the index.
        """
        return (await self.read_many([(tp, offset, bytes_max)]))[0]

    async def read_many(self, wanted: Sequence[tuple[TopicPartition, int, int]]) -> list[Fetched]:
        """Several reads that share downloads: a blob that more than one of them needs is fetched once, whole."""
        avoid: set[str] = set()
        for _ in range(READS_MAX):
            plans = [await self.plan(tp, offset, bytes_max, frozenset(avoid)) for tp, offset, bytes_max in wanted]
            try:
                batches = await self._load([span for _, spans in plans for span in spans])
            except BlobGone as gone:
                avoid.add(gone.data_key)
                continue
            return [
                _fetched(now, spans, batches, offset, bytes_max)
                for (now, spans), (_, offset, bytes_max) in zip(plans, wanted, strict=True)
            ]
        raise Corrupt("records of the index are not in the bucket", blobs=sorted(avoid))

    async def plan(
        self, tp: TopicPartition, offset: int, bytes_max: int, avoid: frozenset[str] = frozenset()
    ) -> tuple[Control, list[IndexSpan]]:
        """The control record as it is now, and the spans that hold the records from `offset` on."""
        for _ in range(READS_MAX):
            now = await self.control(tp)
            control.demand_readable(now, tp, offset)
            if offset > now.sequence_counter:
                return now, []
            spans = await self._covering(tp, offset, now, avoid)
            if spans:
                return now, within(spans, bytes_max)
        raise Corrupt(f"offset {offset} of {tp} is committed, but no index entry with a blob covers it", offset=offset)

    async def _covering(self, tp: TopicPartition, offset: int, now: Control, avoid: frozenset[str]) -> list[IndexSpan]:
        """Empty when nothing covers the offset: it was trimmed since the control record was read, or worse."""
        seen: list[IndexSpan] = []
        look_from = offset
        for page in range(PAGES_MAX):
            limit = ENTRIES_FIRST if page == 0 else PAGE
            more = await self._records.spans(tp, look_from, limit=limit)
            seen += more
            spans, _ = chain_spans(offset, seen, now, avoid=avoid)
            if spans or len(more) < limit:
                return spans
            look_from = more[-1].end_offset + 1
        return []

    async def batch(self, span: IndexSpan) -> RecordBatch:
        """The whole batch behind one index entry. Raises BlobGone."""
        return (await self._load([span]))[_slice_of(span)]

    async def size(self, span: IndexSpan) -> int:
        return await stored_bytes(self._store, self._uris, span)

    async def _load(self, spans: Sequence[IndexSpan]) -> dict[tuple[str, int], RecordBatch]:
        batches: dict[tuple[str, int], RecordBatch] = {}
        missing: dict[str, list[IndexSpan]] = {}
        for span in spans:
            kept = self._bodies.get(_slice_of(span))
            if kept is not None:
                batches[_slice_of(span)] = kept
            else:
                missing.setdefault(span.entry.data_key, []).append(span)
        for data_key, of_blob in missing.items():
            for span, body in zip(of_blob, await self._download(data_key, of_blob), strict=True):
                batch = _checked(span, body)
                batches[_slice_of(span)] = batch
                self._bodies.keep(_slice_of(span), batch, len(body))
        return batches

    async def _download(self, data_key: str, spans: Sequence[IndexSpan]) -> list[memoryview]:
        key = self._uris.key(data_key)
        self._gets.inc()
        try:
            if len(spans) == 1 and spans[0].entry.byte_length is not None:
                place = spans[0].entry
                assert place.byte_length is not None
                return [memoryview(await self._store.get_range(key, place.byte_offset or 0, place.byte_length))]
            whole = memoryview((await self._store.get(key)).data)
        except NotFound as error:
            raise BlobGone(data_key) from error
        return [_cut(whole, span) for span in spans]


async def stored_bytes(store: Store, uris: Uris, span: IndexSpan) -> int:
    """How many bytes a span's records take in the bucket; 0 when they are gone."""
    if span.entry.byte_length is not None:
        return span.entry.byte_length
    try:
        return (await store.head(uris.key(span.entry.data_key))).size
    except NotFound:
        return 0


class BlobGone(Exception):
    """The blob of an index entry is not in the bucket any more."""

    def __init__(self, data_key: str) -> None:
        super().__init__(f"{data_key} is gone")
        self.data_key = data_key


class BatchCache:
    """Decoded batches; the least recently used is dropped first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max, self._bytes = bytes_max, 0
        self._kept: OrderedDict[tuple[str, int], tuple[RecordBatch, int]] = OrderedDict()

    def get(self, key: tuple[str, int]) -> RecordBatch | None:
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found[0]

    def keep(self, key: tuple[str, int], batch: RecordBatch, size: int) -> None:
        if size > self._bytes_max or key in self._kept:
            return
        self._kept[key] = (batch, size)
        self._bytes += size
        while self._bytes > self._bytes_max:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._bytes -= dropped


def _slice_of(span: IndexSpan) -> tuple[str, int]:
    return span.entry.data_key, span.entry.byte_offset or 0


def _cut(whole: memoryview, span: IndexSpan) -> memoryview:
    if span.entry.byte_length is None:
        return whole
    start = span.entry.byte_offset or 0
    if start + span.entry.byte_length > len(whole):
        raise Corrupt(f"{span.entry.data_key} ends at byte {len(whole)}, before {start + span.entry.byte_length}")
    return whole[start : start + span.entry.byte_length]


def _checked(span: IndexSpan, body: memoryview) -> RecordBatch:
    if span.entry.encoding != ENCODING:
        raise Corrupt(f"{span.entry.data_key} is encoded as {span.entry.encoding!r}; {ENCODING!r} is known")
    batch = codec.decode(body)
    if batch.records.count != span.entry.msg_count:
        raise Corrupt(
            f"{span.entry.data_key} holds {batch.records.count} records, but the index has {span.entry.msg_count}"
        )
    return batch


def _fetched(
    now: Control, spans: Sequence[IndexSpan], batches: dict[tuple[str, int], RecordBatch], offset: int, bytes_max: int
) -> Fetched:
    parts: list[RecordColumns] = []
    at, left = offset, bytes_max
    for span in spans:
        records = batches[_slice_of(span)].records
        first = at - span.start_offset
        fitting = records.fitting(first, left)
        if fitting == 0 and not parts:
            fitting = 1  # a record larger than the limit would otherwise block its reader
        if fitting == 0:
            break
        part = records.slice(first, first + fitting)
        parts.append(part)
        at, left = at + fitting, left - part.size
        if first + fitting < records.count or left <= 0:
            break
    return Fetched(offset, at, now.sequence_counter, now.log_start_offset, tuple(parts))


def pending_span(control: Control) -> IndexSpan | None:
    """The pending append, which readers can read too."""
    pending = control.pending
    return IndexSpan(pending.start_offset, pending.end_offset, pending.entry()) if pending is not None else None


def chain_spans(
    offset: int, spans: Sequence[IndexSpan], control: Control, *, avoid: frozenset[str] = frozenset()
) -> tuple[list[IndexSpan], int]:
    """The spans to read one after another from `offset`, and the offset after the last of them."""
    found: list[IndexSpan] = []
    last = pending_span(control)
    usable = [span for span in [*spans, *([last] if last else [])] if span.entry.data_key not in avoid]
    while offset <= control.sequence_counter:
        covering = [span for span in usable if span.covers(offset)]
        if not covering:
            break
        best = min(covering, key=lambda span: (span.entry.type != "COMPACTED", -span.end_offset))
        found.append(best)
        offset = best.end_offset + 1
        usable = [span for span in usable if span.end_offset >= offset]
    return found, offset


def within(spans: Sequence[IndexSpan], bytes_max: int) -> list[IndexSpan]:
    """As many of the first spans as are likely to fill `bytes_max`, at least one. A compacted one fills it alone."""
    taken: list[IndexSpan] = []
    size = 0
    for span in spans:
        taken.append(span)
        size += span.entry.byte_length or bytes_max
        if size >= bytes_max:
            break
    return taken
