"""The contracts of produce and consume: requests, responses and status codes, as JSON and as binary frames.

A frame is a JSON header, then each partition's columns as they are stored:

    0  4  magic "LLC1"
    4  4  u32 big-endian header length
    8     JSON header
          for each partition of the header, in order: count × u32 little-endian record length, then payload_bytes bytes

A produce request's header is {"topic_partitions": [{topic, partition, count, payload_bytes, producer_id?, sequence?}]};
a consume response's header is the JSON response with `payload_bytes` in place of `records`.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from lakebed.core.errors import Invalid, LakebedError, Overloaded, Unavailable
from lakebed.core.http import decoder
from lakebed.log import kafka_batch, producers
from lakebed.log.codec import WIDTH, RecordColumns, Records, as_columns, checked, columns
from lakebed.log.kafka_batch import DecodeBudget, KafkaRecord, KafkaRecords
from lakebed.log.kafka_compression import Buffer
from lakebed.log.model import GroupOffset, TopicPartition, topic_partition
from lakebed.log.producers import RecordChunk, Stamp
from lakebed.log.reader import Fetched
from lakebed.log.writer import Appended, Outcome

Name = Annotated[str, msgspec.Meta(min_length=1)]
Number = Annotated[int, msgspec.Meta(ge=0)]
Millis = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
LATER = (Overloaded, Unavailable)  # back pressure, store or meta unavailable, outcome unknown

FRAME_MEDIA_TYPE = "application/vnd.lakebed.columns"
FRAME_MAGIC = b"LLC1"
FRAME_PREFIX = struct.Struct(">4sI")
FRAME_HEADER_BYTES_MAX = 4 * 1024 * 1024
# Of one response, when record batches are decoded. One batch more may be: it has limits of its own.
DECODED_BYTES_MAX = 64 * 1024 * 1024
DECODED_RECORDS_MAX = 200_000


class Base64Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record of arbitrary bytes."""

    base64: bytes


