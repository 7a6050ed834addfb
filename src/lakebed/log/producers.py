"""Deduplication of idempotent producers: which batches are new, and what a partition stores to decide it. Pure.

A stamped chunk is appended only where it is certain that it was not appended before; everything else is a duplicate
with its offsets, or refused. An id that carries its time (a UUID of version 7) is forgotten some time after its last
batch, and refused from then on. Any other id is a name: it is never forgotten, and the number of names is limited.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice

import msgspec

from lakebed.core.errors import Invalid, LakebedError
from lakebed.log.codec import Records, crc32
from lakebed.log.kafka_batch import KafkaRecords
from lakebed.log.model import (
    Control,
    OutOfOrderSequence,
    ProducerMark,
    SequenceReused,
    TooManyProducers,
    UnknownProducer,
)

CHANGES_MAX = 16  # producers in the control record; more of them go into a snapshot beside it
MARKS_MAX = 5  # batches known of a producer: as many as a client may have in flight
MARKED_MAX = 200  # producers, the last used ones, of which so many batches are known; of all others the last one
NAMES_MAX = 1000  # producers with ids that carry no time: these are never forgotten
PRODUCERS_MAX = 2000  # producers known in all: the record stays below half of what a meta entry may hold (512 KiB)
MEMORY_MS = 24 * 3600 * 1000  # how long a producer is remembered after its last batch; default of log.producer_memory_s
AHEAD_MS_MAX = 3600 * 1000  # how far in the future an id may have been issued: clocks differ, but not by more
PRODUCER_ID_BYTES_MAX = 128
SEQUENCE_MASK = 0x7FFFFFFF  # a Kafka producer counts records, and begins again after this many
KAFKA_ID = re.compile(r"k([0-9a-f]{16})\.[0-9]{1,5}")
KAFKA_RANDOM_BITS = 21  # of a Kafka producer's id; the bits above them are the time of issue in ms
UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


class Stamp(msgspec.Struct, frozen=True, gc=False):
    """Which batch of which producer this is. Sequences count 0, 1, 2 … per producer and partition; those of a Kafka
    producer count records."""

    producer_id: str
    sequence: int


class RecordChunk(msgspec.Struct, frozen=True, gc=False):
    """Records of one request for one partition. `crc` is computed only for a stamped chunk."""

    records: Records
    stamp: Stamp | None = None
    crc: int = 0

    def __post_init__(self) -> None:
        if self.stamp is not None and not self.crc:
            records = self.records
            if isinstance(records, KafkaRecords):
                crc = crc32(b"".join([batch.crc.to_bytes(4, "big") for batch in records.batches()])) or 1
            else:
                crc = crc32(records.payload, crc32(records.lengths))
            msgspec.structs.force_setattr(self, "crc", crc)


class Fresh(msgspec.Struct, frozen=True, gc=False):
    """To be appended."""


class Duplicate(msgspec.Struct, frozen=True):
    """Was appended before."""

    mark: ProducerMark


class Repeat(msgspec.Struct, frozen=True):
    """The same batch as an earlier fresh one of this append."""

    index: int


class RefusedChunk(msgspec.Struct, frozen=True):
    error: LakebedError


FRESH = Fresh()
Verdict = Fresh | Duplicate | Repeat | RefusedChunk


def judge(control: Control, chunks: Sequence[RecordChunk], *, now_ms: int, memory_ms: int = MEMORY_MS) -> list[Verdict]:
    """Judges each chunk: a stamped one is fresh only where it is certain that it was not appended before."""
    if all(chunk.stamp is None for chunk in chunks):
        return [FRESH] * len(chunks)
    verdicts: list[Verdict] = []
    seen: dict[Stamp, int] = {}
    following: dict[str, int] = {}  # of producers with fresh chunks among these: the next sequence
    new: set[str] = set()
    for index, chunk in enumerate(chunks):
        stamp = chunk.stamp
        if stamp is None:
            verdicts.append(FRESH)
            continue
        marks = control.producers.get(stamp.producer_id, ())
        mark = next((mark for mark in marks if mark.sequence == stamp.sequence), None)
        if stamp in seen:
            same = chunk.crc == chunks[seen[stamp]].crc
            verdicts.append(Repeat(seen[stamp]) if same else RefusedChunk(_reused(stamp)))
            continue
        if mark is not None:
            verdicts.append(Duplicate(mark) if mark.crc in (0, chunk.crc) else RefusedChunk(_reused(stamp)))
            continue
        expected = following.get(stamp.producer_id, _after(stamp.producer_id, marks[-1]) if marks else 0)
        error: LakebedError | None = None
        if not marks and stamp.producer_id not in following:
            error = _refuse_unknown(control, stamp, new, now_ms=now_ms, memory_ms=memory_ms)
            new.add(stamp.producer_id)
        elif stamp.sequence != expected:
            error = _out_of_order(stamp, expected)
        if error is not None:
            verdicts.append(RefusedChunk(error))
            continue
        seen[stamp] = index
        following[stamp.producer_id] = _next_sequence(stamp.producer_id, stamp.sequence, chunk.records.count)
        verdicts.append(FRESH)
    return verdicts


def _after(producer_id: str, mark: ProducerMark) -> int:
    return _next_sequence(producer_id, mark.sequence, mark.end_offset - mark.start_offset + 1)


def _next_sequence(producer_id: str, sequence: int, records: int) -> int:
    return (sequence + records) & SEQUENCE_MASK if is_kafka(producer_id) else sequence + 1


def is_kafka(producer_id: str) -> bool:
    """Whether this is the id and epoch of a Kafka client's producer."""
    return KAFKA_ID.fullmatch(producer_id) is not None


