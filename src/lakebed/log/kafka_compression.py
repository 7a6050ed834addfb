"""The compressions of Kafka's record batches. Every one is bounded: a small batch cannot demand much memory."""

from __future__ import annotations

import struct
import zlib
from typing import Any

from lakebed.core import compression
from lakebed.core.errors import Corrupt, Invalid, Unavailable

Buffer = bytes | memoryview

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
CODECS = frozenset({NONE, GZIP, SNAPPY, LZ4, ZSTD})

XERIAL = b"\x82SNAPPY\x00"  # a framing around raw snappy blocks, which the Java client and others write
XERIAL_HEADER = 16
LENGTH = struct.Struct(">i")
LZ4_FIRST = 4  # times the compressed size, the first guess of an LZ4 frame's content
WINDOW_LOG_MAX = 27  # what zstd's own decoder allows by default; bounded by `bytes_max` anyway


def decompress(codec: int, data: Buffer, *, bytes_max: int) -> bytes:
    """The content. Raises Corrupt where it is damaged or larger than `bytes_max`."""
    if codec == NONE:
        return bytes(data)
    if codec == GZIP:
        return _gunzip(data, bytes_max)
    if codec == ZSTD:
        try:
            return compression.decompress(data, bytes_max, what="a record batch", window_log_max=WINDOW_LOG_MAX)
        except Invalid as error:
            raise Corrupt(error.message) from error
    return _snappy(bytes(data), bytes_max) if codec == SNAPPY else _lz4(bytes(data), bytes_max)


def _gunzip(data: Buffer, bytes_max: int) -> bytes:
    out = b""
    rest: Buffer = data
    try:
        while len(rest):  # members may follow one another
            inflate = zlib.decompressobj(wbits=31)
            out += inflate.decompress(rest, bytes_max - len(out) + 1)
            if len(out) > bytes_max:
                raise _too_large(bytes_max)
            if not inflate.eof:
                raise Corrupt("the gzip content of a record batch is cut")
            rest = inflate.unused_data
    except zlib.error as error:
        raise Corrupt(f"the gzip content of a record batch is damaged: {error}") from error
    return out


def _snappy(data: bytes, bytes_max: int) -> bytes:
    if not data.startswith(XERIAL):
        return _snappy_block(data, bytes_max)
    out: list[bytes] = []
    at, size = XERIAL_HEADER, 0
    while at < len(data):
        if at + LENGTH.size > len(data):
            raise Corrupt("the snappy content of a record batch is cut")
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size
        if length < 0 or at + length > len(data):
            raise Corrupt("the snappy content of a record batch is cut")
        out.append(_snappy_block(data[at : at + length], bytes_max - size))
        size += len(out[-1])
        at += length
    return b"".join(out)


def _snappy_block(data: bytes, bytes_max: int) -> bytes:
    """A raw block begins with the length of its content."""
    claimed = shift = 0
    for byte in data[:5]:
        claimed |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if claimed > bytes_max:
        raise _too_large(bytes_max)
    cramjam = _cramjam()
    try:
        return bytes(cramjam.snappy.decompress_raw(data))
    except cramjam.DecompressionError as error:
        raise Corrupt(f"the snappy content of a record batch is damaged: {error}") from error


def _lz4(data: bytes, bytes_max: int) -> bytes:
    """An LZ4 frame need not say how large its content is: the buffer grows up to the limit."""
    cramjam = _cramjam()
    room = max(65_536, len(data) * LZ4_FIRST)
    while True:
        room = min(room, bytes_max)
        into = bytearray(room)
        try:
            return bytes(memoryview(into)[: cramjam.lz4.decompress_into(data, into)])
        except cramjam.DecompressionError as error:
            if room >= bytes_max or "write" not in str(error).lower():
                raise Corrupt(f"the LZ4 content of a record batch is damaged or too large: {error}") from error
            room *= 4


def _too_large(bytes_max: int) -> Corrupt:
    return Corrupt(f"a record batch has more than {bytes_max} bytes when it is decompressed")


def _cramjam() -> Any:
    try:
        import cramjam
    except ImportError as error:
        raise Unavailable(
            "snappy and LZ4 need the package cramjam", hint="install lakebed[kafka], or lakebed[server]"
        ) from error
    return cramjam
