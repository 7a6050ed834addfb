"""Checks every hour, in each long-running process, that its path to the store still honours conditions.

A proxy or a load balancer may be put between at any time. When a check fails, the guard around the store refuses every
write, health is down so that a balancer sends requests elsewhere, and checks come more often until one holds again.
A check that the store does not answer changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lakebed.clock import Clock
from lakebed.context import Component, Context, Health
from lakebed.errors import LakebedError
from lakebed.gateway.boot import writes
from lakebed.logs import logger
from lakebed.store.guarded import GuardedStore

CHECK_EVERY_S = 3600.0  # some 20 requests and 1 MiB each time
AGAIN_S = 30.0  # after a check that failed or was not answered

log = logger("gateway")


def path_watch(context: Context, parts: Sequence[str]) -> list[Component]:
    """The watch of a process that writes; none for one that does not, or whose store has no guard."""
    if not isinstance(context.store, GuardedStore) or not writes(context, parts):
        return []
    return [PathWatch(context.store, context.clock)]


class PathWatch:
    name = "store_path"
    reads = ()
    writes = ()

    def __init__(self, store: GuardedStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self.name)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def health(self) -> Health:
        if self._store.refusal:
            return Health("down", f"writes are refused: {self._store.refusal}")
        if self._task is not None and self._task.done():
            return Health("down", "the path to the store is no longer checked")
        return Health("ok")

    async def _run(self) -> None:
        pause_s = CHECK_EVERY_S
        while True:
            await self._clock.sleep(pause_s)
            held = await self._once()
            pause_s = CHECK_EVERY_S if held else min(AGAIN_S, CHECK_EVERY_S)

    async def _once(self) -> bool:
        try:
            return (await self._store.check()).held
        except LakebedError as error:
            log.warning("the path to the store could not be checked", code=error.code, error=error.message)
        except Exception as error:
            log.error("the path to the store could not be checked", exc_info=error)
        return False
