"""Ranges in byte order on a server that sorts by folders. Pure.

Oxia sorts keys hierarchically: in a folder, first the keys that end there, in byte order, then its folders by name,
each with everything below it. The meta store sorts by plain bytes, so one of its ranges is a few ranges there.
"""

from __future__ import annotations

import msgspec

FIRST = "\x01"  # sorts before every character that a key may have
LAST = "\U0010ffff"  # and this after them
INTERNAL = "__oxia"  # the server's own folder: a scan that touches it fails


class KeyRange(msgspec.Struct, frozen=True):
    """A range in the server's order. `sorted` when what it gives needs neither sorting nor picking."""

    start: str
    end: str
    sorted: bool


def key_ranges(start: str, end: str) -> list[KeyRange]:
    """Ranges in hierarchical order that together cover start <= key < end in byte order.

    A range that is not `sorted` may hold more keys than requested. A whole folder is one range with exactly its keys.
    """
    if start >= end:
        return []
    folder, low, high = _common_folder(start, end)
    if folder and not low and high is None:
        return [KeyRange(folder, _behind(folder), False)]
    found = _folders(folder, low, high)
    if high is None:
        return [KeyRange(folder + _flat(low), folder + "/", True), *found]
    if _flat(low) < _flat(high):
        return [KeyRange(folder + _flat(low), folder + _flat(high), True), *found]
    return found


def is_whole_folder(start: str, end: str) -> bool:
    """Whether this range is a folder with all that is below it: one range in both orders."""
    return start.endswith("/") and end == start[:-1] + "0"


def _common_folder(start: str, end: str) -> tuple[str, str, str | None]:
    """The deepest folder that holds the whole range, and the range's bounds inside it (None: to its end)."""
    if end.endswith("0") and start.startswith(end[:-1] + "/"):
        folder = end[:-1] + "/"
        return folder, start[len(folder) :], None
    shared = _shared(start, end)
    folder = shared[: shared.rfind("/") + 1]
    return folder, start[len(folder) :], end[len(folder) :]


def _flat(bound: str) -> str:
    """The bound for names without a slash: none of them is between 'a/…' and 'a0'."""
    name, slash, _ = bound.partition("/")
    return name + "0" if slash else name


def _folders(folder: str, low: str, high: str | None) -> list[KeyRange]:
    """Ranges of the folders inside `folder` whose keys may be in the range."""
    shared = _shared(low, high) if high is not None else ""
    start, end = f"{folder}{shared}/", f"{folder}{shared}{LAST}/"
    if folder or not (shared <= INTERNAL <= shared + LAST):
        return [KeyRange(start, end, False)]
    return [KeyRange(start, f"{INTERNAL}/", False), KeyRange(f"{INTERNAL}{FIRST}/", end, False)]


def _behind(folder: str) -> str:
    """The first place in hierarchical order behind everything below the folder."""
    return f"{folder[:-1]}{FIRST}/"


def _shared(one: str, other: str) -> str:
    """The common prefix."""
    length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]
