"""Batches as bytes: the binary form `LBQ1`, and the seed's JSON form. Both are read; a setting chooses the one written.

`LBQ1` is a 20-byte header, a body and a checksum of all that, little-endian. The body holds, one after the other, the
end offset of every key, the end offset of every value (u32 each), all keys, all values: lengths come first, so decoding
is slicing. The body may be compressed with zstd, and is decompressed only up to the size the header promises, which is
itself bounded. See docs/formats/queue.md.

Nothing here copies a whole batch more than once: at a mebibyte, a copy costs more than the checksum. The checksum is
taken of small entries that are joined for it, because a call for each costs more than the copy of what is in a cache.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Literal

import google_crc32c
import msgspec

from lakebed.core.compression import compress, decompress
from lakebed.core.errors import Corrupt, Invalid
from lakebed.queue.model import KeyValueEntry

MAGIC = b"LBQ1"
BINARY_VERSION = 1
CONTENT_TYPE = "application/vnd.lakebed.queue-batch"
ENTRY_OVERHEAD_BYTES = 8  # two end offsets
WINDOW_LOG_MAX = 27  # zstd's own default: 128 MiB
RAW_BYTES_MAX = 1 << 30  # no batch is larger than this, whatever the settings allow: offsets are 32 bits
PLAIN, ZSTD = 0, 1
LEVEL = 1
SAMPLE_BYTES = 16 * 1024
SAMPLE_GAIN = 0.9  # `auto` compresses when the sample shrinks to less than this

APART_BYTES = 4 * 1024 * 1024  # larger batches are coded in a thread, so that they do not block the event loop
JOINED_BYTES = 64 * 1024  # what is joined for one call of the checksum, about: it fits in a processor's cache

_HEADER = struct.Struct("<4sBBHIII")  # magic, version, compression, flags, entries, raw bytes, stored bytes
_CRC = struct.Struct("<I")
_RESIDUE = 0x48674BC7  # CRC-32C of any bytes that are followed by their own CRC-32C
OVERHEAD_BYTES = _HEADER.size + _CRC.size

_JSON = msgspec.json.Decoder(list[KeyValueEntry])


def size_of(entries: Sequence[KeyValueEntry]) -> int:
    """What these entries add to a batch, uncompressed."""
    return sum([len(entry.key) + len(entry.value) for entry in entries]) + ENTRY_OVERHEAD_BYTES * len(entries)


def encode(
    entries: Sequence[KeyValueEntry],
    *,
    form: Literal["binary", "json"] = "binary",
    compression: Literal["auto", "zstd", "none"] = "auto",
) -> bytes:
    """The batch as bytes, entries in the order given. Raises Invalid when it is empty or beyond all bounds."""
    if not entries:
        raise Invalid("a batch has at least one entry")
    if form == "json":
        return msgspec.json.encode(entries)
    count = len(entries)
    keys = [entry.key for entry in entries]
    values = [entry.value for entry in entries]
    key_ends = list(accumulate(map(len, keys)))
    value_ends = list(accumulate(map(len, values)))
    raw_bytes = 2 * 4 * count + key_ends[-1] + value_ends[-1]
    if raw_bytes > RAW_BYTES_MAX:
        raise Invalid(f"a batch of {raw_bytes} bytes is larger than {RAW_BYTES_MAX}")
    offsets = struct.pack(f"<{2 * count}I", *key_ends, *value_ends)
    how = ZSTD if compression == "zstd" or (compression == "auto" and _shrinks(values)) else PLAIN
    head_of = partial(_HEADER.pack, MAGIC, BINARY_VERSION, how, 0, count, raw_bytes)
    if how == ZSTD:
        body = compress(b"".join(chain((offsets,), keys, values)), level=LEVEL)
        head = head_of(len(body))
        return b"".join((head, body, _CRC.pack(google_crc32c.extend(google_crc32c.value(head), body))))
    crc = google_crc32c.value(head := head_of(raw_bytes) + offsets)
    crc = _extended(_extended(crc, keys, key_ends[-1]), values, value_ends[-1])
    return b"".join((head, *keys, *values, _CRC.pack(crc)))


def decode(data: bytes, *, bytes_max: int = RAW_BYTES_MAX) -> list[KeyValueEntry]:
    """The entries of a batch in either form. Raises Corrupt for anything else, using bounded memory."""
    if data[:1] == b"[":
        return _decode_json(data, bytes_max)
    count, body, start, end = _body(data, bytes_max)
    ends = struct.unpack_from(f"<{2 * count}I", body, start)
    key_ends, value_ends = ends[:count], ends[count:]
    keys_at = start + 8 * count
    values_at = keys_at + key_ends[-1]
    if list(key_ends) != sorted(key_ends) or list(value_ends) != sorted(value_ends):
        raise Corrupt("batch: offsets go backwards")
    if values_at + value_ends[-1] != end:
        raise Corrupt("batch: offsets do not end where the body ends")
    keys = [keys_at, *[keys_at + end for end in key_ends]]
    values = [values_at, *[values_at + end for end in value_ends]]
    return [
        KeyValueEntry(body[key:key_end], body[value:value_end])
        for key, key_end, value, value_end in zip(keys, keys[1:], values, values[1:], strict=False)
    ]


def _body(data: bytes, bytes_max: int) -> tuple[int, bytes, int, int]:
    """The number of entries, and the bytes that hold the uncompressed body, from where to where."""
    if len(data) < OVERHEAD_BYTES or data[:4] != MAGIC:
        raise Corrupt("batch: neither LBQ1 nor a JSON array", hint="lakebed queue dump shows its first bytes")
    if google_crc32c.value(data) != _RESIDUE:
        raise Corrupt("batch: the checksum does not match")
    _, version, how, flags, count, raw_bytes, stored_bytes = _HEADER.unpack_from(data)
    start, end = _HEADER.size, len(data) - _CRC.size
    if version != BINARY_VERSION or flags:
        raise Corrupt(f"batch: version {version} with flags {flags} is unknown; this Lakebed reads {BINARY_VERSION}")
    if raw_bytes > min(bytes_max, RAW_BYTES_MAX):
        raise Corrupt(f"batch: {raw_bytes} bytes are more than the limit of {bytes_max}", bytes=raw_bytes)
    if stored_bytes != end - start:
        raise Corrupt(f"batch: {end - start} bytes of body, but its header declares {stored_bytes}")
    if not count or raw_bytes < 8 * count:
        raise Corrupt(f"batch: {count} entries do not fit in {raw_bytes} bytes")
    if how == ZSTD:
        return count, _inflate(memoryview(data)[start:end], raw_bytes), 0, raw_bytes
    if how != PLAIN:
        raise Corrupt(f"batch: compression {how} is unknown")
    if stored_bytes != raw_bytes:
        raise Corrupt(f"batch: the body has {stored_bytes} bytes, but its header declares {raw_bytes}")
    return count, data, start, end


def _inflate(body: memoryview, raw_bytes: int) -> bytes:
    """Decompresses one frame, never holding more than one byte beyond what was promised."""
    try:
        raw = decompress(body, raw_bytes, what="batch: the body", window_log_max=WINDOW_LOG_MAX)
    except Invalid as error:
        raise Corrupt(error.message) from error
    if len(raw) != raw_bytes:
        raise Corrupt(f"batch: the body is not exactly one frame of {raw_bytes} bytes")
    return raw


def _decode_json(data: bytes, bytes_max: int) -> list[KeyValueEntry]:
    if len(data) > bytes_max * 2:
        raise Corrupt(f"batch: {len(data)} bytes of JSON are more than the limit of {bytes_max * 2}")
    try:
        entries = _JSON.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise Corrupt(f"batch: not a JSON array of entries: {error}") from error
    if not entries:
        raise Corrupt("batch: an empty JSON array")
    return entries


def _extended(crc: int, parts: Sequence[bytes], size_bytes: int) -> int:
    """The checksum after these parts, which have `size_bytes` together."""
    count = max(1, len(parts) * JOINED_BYTES // max(1, size_bytes))
    for first in range(0, len(parts), count):
        crc = google_crc32c.extend(crc, b"".join(parts[first : first + count]))
    return crc


def _shrinks(values: list[bytes]) -> bool:
    sample = bytearray()
    for value in values:
        sample += value[: SAMPLE_BYTES - len(sample)]
        if len(sample) >= SAMPLE_BYTES:
            break
    return len(compress(bytes(sample), level=LEVEL)) < SAMPLE_GAIN * len(sample)
