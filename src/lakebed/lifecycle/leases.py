"""A lease held while a piece of work goes on: it saves duplicate work, and nothing depends on it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from lakebed.core.errors import LakebedError
from lakebed.core.logs import logger
from lakebed.lifecycle.settings import ns
from lakebed.lifecycle.state import LifecycleState
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
