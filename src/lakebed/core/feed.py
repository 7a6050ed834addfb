"""Feeds: how a bulk reader (Spark, the pipeline) reads a part without knowing it.

A feed orders what a part holds by offsets. Between two offsets are slices: objects, or ranges of objects. One process
plans the slices; each is then read by any process, from the slice alone. An object that is missing, damaged or of a
later format does not stop the read: its slice is returned with the problem instead of rows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from lakebed.core.errors import Corrupt, Invalid, NotFound

READ_AHEAD = 16  # objects of one task that are fetched at once

Offset = dict[str, int]


class FeedSlice(msgspec.Struct, frozen=True):
    """What one read fetches. `key` names it in messages; `locator` is opaque, for its feed alone. 0: not known yet.

    `id` is what a table remembers it by. Where senders number their rows, `series` names the sender, and the numbers
    run from `first` to `last`.
    """

    key: str
    rows: int = 0
    size_bytes: int = 0
    locator: bytes = b""
    id: str = ""
    series: str = ""
    first: int = 0
    last: int = -1


class Limit(msgspec.Struct, frozen=True):
    """How much one step may take; 0 is no limit. At least one object is taken, however large."""

    objects: int = 0
    rows: int = 0
    size_bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.objects or self.rows or self.size_bytes)

    @property
    def by_content(self) -> bool:
        """Whether an object's contents must be known to decide whether it fits."""
        return bool(self.rows or self.size_bytes)

    def exceeded(self, objects: int, rows: int, size_bytes: int) -> bool:
        pairs = ((objects, self.objects), (rows, self.rows), (size_bytes, self.size_bytes))
        return any(most and count > most for count, most in pairs)


class FeedFilter(msgspec.Struct, frozen=True):
    """Bounds on columns, to skip what cannot match. Bounds are inclusive; a reader still filters its rows."""

    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    among: dict[str, frozenset[Any]] = {}

    def may_hold(self, column: str, low: Any, high: Any) -> bool:
        """Whether values between low and high can match."""
        if column in self.low and high < self.low[column]:
            return False
        if column in self.high and low > self.high[column]:
            return False
        return column not in self.among or any(low <= value <= high for value in self.among[column])

    def takes(self, column: str, value: Any) -> bool:
        return self.may_hold(column, value, value)


class SliceRead(msgspec.Struct, frozen=True):
    """A slice that was read: its rows as an Arrow record batch (None: nothing matches), or why it cannot be read."""

    piece: FeedSlice
    rows: Any = None
    problem: str = ""


class Feed(Protocol):
    def schema(self) -> Any:
        """The columns, as an Arrow schema."""

    async def begin(self) -> Offset:
        """The offset of a reader that has read nothing."""

    async def reach(self, start: Offset, limit: Limit) -> Offset:
        """How far a step from `start` goes now, within the limit; `start` when there is nothing more."""

    async def slices(self, start: Offset, end: Offset, wanted: FeedFilter) -> list[FeedSlice]:
        """The slices after `start`, up to and including `end`, without those that cannot match. Repeatable."""

    async def described(self, piece: FeedSlice) -> FeedSlice:
        """The slice with all fields known; one that cannot be described is returned unchanged and fails in `load`."""

    async def load(self, piece: FeedSlice, columns: Sequence[str], wanted: FeedFilter) -> Any:
        """The slice's rows with these columns, or None when none of them match.

        Raises NotFound, Corrupt or Invalid when the stored bytes are missing or wrong.
        """


async def read_all(
    feed: Feed, pieces: Sequence[FeedSlice], columns: Sequence[str], wanted: FeedFilter
) -> AsyncIterator[SliceRead]:
    """Every slice, in order, some fetched ahead. One that cannot be read has its problem; an absent store raises."""

    async def load(piece: FeedSlice) -> SliceRead:
        try:
            return SliceRead(piece, await feed.load(piece, columns, wanted))
        except (NotFound, Corrupt, Invalid) as error:
            return SliceRead(piece, None, f"{error.code}: {error.message}")

    async for read in ahead(pieces, load):
        yield read


async def ahead(
    items: Sequence[Any], work: Callable[[Any], Awaitable[Any]], count: int = READ_AHEAD
) -> AsyncIterator[Any]:
    """The results of the work in the order of the items, up to `count` of them in progress at once."""
    waiting: deque[asyncio.Future[Any]] = deque()
    try:
        for item in items:
            waiting.append(asyncio.ensure_future(work(item)))
            if len(waiting) >= count:
                yield await waiting.popleft()
        while waiting:
            yield await waiting.popleft()
    finally:
        for task in waiting:
            task.cancel()


def within(pieces: Sequence[FeedSlice], limit: Limit) -> list[FeedSlice]:
    """As many of the first slices as the limit allows, at least one."""
    taken: list[FeedSlice] = []
    rows = size_bytes = 0
    for piece in pieces:
        rows, size_bytes = rows + piece.rows, size_bytes + piece.size_bytes
        if taken and limit.exceeded(len(taken) + 1, rows, size_bytes):
            break
        taken.append(piece)
    return taken
