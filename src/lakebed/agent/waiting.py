"""Waits for the first of several events, on a clock that tests control, and runs disk calls outside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from lakebed.core.clock import Clock

T = TypeVar("T")


class Offload(Protocol):
    """Runs a call that waits for the disk, so that the event loop need not."""

    async def __call__(self, call: Callable[[], T], /) -> T: ...


async def in_thread(call: Callable[[], T], /) -> T:
    return await asyncio.to_thread(call)


async def wait_for_any(clock: Clock, seconds: float | None, *events: asyncio.Event) -> None:
    """Returns when an event is set or the time is over (None: no limit), whichever is first."""
    if any(event.is_set() for event in events):
        return
    tasks: list[asyncio.Future[bool]] = [asyncio.ensure_future(_wait(event)) for event in events]
    if seconds is not None:
        tasks.append(asyncio.ensure_future(_sleep(clock, seconds)))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel(tasks)


async def wait_for_first(clock: Clock, seconds: float | None, tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Returns when one of the tasks is done or the time is over (None: no limit). The tasks are left as they are."""
    timer = [] if seconds is None else [asyncio.ensure_future(_sleep(clock, seconds))]
    try:
        await asyncio.wait([*tasks, *timer], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel(timer)


async def cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels what still runs and waits until it has ended; results and errors of these tasks are not wanted."""
    running = list(tasks)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def _wait(event: asyncio.Event) -> bool:
    return await event.wait()


async def _sleep(clock: Clock, seconds: float) -> bool:
    await clock.sleep(seconds)
    return True
