"""What to compact: index entries in, runs of them out. Pure.

Entries have levels. WAL entries are level 0; a compaction of them is level 1; where enough compacted entries of a
partition lie next to each other, they are compacted again, one level higher, until an entry is full. Where enough of
them lie in small blobs, they move into a large one. So a record is rewritten a few times, not once per pass, and the
numbers of entries and blobs grow with the bytes, not with the passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

import msgspec

from lakebed.log.model import Compaction, Control, IndexEntry, IndexSpan, TopicPartition

RUNS_MAX = 16  # first compactions of one partition in one pass
QUIET_MS = 24 * 3600 * 1000  # a partition without compactions for this long has what is small merged, however few


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


def select_again(
    spans: Sequence[IndexSpan],
    size_of: Callable[[IndexSpan], int],
    *,
    fan_in: int,
    bytes_max: int,
    blob_bytes: int,
    quiet: bool,
) -> list[list[IndexSpan]]:
    """Runs of compacted entries to compact again, for one blob: to fewer entries, or else to fewer blobs.

    `quiet`: the partition has not been compacted for long, so that less of it is enough.
    """
    runs = select_merges(spans, size_of, fan_in=fan_in, bytes_max=bytes_max, quiet=quiet)
    if not runs:
        return select_moves(spans, size_of, bytes_max=bytes_max, blob_bytes=blob_bytes, quiet=quiet)
    sizes = accumulate(sum(map(size_of, run)) for run in runs)
    return [run for run, size in zip(runs, sizes, strict=True) if size <= blob_bytes]


def is_quiet(spans: Sequence[IndexSpan], now_ms: int) -> bool:
    """Whether the last of these compacted entries is old."""
    return bool(spans) and spans[-1].entry.created_at_ms < now_ms - QUIET_MS


def final_until(
    spans: Sequence[IndexSpan], size_of: Callable[[IndexSpan], int], *, bytes_max: int, blob_bytes: int
) -> int:
    """The offset up to which nothing is compacted again while the partition is busy; 0 for none.

    It is the end of the last entry that is full and in a large blob: the runs before it get no further neighbours.
    """
    final = (
        span.end_offset
        for span in reversed(spans)
        if size_of(span) * 2 >= bytes_max and span.entry.blob_bytes * 2 >= blob_bytes
    )
    return next(final, 0)


def select_merges(
    spans: Sequence[IndexSpan],
    size_of: Callable[[IndexSpan], int],
    *,
    fan_in: int,
    bytes_max: int,
    quiet: bool = False,
) -> list[list[IndexSpan]]:
    """Runs of small entries that become one: `fan_in` or more of one level, the lowest first, and those of lower levels
    beside them. With fewer of the level, the largest entry would be written again for each few small ones.

    An entry of half of `bytes_max` is full and stays. A run ends where it would grow beyond `bytes_max`. Of a `quiet`
    partition two entries are enough, whatever their levels.
    """
    small = [span for span in spans if span.entry.tier > 0 and size_of(span) * 2 < bytes_max]
    for level in sorted({span.entry.tier for span in small}):
        found = _neighbours([span for span in small if span.entry.tier <= level], size_of, bytes_max)
        counts = [len(run) if quiet else sum(span.entry.tier == level for span in run) for run in found]
        worth = [run for run, count in zip(found, counts, strict=True) if count >= (2 if quiet else fan_in)]
        if worth:
            return worth
    return []


def select_moves(
    spans: Sequence[IndexSpan], size_of: Callable[[IndexSpan], int], *, bytes_max: int, blob_bytes: int, quiet: bool
) -> list[list[IndexSpan]]:
    """The runs of one large blob: neighbours from small blobs that fill it.

    A blob of half of `blob_bytes` is large and stays, so a byte is moved once. What a `quiet` partition has left moves
    before it fills a blob, where it becomes twice as much as it was in any of its blobs: a few times at most.
    """
    shares: Counter[str] = Counter()
    for span in spans:
        shares[span.entry.data_key] += size_of(span)
    small = [
        span
        for span in spans
        if span.entry.tier > 0 and (span.entry.blob_bytes or shares[span.entry.data_key]) * 2 < blob_bytes
    ]
    filled = max(blob_bytes - bytes_max, blob_bytes // 2)
    for group in _neighbours(small, size_of, blob_bytes):
        size, largest = sum(map(size_of, group)), max(shares[span.entry.data_key] for span in group)
        if size > filled or (quiet and size >= 2 * largest):
            return _neighbours(group, size_of, bytes_max)
    return []


def _neighbours(
    spans: Sequence[IndexSpan], size_of: Callable[[IndexSpan], int], bytes_max: int
) -> list[list[IndexSpan]]:
    """All of these in runs without a gap, each of `bytes_max` at most."""
    runs: list[list[IndexSpan]] = []
    size = 0
    for span in spans:
        size += size_of(span)
        if not runs or runs[-1][-1].end_offset + 1 != span.start_offset or size > bytes_max:
            runs.append([])
            size = size_of(span)
        runs[-1].append(span)
    return runs


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
