"""The reader: from an offset to its records, through control, sparse index and ranged gets.

A blob that vanishes between the index and the get was compacted or trimmed meanwhile: the index is read again. The
record at an offset never changes.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Coroutine, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar, cast

import msgspec

from lakebed.core.errors import Corrupt, NotFound
from lakebed.log import codec, control
from lakebed.log.codec import RecordBatch
from lakebed.log.codec import Records as AnyRecords
from lakebed.log.model import ENCODINGS, Control, IndexSpan, TopicPartition
from lakebed.log.paths import Uris
from lakebed.log.records import PAGE, Records
from lakebed.store.protocol import Store
from lakebed.store.runtime import StoreRuntime

T = TypeVar("T")

READS_MAX = 4  # times the index is read again for records whose blob has vanished
ENTRIES_FIRST = 16  # index entries read for one fetch; more when these do not cover the offset, or do not fill it
GETS_MAX = 64  # ranged gets of one reader at the same time
GAP_BYTES_MAX = 64 * 1024  # unwanted bytes between two slices that are read with them: cheaper than another request
SIZES_MAX = 100_000  # blobs of older versions whose size is remembered
PAGES_MAX = 64  # pages of index entries looked through for one that covers an offset


class Fetched(msgspec.Struct, frozen=True):
    """Records from `start_offset` on, in pieces; `next_offset` is where to go on."""

    start_offset: int
    next_offset: int
    high_watermark: int
    log_start_offset: int
    parts: tuple[AnyRecords, ...] = ()

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
        self._bodies, self._bytes_max = BatchCache(bodies_bytes), bodies_bytes
        self._sizes: dict[str, int] = {}
        self._slots = asyncio.Semaphore(GETS_MAX)
        self._gets = runtime.metrics.counter("lakebed_log_reads_total")

    async def control(self, tp: TopicPartition) -> Control:
        return (await self._records.control(tp)).value

    async def read(self, tp: TopicPartition, offset: int, *, bytes_max: int) -> Fetched:
        """Records from `offset` on, about `bytes_max` of them and at least one where there is one.

        Raises UnknownTopicPartition, OffsetOutOfRange, or Corrupt when stored bytes do not match the index.
        """
        return (await self.read_many([(tp, offset, bytes_max)], bytes_max=bytes_max))[0]

    async def read_many(self, wanted: Sequence[tuple[TopicPartition, int, int]], *, bytes_max: int) -> list[Fetched]:
        """Several reads that share downloads: what more than one of them needs of a blob is fetched together.

        The reads share `bytes_max`, and together they give no more, except for the first record batch of all. They hold
        no more than `bodies_bytes` of what is stored, or `bytes_max`. A partition for which nothing is left of either
        has no records in the answer.
        """
        avoid: set[str] = set()
        share = max(1, bytes_max // len(wanted))
        for _ in range(READS_MAX):
            made = await gather_all(
                [self.plan(tp, offset, min(share, most), frozenset(avoid)) for tp, offset, most in wanted]
            )
            plans = fitting(made, share, max(self._bytes_max, bytes_max))
            given = bytes_max // max(1, sum(bool(spans) for _, spans in plans))
            try:
                batches = await self._load([span for _, spans in plans for span in spans])
            except BlobGone as gone:
                avoid.add(gone.data_key)
                continue
            left, found = bytes_max, list[Fetched]()
            for (now, spans), (_, offset, most) in zip(plans, wanted, strict=True):
                one = _fetched(now, spans, batches, offset, min(given, most))
                fits = one.size <= left or left == bytes_max
                found.append(one if fits else _fetched(now, (), batches, offset, 0))
                left -= found[-1].size
            return found
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
            spans = await self._covering(tp, offset, now, avoid, bytes_max)
            if spans:
                return now, within(spans, bytes_max)
        raise Corrupt(f"offset {offset} of {tp} is committed, but no index entry with a blob covers it", offset=offset)

    async def _covering(
        self, tp: TopicPartition, offset: int, now: Control, avoid: frozenset[str], bytes_max: int
    ) -> list[IndexSpan]:
        """Empty when nothing covers the offset: it was trimmed since the control record was read, or worse."""
        seen: list[IndexSpan] = []
        look_from = offset
        for page in range(PAGES_MAX):
            limit = ENTRIES_FIRST if page == 0 else PAGE
            more = await self._records.spans(tp, look_from, limit=limit)
            seen += more
            spans, _ = chain_spans(offset, seen, now, avoid=avoid)
            enough = page > 0 or sum(span.entry.byte_length or bytes_max for span in spans) >= bytes_max
            if (spans and enough) or len(more) < limit:
                return spans
            look_from = more[-1].end_offset + 1
        return []

    async def batch(self, span: IndexSpan) -> RecordBatch:
        """The whole batch behind one index entry. Raises BlobGone."""
        return (await self._load([span]))[slice_of(span)]

    async def batches(self, spans: Sequence[IndexSpan]) -> dict[tuple[str, int], RecordBatch]:
        """The batches of all these entries, by `slice_of`; a blob that several are in is read once. Raises BlobGone."""
        return await self._load(spans)

    async def size(self, span: IndexSpan) -> int:
        """How many bytes a span's records take in the bucket; asked once of a blob whose entry does not tell."""
        if span.entry.byte_length is not None:
            return span.entry.byte_length
        if span.entry.data_key not in self._sizes:
            if len(self._sizes) >= SIZES_MAX:
                self._sizes.clear()
            self._sizes[span.entry.data_key] = await stored_bytes(self._store, self._uris, span)
        return self._sizes[span.entry.data_key]

    async def _load(self, spans: Sequence[IndexSpan]) -> dict[tuple[str, int], RecordBatch]:
        batches: dict[tuple[str, int], RecordBatch] = {}
        missing: dict[str, list[IndexSpan]] = {}
        for span in spans:
            kept = self._bodies.get(slice_of(span))
            if kept is not None:
                batches[slice_of(span)] = kept
            else:
                missing.setdefault(span.entry.data_key, []).append(span)
        gets = [(key, group) for key, of_blob in missing.items() for group in together(of_blob)]
        bodies = await gather_all([self._download(data_key, group) for data_key, group in gets])
        for (_, group), of_group in zip(gets, bodies, strict=True):
            for span, body in zip(group, of_group, strict=True):
                batch = _checked(span, body)
                batches[slice_of(span)] = batch
                self._bodies.keep(slice_of(span), batch, len(body))
        return batches

    async def _download(self, data_key: str, spans: Sequence[IndexSpan]) -> list[memoryview]:
        """The bodies of spans that `together` joined, with one get."""
        key, last = self._uris.key(data_key), spans[-1].entry
        first_byte = spans[0].entry.byte_offset or 0
        async with self._slots:
            self._gets.inc()
            try:
                if last.byte_length is None:
                    return [memoryview((await self._store.get(key)).data)] * len(spans)
                length = (last.byte_offset or 0) + last.byte_length - first_byte
                data = memoryview(await self._store.get_range(key, first_byte, length))
            except NotFound as error:
                raise BlobGone(data_key) from error
        return [_cut(data, first_byte, span) for span in spans]


