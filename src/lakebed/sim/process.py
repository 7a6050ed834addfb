"""One simulated process: the context of a part, and every task that was started inside it.

Ownership follows the context: a task belongs to the process whose code created it, so what library code starts in the
background dies with its process too.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.sim.faults import FaultyClient, Wire
from lakebed.sim.loop import SimClock
from lakebed.store.bucket import BucketStore
from lakebed.store.runtime import StoreRuntime

if TYPE_CHECKING:
    from lakebed.core.context import Context
    from lakebed.core.settings import Settings
    from lakebed.sim.world import World

CLOSINGS_MAX = 8  # awaits in one `finally` chain that are cut through when the world ends
PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Process:
    """One simulated process: the context of a part, and all tasks started inside it.

    Made by `World.process`. `node` is unique for every boot. With `crash_at_await`, it dies at that await at the store.
    """

    def __init__(self, world: World, name: str, boot: int, *, skew_s: float, crash_at_await: int) -> None:
        self.name, self.boot, self.node = name, boot, f"{name}.{boot}"
        self.alive = True
        self.stopped: list[asyncio.Handle] | None = None  # while it is stopped: what it would do next
        self.crash_at_await = crash_at_await
        self.clock = SimClock(world.loop, skew_s=skew_s)
        self.ids = Ids.seeded(f"{world.seed}/{self.node}")
        self.metrics = Metrics()
        runtime = Runtime(self.clock, self.ids, self.metrics)
        self.wire = Wire(world, self)
        client = FaultyClient(self.wire, world.bucket, lambda: world.faults.list_page)
        self.store = BucketStore(client, runtime)
        self.world = world
        self._ends: list[asyncio.Future[bool]] = []

    @property
    def runtime(self) -> StoreRuntime:
        """What a role is built with."""
        return StoreRuntime(clock=self.clock, ids=self.ids, metrics=self.metrics, store=self.store)

    def context(self, settings: Settings | None = None) -> Context:
        """What a part is built with."""
        from lakebed.core.context import Context
        from lakebed.core.settings import Settings

        return Context(
            node=self.node,
            settings=settings or Settings({}, {}),
            store=self.store,
            clock=self.clock,
            ids=self.ids,
            metrics=self.metrics,
        )

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[bool]:
        """Runs `work` inside this process. The future is True when it returned, False at a crash.

        What it raises ends the world: catch what the code is meant to handle.
        """
        if not self.alive:
            work.close()
            raise RuntimeError(f"{self.node} is dead: start a new process")
        inside = contextvars.copy_context()
        inside.run(PROCESS.set, self)
        task = self.world.loop.create_task(work, context=inside)
        end: asyncio.Future[bool] = self.world.loop.create_future()
        self._ends.append(end)
        task.add_done_callback(lambda task: self._ended(task, end), context=self.world.outside)
        return end

    def _ended(self, task: asyncio.Task[Any], end: asyncio.Future[bool]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.world.fail(f"{self.node} failed with {type(error).__name__}: {error}", error)
        elif not end.done():
            end.set_result(True)

    def die(self) -> None:
        """Called by `World.crash`."""
        self.alive = False
        for end in self._ends:
            if not end.done():
                end.set_result(False)


def belongs_to_the_dead(handle: asyncio.Handle) -> bool:
    process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
    return process is not None and not process.alive


def belongs_to_the_stopped(handle: asyncio.Handle) -> bool:
    process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
    if process is None or process.stopped is None:
        return False
    process.stopped.append(handle)
    return True


def drop(task: asyncio.Task[Any]) -> None:
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    work = task.get_coro()
    for _ in range(CLOSINGS_MAX):
        try:
            work.close()
        except BaseException:
            continue  # a `finally` that awaits, or meets the closed loop or the dead store
        if not inspect.iscoroutine(work) or inspect.getcoroutinestate(work) == inspect.CORO_CLOSED:
            return  # what closes an async generator is no coroutine, and has no state to ask for
