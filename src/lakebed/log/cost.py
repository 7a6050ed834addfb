"""What the log would cost on S3, estimated from the requests it makes and the bytes it stores.

Prices are those of S3 Standard in us-east-1. Request costs add up over processes; every process sees the same stored
bytes, so the largest value counts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec

from lakebed.log import paths
from lakebed.store.model import ObjectInfo, StoredObject, Version, Written
from lakebed.store.prices import DOLLARS_PER_GET, DOLLARS_PER_GIB_MONTH, DOLLARS_PER_PUT_OR_LIST
from lakebed.store.runtime import StoreRuntime

LIST_PAGE = 1000  # one LIST request gives this many keys
SECONDS_PER_MONTH = 365 * 24 * 3600 / 12
OPS = ("put", "list", "get", "range_get")


class StorageUsage(msgspec.Struct, frozen=True):
    stored_bytes: int
    stored_objects: int


def request_dollars(counts: dict[str, float]) -> float:
    """The cost of these requests: {"put": …, "list": …, "get": …, "range_get": …}."""
    writes = counts.get("put", 0) + counts.get("list", 0)
    reads = counts.get("get", 0) + counts.get("range_get", 0)
    return writes * DOLLARS_PER_PUT_OR_LIST + reads * DOLLARS_PER_GET


def storage_dollars_month(usage: StorageUsage) -> float:
    return usage.stored_bytes / 1024**3 * DOLLARS_PER_GIB_MONTH


def batching_dollars_month(delay_ms: float, backend: str) -> float:
    """What a broker spends in a month on flights that leave by time, one each `delay_ms`, on this metadata store.

    A flight writes its blob and, with the metadata in the bucket, the object that has the control records of its
    partitions: at least one. A flight of many partitions writes more of these.
    """
    writes = 2 if backend == "bucket" else 1
    return SECONDS_PER_MONTH * 1000 / max(delay_ms, 1.0) * writes * DOLLARS_PER_PUT_OR_LIST


class MeteredStore:
    """The store as the log uses it, each request counted under the name it is billed by."""

    def __init__(self, runtime: StoreRuntime) -> None:
        self._store, metrics = runtime.store, runtime.metrics
        requests = metrics.counter("lakebed_log_s3_requests_total")
        self._ops = {op: requests.labels(op=op) for op in OPS}
        self._counts = dict.fromkeys(OPS, 0.0)
        self._dollars = metrics.gauge("lakebed_log_s3_request_cost_dollars")
        self._bytes = metrics.gauge("lakebed_log_s3_stored_bytes")
        self._objects = metrics.gauge("lakebed_log_s3_stored_objects")
        self._dollars_month = metrics.gauge("lakebed_log_s3_storage_cost_dollars_month")

    async def get(self, key: str) -> StoredObject:
        self._count("get")
        return await self._store.get(key)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        self._count("range_get")
        return await self._store.get_range(key, start, length)

    async def head(self, key: str) -> ObjectInfo:
        self._count("get")  # billed like one
        return await self._store.head(key)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        seen = 0
        async for info in self._store.list(prefix, after=after):
            if seen % LIST_PAGE == 0:
                self._count("list")
            seen += 1
            yield info
        if seen == 0:
            self._count("list")

    async def children(self, prefix: str) -> Sequence[str]:
        self._count("list")
        return await self._store.children(prefix)

    async def create(self, key: str, data: bytes) -> Written:
        self._count("put")
        return await self._store.create(key, data)

    async def replace(self, key: str, data: bytes, etag: Version) -> Written:
        self._count("put")
        return await self._store.replace(key, data, etag)

    async def upload(self, key: str, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        self._count("put")
        return await self._store.upload(key, chunks)

    async def delete(self, key: str) -> None:
        await self._store.delete(key)  # free

    async def measure(self) -> StorageUsage:
        """Scans the log's prefix and sets the gauges; the scan itself is counted too."""
        size = count = 0
        async for info in self.list(paths.ROOT):
            size, count = size + info.size, count + 1
        usage = StorageUsage(size, count)
        self._bytes.set(size)
        self._objects.set(count)
        self._dollars_month.set(storage_dollars_month(usage))
        return usage

    def _count(self, op: str) -> None:
        self._counts[op] += 1
        self._ops[op].inc()
        self._dollars.set(request_dollars(self._counts))
