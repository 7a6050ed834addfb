"""The records of one partition, in one body: `bytes-batch-v1` and `kafka-batches-v1`. Layout in docs/formats/log.md.

    0   4  magic "LLB1" or "LLK1"
    4   4  u32 record count N, 1 or more
    8   4  u32 segment count S, 1 to N
    12  4  u32 CRC-32 of everything after this header
    16     S × (u32 records, u64 created_at_ms)   one segment per append, so times survive compaction
           LLB1: N × u32 record length, then the records' bytes, end to end
           LLK1: Kafka's record batches, end to end, as a producer made them

All numbers are little-endian. Bodies are concatenated part by part: compaction never reads a single record.

In memory, records are two columns: their lengths, and their bytes end to end. To slice and measure thousands of records
takes a few calls into C, and slices are views, not copies. The binary content type carries the same columns, and the
tail cache keeps them. Records with a key, headers or a timestamp of their own are Kafka's record batches, and stay so.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec

from lakebed.core.errors import Corrupt, Invalid
from lakebed.log import kafka_batch
from lakebed.log.kafka_batch import KafkaRecord, KafkaRecords
from lakebed.log.kafka_compression import Buffer
from lakebed.log.model import ENCODING, KAFKA_ENCODING

try:  # the same checksum in a fourteenth of the time, where the gateway's packages are installed
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

assert sys.byteorder == "little", "the lengths column is read in place, and is little-endian"

WIDTH = 4  # bytes per length

MAGIC = b"LLB1"
KAFKA_MAGIC = b"LLK1"
HEADER = struct.Struct("<4sIII")
SEGMENT = struct.Struct("<IQ")


class RecordColumns(msgspec.Struct, frozen=True, gc=False):
    """`count` records: `lengths` holds a little-endian u32 for each, `payload` their bytes in order.

    `at_ms` is when they were appended, 0 before that.
    """

    count: int
    lengths: Buffer
    payload: Buffer
    at_ms: int = 0

    @property
    def size(self) -> int:
        return len(self.payload)

    def __iter__(self) -> Iterator[bytes]:
        """Each record, copied out. Not for hot paths."""
        payload, start = memoryview(self.payload), 0
        for length in memoryview(self.lengths).cast("I"):
            yield bytes(payload[start : start + length])
            start += length

    def slice(self, first: int, last: int) -> RecordColumns:
        """The records [first, last), as views."""
        if first <= 0 and last >= self.count:
            return self
        lengths = memoryview(self.lengths).cast("I")
        begin = sum(lengths[:first])
        end = begin + sum(lengths[first:last])
        of_slice = memoryview(self.lengths)[first * WIDTH : last * WIDTH]
        return RecordColumns(last - first, of_slice, memoryview(self.payload)[begin:end], self.at_ms)

    def take(self, first: int, bytes_max: int, *, least: int) -> RecordColumns:
        """The records from `first` on that have at most `bytes_max` bytes together, but at least `least` of them.

        A reader asks for at least one: a record that is larger than its limit would otherwise block it.
        """
        return self.slice(first, first + max(least, self.fitting(first, bytes_max)))

    def fitting(self, first: int, bytes_max: int) -> int:
        """How many records from `first` on have at most `bytes_max` bytes together."""
        lengths = memoryview(self.lengths).cast("I")
        if first == 0 and self.size <= bytes_max:
            return self.count
        return bisect_right(list(accumulate(lengths[first:])), bytes_max)


Records = RecordColumns | KafkaRecords


def columns(records: Sequence[bytes]) -> RecordColumns:
    return RecordColumns(len(records), array("I", map(len, records)).tobytes(), b"".join(records))


def checked(count: int, lengths: Buffer, payload: Buffer) -> RecordColumns:
    """Columns from outside. Raises Invalid unless the lengths are `count` and add up to the payload."""
    if count <= 0 or len(lengths) != count * WIDTH:
        raise Invalid(f"{len(lengths)} bytes of lengths are not the lengths of {count} records")
    if sum(memoryview(lengths).cast("I")) != len(payload):
        raise Invalid(f"the record lengths do not add up to the payload's {len(payload)} bytes")
    return RecordColumns(count, lengths, payload)


class BatchSegment(msgspec.Struct, frozen=True):
    """A run of records that were appended together."""

    count: int
    created_at_ms: int


class RecordBatch(msgspec.Struct, frozen=True):
    records: Records
    segments: tuple[BatchSegment, ...]

    def parts(self) -> Iterator[Records]:
        """The records in order; columns in one piece per append, each with its time."""
        records = self.records
        if isinstance(records, KafkaRecords):
            yield records
            return
        lengths, payload = memoryview(records.lengths).cast("I"), memoryview(records.payload)
        first = begin = 0
        for segment in self.segments:
            last = first + segment.count
            end = begin + sum(lengths[first:last])
            of_part = memoryview(records.lengths)[first * WIDTH : last * WIDTH]
            yield RecordColumns(segment.count, of_part, payload[begin:end], segment.created_at_ms)
            first, begin = last, end

    def first_at(self, created_at_ms: int) -> int | None:
        """The index of the first record appended at that time or later."""
        index = 0
        for segment in self.segments:
            if segment.created_at_ms >= created_at_ms:
                return index
            index += segment.count
        return None


def appended(records: Records, at_ms: int) -> Records:
    """These records, appended at that time."""
    return msgspec.structs.replace(records, at_ms=at_ms) if isinstance(records, RecordColumns) else records


def decoded(records: Records) -> list[KafkaRecord]:
    """Every record with its key, headers and timestamp. Not for hot paths."""
    if isinstance(records, KafkaRecords):
        return records.decoded()
    return [KafkaRecord(value, timestamp_ms=records.at_ms) for value in records]


def as_batches(records: Records, at_ms: int) -> KafkaRecords:
    """Columns as one of Kafka's record batches, with `at_ms` as their timestamp; batches as they are."""
    if isinstance(records, KafkaRecords):
        return records
    return KafkaRecords(records.count, kafka_batch.encode_values(list(records), records.at_ms or at_ms))


