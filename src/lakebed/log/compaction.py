"""What to compact, and when it is too late to go on with a compaction. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lakebed.log.model import Compaction, Control, IndexEntry, Span


def aligned(cursor: int, log_start_offset: int, spans: Sequence[Span]) -> int:
    """Where to go on from: the cursor, moved past what is trimmed or already compacted.

    `spans` are those that end at the cursor or above. A span that the start of the log cuts through stays whole.
    """
    at = cursor
    for span in spans:
        if span.end_offset < log_start_offset or (span.entry.type == "COMPACTED" and span.covers(at)):
            at = max(at, span.end_offset + 1)
        elif span.start_offset <= at:
            continue
        elif span.covers(log_start_offset):
            at = max(at, span.start_offset)
    return at


def select(at: int, spans: Sequence[Span], *, entries_min: int, entries_max: int, bytes_max: int) -> list[Span]:
    """One gapless run of WAL entries that starts exactly at `at`; empty when it is not worth the work."""
    chosen: list[Span] = []
    size = 0
    for span in spans:
        if span.end_offset < at:
            continue
        size += span.entry.byte_length or 0
        if span.entry.type != "WAL" or span.start_offset != at or (chosen and size > bytes_max):
            break
        chosen.append(span)
        at = span.end_offset + 1
        if len(chosen) == entries_max:
            break
    full = len(chosen) == entries_max or size > bytes_max
    return chosen if len(chosen) >= entries_min or (full and len(chosen) > 1) else []


def may_overwrite(record: Compaction, end: Span | None, control: Control) -> bool:
    """Whether the end key still is the entry that was compacted, and the compacted blob cannot have been vacuumed."""
    return (
        end is not None
        and end.entry.type == "WAL"
        and end.start_offset == record.tail_start_offset
        and record.created_at_ms > control.vacuum_before_ms
    )


def overwritten(record: Compaction, end: IndexEntry | None) -> bool:
    return end is not None and end.type == "COMPACTED" and end.data_key == record.data_key
