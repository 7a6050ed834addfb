"""Which pieces a read needs, and how they are shared out: filters into bounds, pieces into tasks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lakebed.core.feed import FeedFilter, FeedSlice, Offset

PIECES_PER_TASK = 64
TASKS_MIN, TASKS_MAX = 8, 10_000

LOW = ("GreaterThan", "GreaterThanOrEqual")
HIGH = ("LessThan", "LessThanOrEqual")
EQUAL = ("EqualTo", "EqualNullSafe")


def wanted_by(filters: Sequence[Any]) -> FeedFilter:
    """The bounds in Spark's filters, which all must hold; Spark applies the others."""
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    among: dict[str, frozenset[Any]] = {}
    for each in filters:
        kind, path = type(each).__name__, list(getattr(each, "attribute", ()))
        if len(path) != 1 or getattr(each, "value", None) is None:
            continue
        name, value = path[0], each.value
        if kind in LOW:
            low[name] = max(low.get(name, value), value)
        elif kind in HIGH:
            high[name] = min(high.get(name, value), value)
        elif kind in EQUAL or kind == "In":
            values = frozenset([value] if kind in EQUAL else [one for one in value if one is not None])
            among[name] = among[name] & values if name in among else values
    for name, values in among.items():
        if values:
            low[name] = max(low.get(name, min(values)), min(values))
            high[name] = min(high.get(name, max(values)), max(values))
    return FeedFilter(low, high, among)


def shared_out(pieces: Sequence[FeedSlice], tasks: int = 0) -> list[list[FeedSlice]]:
    """Neighbouring pieces together, about as many bytes in each task; pieces of unknown size count alike."""
    if not pieces:
        return []
    count = tasks or min(TASKS_MAX, max(TASKS_MIN, -(-len(pieces) // PIECES_PER_TASK)))
    count = min(count, len(pieces))
    sizes = [piece.size_bytes or 1 for piece in pieces]
    share = sum(sizes) / count
    groups: list[list[FeedSlice]] = [[]]
    done = 0.0
    for index, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
        full = done + size / 2 > share * len(groups) or len(pieces) - index <= count - len(groups)
        if groups[-1] and full and len(groups) < count:
            groups.append([])
        groups[-1].append(piece)
        done += size
    return groups


def capped(start: Offset, reached: Offset, target: Offset) -> Offset:
    """How far a step goes that must not pass the target, nor go back: what the target does not know came after it."""
    known = {name: value for name, value in reached.items() if name in start or name in target}
    return {name: max(min(value, target.get(name, 0)), start.get(name, 0)) for name, value in known.items()}