async def gather_all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all of them, run side by side; the first error when they have all ended, so that none is left."""
    if len(work) == 1:
        return [await work[0]]
    found = await asyncio.gather(*work, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return cast(list[T], found)


def together(spans: Sequence[IndexSpan]) -> list[list[IndexSpan]]:
    """Spans of one blob in groups that one get reads: neighbours, with small gaps at most. An entry without a length is
    a whole blob."""
    groups: list[list[IndexSpan]] = []
    end = 0
    for span in sorted(spans, key=lambda span: span.entry.byte_offset or 0):
        place = span.entry
        start = place.byte_offset or 0
        if not groups or place.byte_length is None or start > end + GAP_BYTES_MAX:
            groups.append([])
        groups[-1].append(span)
        end = max(end, start + (place.byte_length or 0))
    return groups


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


def slice_of(span: IndexSpan) -> tuple[str, int]:
    """The blob of a span and where its body begins: the key of its batch."""
    return span.entry.data_key, span.entry.byte_offset or 0


def _cut(data: memoryview, first_byte: int, span: IndexSpan) -> memoryview:
    """A span's body in what was read from `first_byte` on."""
    assert span.entry.byte_length is not None
    start = (span.entry.byte_offset or 0) - first_byte
    end = start + span.entry.byte_length
    if end > len(data):
        raise Corrupt(f"{span.entry.data_key} ends at byte {first_byte + len(data)}, before {first_byte + end}")
    return data[start:end]


