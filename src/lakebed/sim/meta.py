"""One process's handle to the shared meta store, with the same faults between the two as the object store has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from lakebed.errors import LakebedError
from lakebed.meta.each import put_each
from lakebed.meta.memory import MemoryMeta, MemoryState
from lakebed.meta.model import Entry, Put
from lakebed.meta.protocol import Session
from lakebed.sim.world import Process


class FaultyMeta:
    """A `Meta` for one process. A doubted write is the same call made twice, as a client that retries does it."""

    def __init__(self, process: Process, state: MemoryState) -> None:
        self._faulty = process.store
        self._inner = MemoryMeta(state, clock=process.clock, ids=process.ids)

    async def get(self, key: str, *, partition_key: str = "") -> Entry:
        return await self._faulty._read("m.get", key, partial(self._inner.get, key))

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        expected: str | None = None,
        session: Session | None = None,
        partition_key: str = "",
    ) -> Entry:
        return await self._faulty._write(
            "m.put", key, partial(self._inner.put, key, value, expected=expected, session=session)
        )

    async def put_all(self, puts: Sequence[Put]) -> list[Entry | LakebedError]:
        return await put_each(self, puts)

    async def delete(self, key: str, *, expected: str | None = None, partition_key: str = "") -> None:
        await self._faulty._write("m.delete", key, partial(self._inner.delete, key, expected=expected))

    async def ceiling(self, key: str, *, prefix: str, partition_key: str = "") -> Entry | None:
        return await self._faulty._read("m.ceiling", key, partial(self._inner.ceiling, key, prefix=prefix))

    async def range(self, start: str, end: str, *, limit: int, partition_key: str = "") -> Sequence[Entry]:
        return await self._faulty._read("m.range", start, partial(self._inner.range, start, end, limit=limit))

    async def delete_range(self, start: str, end: str, *, partition_key: str = "") -> None:
        await self._faulty._write("m.del_range", start, partial(self._inner.delete_range, start, end))

    async def open_session(self, *, timeout_s: float) -> Session:
        return await self._inner.open_session(timeout_s=timeout_s)

    async def close(self) -> None:
        await self._inner.close()
