"""Records as two columns: their lengths, and their bytes end to end.

Nothing here works record by record: joining, slicing and measuring thousands of records are a few calls into C, and
slices are views, not copies. This is what the batch codec stores, the binary content type carries and the tail cache
keeps.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec

from lakebed.errors import Invalid

Buffer = bytes | memoryview

assert sys.byteorder == "little", "the lengths column is read in place, and is little-endian"

WIDTH = 4  # bytes per length


class Columns(msgspec.Struct, frozen=True, gc=False):
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

    def slice(self, first: int, last: int) -> Columns:
        """The records [first, last), as views."""
        if first <= 0 and last >= self.count:
            return self
        lengths = memoryview(self.lengths).cast("I")
        begin = sum(lengths[:first])
        end = begin + sum(lengths[first:last])
        of_slice = memoryview(self.lengths)[first * WIDTH : last * WIDTH]
        return Columns(last - first, of_slice, memoryview(self.payload)[begin:end])

    def fitting(self, first: int, bytes_max: int) -> int:
        """How many records from `first` on have at most `bytes_max` bytes together."""
        lengths = memoryview(self.lengths).cast("I")
        if first == 0 and self.size <= bytes_max:
            return self.count
        return bisect_right(list(accumulate(lengths[first:])), bytes_max)


EMPTY = Columns(0, b"", b"")


def columns(records: Sequence[bytes]) -> Columns:
    return Columns(len(records), array("I", map(len, records)).tobytes(), b"".join(records))


def checked(count: int, lengths: Buffer, payload: Buffer) -> Columns:
    """Columns from outside. Raises Invalid unless the lengths are `count` and add up to the payload."""
    if count <= 0 or len(lengths) != count * WIDTH:
        raise Invalid(f"{len(lengths)} bytes of lengths are not the lengths of {count} records")
    if sum(memoryview(lengths).cast("I")) != len(payload):
        raise Invalid(f"the record lengths do not add up to the payload's {len(payload)} bytes")
    return Columns(count, lengths, payload)


def joined(parts: Sequence[Columns]) -> Columns:
    if len(parts) == 1:
        return parts[0]
    return Columns(
        sum(part.count for part in parts),
        b"".join([part.lengths for part in parts]),
        b"".join([part.payload for part in parts]),
    )
