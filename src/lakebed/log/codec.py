"""`bytes-batch-v1`: the records of one partition, in one body. Layout in docs/formats/bytes-batch.md.

    0   4  magic "LLB1"
    4   4  u32 record count N, 1 or more
    8   4  u32 segment count S, 1 to N
    12  4  u32 CRC-32 of everything behind this header
    16     S × (u32 records, u64 created_at_ms)   one segment per append, so times survive compaction
           N × u32 record length
           the records' bytes, end to end

All numbers are little-endian. Joining bodies joins their three parts: compaction never looks at a record.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import msgspec

from lakebed.errors import Corrupt
from lakebed.log.columns import WIDTH, Buffer, Columns

MAGIC = b"LLB1"
HEADER = struct.Struct("<4sIII")
SEGMENT = struct.Struct("<IQ")


class Segment(msgspec.Struct, frozen=True):
    """A run of records that were appended together."""

    count: int
    created_at_ms: int


class Batch(msgspec.Struct, frozen=True):
    records: Columns
    segments: tuple[Segment, ...]

    def first_at(self, created_at_ms: int) -> int | None:
        """The index of the first record appended at that time or later."""
        index = 0
        for segment in self.segments:
            if segment.created_at_ms >= created_at_ms:
                return index
            index += segment.count
        return None


def encode(parts: Sequence[Columns], segments: Sequence[Segment]) -> list[Buffer]:
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


def decode(body: Buffer) -> Batch:
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
    segments = tuple(Segment(*fields) for fields in SEGMENT.iter_unpack(view[HEADER.size : lengths_at]))
    if sum(segment.count for segment in segments) != count or any(segment.count == 0 for segment in segments):
        raise Corrupt(f"the segments of a batch body do not add up to its {count} records")
    lengths, payload = view[lengths_at:payload_at], view[payload_at:]
    if sum(lengths.cast("I")) != len(payload):
        raise Corrupt(f"the record lengths of a batch body do not add up to its {len(payload)} bytes")
    return Batch(Columns(count, lengths, payload), segments)
