"""The requests a bucket understands, one method each: the seam below `BucketStore`.

A client carries a request out and reports what was answered; it never decides what a missing answer means. So the
decisions are one piece of code, and they run unchanged on a real bucket, in memory and in simulation.

Errors: Conflict when the store says that a condition does not hold, NotFound, Denied and Invalid for what they say, and
Unavailable for every request without an answer, a write that was carried out included. A client may repeat a request
by itself, and so may a proxy on the way: a Conflict can be with one's own first try.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from lakebed.store.model import ObjectInfo, StoredObject, Version


class BucketClient(Protocol):
    async def get(self, key: str) -> StoredObject:
        """The object with the version that this same answer carried; Unavailable when the answer was cut short."""

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """At most `length` bytes from `start`: fewer, or Unavailable, when the object or the answer ends before."""

    async def head(self, key: str) -> ObjectInfo: ...

    def pages(self, prefix: str, after: str) -> AsyncIterator[Sequence[ObjectInfo]]:
        """Every object under a folder, page by page, behind the key `after`."""

    async def children(self, prefix: str) -> Sequence[str]:
        """The names of the folders directly under a folder, in any order."""

    async def put(self, key: str, data: bytes, instead_of: Version | None) -> Version:
        """One conditional PUT: only if the object still has this version, or, with None, only if there is no object.

        Returns the version that the answer carried; an answer without one is Unavailable.
        """

    async def upload(self, key: str, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        """Stores a large object in parts, without a condition."""

    async def delete(self, key: str) -> None: ...
