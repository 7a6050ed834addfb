"""The shared WAL blob `LLS1`: the bodies of several partitions in one object. Layout in docs/formats/wal-shared.md.

    0  4  magic "LLS1"
    4  4  u32 big-endian header length
    8     JSON header: version, created_at_ms,
          partitions[{topic, partition, msg_count, encoding, body_offset, body_length}]
          the bodies, end to end

`body_offset` counts from the first byte behind the header. Index entries carry `byte_offset`, which counts from the
start of the object, so a reader needs the header never; only `dump` reads it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from lakebed.errors import Corrupt
from lakebed.log.columns import Buffer
from lakebed.log.model import ENCODING, TopicPartition

MAGIC = b"LLS1"
VERSION = 1
PREFIX = struct.Struct(">4sI")
HEADER_BYTES_MAX = 4 * 1024 * 1024  # tens of thousands of partitions


class Body(msgspec.Struct, frozen=True):
    """One partition's body, still in buffers."""

    tp: TopicPartition
    msg_count: int
    buffers: Sequence[Buffer]

    @property
    def size(self) -> int:
        return sum(map(len, self.buffers))


class Slice(msgspec.Struct, frozen=True):
    """Where a body lies in its object."""

    byte_offset: int
    byte_length: int


class PartitionHeader(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    msg_count: int
    encoding: str
    body_offset: int
    body_length: int


class BlobHeader(msgspec.Struct, frozen=True):
    version: int
    created_at_ms: int
    partitions: list[PartitionHeader]


def encode(bodies: Sequence[Body], created_at_ms: int) -> tuple[bytes, list[Slice]]:
    """The blob, and where each body lies in it. One copy of the payload."""
    headers: list[PartitionHeader] = []
    at = 0
    for body in bodies:
        size = body.size
        headers.append(PartitionHeader(body.tp.topic, body.tp.partition, body.msg_count, ENCODING, at, size))
        at += size
    header = msgspec.json.encode(BlobHeader(VERSION, created_at_ms, headers))
    base = PREFIX.size + len(header)
    blob = b"".join([PREFIX.pack(MAGIC, len(header)), header, *[buffer for body in bodies for buffer in body.buffers]])
    return blob, [Slice(base + header.body_offset, header.body_length) for header in headers]


def decode_header(data: Buffer) -> tuple[BlobHeader, int]:
    """The header and where the bodies begin. Raises Corrupt when it lies about what follows."""
    if len(data) < PREFIX.size:
        raise Corrupt(f"a shared blob of {len(data)} bytes is shorter than its prefix")
    magic, length = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise Corrupt(f"a shared blob starts with {magic!r}, not {MAGIC!r}")
    base = PREFIX.size + length
    if length > HEADER_BYTES_MAX or base > len(data):
        raise Corrupt(f"a shared blob of {len(data)} bytes claims a header of {length}")
    try:
        header = msgspec.json.decode(memoryview(data)[PREFIX.size : base], type=BlobHeader)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"the header of a shared blob does not decode: {error}") from error
    if header.version != VERSION:
        raise Corrupt(f"a shared blob has version {header.version}; {VERSION} is known")
    for part in header.partitions:
        if part.body_offset < 0 or part.body_length < 0 or base + part.body_offset + part.body_length > len(data):
            raise Corrupt(f"a shared blob claims a body outside itself, of {part.topic}/{part.partition}")
    return header, base