def kafka_stamp(producer_id: int, epoch: int, sequence: int) -> Stamp:
    """The stamp of a record batch. Each epoch of a producer counts from 0, as a producer of its own."""
    return Stamp(f"k{producer_id:016x}.{epoch}", sequence)


def new_kafka_id(now_ms: int, random: int) -> int:
    """A producer id that carries its time, like the ids of other producers."""
    return (now_ms << KAFKA_RANDOM_BITS) | (random & ((1 << KAFKA_RANDOM_BITS) - 1))


def all_fresh(verdicts: Sequence[Verdict]) -> bool:
    return verdicts.count(FRESH) == len(verdicts)


def check_stamp(producer_id: str, sequence: int) -> Stamp:
    if not producer_id.isprintable() or not 1 <= len(producer_id.encode()) <= PRODUCER_ID_BYTES_MAX or sequence < 0:
        raise Invalid(
            f"producer_id must have 1 to {PRODUCER_ID_BYTES_MAX} printable bytes and sequence must be 0 or more"
        )
    return Stamp(producer_id, sequence)


@lru_cache(16_384)
def issued_ms(producer_id: str) -> int | None:
    """When this id was issued: a UUID of version 7 and a Kafka producer's id carry it. None for others, names."""
    kafka = KAFKA_ID.fullmatch(producer_id)
    if kafka is not None:
        return int(kafka[1], 16) >> KAFKA_RANDOM_BITS
    if len(producer_id) != 36 or not UUID7.fullmatch(producer_id.lower()):
        return None
    return int(producer_id[:8] + producer_id[9:13], 16)


def _refuse_unknown(
    control: Control, stamp: Stamp, new: set[str], *, now_ms: int, memory_ms: int
) -> LakebedError | None:
    """Why a producer that is not known here may not append; None when it is certain that it never did.

    An id that carries its time was used after that time. So one that was issued after everything that was ever
    forgotten is new. A name is never forgotten, so one that is not known is new.
    """
    at_ms = issued_ms(stamp.producer_id)
    if stamp.sequence != 0:
        return UnknownProducer(
            f"unknown producer {stamp.producer_id} sent batch {stamp.sequence}",
            hint="batches count from 0 per partition; after a long idle time, get a new producer_id (POST /producers)",
            expected=0,
        )
    # A Kafka client retries for minutes, much less than a producer is remembered, and keeps its id for weeks.
    if at_ms is not None and at_ms <= control.forgotten_ms and not is_kafka(stamp.producer_id):
        return UnknownProducer(
            f"producer_id {stamp.producer_id} is older than what this partition remembers",
            hint="get a new producer_id (POST /producers) and start at 0; if a response is missing, read first",
        )
    if at_ms is not None and at_ms > now_ms + AHEAD_MS_MAX:
        return UnknownProducer(
            f"producer_id {stamp.producer_id} was issued in the future", hint="get one from POST /producers"
        )
    return _no_room(control, stamp, new, now_ms=now_ms, memory_ms=memory_ms)


