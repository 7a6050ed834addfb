"""Kafka's record batch, version 2: its header, its records, and the columns made of them.

    0   8  i64 base offset              outside the checksum: rewritten when it is served
    8   4  i32 length of what follows
    12  4  i32 leader epoch             outside the checksum
    16  1  i8  magic, 2
    17  4  u32 CRC-32C of everything after it
    21  2  i16 attributes: compression (bits 0-2), time of append (3), transactional (4), control (5)
    23  4  i32 last offset delta
    27  16 i64 first timestamp, i64 largest timestamp, in ms
    43  14 i64 producer id, i16 epoch, i32 first sequence
    57  4  i32 record count
    61     the records, compressed together

A batch is stored as it comes: only its header is read on the way in. Records are decoded where something other than a
Kafka client reads them. All numbers are big-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import google_crc32c
import msgspec

from lakebed.core.errors import Corrupt, Invalid, TooLarge
from lakebed.log.kafka_compression import CODECS, Buffer, decompress

HEADER = struct.Struct(">qiibIhiqqqhii")
BASE = struct.Struct(">q")
FRAME = struct.Struct(">qi")  # base offset, length of what follows the length
CRC_FROM = 21
MAGIC_AT = 16
MAGIC = 2
COMPRESSION, APPEND_TIME, TRANSACTIONAL, CONTROL = 0x07, 0x08, 0x10, 0x20
NO_PRODUCER = -1
HEADERS_MAX = 10_000  # of one record
HEADERS_ALL_MAX = 1_000_000  # of all records of a batch: each is an object when it is decoded
DECODED_BYTES_MAX = 128 * 1024 * 1024  # of one batch, decompressed
BATCH_RECORDS_MAX = 200_000  # of one batch: a few kilobytes of compressed nothing could be millions


class KafkaBatch(msgspec.Struct, frozen=True, gc=False):
    """One batch: the fields of its header, and its bytes."""

    count: int
    attributes: int
    first_ms: int
    max_ms: int
    producer_id: int
    producer_epoch: int
    sequence: int
    crc: int
    data: Buffer

    @property
    def compression(self) -> int:
        return self.attributes & COMPRESSION

    def at(self, base_offset: int) -> tuple[bytes, memoryview]:
        """The batch as it is served: a new base offset before the rest of its bytes."""
        return BASE.pack(base_offset), memoryview(self.data)[BASE.size :]


class KafkaRecord(msgspec.Struct, frozen=True):
    """One record, decoded."""

    value: bytes | None
    key: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int = 0


class KafkaRecords(msgspec.Struct, frozen=True, gc=False):
    """`count` records in whole batches, end to end. `skip` records of the first batch come before the first of them."""

    count: int
    payload: Buffer
    skip: int = 0

    @property
    def size(self) -> int:
        return len(self.payload)

    @property
    def max_ms(self) -> int:
        """The largest timestamp."""
        return max([batch.max_ms for batch in self.batches()])

    def batches(self) -> list[KafkaBatch]:
        return list(split(self.payload))

    def decoded(self) -> list[KafkaRecord]:
        """Every record, decoded. Not for hot paths."""
        records = [record for batch in self.batches() for record in decode(batch)]
        return records[self.skip : self.skip + self.count]

    def decoded_within(self, budget: DecodeBudget) -> DecodedRecords:
        """The records of the first batches, up to the one with which the budget is used up."""
        records: list[KafkaRecord] = []
        for batch in self.batches():
            if budget.used_up:
                break
            records += budget.charged(decode(batch))
        found = records[self.skip : self.skip + self.count]
        return DecodedRecords(len(found), b"", records=found)

    def __iter__(self) -> Iterator[bytes]:
        """Each record's value; empty where it has none."""
        return iter([record.value or b"" for record in self.decoded()])

    def take(self, first: int, bytes_max: int, *, least: int) -> KafkaRecords:
        """The records from `first` on to the end of the last batch that fits into `bytes_max`.

        With `least` at least one batch, as `RecordColumns.take` gives at least one record.
        """
        if first <= 0 and self.size <= bytes_max:
            return self
        begin = end = at = 0
        wanted, taken, skip = first + self.skip, 0, 0
        for batch in self.batches():
            size = len(batch.data)
            if at + batch.count <= wanted:
                begin = end = end + size
            elif end + size - begin > bytes_max and (taken or not least):
                break
            else:
                skip = skip if taken else wanted - at
                taken += batch.count
                end += size
            at += batch.count
        return KafkaRecords(max(0, taken - skip), memoryview(self.payload)[begin:end], skip)


