"""`bytes-batch-v1`: the records of one partition, in one body. Layout in docs/formats/bytes-batch.md.

    0   4  magic "LLB1"
    4   4  u32 record count N, 1 or more
    8   4  u32 segment count S, 1 to N
    12  4  u32 CRC-32 of everything after this header
    16     S × (u32 records, u64 created_at_ms)   one segment per append, so times survive compaction
           N × u32 record length
           the records' bytes, end to end

All numbers are little-endian. Bodies are concatenated part by part: compaction never reads a single record.

In memory, records are two columns: their lengths, and their bytes end to end. To slice and measure thousands of records
takes a few calls into C, and slices are views, not copies. The binary content type carries the same columns, and the
tail cache keeps them.
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec

from lakebed.core.errors import Corrupt, Invalid

Buffer = bytes | memoryview

assert sys.byteorder == "little", "the lengths column is read in place, and is little-endian"

WIDTH = 4  # bytes per length

MAGIC = b"LLB1"
HEADER = struct.Struct("<4sIII")
SEGMENT = struct.Struct("<IQ")


class RecordColumns(msgspec.Struct, frozen=True, gc=False):
    """`count` records: `lengths` holds a little-endian u32 for each, `payload` their bytes in order."""

    count: int
    lengths: Buffer
    payload: Buffer

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
        return RecordColumns(last - first, of_slice, memoryview(self.payload)[begin:end])

    def fitting(self, first: int, bytes_max: int) -> int:
        """How many records from `first` on have at most `bytes_max` bytes together."""
        lengths = memoryview(self.lengths).cast("I")
        if first == 0 and self.size <= bytes_max:
            return self.count
        return bisect_right(list(accumulate(lengths[first:])), bytes_max)


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
    records: RecordColumns
    segments: tuple[BatchSegment, ...]

    def first_at(self, created_at_ms: int) -> int | None:
        """The index of the first record appended at that time or later."""
        index = 0
        for segment in self.segments:
            if segment.created_at_ms >= created_at_ms:
                return index
            index += segment.count
        return None


def encode(parts: Sequence[RecordColumns], segments: Sequence[BatchSegment]) -> list[Buffer]:
    """The body of these records, as buffers to be written one after another."""
    buffers: list[Buffer] = [
        b"".join([SEGMENT.pack(segment.count, segment.created_at_ms) for segment in segments]),
        *[part.lengths for part in parts],
        *[part.payload for part in parts],
    ]
    crc = 0
    for buffer in buffers:
        crc = zlib.crc32(buffer, crc)
    return [HEADER.pack(MAGIC, sum([part.count for part in parts]), len(segments), crc), *buffers]


def decode(body: Buffer) -> RecordBatch:
    """The batch in these bytes, as views on them. Raises Corrupt for anything that is not exactly one body."""
    if len(body) < HEADER.size:
        raise Corrupt(f"a batch body of {len(body)} bytes is shorter than its header")
    magic, count, segment_count, crc = HEADER.unpack_from(body)
    if magic != MAGIC:
        raise Corrupt(f"a batch body starts with {magic!r}, not {MAGIC!r}")
    view = memoryview(body)
    lengths_at = HEADER.size + segment_count * SEGMENT.size
    payload_at = lengths_at + count * WIDTH
    if not 1 <= segment_count <= count or payload_at > len(body):
        raise Corrupt(f"a batch body claims {count} records in {segment_count} segments, but has {len(body)} bytes")
    if zlib.crc32(view[HEADER.size :]) != crc:
        raise Corrupt("a batch body does not match its checksum")
    segments = tuple(BatchSegment(*fields) for fields in SEGMENT.iter_unpack(view[HEADER.size : lengths_at]))
    if sum(segment.count for segment in segments) != count or any(segment.count == 0 for segment in segments):
        raise Corrupt(f"the segments of a batch body do not add up to its {count} records")
    lengths, payload = view[lengths_at:payload_at], view[payload_at:]
    if sum(lengths.cast("I")) != len(payload):
        raise Corrupt(f"the record lengths of a batch body do not add up to its {len(payload)} bytes")
    return RecordBatch(RecordColumns(count, lengths, payload), segments)
