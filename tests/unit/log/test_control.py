"""What may happen to a partition."""

from __future__ import annotations

import msgspec
import pytest

from lakebed.log import control
from lakebed.log.blob import BlobSlice
from lakebed.log.codec import columns
from lakebed.log.control import BlobTooOld
from lakebed.log.model import Control, LogDeleted, LogFenced, OffsetOutOfRange, TopicPartition
from lakebed.log.producers import RecordChunk

TP = TopicPartition("orders", 0)
OPEN = control.opened(5)


def append(now: Control, *chunks: RecordChunk, created_at_ms: int = 10) -> Control:
    return control.append(
        control.cleared(now),
        chunks,
        tp=TP,
        append_id="a",
        data_key="s3://b/llog/wal-shared/x",
        place=BlobSlice(100, 50),
        created_at_ms=created_at_ms,
    )


def test_the_stored_record_has_the_seeds_fields() -> None:
    """An untouched control record has exactly log_state, sequence_counter and pending; pending names its slice."""
    stored = msgspec.json.decode(
        msgspec.json.encode(append(Control("OPEN", 0, None), RecordChunk(columns([b"a", b"b"]))))
    )

    assert {"log_state", "sequence_counter", "pending"} == set(stored)
    assert stored["sequence_counter"] == 2
    assert stored["pending"] == {
        "append_id": "a",
        "start_offset": 1,
        "end_offset": 2,
        "msg_count": 2,
        "entry_type": "WAL",
        "data_key": "s3://b/llog/wal-shared/x",
        "encoding": "bytes-batch-v1",
        "byte_offset": 100,
        "byte_length": 50,
        "created_at_ms": 10,
    }


def test_offsets_follow_each_other_without_gaps() -> None:
    """The next append begins where the last one ended."""
    first = append(OPEN, RecordChunk(columns([b"a", b"b"])))
    second = append(first, RecordChunk(columns([b"c"])), RecordChunk(columns([b"d", b"e"])))

    assert first.pending and (first.pending.start_offset, first.pending.end_offset) == (1, 2)
    assert second.pending and (second.pending.start_offset, second.pending.end_offset) == (3, 5)


def test_fenced_and_deleted_logs_take_no_append() -> None:
    """FENCED refuses until unfenced; DELETED refuses for ever, and its offsets are not given out again."""
    full = control.cleared(append(OPEN, RecordChunk(columns([b"a"] * 3))))
    fenced = control.fenced(full, TP, reason="move", now_ms=9)
    dead = control.deleted(full, reason="gone", now_ms=9)

    with pytest.raises(LogFenced, match="move"):
        append(fenced, RecordChunk(columns([b"b"])))
    with pytest.raises(LogDeleted):
        append(dead, RecordChunk(columns([b"b"])))
    with pytest.raises(LogDeleted):
        control.unfenced(dead, TP, now_ms=9)
    assert append(control.unfenced(fenced, TP, now_ms=9), RecordChunk(columns([b"b"]))).sequence_counter == 4
    again = append(control.reopened(dead, 9), RecordChunk(columns([b"b"])))
    assert (again.log_start_offset, again.sequence_counter) == (4, 4)


def test_a_blob_that_the_vacuum_may_have_taken_is_not_committed() -> None:
    """After the vacuum has announced itself, older blobs are refused and younger ones are taken."""
    now = control.sweep_announced(OPEN, 10)

    with pytest.raises(BlobTooOld):
        append(now, RecordChunk(columns([b"a"])), created_at_ms=10)
    assert append(now, RecordChunk(columns([b"a"])), created_at_ms=11).sequence_counter == 1
    assert control.sweep_announced(now, 9) is now


def test_trim_goes_forward_only_and_not_past_the_end() -> None:
    """The start never moves back; a reader below it, or past the end, is out of range."""
    full = append(OPEN, RecordChunk(columns([b"a"] * 5)))
    trimmed = control.trimmed(full, TP, 4)

    assert control.trimmed(trimmed, TP, 2) is trimmed
    assert control.trimmed(full, TP, 6).log_start_offset == 6
    with pytest.raises(OffsetOutOfRange):
        control.trimmed(full, TP, 7)
    for offset in (0, 3, 7):
        with pytest.raises(OffsetOutOfRange):
            control.demand_readable(trimmed, TP, offset)
    for offset in (4, 5, 6):
        control.demand_readable(trimmed, TP, offset)