class JsonHeader(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A header: text in `value`, or bytes in `base64`; neither for a header without a value."""

    name: str
    value: str | None = None
    base64: bytes | None = None


class JsonRecord(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A record as an object: its value as text or as `base64`, and what else it has. `timestamp` is in milliseconds."""

    base64: bytes | None = None
    value: str | None = None
    key: str | None = None
    key_base64: bytes | None = None
    headers: list[JsonHeader] = []
    timestamp: Millis | None = None

    @property
    def plain(self) -> bool:
        """Whether it has nothing but a value."""
        rest = (self.key, self.key_base64, self.timestamp)
        return not self.headers and rest == (None, None, None) and (self.base64, self.value) != (None, None)


class ProducePartition(msgspec.Struct, frozen=True):
    """`producer_id` and `sequence` make retries idempotent: the same pair is appended once."""

    topic: Name
    partition: Number
    records: Annotated[list[str | JsonRecord], msgspec.Meta(min_length=1)]
    producer_id: str | None = None
    sequence: int | None = None


class ProduceRequest(msgspec.Struct, frozen=True):
    topic_partitions: Annotated[list[ProducePartition], msgspec.Meta(min_length=1)]


class ConsumePartition(msgspec.Struct, frozen=True):
    topic: Name
    partition: Number
    fetch_offset: Number
    partition_max_bytes: Annotated[int, msgspec.Meta(ge=1)] | None = None


class ConsumeRequest(msgspec.Struct, frozen=True):
    topic_partitions: Annotated[list[ConsumePartition], msgspec.Meta(min_length=1)]
    max_wait_ms: Number = 0
    min_bytes: Number = 1
    max_bytes: Annotated[int, msgspec.Meta(ge=1)] | None = None


class ProduceResult(msgspec.Struct, frozen=True, omit_defaults=True):
    topic: str
    partition: int
    ok: bool
    start_offset: int | None = None
    end_offset: int | None = None
    count: int | None = None
    index_key: str | None = None
    wal_uri: str | None = None
    duplicate: bool = False
    error_type: str = ""
    error: str = ""
    hint: str = ""


class ConsumeResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """`records` has one entry per record, in the form produce takes; a binary response has them after its header."""

    topic: str
    partition: int
    ok: bool
    start_offset: int | None = None
    next_offset: int | None = None
    count: int | None = None
    high_watermark: int | None = None
    log_start_offset: int | None = None
    records: list[Any] | None = None
    payload_bytes: int | None = None
    error_type: str = ""
    error: str = ""
    hint: str = ""


class LogResponse(msgspec.Struct, frozen=True):
    results: Sequence[Any]
    success_count: int
    error_count: int


def to_chunk(part: ProducePartition, record_max_bytes: int, now_ms: int) -> tuple[TopicPartition, RecordChunk]:
    """Raises Invalid for an invalid topic, partition, producer or record.

    One record with a key, headers or a timestamp makes all of them a record batch; those without a timestamp get
    `now_ms`.
    """
    if not all(isinstance(record, str) or record.plain for record in part.records):
        made = [kafka_batch.check_record(kafka_record(record), record_max_bytes) for record in part.records]
        batch = KafkaRecords(len(made), kafka_batch.encode(made, now_ms=now_ms))
        stamp = _stamp(part.producer_id, part.sequence)
        # Of what was sent: a retry gets other times, and is the same batch.
        crc = zlib.crc32(msgspec.json.encode(part.records)) or 1
        return topic_partition(part.topic, part.partition), RecordChunk(batch, stamp, crc)
    records = [record.encode() if isinstance(record, str) else _value(record) or b"" for record in part.records]
    return chunk_of(part.topic, part.partition, columns(records), part.producer_id, part.sequence, record_max_bytes)


def kafka_record(record: str | JsonRecord) -> KafkaRecord:
    if isinstance(record, str):
        return KafkaRecord(record.encode())
    value, key = _value(record), record.key.encode() if record.key is not None else record.key_base64
    if value is None and key is None:
        raise Invalid("a record needs a value, base64 or key", hint='{"value": "text", "key": "k"}')
    headers = tuple((header.name, _value(header)) for header in record.headers)
    return KafkaRecord(value, key, headers, record.timestamp or 0)


def _value(of: JsonRecord | JsonHeader) -> bytes | None:
    if of.value is not None and of.base64 is not None:
        raise Invalid("value and base64 exclude each other")
    return of.value.encode() if of.value is not None else of.base64


def chunk_of(
    topic: str,
    partition: int,
    records: RecordColumns,
    producer_id: str | None,
    sequence: int | None,
    record_max_bytes: int,
) -> tuple[TopicPartition, RecordChunk]:
    if records.size > record_max_bytes and max(memoryview(records.lengths).cast("I")) > record_max_bytes:
        raise Invalid(f"a record is larger than log.record_max_bytes ({record_max_bytes})")
    return topic_partition(topic, partition), RecordChunk(records, _stamp(producer_id, sequence))


def _stamp(producer_id: str | None, sequence: int | None) -> Stamp | None:
    if producer_id is None and sequence is None:
        return None
    if producer_id is None or sequence is None:
        raise Invalid("producer_id and sequence must be given together")
    return producers.check_stamp(producer_id, sequence)


def produced(tp: TopicPartition, outcome: Outcome) -> ProduceResult:
    if isinstance(outcome, Appended):
        return ProduceResult(
            tp.topic,
            tp.partition,
            True,
            outcome.start_offset,
            outcome.end_offset,
            outcome.count,
            outcome.index_key,
            outcome.wal_uri,
            outcome.duplicate,
        )
    return ProduceResult(
        tp.topic, tp.partition, False, error_type=type(outcome).__name__, error=outcome.message, hint=outcome.hint
    )


def consumed(tp: TopicPartition, found: Fetched | LakebedError, *, as_json: bool) -> ConsumeResult:
    if isinstance(found, LakebedError):
        return ConsumeResult(
            tp.topic,
            tp.partition,
            False,
            high_watermark=found.detail.get("high_watermark"),
            log_start_offset=found.detail.get("log_start_offset"),
            error_type=type(found).__name__,
            error=found.message,
            hint=found.hint,
        )
    return ConsumeResult(
        tp.topic,
        tp.partition,
        True,
        found.start_offset,
        found.next_offset,
        found.count,
        found.high_watermark,
        found.log_start_offset,
        records=[record for part in found.parts for record in shown_part(part)] if as_json else None,
        payload_bytes=None if as_json else found.size,
    )


def shown(record: bytes) -> str | Base64Record:
    """A record as JSON: text where it is UTF-8, base64 otherwise."""
    try:
        return record.decode()
    except UnicodeDecodeError:
        return Base64Record(record)


def shown_part(part: Records) -> Iterator[str | Base64Record | JsonRecord]:
    """Records as JSON: columns as their values alone, record batches as objects."""
    return map(shown, part) if isinstance(part, RecordColumns) else map(shown_record, part.decoded())


def shown_record(record: KafkaRecord) -> JsonRecord:
    value, value_base64 = _text(record.value)
    key, key_base64 = _text(record.key)
    headers = [JsonHeader(name, *_text(content)) for name, content in record.headers]
    return JsonRecord(value_base64, value, key, key_base64, headers, max(0, record.timestamp_ms))


def _text(content: bytes | None) -> tuple[str | None, bytes | None]:
    """Text where it is UTF-8, bytes otherwise."""
    if content is None:
        return None, None
    try:
        return content.decode(), None
    except UnicodeDecodeError:
        return None, content


def readable(found: Sequence[Fetched | LakebedError], *, as_json: bool) -> list[Fetched | LakebedError]:
    """What was fetched in the form of the response: record batches decoded, as columns of values where it is binary.

    A few kilobytes of record batches may be gigabytes when they are decoded: the response ends where the budget does,
    and the client goes on from its `next_offset`.
    """
    budget = DecodeBudget(DECODED_BYTES_MAX, DECODED_RECORDS_MAX)
    return [each if isinstance(each, LakebedError) else _readable(each, budget, as_json) for each in found]


def _readable(found: Fetched, budget: DecodeBudget, as_json: bool) -> Fetched:
    parts: list[Records] = []
    offset = found.start_offset
    for part in found.parts:
        made = part.decoded_within(budget) if isinstance(part, KafkaRecords) else part
        parts.append(made if as_json else as_columns(made))
        offset += made.count
        if made.count < part.count:
            return msgspec.structs.replace(found, parts=tuple(parts), next_offset=offset)
    return msgspec.structs.replace(found, parts=tuple(parts))


def response(results: Sequence[ProduceResult] | Sequence[ConsumeResult]) -> LogResponse:
    good = sum(result.ok for result in results)
    return LogResponse(results, good, len(results) - good)


def status(outcomes: Sequence[object]) -> int:
    """200 when all succeeded; 503 when every one of them may succeed later; 409 for every other failure, whole or part.

    A partial failure is never 503: a client that sends everything again would repeat what succeeded.
    """
    failed = [outcome for outcome in outcomes if isinstance(outcome, LakebedError)]
    if not failed:
        return 200
    later = len(failed) == len(outcomes) and all(isinstance(error, LATER) for error in failed)
    return 503 if later else 409


def headers(outcomes: Sequence[object]) -> dict[str, str]:
    """Retry-After of a response with status 503."""
    if status(outcomes) != 503:
        return {}
    waits_s = [outcome.retry_after_s for outcome in outcomes if isinstance(outcome, LATER)]
    return {"retry-after": str(max(1, math.ceil(max(waits_s))))}


class FramePartition(msgspec.Struct, frozen=True, omit_defaults=True):
    topic: Annotated[str, msgspec.Meta(min_length=1)]
    partition: Annotated[int, msgspec.Meta(ge=0)]
    count: Annotated[int, msgspec.Meta(ge=1)]
    payload_bytes: Annotated[int, msgspec.Meta(ge=0)]
    producer_id: str | None = None
    sequence: int | None = None


class FrameHeader(msgspec.Struct, frozen=True):
    topic_partitions: Annotated[list[FramePartition], msgspec.Meta(min_length=1)]


def encode_frame(header: Any, parts: Sequence[RecordColumns]) -> bytes:
    """A frame with one part for each partition. Copies everything once."""
    head = msgspec.json.encode(header)
    buffers: list[Buffer] = [FRAME_PREFIX.pack(FRAME_MAGIC, len(head)), head]
    for part in parts:
        buffers += (part.lengths, part.payload)
    return b"".join(buffers)


def encode_frame_groups(header: Any, groups: Sequence[Sequence[Records]]) -> bytes:
    """A frame with several parts for each partition: all lengths of a partition, then all its payloads."""
    head = msgspec.json.encode(header)
    buffers: list[Buffer] = [FRAME_PREFIX.pack(FRAME_MAGIC, len(head)), head]
    for group in groups:
        parts = [as_columns(part) for part in group]
        buffers += [part.lengths for part in parts]
        buffers += [part.payload for part in parts]
    return b"".join(buffers)


def decode_frame(body: Buffer) -> list[tuple[FramePartition, RecordColumns]]:
    """A produce request's partitions, as views on the body. Raises Invalid when lengths do not match."""
    header, at = decode_frame_header(body, FrameHeader)
    view = memoryview(body)
    found: list[tuple[FramePartition, RecordColumns]] = []
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


def decode_frame_header(body: Buffer, kind: type[Any]) -> tuple[Any, int]:
    if len(body) < FRAME_PREFIX.size:
        raise Invalid("the body is shorter than a frame's prefix")
    magic, length = FRAME_PREFIX.unpack_from(body)
    if magic != FRAME_MAGIC or length > FRAME_HEADER_BYTES_MAX or FRAME_PREFIX.size + length > len(body):
        raise Invalid(f"the body is not a {FRAME_MEDIA_TYPE} frame")
    try:
        header = decoder(kind).decode(memoryview(body)[FRAME_PREFIX.size : FRAME_PREFIX.size + length])
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"the header of the frame is invalid: {error}") from error
    return header, FRAME_PREFIX.size + length


def offset_row(tp: TopicPartition, made: GroupOffset) -> dict[str, Any]:
    return {"topic": tp.topic, "partition": tp.partition, "offset": made.offset, "generation": made.generation}


def subject(tp: TopicPartition) -> dict[str, str]:
    return {"topic": tp.topic, "partition": str(tp.partition)}
