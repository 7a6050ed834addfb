"""What may happen to a partition: control in, control out. Pure; the caller makes it true by compare-and-swap.

A pending append is committed the moment it stands in the control record. It must be in the index before the next
append takes its place: `append` is only asked once that is so.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lakebed.errors import Conflict, Invalid
from lakebed.log.blob import Slice
from lakebed.log.columns import Columns
from lakebed.log.model import (
    ENCODING,
    Control,
    LogDeleted,
    LogFenced,
    Mark,
    OffsetOutOfRange,
    OutOfOrderSequence,
    Pending,
    TopicPartition,
)

MARKS_MAX = 5  # batches remembered per producer: as many as a client may have in flight
PRODUCERS_MAX = 200  # producers remembered per partition; the longest unused is forgotten first


class BlobTooOld(Conflict):
    """The vacuum may have deleted this blob already: write the records again under a new name."""

    code = "blob_too_old"


class Stamp(msgspec.Struct, frozen=True, gc=False):
    """Which batch of which producer this is. Sequences count 0, 1, 2 … per producer and partition."""

    producer_id: str
    sequence: int


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Records that came together and are answered together."""

    records: Columns
    stamp: Stamp | None = None


class Fresh(msgspec.Struct, frozen=True, gc=False):
    """To be appended."""


class Duplicate(msgspec.Struct, frozen=True):
    """Was appended before."""

    mark: Mark


class Repeat(msgspec.Struct, frozen=True):
    """The same batch as an earlier fresh one of this append."""

    index: int


class Refused(msgspec.Struct, frozen=True):
    error: OutOfOrderSequence


FRESH = Fresh()
Verdict = Fresh | Duplicate | Repeat | Refused


def opened(now_ms: int) -> Control:
    """A new partition."""
    return Control(log_state="OPEN", sequence_counter=0, pending=None, changed_at_ms=now_ms)


def reopened(control: Control, now_ms: int) -> Control:
    """A deleted partition in use again. Offsets go on: what is left over of its former life lies below its start."""
    return Control(
        log_state="OPEN",
        sequence_counter=control.sequence_counter,
        pending=None,
        log_start_offset=control.next_offset,
        vacuum_before_ms=control.vacuum_before_ms,
        changed_at_ms=now_ms,
    )


def judge(control: Control, chunks: Sequence[Chunk]) -> list[Verdict]:
    """What becomes of each chunk. An unknown producer must begin at 0, so a forgotten one cannot append twice."""
    stamps = [chunk.stamp for chunk in chunks]
    if not any(stamps):
        return [FRESH] * len(stamps)
    verdicts: list[Verdict] = []
    seen: dict[Stamp, int] = {}
    last = {producer: marks[-1].sequence for producer, marks in control.producers.items() if marks}
    for index, stamp in enumerate(stamps):
        if stamp is None:
            verdicts.append(FRESH)
            continue
        mark = next((m for m in control.producers.get(stamp.producer_id, ()) if m.sequence == stamp.sequence), None)
        expected = last.get(stamp.producer_id, -1) + 1
        if stamp in seen:
            verdicts.append(Repeat(seen[stamp]))
        elif mark is not None:
            verdicts.append(Duplicate(mark))
        elif stamp.sequence == expected:
            seen[stamp] = index
            last[stamp.producer_id] = stamp.sequence
            verdicts.append(FRESH)
        else:
            verdicts.append(Refused(_out_of_order(stamp, expected)))
    return verdicts


def all_fresh(verdicts: Sequence[Verdict]) -> bool:
    return verdicts.count(FRESH) == len(verdicts)


def append(
    control: Control,
    chunks: Sequence[Chunk],
    *,
    tp: TopicPartition,
    append_id: str,
    data_key: str,
    place: Slice,
    created_at_ms: int,
) -> Control:
    """The control after appending these chunks, all judged fresh, which lie at `place` in the blob at `data_key`."""
    demand_open(control, tp)
    if created_at_ms <= control.vacuum_before_ms:
        raise BlobTooOld(f"a blob of {tp} waited too long to be committed, and may be gone")
    count = sum([chunk.records.count for chunk in chunks])
    pending = Pending(
        append_id=append_id,
        start_offset=control.next_offset,
        end_offset=control.sequence_counter + count,
        msg_count=count,
        entry_type="WAL",
        data_key=data_key,
        encoding=ENCODING,
        created_at_ms=created_at_ms,
        byte_offset=place.byte_offset,
        byte_length=place.byte_length,
    )
    return msgspec.structs.replace(
        control,
        sequence_counter=pending.end_offset,
        pending=pending,
        producers=_remember(control.producers, chunks, pending.start_offset),
    )