def _checked(span: IndexSpan, body: memoryview) -> RecordBatch:
    if span.entry.encoding not in ENCODINGS:
        raise Corrupt(f"{span.entry.data_key} is encoded as {span.entry.encoding!r}; {sorted(ENCODINGS)} are known")
    batch = codec.decode(body)
    if batch.records.count != span.entry.msg_count:
        raise Corrupt(
            f"{span.entry.data_key} holds {batch.records.count} records, but the index has {span.entry.msg_count}"
        )
    return batch


def _fetched(
    now: Control, spans: Sequence[IndexSpan], batches: dict[tuple[str, int], RecordBatch], offset: int, bytes_max: int
) -> Fetched:
    parts: list[AnyRecords] = []
    at, left = offset, bytes_max
    for start, records in _pieces(spans, batches):
        first = at - start
        if first >= records.count:
            continue
        part = records.take(first, left, least=0 if parts else 1)
        parts += [part] if part.count else []
        at, left = at + part.count, left - part.size
        if first + part.count < records.count or left <= 0:
            break
    return Fetched(offset, at, now.sequence_counter, now.log_start_offset, tuple(parts))


def _pieces(
    spans: Sequence[IndexSpan], batches: dict[tuple[str, int], RecordBatch]
) -> Iterator[tuple[int, AnyRecords]]:
    """The records of these spans with their first offsets."""
    for span in spans:
        start = span.start_offset
        for records in batches[slice_of(span)].parts():
            yield start, records
            start += records.count


def pending_span(control: Control) -> IndexSpan | None:
    """The pending append, which readers can read too."""
    pending = control.pending
    return IndexSpan(pending.start_offset, pending.end_offset, pending.entry()) if pending is not None else None


def chain_spans(
    offset: int, spans: Sequence[IndexSpan], control: Control, *, avoid: frozenset[str] = frozenset()
) -> tuple[list[IndexSpan], int]:
    """The spans to read one after another from `offset`, and the offset after the last of them."""
    last = pending_span(control)
    usable = [span for span in [*spans, *([last] if last else [])] if span.entry.data_key not in avoid]
    usable.sort(key=lambda span: span.end_offset)
    starts = [*accumulate([span.start_offset for span in reversed(usable)], min)][::-1]  # the lowest from there on
    found: list[IndexSpan] = []
    at = 0
    while offset <= control.sequence_counter:
        while at < len(usable) and usable[at].end_offset < offset:
            at += 1
        until = bisect_right(starts, offset, at)  # none behind it begins early enough
        covering = [span for span in usable[at:until] if span.covers(offset)]
        if not covering:
            break
        best = min(covering, key=lambda span: (span.entry.type != "COMPACTED", -span.end_offset))
        found.append(best)
        offset = best.end_offset + 1
    return found, offset


def fitting(
    plans: Sequence[tuple[Control, list[IndexSpan]]], share: int, bytes_max: int
) -> list[tuple[Control, list[IndexSpan]]]:
    """The plans with their spans as long as these fit into `bytes_max`; without, where they do not. The first fits."""
    found: list[tuple[Control, list[IndexSpan]]] = []
    left = bytes_max
    for now, spans in plans:
        size = sum(span.entry.byte_length or share for span in spans)
        fits = size <= left or left == bytes_max
        found.append((now, spans if fits else []))
        left -= size if fits else 0
    return found


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
