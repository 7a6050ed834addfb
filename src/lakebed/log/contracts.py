"""The JSON contracts of produce and consume: what is taken, what is answered, and with which status."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from lakebed.errors import Invalid, LakebedError, Overloaded, Unavailable
from lakebed.log import producers
from lakebed.log.columns import Columns, columns
from lakebed.log.model import TopicPartition, topic_partition
from lakebed.log.producers import Chunk
from lakebed.log.reader import Fetched
from lakebed.log.writer import Appended, Outcome

Name = Annotated[str, msgspec.Meta(min_length=1)]
Number = Annotated[int, msgspec.Meta(ge=0)]
LATER = (Overloaded, Unavailable)  # back pressure, a store or meta that is away, an outcome that is not known


class Base64Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record of arbitrary bytes."""

    base64: bytes


class ProducePartition(msgspec.Struct, frozen=True):
    """`producer_id` and `sequence` make a retry harmless: the same pair is appended once."""

    topic: Name
    partition: Number
    records: Annotated[list[str | Base64Record], msgspec.Meta(min_length=1)]
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
    """`records` has one entry per record, in the form produce takes; a binary answer has them behind its header."""

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


class Answer(msgspec.Struct, frozen=True):
    results: Sequence[Any]
    success_count: int
    error_count: int


def to_chunk(asked: ProducePartition, record_max_bytes: int) -> tuple[TopicPartition, Chunk]:
    """Raises Invalid for a topic, partition, producer or record that cannot be."""
    records = [record.encode() if isinstance(record, str) else record.base64 for record in asked.records]
    return chunk_of(asked.topic, asked.partition, columns(records), asked.producer_id, asked.sequence, record_max_bytes)


def chunk_of(
    topic: str,
    partition: int,
    records: Columns,
    producer_id: str | None,
    sequence: int | None,
    record_max_bytes: int,
) -> tuple[TopicPartition, Chunk]:
    if (producer_id is None) != (sequence is None):
        raise Invalid("producer_id and sequence go together")
    if records.size > record_max_bytes and max(memoryview(records.lengths).cast("I")) > record_max_bytes:
        raise Invalid(f"a record is larger than log.record_max_bytes ({record_max_bytes})")
    stamp = producers.check_stamp(producer_id, sequence) if producer_id is not None and sequence is not None else None
    return topic_partition(topic, partition), Chunk(records, stamp)


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
        records=[shown(record) for part in found.parts for record in part] if as_json else None,
        payload_bytes=None if as_json else found.size,
    )


def shown(record: bytes) -> str | Base64Record:
    """A record as JSON: text where it is UTF-8, base64 otherwise."""
    try:
        return record.decode()
    except UnicodeDecodeError:
        return Base64Record(record)


def answer(results: Sequence[ProduceResult] | Sequence[ConsumeResult]) -> Answer:
    good = sum(result.ok for result in results)
    return Answer(results, good, len(results) - good)


def status(outcomes: Sequence[object]) -> int:
    """200 when all succeeded; 503 when every one of them may succeed later; 409 for every other failure, whole or part.

    Part of a request is never answered 503: a client that sends all of it again would repeat what succeeded.
    """
    failed = [outcome for outcome in outcomes if isinstance(outcome, LakebedError)]
    if not failed:
        return 200
    later = len(failed) == len(outcomes) and all(isinstance(error, LATER) for error in failed)
    return 503 if later else 409


def headers(outcomes: Sequence[object]) -> dict[str, str]:
    """Retry-After of an answer with status 503."""
    if status(outcomes) != 503:
        return {}
    waits_s = [outcome.retry_after_s for outcome in outcomes if isinstance(outcome, LATER)]
    return {"retry-after": str(max(1, math.ceil(max(waits_s))))}
