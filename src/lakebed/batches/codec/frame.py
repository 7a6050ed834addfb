"""Frames to bytes and back. `decode` trusts nothing: lengths, indexes, names and the checksum are checked.

Bad bytes give Invalid and nothing else. No step on the way in loops over samples in Python: columns are views of the
body's bytes, checked by whole-array comparisons; only the string dictionary is walked.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

import google_crc32c
import numpy as np

from lakebed.batches.codec.series import KnownTables, TableCounts, below, read_table
from lakebed.batches.model import (
    FRAME_VERSION,
    LIMITS,
    WIRE_VERSION,
    Batch,
    BatchIdentity,
    Compression,
    FrameLimits,
    Kind,
    Sample,
    SampleColumns,
    check_identity,
)
from lakebed.core.compression import compress, decompress
from lakebed.core.errors import Invalid

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


ZSTD_LEVEL = 1  # a collector pays for reading, an agent for writing: both want it cheap

_TIMES, _VALUES, _INDEX, _BYTE = np.dtype("<i8"), np.dtype("<f8"), np.dtype("<u4"), np.dtype("u1")


def columns_of(samples: Iterable[Sample]) -> SampleColumns:
    """The samples as columns, in the order given. Raises Invalid for a sample no reader would take."""
    series: dict[tuple[str, tuple[tuple[str, str], ...]], int] = {}
    rows: list[tuple[int, float, int, int]] = []
    for sample in samples:
        key = (sample.metric, tuple(sorted(sample.labels.items(), key=_by_name)))
        rows.append((sample.time_ns, sample.value, sample.kind, series.setdefault(key, len(series))))
    try:
        strings = sorted({s for metric, pairs in series for s in (metric, *(t for p in pairs for t in p))}, key=_utf8)
        at = {text: index for index, text in enumerate(strings)}
        times, values, kinds, indexes = zip(*rows, strict=True) if rows else ((), (), (), ())
        lengths = [len(pairs) for _, pairs in series]
        return SampleColumns(
            times_ns=np.array(times, _TIMES),
            values=np.array(values, _VALUES),
            kinds=np.array(kinds, _BYTE),
            series=np.array(indexes, _INDEX),
            series_metric=np.array([at[metric] for metric, _ in series], _INDEX),
            label_offsets=np.cumsum([0, *lengths]).astype(_INDEX),
            label_names=np.array([at[name] for _, pairs in series for name, _ in pairs], _INDEX),
            label_values=np.array([at[value] for _, pairs in series for _, value in pairs], _INDEX),
            strings=tuple(strings),
        )
    except (OverflowError, TypeError, ValueError) as error:
        raise Invalid(f"a sample cannot be encoded: {error}") from error


def encode(identity: BatchIdentity, columns: SampleColumns, compression: Compression = Compression.ZSTD) -> bytes:
    """The frame's bytes. The same arguments always give the same bytes on one version of the zstd library.

    Raises Invalid when identity and columns do not fit together. Limits are the reader's business: see `decode`.
    """
    check_identity(identity)
    if columns.samples != identity.samples:
        raise Invalid(f"{columns.samples} samples do not fill the sequence range of {identity.samples}")
    texts = [text.encode() for text in columns.strings]
    offsets = np.cumsum([0, *map(len, texts)]).astype(_INDEX)
    body = b"".join(
        (
            columns.times_ns.astype(_TIMES, copy=False).tobytes(),
            columns.values.astype(_VALUES, copy=False).tobytes(),
            columns.series.astype(_INDEX, copy=False).tobytes(),
            columns.series_metric.astype(_INDEX, copy=False).tobytes(),
            columns.label_offsets.astype(_INDEX, copy=False).tobytes(),
            columns.label_names.astype(_INDEX, copy=False).tobytes(),
            columns.label_values.astype(_INDEX, copy=False).tobytes(),
            offsets.tobytes(),
            columns.kinds.astype(_BYTE, copy=False).tobytes(),
            *texts,
        )
    )
    agent, boot = identity.agent_id.encode(), identity.boot_id.encode()
    counts = (len(columns.series_metric), len(columns.label_names), len(texts), int(offsets[-1]))
    header = HEADER.pack(identity.seq_start, identity.seq_end, columns.samples, *counts, len(agent), len(boot))
    header = (header + agent + boot).ljust(padded(len(header) + len(agent) + len(boot)), b"\0")
    stored = compress(body, level=ZSTD_LEVEL) if compression is Compression.ZSTD else body
    sizes = (len(header), len(stored), len(body), 0)
    prefix = PREFIX.pack(MAGIC, WIRE_VERSION, FRAME_VERSION, int(compression), *sizes, 0)[:CRC_AT]
    crc = google_crc32c.extend(google_crc32c.extend(google_crc32c.value(prefix), header), stored)
    return b"".join((prefix, crc.to_bytes(4, "little"), header, stored))


class Envelope(NamedTuple):
    """The header of a frame, read before its body; its checksum is verified."""

    identity: BatchIdentity
    compression: Compression
    counts: tuple[int, int, int, int, int]  # samples, series, labels, strings, string bytes
    body_at: int


def decode(data: bytes, limits: FrameLimits = LIMITS) -> Batch:
    """The batch in these bytes, validated whole. Raises Invalid, having used memory within the limits' bounds."""
    return decode_body(data, unseal(data, limits), limits)


def peek(data: bytes, limits: FrameLimits = LIMITS) -> BatchIdentity:
    """The identity alone, from a frame whose checksum holds; the body is not looked into."""
    return unseal(data, limits).identity


