"""Sets of sequence numbers as sorted, disjoint, inclusive ranges: what is known of an agent's boot, in few bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

SeqRanges = tuple[tuple[int, int], ...]


def union(ranges: SeqRanges, more: Iterable[tuple[int, int]]) -> SeqRanges:
    """Both together; ranges that touch become one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted((*ranges, *more)):
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(merged)


def covers(ranges: SeqRanges, start: int, end: int) -> bool:
    """Whether one range holds all of [start, end]."""
    at = bisect_right(ranges, start, key=lambda each: each[0]) - 1
    return at >= 0 and end <= ranges[at][1]


def gaps(ranges: SeqRanges) -> list[tuple[int, int | None]]:
    """Where a number that is not in the set can be: before, between and behind the ranges. None: without an end."""
    found: list[tuple[int, int | None]] = []
    after = -1
    for start, end in ranges:
        if start > after + 1:
            found.append((after + 1, start - 1))
        after = end
    return [*found, (after + 1, None)]
