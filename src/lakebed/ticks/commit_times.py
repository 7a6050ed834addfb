"""When ticks were committed or replayed: one small note each, whose key sorts by time.

The audit of what silver has not finished lists the notes after its watermark, so that it costs as much as was committed
since, not as much as is kept. A repeated finalize makes a second note, which is harmless.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress

from lakebed.core.clock import now_ms
from lakebed.core.errors import AlreadyExists
from lakebed.store.runtime import StoreRuntime
from lakebed.ticks import paths
from lakebed.ticks.model import TickId


async def note(runtime: StoreRuntime, tick: TickId) -> None:
    """Notes the tick as of now; durable when it returns."""
    with suppress(AlreadyExists):  # of the same millisecond
        await runtime.store.create(paths.noted(now_ms(runtime.clock), tick), b"{}")


async def since(runtime: StoreRuntime, at_ms: int) -> AsyncIterator[tuple[int, TickId]]:
    """Every note from this time on, in order of time."""
    async for info in runtime.store.list(f"{paths.TIMES}/", after=paths.times(max(0, at_ms))):
        yield paths.noted_tick(info.key)


async def sweep(runtime: StoreRuntime, *, ttl_s: float) -> int:
    """Deletes the notes that are older than the audit rows they are for."""
    swept, before_ms = 0, now_ms(runtime.clock) - round(ttl_s * 1000)
    async for info in runtime.store.list(f"{paths.TIMES}/"):
        if paths.noted_tick(info.key)[0] >= before_ms:
            break
        await runtime.store.delete(info.key)
        swept += 1
    return swept
