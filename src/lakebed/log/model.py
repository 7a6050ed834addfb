"""The log's values. The JSON of a struct here is what is stored: names and meanings are the format's."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

import msgspec

from lakebed.core.errors import Conflict, Fenced, Invalid, NotFound, Overloaded

ENCODING = "bytes-batch-v1"
KAFKA_ENCODING = "kafka-batches-v1"
ENCODINGS = frozenset({ENCODING, KAFKA_ENCODING})
FIRST_OFFSET = 1  # offsets count from 1; sequence_counter is the last one given out
PARTITION_MAX = 99_999
NAMES_MAX = 16_384  # topic-partitions whose checked names are remembered
TOPIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
TOPICS_RESERVED = frozenset({"wal-shared", "vacuum"})  # Lakebed's own folders beside the topics


class BackPressureRejected(Overloaded):
    code = "back_pressure"


class LogFenced(Fenced):
    code = "log_fenced"


class LogDeleted(LogFenced):
    code = "log_deleted"


class UnknownTopicPartition(NotFound):
    code = "unknown_topic_partition"


class OffsetOutOfRange(Conflict):
    code = "offset_out_of_range"


class OutOfOrderSequence(Conflict):
    code = "out_of_order_sequence"


class UnknownProducer(OutOfOrderSequence):
    """The partition does not know this producer, so it cannot tell whether the batch was appended before."""

    code = "unknown_producer"


class SequenceReused(Conflict):
    """Another batch was appended under this producer and sequence."""

    code = "sequence_reused"


class TooManyProducers(Overloaded):
    code = "too_many_producers"


class GroupFenced(Fenced):
    """Another member has claimed this partition of the group: stop, or claim it again."""

    code = "group_fenced"


class OffsetMovedBack(Conflict):
    """A commit below the committed offset, without `seek`."""

    code = "offset_moved_back"


class TopicPartition(msgspec.Struct, frozen=True, order=True):
    """One log. Everything in meta that belongs to it is routed by `partition_key`."""

    topic: str
    partition: int

    @property
    def partition_key(self) -> str:
        return f"{self.topic}:{self.partition}"

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


@lru_cache(NAMES_MAX)
def topic_partition(topic: str, partition: int) -> TopicPartition:
    """Validates input. Raises Invalid for a name that is not a key segment, or a number out of range."""
    check_topic(topic)
    if not 0 <= partition <= PARTITION_MAX:
        raise Invalid(f"partition must be 0 to {PARTITION_MAX}, not {partition}")
    return TopicPartition(topic, partition)


def check_topic(topic: str) -> str:
    if not TOPIC.fullmatch(topic) or topic in TOPICS_RESERVED:
        raise Invalid(
            f"topic {topic[:80]!r} is not a valid topic name",
            hint="use a letter or digit, then letters, digits, '.', '_' and '-', at most 200 characters",
        )
    return topic


class PendingAppend(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """An append that is committed and may not be in the index yet."""

    append_id: str
    start_offset: int
    end_offset: int
    msg_count: int
    entry_type: Literal["WAL"]
    data_key: str
    encoding: str
    created_at_ms: int
    byte_offset: int | None = None
    byte_length: int | None = None
    max_timestamp_ms: int = 0

    def entry(self) -> IndexEntry:
        return IndexEntry(
            type=self.entry_type,
            msg_count=self.msg_count,
            data_key=self.data_key,
            encoding=self.encoding,
            created_at_ms=self.created_at_ms,
            byte_offset=self.byte_offset,
            byte_length=self.byte_length,
            max_timestamp_ms=self.max_timestamp_ms,
        )


class ProducerMark(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One batch of an idempotent producer: its sequence number and where it went.

    `crc` is that of its records, 0 in marks of older versions. `at_ms` is set in a producer's last mark alone: when it
    was last used.
    """

    sequence: int
    start_offset: int
    end_offset: int
    crc: int = 0
    at_ms: int = 0


