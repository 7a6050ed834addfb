"""Packs to bytes and back: the frames of several batches in one object, behind a table of them.

    magic "LMPK" · table bytes u32 · crc32c of the table u32 · table (JSON) · frames, end to end

Little endian. The key of a pack is the hash of all its bytes; a frame is verified by its own hash, so a reader needs
the table and one range. The table names identities, so what may refer to a pack follows from its first bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import google_crc32c
import msgspec

from lakebed.batches.model import BatchIdentity, FramePlace, check_identity
from lakebed.core.errors import Corrupt, Invalid

MAGIC = b"LMPK"
HEAD = struct.Struct("<4sII")
FRAMES_MAX = 1_000  # of one pack: some 300 KB of table with the longest ids
TABLE_BYTES_MAX = 4 * 1024 * 1024


class PackedFrame(msgspec.Struct, frozen=True):
    """A row of the table. `offset` counts from the beginning of the pack, so it is never 0."""

    identity: BatchIdentity
    sha256: str
    offset: int
    length: int

    def place(self, pack: str) -> FramePlace:
        return FramePlace(pack, self.offset, self.length)


class _Row(msgspec.Struct, frozen=True):
    identity: BatchIdentity
    sha256: str
    length: int


def encode_pack(frames: Sequence[tuple[BatchIdentity, str, bytes]]) -> tuple[bytes, list[PackedFrame]]:
    """The bytes of a pack of these identities, hashes and frames, and where each of them is."""
    rows = [_Row(identity, sha256, len(frame)) for identity, sha256, frame in frames]
    table = msgspec.json.encode(rows)
    head = HEAD.pack(MAGIC, len(table), google_crc32c.value(table))
    return b"".join([head, table, *(frame for _, _, frame in frames)]), _placed(rows, HEAD.size + len(table))


def table_bytes(head: bytes) -> int:
    """How long the table behind these first `HEAD.size` bytes is. Raises Corrupt."""
    if len(head) < HEAD.size or head[:4] != MAGIC:
        raise Corrupt("is not a pack")
    size = int(HEAD.unpack_from(head)[1])
    if size > TABLE_BYTES_MAX:
        raise Corrupt(f"has a table of {size} bytes, more than {TABLE_BYTES_MAX}")
    return size


def decode_table(data: bytes) -> list[PackedFrame]:
    """The frames of a pack, from its first bytes. Raises Corrupt."""
    end = HEAD.size + table_bytes(data)
    table = data[HEAD.size : end]
    if len(data) < end or google_crc32c.value(table) != HEAD.unpack_from(data)[2]:
        raise Corrupt("its table of frames is damaged")
    try:
        rows = msgspec.json.decode(table, type=list[_Row])
        for row in rows:
            check_identity(row.identity)
    except (msgspec.DecodeError, Invalid) as error:
        raise Corrupt(f"its table of frames cannot be read: {error}") from error
    return _placed(rows, end)


def _placed(rows: Sequence[_Row], at: int) -> list[PackedFrame]:
    found = []
    for row in rows:
        found.append(PackedFrame(row.identity, row.sha256, at, row.length))
        at += row.length
    return found
