"""The binary content type of produce and consume: a JSON header, then each partition's columns as they are stored.

    0  4  magic "LLC1"
    4  4  u32 big-endian header length
    8     JSON header
          for each partition of the header, in order: count × u32 little-endian record length, then payload_bytes bytes

A produce request's header is {"topic_partitions": [{topic, partition, count, payload_bytes, producer_id?, sequence?}]};
a consume answer's header is the JSON answer with `payload_bytes` where it would have `records`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from lakebed.errors import Invalid
from lakebed.log.columns import WIDTH, Buffer, Columns, checked
from lakebed.wire import decoder

MEDIA_TYPE = "application/vnd.lakebed.columns"
MAGIC = b"LLC1"
PREFIX = struct.Struct(">4sI")
HEADER_BYTES_MAX = 4 * 1024 * 1024


class FramePartition(msgspec.Struct, frozen=True, omit_defaults=True):
    topic: Annotated[str, msgspec.Meta(min_length=1)]
    partition: Annotated[int, msgspec.Meta(ge=0)]
    count: Annotated[int, msgspec.Meta(ge=1)]
    payload_bytes: Annotated[int, msgspec.Meta(ge=0)]
    producer_id: str | None = None
    sequence: int | None = None


class FrameHeader(msgspec.Struct, frozen=True):
    topic_partitions: Annotated[list[FramePartition], msgspec.Meta(min_length=1)]


def encode(header: Any, parts: Sequence[Columns]) -> bytes:
    """A frame: one copy of everything. Several parts may belong to one partition only when its columns are joined."""
    head = msgspec.json.encode(header)
    buffers: list[Buffer] = [PREFIX.pack(MAGIC, len(head)), head]
    for part in parts:
        buffers += (part.lengths, part.payload)
    return b"".join(buffers)


def encode_grouped(header: Any, groups: Sequence[Sequence[Columns]]) -> bytes:
    """A frame whose partitions come in pieces: all lengths of a partition, then all its payloads."""
    head = msgspec.json.encode(header)
    buffers: list[Buffer] = [PREFIX.pack(MAGIC, len(head)), head]
    for parts in groups:
        buffers += [part.lengths for part in parts]
        buffers += [part.payload for part in parts]
    return b"".join(buffers)


def decode(body: Buffer) -> list[tuple[FramePartition, Columns]]:
    """A produce request's partitions, as views on the body. Raises Invalid for anything that does not add up."""
    header, at = decode_header(body, FrameHeader)
    view = memoryview(body)
    found: list[tuple[FramePartition, Columns]] = []
    for part in header.topic_partitions:
        payload_at = at + part.count * WIDTH
        end = payload_at + part.payload_bytes
        if end > len(view):
            raise Invalid(f"the frame ends before the records of {part.topic}/{part.partition} do")
        found.append((part, checked(part.count, view[at:payload_at], view[payload_at:end])))
        at = end
    if at != len(view):
        raise Invalid(f"{len(view) - at} bytes follow the last partition of the frame")
    return found


def decode_header(body: Buffer, kind: type[Any]) -> tuple[Any, int]:
    if len(body) < PREFIX.size:
        raise Invalid("the body is shorter than a frame's prefix")
    magic, length = PREFIX.unpack_from(body)
    if magic != MAGIC or length > HEADER_BYTES_MAX or PREFIX.size + length > len(body):
        raise Invalid(f"the body is no {MEDIA_TYPE} frame")
    try:
        header = decoder(kind).decode(memoryview(body)[PREFIX.size : PREFIX.size + length])
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"the header of the frame does not fit: {error}") from error
    return header, PREFIX.size + length