def identity_of_head(head: bytes) -> BatchIdentity:
    """The identity in the first bytes of a frame, unverified: the whole frame must confirm it. Raises Invalid."""
    at = PREFIX_BYTES + HEADER.size
    if len(head) < at or head[:8] != MAGIC:
        raise Invalid("these bytes are not an .lmbatch frame")
    start, end, *_, agent_len, boot_len = HEADER.unpack_from(head, PREFIX_BYTES)
    agent, boot = head[at : at + agent_len], head[at + agent_len : at + agent_len + boot_len]
    return check_identity(BatchIdentity(_text(agent), _text(boot), start, end))


def decode_body(
    data: bytes, envelope: Envelope, limits: FrameLimits = LIMITS, known: KnownTables | None = None
) -> Batch:
    """The rest of `decode`, for a frame that was unsealed first: to know whose it is before paying for its body.

    `known` are tables of names that this reader has already checked, under the same limits.
    """
    body: bytes | memoryview = memoryview(data)[envelope.body_at :]
    if envelope.compression is Compression.ZSTD:
        body = _decompress(body, body_bytes(*envelope.counts))
    samples, *counts = envelope.counts
    columns = _columns(body, samples, TableCounts(*counts), limits, known)
    return Batch(envelope.identity, columns, envelope.compression)


def unseal(data: bytes, limits: FrameLimits = LIMITS) -> Envelope:
    """Everything up to the body, checked, and the checksum of the whole. Raises Invalid."""
    if len(data) > limits.frame_bytes:
        raise Invalid(f"frame of {len(data)} bytes is over the limit of {limits.frame_bytes}")
    if len(data) < PREFIX_BYTES + HEADER.size:
        raise Invalid(f"frame of {len(data)} bytes ends inside its header")
    magic, wire, version, flags, header_len, stored_len, body_len, zero, crc = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise Invalid("these bytes are not an .lmbatch frame")
    if wire != WIRE_VERSION or version != FRAME_VERSION:
        raise Invalid(
            f"frame version {wire}.{version} is not supported by this version", hint="upgrade the reader first"
        )
    if PREFIX_BYTES + header_len + stored_len != len(data) or header_len < HEADER.size:
        raise Invalid(f"frame of {len(data)} bytes claims {PREFIX_BYTES}+{header_len}+{stored_len}")
    if google_crc32c.extend(google_crc32c.value(data[:CRC_AT]), data[PREFIX_BYTES:]) != crc:
        raise Invalid("frame checksum does not match: the bytes were damaged in transit")
    if flags & ~COMPRESSION_MASK or zero or flags & COMPRESSION_MASK not in (0, 1):
        raise Invalid(f"frame flags {flags:#06x} are not supported by this version")
    start, end, *counts, agent_len, boot_len = HEADER.unpack_from(data, PREFIX_BYTES)
    at = PREFIX_BYTES + HEADER.size
    if header_len != padded(HEADER.size + agent_len + boot_len):
        raise Invalid(f"header of {header_len} bytes does not fit ids of {agent_len} and {boot_len} bytes")
    identity = check_identity(
        BatchIdentity(
            _text(data[at : at + agent_len]), _text(data[at + agent_len : at + agent_len + boot_len]), start, end
        )
    )
    samples, series, labels, strings, string_bytes = counts
    if any(data[at + agent_len + boot_len : PREFIX_BYTES + header_len]):
        raise Invalid("header padding is not zero")
    if samples != identity.samples:
        raise Invalid(f"{samples} samples do not fill the sequence range of {identity.samples}")
    if samples > limits.samples or series > limits.series or strings > limits.strings:
        raise Invalid(f"{samples} samples, {series} series, {strings} strings: over {limits}")
    if body_len != body_bytes(samples, series, labels, strings, string_bytes) or body_len > limits.body_bytes:
        raise Invalid(f"body of {body_len} bytes does not match its counts, or is over {limits.body_bytes}")
    compression = Compression(flags & COMPRESSION_MASK)
    if compression is Compression.NONE and stored_len != body_len:
        raise Invalid(f"body of {stored_len} bytes claims to be {body_len}")
    return Envelope(identity, compression, (samples, series, labels, strings, string_bytes), PREFIX_BYTES + header_len)


def _decompress(data: bytes | memoryview, size: int) -> bytes:
    """Exactly `size` bytes out of one zstd frame; never more is produced, whatever the frame declares."""
    out = decompress(data, size, what="body")
    if len(out) != size:
        raise Invalid(f"body does not decompress to its {size} bytes")
    return out


def _columns(
    body: bytes | memoryview, samples: int, counts: TableCounts, limits: FrameLimits, known: KnownTables | None
) -> SampleColumns:
    words_at, kinds_at = 20 * samples, 20 * samples + 4 * counts.words
    times = np.frombuffer(body, _TIMES, samples)
    values = np.frombuffer(body, _VALUES, samples, 8 * samples)
    index = np.frombuffer(body, _INDEX, samples, 16 * samples)
    kinds = np.frombuffer(body, _BYTE, samples, kinds_at)
    if times[times.argmin()] < 0:
        raise Invalid("a sample is older than 1970")
    below("series", index, counts.series)
    below("kind", kinds, len(Kind))
    words, texts = bytes(body[words_at:kinds_at]), bytes(body[kinds_at + samples :])
    table = known.table(words, texts, counts) if known is not None else read_table(words, texts, counts, limits)
    return SampleColumns(times, values, kinds, index, *table)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Invalid("an id is not UTF-8") from error


def _utf8(text: str) -> bytes:
    return text.encode()


def _by_name(pair: tuple[str, str]) -> bytes:
    return pair[0].encode()
