"""What to compact: index entries in, runs of them out. Pure.

Entries have levels. WAL entries are level 0; a compaction of them is level 1; where enough compacted entries of a
partition lie next to each other, they are compacted again, one level higher, until an entry is full. So a record is
rewritten a few times, not once per pass, and the number of entries grows with the bytes, not with the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from lakebed.log.model import Compaction, Control, IndexEntry, IndexSpan, TopicPartition

RUNS_MAX = 16  # runs of one partition in one pass


class CompactionRun(msgspec.Struct, frozen=True):
    """Entries of one partition without a gap that become one entry. `size` is what they take in the bucket."""

    tp: TopicPartition
    spans: tuple[IndexSpan, ...]
    size: int

    @property
    def level(self) -> int:
        return 1 + max(span.entry.tier for span in self.spans)


class CompactionPlan(msgspec.Struct, frozen=True):
    """The runs of one partition. They wait for a partition that is `due`: then all of them share its blob."""

    runs: tuple[CompactionRun, ...] = ()
    due: bool = False
    lag: int = 0


def aligned(cursor: int, log_start_offset: int, spans: Sequence[IndexSpan]) -> int:
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


def select(
    at: int,
    spans: Sequence[IndexSpan],
    *,
    entries_min: int,
    entries_max: int,
    bytes_max: int,
    bytes_min: int | None = None,
    old_ms: int = 0,
) -> list[IndexSpan]:
    """One gapless run of WAL entries that starts exactly at `at`; empty when it is not worth the work.

    It is when it has `entries_min` entries or `bytes_min` bytes, when its first append is not younger than `old_ms`,
    or when it is full: nothing more fits into it.
    """
    chosen: list[IndexSpan] = []
    size = 0
    for span in spans:
        if span.end_offset < at:
            continue
        if span.entry.type != "WAL" or span.start_offset != at:
            break
        size += span.entry.byte_length or 0
        if chosen and size > bytes_max:
            break
        chosen.append(span)
        at = span.end_offset + 1
        if len(chosen) == entries_max:
            break
    if not chosen:
        return []
    full = len(chosen) == entries_max or size > bytes_max
    old = chosen[0].entry.appended_at_ms <= old_ms
    large = bytes_min is not None and size >= bytes_min
    return chosen if full or old or large or len(chosen) >= entries_min else []


def select_merges(
    spans: Sequence[IndexSpan], size_of: Callable[[IndexSpan], int], *, fan_in: int, bytes_max: int
) -> list[list[IndexSpan]]:
    """Runs of compacted entries to compact again: `fan_in` or more next to each other, the lowest level first.

    An entry of half of `bytes_max` is full and stays. A run ends where it would grow beyond `bytes_max`.
    """
    for level in sorted({span.entry.tier for span in spans if span.entry.tier > 0}):
        found: list[list[IndexSpan]] = []
        run: list[IndexSpan] = []
        size = 0
        for span in spans:
            own = size_of(span)
            fits = 0 < span.entry.tier <= level and own * 2 < bytes_max
            follows = bool(run) and run[-1].end_offset + 1 == span.start_offset and size + own <= bytes_max
            if not fits or not follows:
                found.append(run)
                run, size = [], 0
            if fits:
                run.append(span)
                size += own
        worth = [run for run in [*found, run] if len(run) >= fan_in]
        if worth:
            return worth
    return []


def pack(runs: Sequence[CompactionRun], bytes_max: int) -> list[list[CompactionRun]]:
    """The runs of each blob; those of one partition stay together and in their order.

    First compactions and later ones do not share: what is merged soon must not be kept by what stays long.
    """
    blobs: list[list[CompactionRun]] = []
    for first in (True, False):
        of_partition: dict[TopicPartition, list[CompactionRun]] = {}
        for run in runs:
            if (run.level == 1) is first:
                of_partition.setdefault(run.tp, []).append(run)
        size, blob = 0, list[CompactionRun]()
        for group in of_partition.values():
            more = sum(run.size for run in group)
            if blob and size + more > bytes_max:
                blobs.append(blob)
                size, blob = 0, []
            blob += group
            size += more
        blobs += [blob] if blob else []
    return blobs


def may_overwrite(record: Compaction, end: IndexSpan | None, control: Control) -> bool:
    """Whether the end key still is the entry that was compacted, and no sweep can have deleted the compacted blob."""
    return (
        end is not None
        and end.entry.tier == record.tail_level
        and end.start_offset == record.tail_start_offset
        and record.created_at_ms > control.vacuum_before_ms
    )


def overwritten(record: Compaction, end: IndexEntry | None) -> bool:
    return end is not None and end.type == "COMPACTED" and end.data_key == record.data_key
