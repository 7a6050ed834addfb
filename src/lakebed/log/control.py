"""The state changes of a partition: control record in, control record out. Pure; the caller stores it by
compare-and-swap.

An append is committed when it is pending in the control record. It must be in the index before the next append replaces
it there: only then is `append` called.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lakebed.core.errors import Conflict
from lakebed.log import codec
from lakebed.log.blob import BlobSlice
from lakebed.log.model import (
    Control,
    LogDeleted,
    LogFenced,
    OffsetOutOfRange,
    PendingAppend,
    TopicPartition,
    UnknownTopicPartition,
)
from lakebed.log.producers import MEMORY_MS, RecordChunk, remember


class BlobTooOld(Conflict):
    """A sweep may have deleted this blob already: write the records again under a new name."""

    code = "blob_too_old"


def opened(now_ms: int, *, horizon_ms: int = 0) -> Control:
    """A new partition. It may have been deleted so long ago that its tombstone is gone.

    So what was made before the vacuum's horizon is refused, as that tombstone would have refused it: a blob that a
    sweep may have deleted, or a compaction of the former log, whose offsets are used again.
    """
    refused_ms = max(0, now_ms - horizon_ms - 1)
    return Control(
        log_state="OPEN", sequence_counter=0, pending=None, vacuum_before_ms=refused_ms, changed_at_ms=now_ms
    )


def reopened(control: Control, now_ms: int) -> Control:
    """A deleted partition in use again. Offsets continue: what is left of the deleted log is below the new start."""
    return Control(
        log_state="OPEN",
        sequence_counter=control.sequence_counter,
        pending=None,
        log_start_offset=control.next_offset,
        vacuum_before_ms=control.vacuum_before_ms,
        changed_at_ms=now_ms,
        forgotten_ms=max(now_ms, control.forgotten_ms),
    )


def append(
    control: Control,
    chunks: Sequence[RecordChunk],
    *,
    tp: TopicPartition,
    append_id: str,
    data_key: str,
    place: BlobSlice,
    created_at_ms: int,
    memory_ms: int = MEMORY_MS,
) -> Control:
    """The control after appending these chunks, all judged fresh, at `place` in the blob at `data_key`."""
    demand_open(control, tp)
    if created_at_ms <= control.vacuum_before_ms:
        raise BlobTooOld(f"a blob of {tp} waited too long for its commit and may be deleted")
    parts = [chunk.records for chunk in chunks]
    count = sum([part.count for part in parts])
    pending = PendingAppend(
        append_id=append_id,
        start_offset=control.next_offset,
        end_offset=control.sequence_counter + count,
        msg_count=count,
        entry_type="WAL",
        data_key=data_key,
        encoding=codec.encoding_of(parts),
        created_at_ms=created_at_ms,
        byte_offset=place.byte_offset,
        byte_length=place.byte_length,
        max_timestamp_ms=codec.max_timestamp_ms(parts, created_at_ms),
    )
    producers, forgotten_ms = remember(control, chunks, pending.start_offset, created_at_ms, memory_ms)
    return msgspec.structs.replace(
        control,
        sequence_counter=pending.end_offset,
        pending=pending,
        producers=producers,
        forgotten_ms=forgotten_ms,
    )


def cleared(control: Control) -> Control:
    """The control once its pending append is in the index."""
    return msgspec.structs.replace(control, pending=None)


def fenced(control: Control, tp: TopicPartition, *, reason: str, now_ms: int) -> Control:
    """Refuses appends. Idempotent."""
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
    """A tombstone: nothing is readable, and offsets are never used again. Idempotent."""
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
        forgotten_ms=max(now_ms, control.forgotten_ms),
    )


def trimmed(control: Control, tp: TopicPartition, before_offset: int) -> Control:
    """Records below `before_offset` are gone for every reader. Never goes back."""
    if not 0 <= before_offset <= control.next_offset:
        raise OffsetOutOfRange(
            f"{tp} ends at {control.sequence_counter}; it cannot be trimmed before {before_offset}",
            hint=f"at most {control.next_offset}, which drops all records",
            high_watermark=control.sequence_counter,
        )
    if before_offset <= control.log_start_offset:
        return control
    return msgspec.structs.replace(control, log_start_offset=before_offset)


def sweep_announced(control: Control, before_ms: int) -> Control:
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


def demand_existing(control: Control, tp: TopicPartition) -> None:
    """Raises UnknownTopicPartition for a deleted log, of which only the tombstone is left."""
    if control.log_state == "DELETED":
        raise UnknownTopicPartition(f"{tp} is deleted", hint="a produce creates it again")


def demand_readable(control: Control, tp: TopicPartition, offset: int) -> None:
    """Raises OffsetOutOfRange unless `offset` is in the log, or right after its end.

    Raises UnknownTopicPartition for a deleted one.
    """
    demand_existing(control, tp)
    if offset < control.log_start_offset or offset > control.next_offset:
        raise OffsetOutOfRange(
            f"{tp} has offsets {control.log_start_offset} to {control.sequence_counter}, not {offset}",
            hint="start at log_start_offset, or at the end",
            log_start_offset=control.log_start_offset,
            high_watermark=control.sequence_counter,
        )
