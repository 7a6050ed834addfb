"""Leases held while a piece of work goes on, and the shards of a worker: they save duplicate work, and nothing depends
on them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

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