def _no_room(control: Control, stamp: Stamp, new: set[str], *, now_ms: int, memory_ms: int) -> LakebedError | None:
    if len(control.producers) + len(new) < NAMES_MAX:
        return None
    known = [id for id, marks in control.producers.items() if not _expired(id, marks, now_ms, memory_ms)]
    names = sum([issued_ms(id) is None for id in (*known, *new)])
    if issued_ms(stamp.producer_id) is None and names >= NAMES_MAX:
        return TooManyProducers(
            f"this partition already has {names} named producers, the limit; names do not expire",
            retry_after_s=60.0,
            hint="get a producer_id from POST /producers: it contains its time, so it expires",
        )
    if len(known) + len(new) >= PRODUCERS_MAX:
        return TooManyProducers(
            f"this partition already has {len(known)} active producers, the limit",
            retry_after_s=60.0,
            hint="use fewer producers, more partitions, or a shorter log.producer_memory_s",
        )
    return None


def _expired(producer_id: str, marks: Sequence[ProducerMark], now_ms: int, memory_ms: int) -> bool:
    used_ms = marks[-1].at_ms if marks else 0
    return 0 < used_ms < now_ms - memory_ms and issued_ms(producer_id) is not None


def remember(
    control: Control, chunks: Sequence[RecordChunk], start_offset: int, now_ms: int, memory_ms: int
) -> tuple[dict[str, list[ProducerMark]], int]:
    """The producers after these chunks, and up to when producers have been forgotten."""
    if all(chunk.stamp is None for chunk in chunks):
        return control.producers, control.forgotten_ms
    after = dict(control.producers)
    for chunk in chunks:
        end_offset = start_offset + chunk.records.count - 1
        if chunk.stamp is not None:
            id = chunk.stamp.producer_id
            marks = [ProducerMark(m.sequence, m.start_offset, m.end_offset, m.crc) for m in after.pop(id, ())]
            # A clock that issued the id may be ahead of this one: an id is never used before it was issued.
            used_ms = max(now_ms, issued_ms(id) or 0)
            mark = ProducerMark(chunk.stamp.sequence, start_offset, end_offset, chunk.crc, used_ms)
            after[id] = [*marks, mark][-MARKS_MAX:]  # popped and set again: the longest unused comes first
        start_offset = end_offset + 1
    return _bounded(after, control.forgotten_ms, now_ms, memory_ms)


def _bounded(
    producers: dict[str, list[ProducerMark]], forgotten_ms: int, now_ms: int, memory_ms: int
) -> tuple[dict[str, list[ProducerMark]], int]:
    """Drops what has expired and shortens what is long unused, in place: this is done at each append."""
    for id in [id for id, marks in producers.items() if _expired(id, marks, now_ms, memory_ms)]:
        forgotten_ms = max(forgotten_ms, producers.pop(id)[-1].at_ms)
    for id in [id for id in islice(producers, max(0, len(producers) - MARKED_MAX)) if len(producers[id]) > 1]:
        producers[id] = producers[id][-1:]
    return producers, forgotten_ms


ProducerMarks = dict[str, list[ProducerMark]]


def expanded(snapshot: ProducerMarks, changes: ProducerMarks) -> ProducerMarks:
    """The producers of a snapshot after these changes, the longest unused first."""
    after = {**snapshot, **changes}
    return dict(sorted(((id, marks) for id, marks in after.items() if marks), key=lambda one: one[1][-1].at_ms))


def changes_since(snapshot: ProducerMarks, producers: ProducerMarks) -> ProducerMarks:
    """What `expanded` needs to make these producers from the snapshot. A producer that was forgotten has no marks."""
    forgotten: ProducerMarks = {id: [] for id in snapshot if id not in producers}
    return forgotten | {id: marks for id, marks in producers.items() if snapshot.get(id) != marks}


def _out_of_order(stamp: Stamp, expected: int) -> OutOfOrderSequence:
    return OutOfOrderSequence(
        f"producer {stamp.producer_id} sent batch {stamp.sequence}, but {expected} is next",
        hint="resend from the missing batch on, or start at 0 with a new producer_id",
        expected=expected,
    )


def _reused(stamp: Stamp) -> SequenceReused:
    return SequenceReused(
        f"producer {stamp.producer_id} already sent other records as batch {stamp.sequence}",
        hint="use one producer_id per process, and do not change records between retries",
    )
