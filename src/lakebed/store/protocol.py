"""The interface to object storage. Everything that Lakebed stores goes through these verbs.

Two of them are conditional, and both decide by content when a response is lost or leaves a doubt:

- `create` succeeds when the key holds exactly these bytes afterwards, and raises AlreadyExists when it holds others.
- `replace` succeeds when these bytes took the place of the object with `etag`, and raises Stale otherwise.

So repeating either is harmless, and a writer recognises its own object by an attempt id in its bytes.
A conflict describes the last read: when a response was lost, our bytes may have been stored for a while.
Both are single PUTs: commit objects stay small.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from lakebed.core.errors import NotFound
from lakebed.store.model import ObjectInfo, StoredObject, Version, Written


class Store(Protocol):
    async def get(self, key: str) -> StoredObject:
        """The object, whole, with its version from the same response. Raises NotFound."""

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`. Raises NotFound, or Corrupt when the object is shorter."""

    async def head(self, key: str) -> ObjectInfo:
        """The object's size, etag and time. Raises NotFound."""

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Every object under the folder `prefix`, each once; `after` resumes after a key of an earlier list.

        Inside one folder keys are in byte order; the order of folders among keys depends on the store.
        No key may also be a folder (`a` beside `a/b`): SeaweedFS would skip the folder when resuming after the key.
        """

    async def children(self, prefix: str) -> Sequence[str]:
        """The names of the folders directly under the folder `prefix`, sorted."""

    async def create(self, key: str, data: bytes) -> Written:
        """Stores the bytes if the key is absent. Idempotent by content.

        Raises AlreadyExists (with `current`) when the key has other bytes, or OutcomeUnknown.
        """

    async def replace(self, key: str, data: bytes, etag: Version) -> Written:
        """Stores the bytes if the object still has `etag`. Idempotent by content.

        The bytes must never have been stored at this key before (carry an epoch or a nonce): etags are content hashes
        on some stores. Raises Stale (with `current`, None when the key is absent), or OutcomeUnknown.
        """

    async def upload(self, key: str, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        """Stores a large object in parts, without a condition: only for names that make repeating harmless.

        Nothing is visible until all parts are there; an iterator that raises leaves nothing behind. Raises
        OutcomeUnknown without a response: upload again.
        """

    async def delete(self, key: str) -> None:
        """Removes the object; a missing one is fine. Without a condition: guard it by identity or by reachability.

        Raises OutcomeUnknown without a response: the object may be deleted.
        """


async def exists(store: Store, key: str) -> bool:
    try:
        await store.head(key)
    except NotFound:
        return False
    return True
