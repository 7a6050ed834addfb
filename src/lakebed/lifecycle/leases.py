"""Leases held while a piece of work goes on, the shards of a worker, and the work it has in progress: they save
duplicate work, and nothing depends on them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any

from lakebed.core.errors import LakebedError
from lakebed.core.logs import logger
from lakebed.lifecycle.cluster import claimed, owned, prefer_worker_id, released
from lakebed.lifecycle.settings import ns
from lakebed.lifecycle.state import LifecycleState, changed
from lakebed.store.lease import Lease

log = logger("lifecycle")


async def hold(
    state: LifecycleState, key: str, owner: str, lease_s: float, stack: AsyncExitStack
) -> Callable[[], Awaitable[None]]:
    """Takes the lease until the stack closes. Returns the function that renews it while the work goes on."""
    lease = Lease(state.runtime, key, owner=owner, lease_s=lease_s)
    held = await lease.acquire()

    async def release() -> None:
        try:
            await lease.release(held)
        except LakebedError as error:
            log.info("lease not released", key=key, error=error.message)

    stack.push_async_callback(release)

    async def alive() -> None:
        nonlocal held
        if held.expires_at_ms * 1_000_000 - state.clock.now_ns() < ns(lease_s * 2 / 3):
            held = await lease.renew(held)

    return alive


class ShardClaim:
    """The shards of the event stream that one worker reads."""

    def __init__(self, state: LifecycleState, name: str, lease_s: float) -> None:
        self.name, self._state, self._lease_ns = name, state, ns(lease_s)
        self._claimed_ns = 0

    async def claim(self) -> frozenset[int]:
        """Reports that this worker lives, and returns the shards it has. Written every third of a lease."""
        now_ns = self._state.clock.now_ns()
        if self._claimed_ns and now_ns - self._claimed_ns < self._lease_ns // 3:
            return owned((await self._state.shards.read()).value, self.name)
        after = await self._state.shards.change(
            changed(lambda known: claimed(known, self.name, now_ns, self._lease_ns))
        )
        self._claimed_ns = now_ns
        return owned(after, self.name)

    async def alive(self) -> None:
        await self.claim()

    async def is_preferred(self, work: str) -> bool:
        """Whether this worker should do this work now: it is preferred for it, or does not take part."""
        known = (await self._state.shards.read()).value
        preferred = prefer_worker_id(known, work, self._state.clock.now_ns())
        return self.name not in known.workers or self.name == preferred

    async def leave(self) -> None:
        self._claimed_ns = 0
        try:
            await self._state.shards.change(changed(lambda known: released(known, self.name)))
        except LakebedError as error:
            log.info("shards not released", error=error.message)


class OngoingWork:
    """Pieces of work by name, `limit` at the same time. One may outlast the wait for it, and is not started twice."""

    def __init__(self, limit: int) -> None:
        self._slots, self._idle = asyncio.Semaphore(limit), asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._fault: Exception | None = None

    def start(self, work: Mapping[str, Callable[[], Awaitable[None]]]) -> None:
        """Starts what is not in progress."""
        for name, piece in work.items():
            if name not in self._tasks:
                self._tasks[name] = asyncio.create_task(self._run(name, piece))

    async def wait(self, until: Coroutine[Any, Any, None]) -> None:
        """Returns when nothing is in progress, or at the end of `until`. A LakebedError of a piece is logged, and the
        piece may be started again; any other is raised here.
        """
        self._idle.clear()
        if not self._tasks or self._fault is not None:
            self._idle.set()
        ends = [asyncio.create_task(until), asyncio.create_task(self._idle.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def cancel(self) -> list[asyncio.Task[None]]:
        """Ends what is in progress; the caller waits for it."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        return tasks

    async def _run(self, name: str, piece: Callable[[], Awaitable[None]]) -> None:
        try:
            async with self._slots:
                await piece()
        except LakebedError as error:
            log.warning("work failed", about=name, error=error.message, kind=error.code)
        except Exception as error:
            self._fault = error
            self._idle.set()
        finally:
            self._tasks.pop(name, None)
            if not self._tasks:
                self._idle.set()