class Control(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of one partition, and its only source of truth. Fields after `pending` are left out while unused.

    `vacuum_before_ms`: blobs made at or before this time can no longer be committed, because a sweep may delete them.
    `producers` are the last batches of idempotent producers, the longest unused producer first; where `producers_key`
    names a snapshot of them, only what has changed since then ([]: forgotten). `forgotten_ms`: a producer that was last
    used at or before this time may have been removed from them.
    """

    log_state: Literal["OPEN", "FENCED", "DELETED"]
    sequence_counter: int
    pending: PendingAppend | None
    log_start_offset: int = FIRST_OFFSET
    vacuum_before_ms: int = 0
    producers: dict[str, list[ProducerMark]] = {}
    changed_at_ms: int = 0
    reason: str = ""
    forgotten_ms: int = 0
    producers_key: str = ""

    @property
    def next_offset(self) -> int:
        return self.sequence_counter + 1


class ProducersSnapshot(msgspec.Struct, frozen=True):
    """What a partition knew of its producers at one append. Never changed; the control record names the current one."""

    created_at_ms: int
    producers: dict[str, list[ProducerMark]]


class IndexEntry(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Where the records [end - msg_count + 1, end] are; `end` is in the key."""

    type: Literal["WAL", "COMPACTED"]
    msg_count: int
    data_key: str
    encoding: str
    created_at_ms: int
    byte_offset: int | None = None
    byte_length: int | None = None
    last_append_at_ms: int = 0  # compacted: when the last of its records was appended
    level: int = 0  # compacted: how often its records were compacted; 0 in entries of older versions
    max_timestamp_ms: int = 0  # of records with timestamps of their own; 0: all have the time of their append
    blob_bytes: int = 0  # compacted: the size of the whole blob; 0 in entries of older versions

    @property
    def appended_at_ms(self) -> int:
        return self.last_append_at_ms or self.created_at_ms

    @property
    def tier(self) -> int:
        """How often its records were compacted; 0 for the WAL."""
        return 0 if self.type == "WAL" else max(1, self.level)

    @property
    def newest_ms(self) -> int:
        """The largest timestamp of its records."""
        return self.max_timestamp_ms or self.appended_at_ms


class IndexSpan(msgspec.Struct, frozen=True, gc=False):
    """An index entry together with the offsets it covers."""

    start_offset: int
    end_offset: int
    entry: IndexEntry

    def covers(self, offset: int) -> bool:
        return self.start_offset <= offset <= self.end_offset


class Cursor(msgspec.Struct, frozen=True):
    """The first offset that has not been compacted."""

    offset: int


class Compaction(msgspec.Struct, frozen=True):
    """A compaction in progress; any compactor that finds it finishes it. `tail_start_offset` and `tail_level` are the
    start and the level of the last source entry."""

    compaction_id: str
    state: Literal["WRITING_COMPACTED_INDEX", "DELETING_OLD", "UPDATING_CURSOR"]
    start_offset: int
    end_offset: int
    msg_count: int
    data_key: str
    encoding: str
    created_at_ms: int
    tail_start_offset: int = 0
    last_append_at_ms: int = 0
    byte_offset: int | None = None
    byte_length: int | None = None
    level: int = 1
    tail_level: int = 0
    max_timestamp_ms: int = 0
    blob_bytes: int = 0

    def entry(self) -> IndexEntry:
        return IndexEntry(
            type="COMPACTED",
            msg_count=self.msg_count,
            data_key=self.data_key,
            encoding=self.encoding,
            created_at_ms=self.created_at_ms,
            byte_offset=self.byte_offset,
            byte_length=self.byte_length,
            last_append_at_ms=self.last_append_at_ms,
            level=self.level,
            max_timestamp_ms=self.max_timestamp_ms,
            blob_bytes=self.blob_bytes,
        )


class VacuumCursor(msgspec.Struct, frozen=True):
    """Where the next pass of the vacuum starts: behind this key of the bucket; "" is the beginning."""

    after: str


class CompactionClaim(msgspec.Struct, frozen=True):
    compactor_id: str
    claimed_at_ms: int


class GroupOffset(msgspec.Struct, frozen=True, omit_defaults=True):
    """The committed position of a consumer group: the next offset it reads, 0 when nothing was committed yet.

    `generation` counts how often a member has claimed the partition; the last one to do so has this number.
    """

    offset: int
    committed_at_ms: int
    note: str = ""
    generation: int = 0


class TopicConfig(msgspec.Struct, frozen=True):
    """Retention of a topic; 0 keeps everything."""

    retention_s: float = 0.0
    retention_bytes: int = 0
