"""A bucket that is a folder on this machine: our store, delta-rs, Polars and Spark see the same table in it."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from lakebed.core import errors
from lakebed.core.clock import Clock
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.store.bucket import BucketStore
from lakebed.store.model import ObjectInfo, StoredObject, Version


class FolderBucket:
    """A `BucketClient` for one writer of ours at a time; a create is exclusive among all processes (a hard link)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def get(self, key: str) -> StoredObject:
        try:
            data = (self.folder / key).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise errors.NotFound(f"get {key!r}: no such object") from None
        return StoredObject(self._info(key, data), data)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        return (await self.get(key)).data[start : start + length]

    async def head(self, key: str) -> ObjectInfo:
        return (await self.get(key)).info

    async def pages(self, prefix: str, after: str) -> AsyncIterator[Sequence[ObjectInfo]]:
        found = [each for each in (self.folder / prefix).rglob("*") if each.is_file()]
        keys = sorted(each.relative_to(self.folder).as_posix() for each in found)
        yield [(await self.get(key)).info for key in keys if key > after]

    async def children(self, prefix: str) -> Sequence[str]:
        folder = self.folder / prefix
        return [each.name for each in folder.iterdir() if each.is_dir()] if folder.is_dir() else []

    async def put(self, key: str, data: bytes, instead_of: Version | None) -> Version:
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.folder)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        try:
            if instead_of is None:
                os.link(name, path)
            elif (await self.get(key)).etag != instead_of:
                raise FileExistsError
            else:
                Path(name).replace(path)
        except FileExistsError:
            raise errors.Conflict(f"put {key!r}: the condition does not hold") from None
        finally:
            Path(name).unlink(missing_ok=True)
        return Version(self._info(key, data).etag)

    async def upload(self, key: str, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        data = b"".join([chunk async for chunk in chunks])
        (self.folder / key).write_bytes(data)
        return self._info(key, data)

    async def delete(self, key: str) -> None:
        (self.folder / key).unlink(missing_ok=True)

    def _info(self, key: str, data: bytes) -> ObjectInfo:
        etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        return ObjectInfo(key, len(data), etag, int((self.folder / key).stat().st_mtime * 1000))


def folder_store(folder: Path, clock: Clock) -> BucketStore:
    return BucketStore(FolderBucket(folder), Runtime(clock, Ids(), Metrics()))