def cleared(control: Control) -> Control:
    """The control once its pending append is in the index."""
    return msgspec.structs.replace(control, pending=None)


def fenced(control: Control, tp: TopicPartition, *, reason: str, now_ms: int) -> Control:
    """Takes no appends any more. Idempotent."""
    if control.log_state == "FENCED":
        return control
    demand_open(control, tp)
    return msgspec.structs.replace(control, log_state="FENCED", reason=reason, changed_at_ms=now_ms)


def unfenced(control: Control, tp: TopicPartition, *, now_ms: int) -> Control:
    if control.log_state == "DELETED":
        raise LogDeleted(f"{tp} is deleted")
    if control.log_state == "OPEN":
        return control
    return msgspec.structs.replace(control, log_state="OPEN", reason="", changed_at_ms=now_ms)


def deleted(control: Control, *, reason: str, now_ms: int) -> Control:
    """A tombstone: nothing is readable, and offsets are never given out again. Idempotent."""
    if control.log_state == "DELETED":
        return control
    return Control(
        log_state="DELETED",
        sequence_counter=control.sequence_counter,
        pending=None,
        log_start_offset=control.next_offset,
        vacuum_before_ms=control.vacuum_before_ms,
        changed_at_ms=now_ms,
        reason=reason,
    )


def trimmed(control: Control, tp: TopicPartition, before_offset: int) -> Control:
    """Records below `before_offset` are gone for every reader. Never goes back."""
    if not 0 <= before_offset <= control.next_offset:
        raise OffsetOutOfRange(
            f"{tp} ends at {control.sequence_counter}; it cannot be trimmed before {before_offset}",
            high_watermark=control.sequence_counter,
        )
    if before_offset <= control.log_start_offset:
        return control
    return msgspec.structs.replace(control, log_start_offset=before_offset)


def vacuumed(control: Control, before_ms: int) -> Control:
    """Blobs made at or before `before_ms` can no longer be committed."""
    if before_ms <= control.vacuum_before_ms:
        return control
    return msgspec.structs.replace(control, vacuum_before_ms=before_ms)


def demand_open(control: Control, tp: TopicPartition) -> None:
    if control.log_state != "OPEN":
        kind = LogDeleted if control.log_state == "DELETED" else LogFenced
        raise kind(
            f"{tp} is {control.log_state.lower()}{': ' + control.reason if control.reason else ''}",
            hint=f"lakebed topics unfence {tp.topic} --partition {tp.partition}",
        )


def demand_readable(control: Control, tp: TopicPartition, offset: int) -> None:
    """Raises OffsetOutOfRange unless a reader may stand at `offset`: in the log, or right behind its end."""
    if offset < control.log_start_offset or offset > control.next_offset:
        raise OffsetOutOfRange(
            f"{tp} has offsets {control.log_start_offset} to {control.sequence_counter}, not {offset}",
            hint="start at log_start_offset, or at the end",
            log_start_offset=control.log_start_offset,
            high_watermark=control.sequence_counter,
        )


def check_stamp(producer_id: str, sequence: int) -> Stamp:
    if not producer_id or len(producer_id) > 128 or sequence < 0:
        raise Invalid("producer_id must have 1 to 128 characters and sequence must be 0 or more")
    return Stamp(producer_id, sequence)


def _remember(producers: dict[str, list[Mark]], chunks: Sequence[Chunk], start_offset: int) -> dict[str, list[Mark]]:
    after = producers
    for chunk in chunks:
        end_offset = start_offset + chunk.records.count - 1
        if chunk.stamp is not None:
            after = dict(after) if after is producers else after
            marks = after.pop(chunk.stamp.producer_id, [])  # popped and set again: the longest unused comes first
            after[chunk.stamp.producer_id] = [*marks, Mark(chunk.stamp.sequence, start_offset, end_offset)][-MARKS_MAX:]
        start_offset = end_offset + 1
    while len(after) > PRODUCERS_MAX:
        after.pop(next(iter(after)))
    return after


def _out_of_order(stamp: Stamp, expected: int) -> OutOfOrderSequence:
    return OutOfOrderSequence(
        f"producer {stamp.producer_id} sent batch {stamp.sequence}, but {expected} is next",
        hint="resend from the missing batch on, or begin at 0 under a new producer_id",
        expected=expected,
    )
