"""A bucket that ignores conditions, as an endpoint does that drops If-Match and If-None-Match."""

from __future__ import annotations

from lakebed.core.clock import Clock
from lakebed.store.memory import MemoryBucket, MemoryStore
from lakebed.store.model import Version


class CarelessBucket(MemoryBucket):
    async def put(self, key: str, data: bytes, instead_of: Version | None) -> Version:
        return Version(self.overwrite(key, data).etag)


def careless_store(clock: Clock) -> MemoryStore:
    """A store on such a bucket; `bucket.objects` shows what is kept."""
    return MemoryStore(clock=clock, bucket=CarelessBucket(clock=clock))