def as_columns(records: Records) -> RecordColumns:
    """The values alone."""
    return records if isinstance(records, RecordColumns) else columns(list(records))


def encoding_of(parts: Sequence[Records]) -> str:
    """The form of a body with these records: one batch of Kafka's makes all of it record batches."""
    return KAFKA_ENCODING if any(isinstance(part, KafkaRecords) for part in parts) else ENCODING


def max_timestamp_ms(parts: Sequence[Records], at_ms: int) -> int:
    """The largest timestamp of records appended at `at_ms`; 0 where all have the time of their append."""
    stamped = [part.max_ms for part in parts if isinstance(part, KafkaRecords)]
    return max([*stamped, at_ms] if len(stamped) < len(parts) else stamped) if stamped else 0


def encode(parts: Sequence[Records], segments: Sequence[BatchSegment]) -> list[Buffer]:
    """The body of these records, as buffers to be written one after another."""
    buffers: list[Buffer] = [b"".join([SEGMENT.pack(segment.count, segment.created_at_ms) for segment in segments])]
    if encoding_of(parts) == KAFKA_ENCODING:
        magic = KAFKA_MAGIC
        buffers += [as_batches(part, segments[-1].created_at_ms).payload for part in parts]
    else:
        magic = MAGIC
        plain = [part for part in parts if isinstance(part, RecordColumns)]
        buffers += [*[part.lengths for part in plain], *[part.payload for part in plain]]
    crc = 0
    for buffer in buffers:
        crc = crc32(buffer, crc)
    return [HEADER.pack(magic, sum([part.count for part in parts]), len(segments), crc), *buffers]


def join(batches: Sequence[RecordBatch]) -> list[Buffer]:
    """The body of several batches, in order, each append with its time."""
    segments = [segment for batch in batches for segment in batch.segments]
    whole = [batch.records for batch in batches]
    if encoding_of(whole) == ENCODING:
        return encode(whole, segments)
    return encode([part for batch in batches for part in batch.parts()], segments)


def decode(body: Buffer) -> RecordBatch:
    """The batch in these bytes, as views on them. Raises Corrupt for anything that is not exactly one body."""
    if len(body) < HEADER.size:
        raise Corrupt(f"a batch body of {len(body)} bytes is shorter than its header")
    magic, count, segment_count, crc = HEADER.unpack_from(body)
    if magic not in (MAGIC, KAFKA_MAGIC):
        raise Corrupt(f"a batch body starts with {magic!r}, not {MAGIC!r} or {KAFKA_MAGIC!r}")
    view = memoryview(body)
    records_at = HEADER.size + segment_count * SEGMENT.size
    if not 1 <= segment_count <= count or records_at > len(body):
        raise Corrupt(f"a batch body claims {count} records in {segment_count} segments, but has {len(body)} bytes")
    if crc32(view[HEADER.size :]) != crc:
        raise Corrupt("a batch body does not match its checksum")
    segments = tuple(BatchSegment(*fields) for fields in SEGMENT.iter_unpack(view[HEADER.size : records_at]))
    if sum(segment.count for segment in segments) != count or any(segment.count == 0 for segment in segments):
        raise Corrupt(f"the segments of a batch body do not add up to its {count} records")
    read = _columns_in if magic == MAGIC else _batches_in
    return RecordBatch(read(count, view[records_at:]), segments)


def _columns_in(count: int, view: memoryview) -> RecordColumns:
    if count * WIDTH > len(view):
        raise Corrupt(f"a batch body claims {count} records, but has {len(view)} bytes for them")
    lengths, payload = view[: count * WIDTH], view[count * WIDTH :]
    if sum(lengths.cast("I")) != len(payload):
        raise Corrupt(f"the record lengths of a batch body do not add up to its {len(payload)} bytes")
    return RecordColumns(count, lengths, payload)


def _batches_in(count: int, view: memoryview) -> KafkaRecords:
    found = sum([batch.count for batch in kafka_batch.split(view)])
    if found != count:
        raise Corrupt(f"a batch body claims {count} records, but its record batches have {found}")
    return KafkaRecords(count, view)