class DecodedRecords(KafkaRecords, frozen=True, gc=False, kw_only=True):
    """Records that are decoded already."""

    records: list[KafkaRecord]

    def decoded(self) -> list[KafkaRecord]:
        return self.records


class DecodeBudget:
    """How much one response may decode. What was charged may exceed it by one batch, which has limits of its own."""

    def __init__(self, bytes_max: int, records_max: int) -> None:
        self._bytes, self._records = bytes_max, records_max

    @property
    def used_up(self) -> bool:
        return self._bytes <= 0 or self._records <= 0

    def charged(self, records: list[KafkaRecord]) -> list[KafkaRecord]:
        self._bytes -= sum([len(record.value or b"") + len(record.key or b"") for record in records])
        self._records -= len(records)
        return records


def kafka_records(batches: Sequence[KafkaBatch], data: Buffer) -> KafkaRecords:
    return KafkaRecords(sum([batch.count for batch in batches]), data)


def split(data: Buffer) -> Iterator[KafkaBatch]:
    """The batches in these bytes, one after another. Raises Corrupt for anything else; checks no checksum."""
    view = memoryview(data)
    at = 0
    while at < len(view):
        if len(view) - at < HEADER.size:
            raise Corrupt(f"a record batch is cut after {len(view) - at} bytes")
        (_, length, _, magic, crc, attributes, last_delta, first_ms, max_ms, producer_id, epoch, sequence, count) = (
            HEADER.unpack_from(view, at)
        )
        end = at + FRAME.size + length
        if magic != MAGIC:
            raise Corrupt(f"a record batch has magic {magic}; {MAGIC} is known")
        if end > len(view) or length < HEADER.size - FRAME.size:
            raise Corrupt(f"a record batch claims {length} bytes of {len(view) - at}")
        if count < 1 or last_delta != count - 1:
            raise Corrupt(f"a record batch has {count} records and a last offset delta of {last_delta}")
        yield KafkaBatch(count, attributes, first_ms, max_ms, producer_id, epoch, sequence, crc, view[at:end])
        at = end


def checked(data: Buffer) -> list[KafkaBatch]:
    """Batches from outside, with their checksums compared. Raises Corrupt, and TooLarge for too many records."""
    found = list(split(data))
    for batch in found:
        if google_crc32c.value(bytes(batch.data[CRC_FROM:])) != batch.crc:
            raise Corrupt("a record batch does not match its checksum")
        if batch.count > BATCH_RECORDS_MAX:
            raise TooLarge(f"a record batch has {batch.count} records; {BATCH_RECORDS_MAX} is the limit")
        if batch.compression not in CODECS:
            raise Corrupt(f"a record batch has compression {batch.compression}; {sorted(CODECS)} are known")
    if not found:
        raise Corrupt("no record batch was sent")
    return found


def encode(records: Sequence[KafkaRecord], *, now_ms: int = 0) -> bytes:
    """One uncompressed batch. A record without a timestamp gets `now_ms`."""
    times = [record.timestamp_ms or now_ms for record in records]
    first_ms = times[0]
    body = bytearray()
    for delta, (record, at_ms) in enumerate(zip(records, times, strict=True)):
        one = bytearray(b"\0")
        _varint(one, at_ms - first_ms)
        _varint(one, delta)
        _bytes(one, record.key)
        _bytes(one, record.value)
        _varint(one, len(record.headers))
        for name, value in record.headers:
            _bytes(one, name.encode())
            _bytes(one, value)
        _varint(body, len(one))
        body += one
    return _sealed(len(records), first_ms, max(times), bytes(body))


