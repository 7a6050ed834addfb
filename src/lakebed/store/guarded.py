"""A store that allows writes only after a check that its path honours conditional requests.

Every process gets its store through this guard: the first write of a command runs the check, a gateway and the workers
run it at start and every hour. When a later check fails, all writes are refused, deletes too (what looks unreferenced
may have been overwritten), until a check succeeds.

Writes in progress, and those since the last successful check, may have been acknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from lakebed.core.errors import Invalid, Unavailable
from lakebed.core.logs import logger
from lakebed.core.runtime import Runtime
from lakebed.store.model import ObjectInfo, StoredObject, Version, Written
from lakebed.store.path_check import check_path
from lakebed.store.protocol import Store
from lakebed.store.prover import StoreProof, demand

RETRY_AFTER_S = 60.0  # a refused client retries after the next check

log = logger("store")


class ConditionsIgnored(Unavailable):
    """This process refuses writes: its path to the bucket ignores conditions. Use another process, or wait."""

    code = "conditions_ignored"


class GuardedStore:
    """The store `inner` behind the check. Reads pass; writes pass after a successful check."""

    def __init__(self, inner: Store, runtime: Runtime) -> None:
        self.inner = inner
        self._guard = self  # whose check counts
        self._runtime = runtime
        self._ignored = runtime.metrics.gauge("lakebed_store_conditions_ignored")
        self._holds = False
        self._checking: asyncio.Task[StoreProof] | None = None
        self.refusal = ""  # why writes are refused; empty when they are not

    def beside(self, inner: Store) -> GuardedStore:
        """Another client of the same path, as of other credentials: it writes only while this one may."""
        made = GuardedStore(inner, self._runtime)
        made._guard = self
        return made

    async def check(self) -> StoreProof:
        """Checks the path now and allows or refuses writes. Concurrent callers share one check.

        Raises what the store raises when it does not respond; the last result stays.
        """
        task = self._checking
        if task is None or task.done() or task.get_loop() is not asyncio.get_running_loop():
            task = self._checking = asyncio.create_task(self._check())
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its caller may have left
        return await asyncio.shield(task)

    async def _check(self) -> StoreProof:
        proof = await check_path(self.inner, self._runtime)
        try:
            demand(proof)
        except Invalid as error:
            self._holds, self.refusal = False, error.message
            self._ignored.set(1)
            log.error("the store ignores conditional requests on this path; writes are refused", error=error.message)
        else:
            if self.refusal:
                log.warning("the store honours conditional requests again; writes are allowed")
            self._holds, self.refusal = True, ""
            self._ignored.set(0)
        return proof

    async def _admit(self) -> None:
        """Raises Invalid when the first check fails, ConditionsIgnored when a later one did."""
        if self.refusal:
            raise ConditionsIgnored(
                f"this process refuses writes: {self.refusal}",
                retry_after_s=RETRY_AFTER_S,
                hint="run lakebed doctor to check the path to the store",
            )
        demand(await self.check())

    def get(self, key: str) -> Coroutine[Any, Any, StoredObject]:
        return self.inner.get(key)

    def get_range(self, key: str, start: int, length: int) -> Coroutine[Any, Any, bytes]:
        return self.inner.get_range(key, start, length)

    def head(self, key: str) -> Coroutine[Any, Any, ObjectInfo]:
        return self.inner.head(key)

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        return self.inner.list(prefix, after=after)

    def children(self, prefix: str) -> Coroutine[Any, Any, Sequence[str]]:
        return self.inner.children(prefix)

    async def create(self, key: str, data: bytes) -> Written:
        if not self._guard._holds:
            await self._guard._admit()
        return await self.inner.create(key, data)

    async def replace(self, key: str, data: bytes, etag: Version) -> Written:
        if not self._guard._holds:
            await self._guard._admit()
        return await self.inner.replace(key, data, etag)

    async def upload(self, key: str, chunks: AsyncIterator[bytes]) -> ObjectInfo:
        if not self._guard._holds:
            await self._guard._admit()
        return await self.inner.upload(key, chunks)

    async def delete(self, key: str) -> None:
        if not self._guard._holds:
            await self._guard._admit()
        await self.inner.delete(key)


def unguarded(store: Store) -> Store:
    """The store without its guard, for checks of the path itself."""
    return store.inner if isinstance(store, GuardedStore) else store
