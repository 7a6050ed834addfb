"""Opens the store of the settings, also below a prefix of its bucket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

import msgspec

from lakebed.core.clock import Clock
from lakebed.core.errors import AlreadyExists, Stale
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.store.bucket import BucketStore
from lakebed.store.fast.puts import PutClient
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo, StoredObject, Version, Written, check_key
from lakebed.store.obstore_client import ObstoreClient, open_bucket
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings

Info = TypeVar("Info", bound=ObjectInfo)


class PrefixedStore:
    """A store below a prefix: several Lakebeds can share one bucket."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._root = check_key(prefix.rstrip("/")) + "/"

    async def get(self, key: str) -> StoredObject:
        return self._inside(await self._store.get(self._root + key))

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        return await self._store.get_range(self._root + key, start, length)

    async def head(self, key: str) -> ObjectInfo:
        return self._short(await self._store.head(self._root + key))

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in self._store.list(self._root + prefix, after=self._root + after if after else ""):
            yield self._short(info)

    async def children(self, prefix: str) -> Sequence[str]:
        return await self._store.children(self._root + prefix)

    async def create(self, key: str, data: bytes) -> Written:
        try:
            return self._short(await self._store.create(self._root + key, data))
        except AlreadyExists as error:
            error.current = self._inside(error.current)
            raise

    async def replace(self, key: str, data: bytes, etag: Version) -> Written:
        try:
            return self._short(await self._store.replace(self._root + key, data, etag))
        except Stale as error:
            error.current = error.current and self._inside(error.current)
            raise

    async def upload(self, key: str, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        return self._short(await self._store.upload(self._root + key, chunks))

    async def delete(self, key: str) -> None:
        await self._store.delete(self._root + key)

    def _short(self, info: Info) -> Info:
        return msgspec.structs.replace(info, key=info.key.removeprefix(self._root))

    def _inside(self, stored: StoredObject) -> StoredObject:
        return StoredObject(self._short(stored.info), stored.data)


def connect(settings: StoreSettings, *, clock: Clock, ids: Ids, metrics: Metrics) -> Store:
    """The store at `store.url`, below `store.prefix`. Opens no connection yet."""
    if settings.url.startswith("memory:"):
        store: Store = MemoryStore(clock=clock)
    else:
        puts = PutClient(settings, clock=clock, ids=ids) if PutClient.applies(settings) else None
        client = ObstoreClient(open_bucket(settings), puts)
        store = BucketStore(client, clock=clock, ids=ids, metrics=metrics)
    return PrefixedStore(store, settings.prefix) if settings.prefix else store
