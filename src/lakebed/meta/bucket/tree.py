"""The tree of bins: which bin has the groups of a partition key, and work in it that follows a split.

The root is at a known name. A split never changes, so what a process has learned of the tree stays true; what it has
not learned it is told by the bin that it asks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from lakebed.meta.bucket.group import Divided, KeyGroup
from lakebed.meta.bucket.model import BIN_SCHEMA, Head

R = TypeVar("R")
ROOT = "root"


class _Bin:
    """A place in the tree. A bin that was split has a boundary and two halves."""

    def __init__(self, group: KeyGroup) -> None:
        self.group = group
        self.at = ""
        self.halves: tuple[_Bin, _Bin] | None = None


class BinTree:
    """`make` opens the bin of a name, which begins with that head where it was never written."""

    def __init__(self, make: Callable[[str, Head], KeyGroup]) -> None:
        self._make = make
        self._root = _Bin(make(ROOT, Head(schema=BIN_SCHEMA)))

    def bin_of(self, partition_key: str) -> KeyGroup:
        """The bin of this partition key, as far as is known."""
        return self._place(partition_key).group

    async def run(self, partition_key: str, work: Callable[[KeyGroup], Awaitable[R]]) -> R:
        """The result of `work` in the bin of this partition key. It is repeated where it met a split."""
        while True:
            place = self._place(partition_key)
            try:
                return await work(place.group)
            except Divided as divided:
                await self._learn(place, divided.head)

    async def learn(self, partition_key: str, head: Head) -> None:
        """The bin of this partition key was split."""
        await self._learn(self._place(partition_key), head)

    async def each(self, work: Callable[[KeyGroup], Awaitable[R]]) -> list[R]:
        """The results of `work` in every bin that is not split, in the order of partition keys."""
        results: list[R] = []
        places = [self._root]
        while places:
            place = places.pop()
            if place.halves is None:
                try:
                    results.append(await work(place.group))
                    continue
                except Divided as divided:
                    await self._learn(place, divided.head)
            assert place.halves is not None
            places += place.halves[::-1]
        return results

    def _place(self, partition_key: str) -> _Bin:
        place = self._root
        while place.halves is not None:
            place = place.halves[0 if partition_key < place.at else 1]
        return place

    async def _learn(self, place: _Bin, head: Head) -> None:
        assert head.split is not None
        if place.halves is not None:
            return
        left, right = await place.group.halves(head)
        place.at = head.split.at
        place.halves = (_Bin(self._make(head.split.left, left)), _Bin(self._make(head.split.right, right)))
