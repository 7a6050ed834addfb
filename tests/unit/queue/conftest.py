"""A queue in memory, on a clock that moves when told to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from typing import Any

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.queue.roles import Queue
from lakebed.queue.settings import QueueSettings
from lakebed.store.memory import MemoryStore
from lakebed.store.runtime import StoreRuntime

Run = Callable[[Awaitable[Any]], Awaitable[Any]]


@pytest.fixture
def memory(manual_clock: ManualClock) -> MemoryStore:
    return MemoryStore(clock=manual_clock)


@pytest.fixture
def open_queue(memory: MemoryStore, manual_clock: ManualClock, metrics: Metrics) -> Callable[..., Queue]:
    """Opens the queue as a process of its own would: sharing nothing but the store."""

    processes = count()

    def opened(name: str = "default", *, store: Any = None, **changes: Any) -> Queue:
        settings = QueueSettings(**{"redelivery_delay_s": 1e-6, **changes})  # a rejected batch comes again at once
        ids = Ids.seeded(f"{name}-{next(processes)}")
        return Queue(name, settings, StoreRuntime(clock=manual_clock, ids=ids, metrics=metrics, store=store or memory))

    return opened


@pytest.fixture
async def running(manual_clock: ManualClock) -> AsyncIterator[Run]:
    """Runs work to its end while time passes."""
    import asyncio

    async def run(work: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(work)
        for _ in range(2000):
            if task.done():
                return task.result()
            await manual_clock.advance(0.05)
        task.cancel()
        raise AssertionError("it did not end within 100 s")

    yield run
