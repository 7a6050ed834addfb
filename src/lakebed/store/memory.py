"""A bucket in memory, for unit tests, simulation and `store.url = "memory:"`.

It is below `BucketStore` like a real bucket: one object per key, conditions and pages, and no decisions. Its etag is
the MD5 of the content, as in SeaweedFS, so that code which forgets the nonce (A → B → A) fails here too.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import AsyncIterator, Sequence

from lakebed.core import errors
from lakebed.core.clock import Clock, now_ms
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.store.bucket import BucketStore
from lakebed.store.model import ObjectInfo, StoredObject, Version

LIST_PAGE = 1000  # S3's page: a listing sees later pages as they are when it reaches them


class MemoryBucket:
    """A `BucketClient` whose bucket is this object: several stores may share it, as processes share a bucket."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self.objects: dict[str, StoredObject] = {}
        self._order: list[tuple[str, ...]] = []  # sorted by segments, like a folder tree

    async def get(self, key: str) -> StoredObject:
        found = self.objects.get(key)
        if found is None:
            raise errors.NotFound(f"get {key!r}: no such object")
        return found

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        return (await self.get(key)).data[start : start + length]

    async def head(self, key: str) -> ObjectInfo:
        return (await self.get(key)).info

    async def pages(self, prefix: str, after: str) -> AsyncIterator[Sequence[ObjectInfo]]:
        while page := self.page(prefix, after, LIST_PAGE):
            yield page
            if len(page) < LIST_PAGE:
                return
            after = page[-1].key

    def page(self, prefix: str, after: str, size: int) -> list[ObjectInfo]:
        """The next `size` objects under a folder, after the key `after`."""
        folder = tuple(prefix.split("/")[:-1])
        last = tuple(after.split("/")) if after else folder
        start = bisect_right(self._order, max(last, folder))
        found = ("/".join(each) for each in self._order[start : start + size] if each[: len(folder)] == folder)
        return [self.objects[key].info for key in found]

    async def children(self, prefix: str) -> Sequence[str]:
        depth = prefix.count("/")
        keys = [info.key async for page in self.pages(prefix, "") for info in page]
        return list({key.split("/")[depth] for key in keys if key.count("/") > depth})

    async def put(self, key: str, data: bytes, instead_of: Version | None) -> Version:
        current = self.objects.get(key)
        if (current.etag if current else None) != instead_of:
            conflict = errors.Conflict(f"put {key!r}: the condition does not hold")
            conflict.repeated = False
            raise conflict
        return Version(self.overwrite(key, data).etag)

    async def upload(self, key: str, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        return self.overwrite(key, b"".join([chunk async for chunk in chunks]))

    async def delete(self, key: str) -> None:
        if self.objects.pop(key, None) is not None:
            del self._order[bisect_left(self._order, tuple(key.split("/")))]

    def overwrite(self, key: str, data: bytes) -> ObjectInfo:
        """Stores the bytes, whatever was there."""
        data = bytes(data)
        etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        info = ObjectInfo(key=key, size=len(data), etag=etag, modified_ms=now_ms(self._clock))
        if key not in self.objects:
            insort(self._order, tuple(key.split("/")))
        self.objects[key] = StoredObject(info, data)
        return info


class MemoryStore(BucketStore):
    """A store on a bucket in memory: its own, or a shared one."""

    def __init__(self, *, clock: Clock, bucket: MemoryBucket | None = None) -> None:
        self.bucket = bucket or MemoryBucket(clock=clock)
        super().__init__(self.bucket, Runtime(clock, Ids.seeded("memory"), Metrics()))
