"""Where each thing lies in a frame; see docs/formats/lmbatch.md. Little-endian throughout.

    prefix   32 bytes   magic, versions, flags, three lengths, zero, checksum
    header              identity and counts, then the two ids, zero-padded to 8 bytes
    body                the columns, as they are or as one zstd frame

The counts in the header fix the size of the body to the byte, so a lying length is caught before anything is read.
"""

from __future__ import annotations

import struct

MAGIC = b"LMBATCH\x00"
PREFIX = struct.Struct("<8sBBHIIIII")  # magic, wire, frame, flags, header, body, body uncompressed, zero, crc32c
CRC_AT = PREFIX.size - 4
HEADER = struct.Struct("<QQIIIIIHH")  # seq_start, seq_end, samples, series, labels, strings, string bytes, two ids
PREFIX_BYTES = PREFIX.size
COMPRESSION_MASK = 0x000F  # the other flags are reserved and must be zero


def padded(size: int) -> int:
    return -(-size // 8) * 8


def body_bytes(samples: int, series: int, labels: int, strings: int, string_bytes: int) -> int:
    """Size of the uncompressed body: times, values; series, table, labels, string offsets; kinds; strings."""
    return samples * 16 + 4 * (samples + series + (series + 1) + 2 * labels + (strings + 1)) + samples + string_bytes
