"""`lakebed work`: the workers as a process, with their health and metrics on a port of their own.

A worker runs until it is cancelled. One that fails (or returns) is started again after a pause that grows while it
keeps failing, up to a cap; the others go on. A stop signal cancels all of them and waits for what they put down.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

import uvloop

from lakebed.context import Context, Health, Worker, make_context
from lakebed.errors import LakebedError
from lakebed.gateway.app import build
from lakebed.gateway.listen import bind, listen, url_of
from lakebed.gateway.path_watch import path_watch
from lakebed.gateway.serve import Ready
from lakebed.gateway.settings import GatewaySettings
from lakebed.gateway.waiting import boot_when_ready
from lakebed.logs import logger
from lakebed.parts import workers
from lakebed.settings import Settings
from lakebed.traces.start import tracing

PAUSE_BASE_S = 0.5
PAUSE_CAP_S = 30.0
STEADY_S = 60.0  # a worker that ran this long has recovered: its next pause starts small again
DOWN_AFTER = 5  # failures in a row after which a worker is called down, not degraded

log = logger("work")


class Foreman:
    """Keeps one worker running, and knows how it is."""

    def __init__(self, worker: Worker, context: Context) -> None:
        self.name = worker.name
        self._worker = worker
        self._clock, self._ids = context.clock, context.ids
        self._restarts = context.metrics.counter("lakebed_worker_restarts_total").labels(worker=worker.name)
        self._failures = 0
        self._last = ""
        self._running = False
        self._started_s = 0.0

    async def keep(self) -> None:
        """Runs the worker, and runs it again, until cancelled."""
        while True:
            self._started_s = self._clock.monotonic_s()
            self._running = True
            self._last = await self._once()
            if self._steady():
                self._failures = 0
            self._running = False
            pause_s = self._ids.jitter_s(self._failures, base_s=PAUSE_BASE_S, cap_s=PAUSE_CAP_S) + PAUSE_BASE_S
            self._failures += 1
            await self._clock.sleep(pause_s)
            self._restarts.inc()

    async def health(self) -> Health:
        """Ok while it runs and has not failed lately; degraded after a failure, down after several in a row."""
        if not self._failures or self._steady():
            return Health("ok")
        state = "running again" if self._running else "waiting to start again"
        told = f"{state} after {self._failures} failures: {self._last}"
        return Health("down" if self._failures >= DOWN_AFTER else "degraded", told)

    def _steady(self) -> bool:
        return self._running and self._clock.monotonic_s() - self._started_s >= STEADY_S

    async def _once(self) -> str:
        try:
            await self._worker.run()
        except LakebedError as error:
            log.error("worker failed", worker=self.name, code=error.code, message=error.message, hint=error.hint)
            return error.message
        except Exception as error:
            log.error("worker failed", worker=self.name, exc_info=error)
            return type(error).__name__
        log.warning("worker returned", worker=self.name)
        return "it returned"


class Crew:
    """All the foremen as one component: started together, cancelled together."""

    name = "workers"
    reads = ()
    writes = ()

    def __init__(self, foremen: Sequence[Foreman]) -> None:
        self._foremen = foremen
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(foreman.keep(), name=foreman.name) for foreman in self._foremen]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def health(self) -> Health:
        ended = [task.get_name() for task in self._tasks if task.done()]
        return Health("down", f"nobody keeps {', '.join(ended)}") if ended else Health("ok")


def work(settings: Settings, parts: Sequence[str] = (), *, ready: Callable[[Ready], None] = lambda _: None) -> None:
    """Runs the parts' workers (all of them by default) until SIGTERM or SIGINT, then cancels and drains them."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_work(settings, parts, ready))


async def _work(settings: Settings, parts: Sequence[str], ready: Callable[[Ready], None]) -> None:
    gateway = settings.of(GatewaySettings)
    bound = bind(gateway.host, gateway.work_port)
    context = make_context(settings, role="work")
    authority = await boot_when_ready(context, parts, bound)
    if authority is None:
        return
    foremen = [Foreman(worker, context) for worker in workers(context, parts)]
    app = build(
        context,
        [*path_watch(context, parts), Crew(foremen)],
        authority=authority.authority_id,
        checks={foreman.name: foreman.health for foreman in foremen},
    )
    said = Ready(
        url=url_of(bound),
        node=context.node,
        authority=authority.authority_id,
        pid=os.getpid(),
        parts=tuple(foreman.name for foreman in foremen),
    )

    def begin() -> None:
        log.info("working", url=said.url, node=said.node, authority=said.authority, workers=said.parts)
        ready(said)

    with tracing("work", context.node, os.environ, clock=context.clock, ids=context.ids, metrics=context.metrics):
        await listen(app, bound, gateway, ready=begin)
    log.info("stopped", node=said.node)
