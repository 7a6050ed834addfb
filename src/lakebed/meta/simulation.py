"""One process's handle to the shared meta store, with the same faults between the two as the object store has."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from lakebed.core.errors import LakebedError, OutcomeUnknown
from lakebed.meta.memory import MemoryMeta, MemoryState
from lakebed.meta.model import MetaEntry, Put
from lakebed.meta.protocol import MetaSession, put_each
from lakebed.sim.faults import Unanswered
from lakebed.sim.world import Process

T = TypeVar("T")


class FaultyMeta:
    """A `Meta` for one process. A repeated write is the same call made twice, as a client that retries does it."""

    def __init__(self, process: Process, state: MemoryState) -> None:
        self._wire = process.wire
        self._inner = MemoryMeta(process.context(), state)

    async def get(self, key: str, *, partition_key: str = "") -> MetaEntry:
        return await self._wire.read("m.get", key, partial(self._inner.get, key))

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        expected: str | None = None,
        session: MetaSession | None = None,
        partition_key: str = "",
    ) -> MetaEntry:
        return await self._write("m.put", key, partial(self._inner.put, key, value, expected=expected, session=session))

    async def put_all(self, puts: Sequence[Put]) -> list[MetaEntry | LakebedError]:
        return await put_each(self, puts)

    async def delete(self, key: str, *, expected: str | None = None, partition_key: str = "") -> None:
        await self._write("m.delete", key, partial(self._inner.delete, key, expected=expected))

    async def ceiling(self, key: str, *, prefix: str, partition_key: str = "") -> MetaEntry | None:
        return await self._wire.read("m.ceiling", key, partial(self._inner.ceiling, key, prefix=prefix))

    async def range(self, start: str, end: str, *, limit: int, partition_key: str = "") -> Sequence[MetaEntry]:
        return await self._wire.read("m.range", start, partial(self._inner.range, start, end, limit=limit))

    async def delete_range(self, start: str, end: str, *, partition_key: str = "") -> None:
        await self._write("m.del_range", start, partial(self._inner.delete_range, start, end))

    async def _write(self, verb: str, key: str, write: Callable[[], Coroutine[Any, Any, T]]) -> T:
        try:
            return await self._wire.write(verb, key, write)
        except Unanswered as error:
            raise OutcomeUnknown(error.message, retry_after_s=error.retry_after_s) from error

    async def open_session(self, *, timeout_s: float) -> MetaSession:
        return await self._inner.open_session(timeout_s=timeout_s)

    async def close(self) -> None:
        await self._inner.close()
