"""The store seam in memory: the deterministic twin that simulation and unit tests run on.

It passes the same conformance suite as the real bucket, and like SeaweedFS its etag is the content's MD5, so that code
which forgets the nonce (A → B → A) fails here too.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right, insort
from collections.abc import AsyncIterator, Sequence

from lakebed import errors
from lakebed.clock import Clock, now_ms
from lakebed.store.model import ObjectInfo, StoredObject, check_key, check_prefix

LIST_PAGE = 1000  # S3's page: a listing sees later pages as they are when it reaches them


class MemoryStore:
    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._objects: dict[str, StoredObject] = {}
        self._order: list[tuple[str, ...]] = []  # sorted by segments, as a folder tree is walked

    async def get(self, key: str) -> StoredObject:
        found = self._objects.get(check_key(key))
        if found is None:
            raise errors.NotFound(f"get {key!r}: no such object")
        return found

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        if start < 0 or length <= 0:
            raise errors.Invalid(f"range {start}+{length} of {key!r} is not a range")
        data = (await self.get(key)).data
        if start + length > len(data):
            raise errors.Corrupt(f"{key!r} ends at byte {len(data)}, before {start + length}")
        return data[start : start + length]

    async def head(self, key: str) -> ObjectInfo:
        return (await self.get(key)).info

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        folder = tuple(check_prefix(prefix).split("/")[:-1])
        last = tuple(after.split("/")) if after else folder
        while True:
            start = bisect_right(self._order, max(last, folder))
            page = self._order[start : start + LIST_PAGE]
            for segments in page:
                if segments[: len(folder)] != folder:
                    return
                found = self._objects.get("/".join(segments))
                if found is not None:
                    yield found.info
            if len(page) < LIST_PAGE:
                return
            last = page[-1]

    async def children(self, prefix: str) -> Sequence[str]:
        depth = check_prefix(prefix).count("/")
        names = {info.key.split("/")[depth] async for info in self.list(prefix) if info.key.count("/") > depth}
        return sorted(names)

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        current = self._objects.get(check_key(key))
        if current is None:
            return self._put(key, data)
        if current.data == data:
            return current.info
        raise errors.AlreadyExists(f"{key!r} already holds other bytes", current=current)

    async def replace(self, key: str, data: bytes, etag: str) -> ObjectInfo:
        current = self._objects.get(check_key(key))
        if current is None:
            raise errors.Stale(f"{key!r} is gone", current=None)
        if current.etag == etag:
            return self._put(key, data)
        if current.data == data:
            return current.info
        raise errors.Stale(f"{key!r} has changed", current=current)

    async def upload(self, key: str, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        check_key(key)
        return self._put(key, b"".join([chunk async for chunk in chunks]))

    async def delete(self, key: str) -> None:
        if self._objects.pop(check_key(key), None) is not None:
            self._order.remove(tuple(key.split("/")))

    def _put(self, key: str, data: bytes) -> ObjectInfo:
        data = bytes(data)
        etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        info = ObjectInfo(key=key, size=len(data), etag=etag, modified_ms=now_ms(self._clock))
        if key not in self._objects:
            insort(self._order, tuple(key.split("/")))
        self._objects[key] = StoredObject(info, data)
        return info
