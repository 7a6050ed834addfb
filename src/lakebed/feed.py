"""What a part tells whoever reads it in bulk, without knowing who: pieces, planned in one place and read in many.

A feed orders what a part holds by offsets. Between two offsets lie pieces: objects, or slices of objects, each of which
a process elsewhere reads on its own, by the piece alone. An object that is missing, damaged or of a later format stops
nobody: its piece comes back with the problem in place of rows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from lakebed.errors import Corrupt, Invalid, NotFound

READ_AHEAD = 16  # objects of one task that are on their way at once

Offset = dict[str, int]


class Piece(msgspec.Struct, frozen=True):
    """What one read fetches. `key` names it to people; `told` is for its feed alone. Zero: not known yet.

    `id` is what a table remembers it by. Where rows are numbered by whoever sent them, `series` says who, and the
    numbers are those from `first` to `last`.
    """

    key: str
    rows: int = 0
    size_bytes: int = 0
    told: bytes = b""
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
        """Whether an object's contents must be known to tell whether it fits."""
        return bool(self.rows or self.size_bytes)

    def exceeded(self, objects: int, rows: int, size_bytes: int) -> bool:
        pairs = ((objects, self.objects), (rows, self.rows), (size_bytes, self.size_bytes))
        return any(most and count > most for count, most in pairs)


class Wanted(msgspec.Struct, frozen=True):
    """Bounds on columns, for leaving out what cannot matter. Bounds are inclusive; a reader still filters its rows."""

    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    among: dict[str, frozenset[Any]] = {}

    def may_hold(self, column: str, low: Any, high: Any) -> bool:
        """Whether values between low and high can be wanted."""
        if column in self.low and high < self.low[column]:
            return False
        if column in self.high and low > self.high[column]:
            return False
        return column not in self.among or any(low <= value <= high for value in self.among[column])

    def takes(self, column: str, value: Any) -> bool:
        return self.may_hold(column, value, value)


class Read(msgspec.Struct, frozen=True):
    """A piece that was read: its rows as an Arrow record batch (None: nothing of it is wanted), or why it cannot be."""

    piece: Piece
    rows: Any = None
    problem: str = ""


class Feed(Protocol):
    def schema(self) -> Any:
        """The columns, as an Arrow schema."""

    async def begin(self) -> Offset:
        """Where somebody begins who has read nothing."""

    async def reach(self, start: Offset, limit: Limit) -> Offset:
        """How far a step from `start` goes now, within the limit; `start` when there is nothing more."""

    async def pieces(self, start: Offset, end: Offset, wanted: Wanted) -> list[Piece]:
        """What lies behind `start`, up to and including `end`, less what cannot be wanted. The same again each time."""

    async def described(self, piece: Piece) -> Piece:
        """The piece with everything known; one that cannot be described stays as it is, and fails when loaded."""

    async def load(self, piece: Piece, columns: Sequence[str], wanted: Wanted) -> Any:
        """The piece's rows with these columns, or None when none of it is wanted.

        Raises NotFound, Corrupt or Invalid when the stored bytes are not what they should be.
        """


async def read_all(feed: Feed, pieces: Sequence[Piece], columns: Sequence[str], wanted: Wanted) -> AsyncIterator[Read]:
    """Every piece, in order, some of them fetched ahead. What cannot be read says why; an absent store still raises."""

    async def load(piece: Piece) -> Read:
        try:
            return Read(piece, await feed.load(piece, columns, wanted))
        except (NotFound, Corrupt, Invalid) as error:
            return Read(piece, None, f"{error.code}: {error.message}")

    async for read in ahead(pieces, load):
        yield read


async def ahead(
    items: Sequence[Any], work: Callable[[Any], Awaitable[Any]], count: int = READ_AHEAD
) -> AsyncIterator[Any]:
    """The results of the work in the order of the items, up to `count` of them under way at once."""
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


def within(pieces: Sequence[Piece], limit: Limit) -> list[Piece]:
    """As many of the first pieces as the limit lets through, at least one."""
    taken: list[Piece] = []
    rows = size_bytes = 0
    for piece in pieces:
        rows, size_bytes = rows + piece.rows, size_bytes + piece.size_bytes
        if taken and limit.exceeded(len(taken) + 1, rows, size_bytes):
            break
        taken.append(piece)
    return taken