def encode_values(values: Sequence[bytes], at_ms: int) -> bytes:
    """One uncompressed batch of records that have nothing but a value, all with the same time."""
    return encode([KafkaRecord(value) for value in values], now_ms=at_ms)


def decode(batch: KafkaBatch, *, bytes_max: int = DECODED_BYTES_MAX) -> list[KafkaRecord]:
    """The records. Raises Corrupt for bytes that are not exactly them, and for more than `bytes_max` of them."""
    packed = memoryview(batch.data)[HEADER.size :]
    data = decompress(batch.compression, packed, bytes_max=bytes_max)
    append_time = bool(batch.attributes & APPEND_TIME)
    found: list[KafkaRecord] = []
    at = named = 0
    try:
        for _ in range(batch.count):
            length, at = _read_varint(data, at)
            end = at + length
            if length < 0 or end > len(data):
                raise Corrupt("a record is cut")
            delta_ms, at = _read_varint(data, at + 1)  # after the attributes, which mean nothing
            _, at = _read_varint(data, at)
            key, at = _read_bytes(data, at, end)
            value, at = _read_bytes(data, at, end)
            headers, at = _read_headers(data, at, end)
            named += len(headers)
            if named > HEADERS_ALL_MAX:
                raise Corrupt(f"a record batch has more than {HEADERS_ALL_MAX} headers")
            if at != end:
                raise Corrupt("a record is shorter than its length")
            found.append(KafkaRecord(value, key, headers, batch.max_ms if append_time else batch.first_ms + delta_ms))
    except (IndexError, UnicodeDecodeError) as error:
        raise Corrupt(f"a record does not decode: {error}") from error
    if at != len(data):
        raise Corrupt(f"{len(data) - at} bytes follow the last record of a batch")
    return found


def _sealed(count: int, first_ms: int, max_ms: int, records: bytes) -> bytes:
    """A batch around its records, with its checksum."""
    length = HEADER.size - FRAME.size + len(records)
    head = HEADER.pack(0, length, -1, MAGIC, 0, 0, count - 1, first_ms, max_ms, NO_PRODUCER, -1, -1, count)
    crc = google_crc32c.value(head[CRC_FROM:] + records)
    return head[: CRC_FROM - 4] + struct.pack(">I", crc) + head[CRC_FROM:] + records


def _varint(out: bytearray, value: int) -> None:
    """Signed: zigzag, then groups of seven bits."""
    rest = (value << 1) ^ (value >> 63)
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)


def _bytes(out: bytearray, value: bytes | None) -> None:
    if value is None:
        _varint(out, -1)
        return
    _varint(out, len(value))
    out += value


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    shift = value = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at
        shift += 7
        if shift > 63:
            raise Corrupt("a number in a record is longer than ten bytes")


def _read_bytes(data: bytes, at: int, end: int) -> tuple[bytes | None, int]:
    length, at = _read_varint(data, at)
    if length < 0:
        return None, at
    if at + length > end:
        raise Corrupt("a field of a record is cut")
    return data[at : at + length], at + length


def _read_headers(data: bytes, at: int, end: int) -> tuple[tuple[tuple[str, bytes | None], ...], int]:
    count, at = _read_varint(data, at)
    if not 0 <= count <= HEADERS_MAX:
        raise Corrupt(f"a record has {count} headers; {HEADERS_MAX} is the limit")
    headers: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        name, at = _read_bytes(data, at, end)
        value, at = _read_bytes(data, at, end)
        headers.append(((name or b"").decode(), value))
    return tuple(headers), at


def check_record(record: KafkaRecord, bytes_max: int) -> KafkaRecord:
    """A record of a client that sends no batches. Raises Invalid for one that is too large."""
    size = len(record.value or b"") + len(record.key or b"")
    size += sum(len(name) + len(value or b"") for name, value in record.headers)
    if size > bytes_max:
        raise Invalid(f"a record is larger than log.record_max_bytes ({bytes_max})")
    if len(record.headers) > HEADERS_MAX:
        raise Invalid(f"a record has {len(record.headers)} headers; {HEADERS_MAX} is the limit")
    return record
