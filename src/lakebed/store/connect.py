"""Opens the store of the settings, also below a prefix of its bucket."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from lakebed.core.errors import AlreadyExists, Invalid, Stale
from lakebed.core.runtime import Runtime
from lakebed.store.bucket import BucketStore
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo, StoredObject, Version, Written, check_key
from lakebed.store.obstore_client import ObstoreClient, open_bucket
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings

if TYPE_CHECKING:
    from lakebed.store.fast.puts import PutClient

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


def connect(settings: StoreSettings, runtime: Runtime) -> Store:
    """The store at `store.url`, below `store.prefix`. Opens no connection yet."""
    trust(settings)
    if settings.url.startswith("memory:"):
        store: Store = MemoryStore(clock=runtime.clock)
    else:
        client = ObstoreClient(open_bucket(settings), _fast_puts(settings, runtime))
        store = BucketStore(client, runtime)
    return PrefixedStore(store, settings.prefix) if settings.prefix else store


def trust(settings: StoreSettings) -> None:
    """Makes this process verify servers with `store.ca_file`. Raises Invalid when there is no such file.

    obstore and delta-rs know no other way than this variable, which OpenSSL and rustls both read.
    """
    if not settings.ca_file:
        return
    if not Path(settings.ca_file).is_file():
        raise Invalid(f"store.ca_file {settings.ca_file} is not a file", hint="a PEM file with the store's authority")
    os.environ["SSL_CERT_FILE"] = settings.ca_file


def _fast_puts(settings: StoreSettings, runtime: Runtime) -> PutClient | None:
    """The fast path of conditional PUTs, where it applies and its parser is installed (extra `server`)."""
    try:
        from lakebed.store.fast.puts import PutClient
    except ModuleNotFoundError:
        return None
    return PutClient(settings, runtime) if PutClient.applies(settings) else None
