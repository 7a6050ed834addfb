"""Whether the last reference to an object frees it, as a program expects that drops it: without the collector."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def without_collector() -> Iterator[None]:
    """Nothing that is part of a cycle is freed in this block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Caller:
    def __init__(self, work: Callable[[], Awaitable[object]]) -> None:
        self._work = work

    async def fails(self) -> None:
        await self._work()


async def is_freed_after(work: Callable[[], Awaitable[object]], error: type[Exception]) -> bool:
    """Whether a caller of `work`, which raises this error, is freed once it is dropped."""
    with without_collector():
        caller = _Caller(work)
        known = weakref.ref(caller)
        raised = False
        try:
            await caller.fails()
        except error:
            raised = True
        del caller
        assert raised
        for _ in range(100):  # the turn of the loop that brought the error refers to it, and perhaps a thread
            if known() is None:
                return True
            await asyncio.sleep(0.005)
        return False


async def frames_left_after(work: Callable[[], Awaitable[object]], error: type[Exception]) -> set[str]:
    """The functions whose frames, with all that they hold, only the garbage collector frees after this error."""
    with without_collector():
        try:
            await work()
        except error:
            await asyncio.sleep(0.01)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        found = {one.f_code.co_name for one in gc.garbage if isinstance(one, FrameType)}
        gc.garbage.clear()
        return found
