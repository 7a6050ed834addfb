"""Ranges in byte order, queried of a server that sorts by folders."""

from __future__ import annotations

from functools import cmp_to_key

import pytest

from lakebed.meta.oxia.order import INTERNAL, is_whole_folder, key_ranges


def folders_first(one: str, other: str) -> int:
    """Hierarchical order, written down as Oxia documents it: names that end here come before folders."""
    mine, theirs = one.split("/"), other.split("/")
    for at in range(min(len(mine), len(theirs))):
        ends = (at == len(mine) - 1, at == len(theirs) - 1)
        if ends[0] != ends[1]:
            return -1 if ends[0] else 1
        if mine[at] != theirs[at]:
            return -1 if mine[at] < theirs[at] else 1
    return 0


def server_scan(keys: list[str], start: str, end: str) -> list[str]:
    inside = [key for key in keys if folders_first(start, key) <= 0 and folders_first(key, end) < 0]
    return sorted(inside, key=cmp_to_key(folders_first))


NAMES = ["a", "a!", "a-b", "a.", "a0", "b"]
UNIVERSE = [*NAMES, *(f"{one}/{other}" for one in NAMES for other in NAMES), "a/b/c", "a/b/a0", "a0/a/b/c"]
BOUNDS = [
    *NAMES,
    "",
    "a/",
    "a!/",
    "b/",
    "a/a",
    "a/a-",
    "a/b",
    "a/b/",
    "a/b/b",
    "a/b0",
    "a0/",
    "a0/a/b",
    "b/c",
    "c",
    "a//",
]


@pytest.mark.parametrize("start", BOUNDS)
def test_the_pieces_of_any_range_hold_every_key_of_it_once(start: str) -> None:
    """Whatever the bounds, the pieces together give the range, and sorted pieces give nothing else, in order."""
    for end in BOUNDS:
        scans = [(piece, server_scan(UNIVERSE, piece.start, piece.end)) for piece in key_ranges(start, end)]

        given = [key for _, scan in scans for key in scan if start <= key < end]
        assert sorted(key for key in UNIVERSE if start <= key < end) == sorted(given), (start, end)
        for piece, scan in scans:
            if piece.sorted or is_whole_folder(start, end):
                assert all(start <= key < end for key in scan), (start, end)
            if piece.sorted:
                assert scan == sorted(scan), (start, end)


def test_a_whole_folder_is_one_piece() -> None:
    """What topics and partitions are deleted by stays one atomic range."""
    assert len(key_ranges("llog/t/partitions/0/", "llog/t/partitions/00")) == 1


def test_no_piece_touches_the_servers_own_folder() -> None:
    """A scan over everything steps around the keys that the server keeps for itself."""
    for piece in key_ranges("", "zzz"):
        assert server_scan([f"{INTERNAL}/term", f"{INTERNAL}/notifications/0"], piece.start, piece.end) == []
