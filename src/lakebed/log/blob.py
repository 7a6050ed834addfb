"""The shared WAL blob `LLS1`: the bodies of several partitions in one object. Layout in docs/formats/log.md.

    0  4  magic "LLS1"
    4  4  u32 big-endian header length
    8     JSON header: version, created_at_ms,
          partitions[{topic, partition, msg_count, encoding, body_offset, body_length}]
          the bodies, end to end

`body_offset` counts from the first byte behind the header. Index entries carry `byte_offset`, which counts from the
start of the object, so a reader never needs the header; only `dump` reads it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import islice
from typing import Any

import msgspec

from lakebed.core.errors import Corrupt
from lakebed.log import blob, codec
from lakebed.log.kafka_compression import Buffer
from lakebed.log.model import ENCODING, KAFKA_ENCODING, TopicPartition

MAGIC = b"LLS1"
VERSION = 1
PREFIX = struct.Struct(">4sI")
HEADER_BYTES_MAX = 4 * 1024 * 1024  # tens of thousands of partitions

RECORDS_SHOWN = 5
BYTES_SHOWN = 60


class PartitionBody(msgspec.Struct, frozen=True):
    """One partition's body, still in buffers."""

    tp: TopicPartition
    msg_count: int
    buffers: Sequence[Buffer]
    encoding: str = ENCODING

    @property
    def size(self) -> int:
        return sum(map(len, self.buffers))


class BlobSlice(msgspec.Struct, frozen=True):
    """Where a body is in its object."""

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


def encode(bodies: Sequence[PartitionBody], created_at_ms: int) -> tuple[bytes, list[BlobSlice]]:
    """The blob, and the slice of each body in it. Copies the payload once."""
    headers: list[PartitionHeader] = []
    at = 0
    for body in bodies:
        size = body.size
        headers.append(PartitionHeader(body.tp.topic, body.tp.partition, body.msg_count, body.encoding, at, size))
        at += size
    header = msgspec.json.encode(BlobHeader(VERSION, created_at_ms, headers))
    base = PREFIX.size + len(header)
    blob = b"".join([PREFIX.pack(MAGIC, len(header)), header, *[buffer for body in bodies for buffer in body.buffers]])
    return blob, [BlobSlice(base + header.body_offset, header.body_length) for header in headers]


def decode_header(data: Buffer) -> tuple[BlobHeader, int]:
    """The header, and the offset of the first body. Raises Corrupt when the header does not match the data."""
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


def describe_blob(data: bytes) -> dict[str, Any]:
    """A shared blob or a batch body, by its magic. Raises Corrupt for anything else."""
    if data[:4] == blob.MAGIC:
        header, base = blob.decode_header(data)
        return {
            "format": "wal-shared",
            "version": header.version,
            "created_at_ms": header.created_at_ms,
            "partitions": [
                msgspec.to_builtins(part)
                | _batch(data[base + part.body_offset : base + part.body_offset + part.body_length])
                for part in header.partitions
            ],
        }
    if data[:4] in (codec.MAGIC, codec.KAFKA_MAGIC):
        return {"format": ENCODING if data[:4] == codec.MAGIC else KAFKA_ENCODING, **_batch(data)}
    raise Corrupt(f"{data[:4]!r} is the start of neither a shared blob nor a batch")


def _batch(body: bytes) -> dict[str, Any]:
    batch = codec.decode(body)
    return {
        "records": batch.records.count,
        "bytes": batch.records.size,
        "segments": [msgspec.to_builtins(segment) for segment in batch.segments],
        "first": [_start(record) for record in islice(batch.records, RECORDS_SHOWN)],
    }


def _start(record: bytes) -> str:
    return record[:BYTES_SHOWN].decode(errors="backslashreplace")
