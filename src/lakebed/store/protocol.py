"""The seam to object storage. Everything that Lakebed keeps goes through these verbs.

Two of them are conditional, and both decide on content when an answer is lost or doubtful:

- `create` succeeds when the key holds exactly these bytes afterwards, and raises AlreadyExists when it holds others.
- `replace` succeeds when these bytes took the place of the object with `etag`, and raises Stale otherwise.

So repeating either is harmless, and an object whose bytes carry an attempt id tells its writer "mine" from "theirs".
A conflict speaks of the last look: when an answer was lost, the bytes may have stood there until another replaced them.
Both are single PUTs: commit objects stay small.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from lakebed.store.model import ObjectInfo, StoredObject, Version, Written


class Store(Protocol):
    async def get(self, key: str) -> StoredObject:
        """The object, whole, with its version from the same answer. Raises NotFound."""

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`. Raises NotFound, or Corrupt when the object is shorter."""

    async def head(self, key: str) -> ObjectInfo:
        """The object's size, etag and time. Raises NotFound."""

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Every object under the folder `prefix`, each once; `after` resumes behind a key that an earlier list gave.

        Inside one folder keys come in byte order; how a folder sorts among its neighbours is the store's own affair.
        No key may also be a folder (`a` beside `a/b`): SeaweedFS would skip the folder when resuming behind the key.
        """

    async def children(self, prefix: str) -> Sequence[str]:
        """The names of the folders directly under the folder `prefix`, sorted."""

    async def create(self, key: str, data: bytes) -> Written:
        """Stores the bytes if the key is absent. Idempotent by content.

        Raises AlreadyExists (with `current`) when other bytes stand there, OutcomeUnknown when nobody can tell.
        """

    async def replace(self, key: str, data: bytes, etag: Version) -> Written:
        """Stores the bytes if the object still has `etag`. Idempotent by content.

        The bytes must never have been stored at this key before (carry an epoch or a nonce): etags are content hashes
        on some stores. Raises Stale (with `current`, None when the key is gone), or OutcomeUnknown.
        """

    async def upload(self, key: str, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        """Stores a large object in parts, without a condition: only for names that make repeating harmless.

        Nothing is visible until all parts are there; an iterator that raises leaves nothing behind. Raises
        OutcomeUnknown when no answer came: upload again.
        """

    async def delete(self, key: str) -> None:
        """Removes the object; a missing one is fine. Without a condition: guard it by identity or by reachability.

        Raises OutcomeUnknown when no answer came: the object may be gone.
        """
