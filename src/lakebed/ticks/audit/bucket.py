"""Audit rows in the bucket: one small object each, created if absent, replaced if unchanged."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.errors import AlreadyExists, NotFound, Stale
from lakebed.store.model import StoredObject, Version, read_record
from lakebed.store.runtime import StoreRuntime
from lakebed.ticks import paths
from lakebed.ticks.audit import AuditRow
from lakebed.ticks.model import TickId


class BucketAudit:
    def __init__(self, runtime: StoreRuntime, table: str, *, ttl_s: float = 0.0) -> None:
        """Rows expire after `ttl_s` at the earliest: a sweep does not read younger ones."""
        self._store, self._clock, self._table, self._ttl_s = runtime.store, runtime.clock, table, ttl_s

    async def create(self, row: AuditRow) -> bool:
        key, data = paths.audit(self._table, row.tick), msgspec.json.encode(row)
        try:
            await self._store.create(key, data)
        except AlreadyExists as error:
            found: StoredObject = error.current
            return self._over(read_record(found, AuditRow)) and await self._replace(key, data, found.etag)
        return True

    async def change(self, row: AuditRow, was: AuditRow) -> bool:
        key = paths.audit(self._table, row.tick)
        try:
            found = await self._store.get(key)
        except NotFound:
            return False
        if read_record(found, AuditRow).attempt_id != was.attempt_id:
            return False
        return await self._replace(key, msgspec.json.encode(row), found.etag)

    async def get(self, tick: TickId) -> AuditRow | None:
        try:
            row = read_record(await self._store.get(paths.audit(self._table, tick)), AuditRow)
        except NotFound:
            return None
        return None if self._over(row) else row

    async def clear(self, tick: TickId) -> None:
        await self._store.delete(paths.audit(self._table, tick))

    async def rows(self) -> AsyncIterator[AuditRow]:
        async for info in self._store.list(paths.audit(self._table)):
            try:
                row = read_record(await self._store.get(info.key), AuditRow)
            except NotFound:
                continue
            if not self._over(row):
                yield row

    async def ticks(self) -> AsyncIterator[TickId]:
        folder = paths.audit(self._table)
        async for info in self._store.list(folder):
            yield TickId(*info.key.removeprefix(folder).removesuffix(".json").split("/"))

    async def sweep(self) -> int:
        swept = 0
        young_ms = now_ms(self._clock) - round(self._ttl_s * 1000)
        async for info in self._store.list(paths.audit(self._table)):
            if info.modified_ms > young_ms:
                continue
            try:
                over = self._over(read_record(await self._store.get(info.key), AuditRow))
            except NotFound:
                continue
            if over:
                await self._store.delete(info.key)
                swept += 1
        return swept

    async def _replace(self, key: str, data: bytes, etag: Version) -> bool:
        try:
            await self._store.replace(key, data, etag)
        except Stale:
            return False
        return True

    def _over(self, row: AuditRow) -> bool:
        return row.expires_at_s * 1000 <= now_ms(self._clock)
