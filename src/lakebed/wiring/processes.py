"""The two long-running processes: `lakebed serve`, the gateway, and `lakebed work`, the workers.

A worker runs until it is cancelled. One that fails (or returns) is restarted after a pause that grows with each
failure, up to a cap; the other workers keep running. A stop signal cancels all workers and waits until they have
ended. Workers have health and metrics on a port of their own.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Callable, Sequence

import msgspec
import uvloop

from lakebed.core.context import Component, Context, Health, Worker
from lakebed.core.errors import LakebedError
from lakebed.core.logs import logger
from lakebed.core.settings import Settings
from lakebed.core.traces.start import tracing
from lakebed.gateway.app import build
from lakebed.gateway.listen import bind, listen, url_of
from lakebed.gateway.settings import GatewaySettings
from lakebed.store.authority import Authority
from lakebed.wiring.boot import boot_when_ready, path_watch
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import components, workers

# Requests leave few cycles behind: collecting every 700 allocations, Python's default, took a tenth of the CPU.
GC_THRESHOLDS = (20_000, 20, 50)


class Ready(msgspec.Struct, frozen=True):
    """Printed once, when the process accepts requests."""

    url: str
    node: str
    authority: str
    pid: int
    parts: tuple[str, ...]


def _ready(
    bound: socket.socket, context: Context, authority: Authority, running: Sequence[Component | WorkerSupervisor]
) -> Ready:
    names = tuple(each.name for each in running)
    return Ready(
        url_of(bound, context.settings.of(GatewaySettings)), context.node, authority.authority_id, os.getpid(), names
    )


def serve(settings: Settings, parts: Sequence[str] = (), *, ready: Callable[[Ready], None] = lambda _: None) -> None:
    """Serves the parts (all of them by default) until SIGTERM or SIGINT, then drains and returns.

    While the store is unreachable it answers 503 and retries. Raises what else `boot` and the components raise.
    """
    gc.set_threshold(*GC_THRESHOLDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, parts, ready))


async def _serve(settings: Settings, parts: Sequence[str], ready: Callable[[Ready], None]) -> None:
    gateway = settings.of(GatewaySettings)
    bound = bind(gateway.host, gateway.port)  # first: a port that is in use fails at once
    context = msgspec.structs.replace(make_context(settings, role="gateway"), url=url_of(bound, gateway))
    authority = await boot_when_ready(context, parts, bound)
    if authority is None:
        return
    served = components(context, parts)
    app = build(context, [*path_watch(context, parts), *served], authority=authority.authority_id)
    started = _ready(bound, context, authority, served)

    def begin() -> None:
        gc.freeze()  # what is loaded by now stays: the collector need not scan it again
        log.info("serving", url=started.url, node=started.node, authority=started.authority, parts=started.parts)
        ready(started)

    with tracing("gateway", context.node, metrics=context.metrics):
        await listen(app, bound, gateway, ready=begin)
    log.info("stopped", node=started.node)


PAUSE_BASE_S = 0.5
PAUSE_CAP_S = 30.0
STEADY_S = 60.0  # a worker that ran this long has recovered: its next pause starts small again
DOWN_AFTER = 5  # failures in a row after which a worker is down, not degraded

log = logger("work")


class WorkerSupervisor:
    """Runs one worker, restarts it after a failure, and knows its health."""

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
        """Runs and restarts the worker until cancelled."""
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
        state = "running again" if self._running else "waiting for its restart"
        detail = f"{state} after {self._failures} failures: {self._last}"
        return Health("down" if self._failures >= DOWN_AFTER else "degraded", detail)

    def _steady(self) -> bool:
        return self._running and self._clock.monotonic_s() - self._started_s >= STEADY_S

    async def _once(self) -> str:
        try:
            await self._worker.run()
        except LakebedError as error:
            log.error("worker failed", worker=self.name, code=error.code, error=error.message, hint=error.hint)
            return error.message
        except Exception as error:
            log.error("worker failed", worker=self.name, error=type(error).__name__, exc_info=error)
            return type(error).__name__
        log.warning("worker returned", worker=self.name)
        return "it returned"


class SupervisedWorkers:
    """All worker supervisors as one component: started together, cancelled together."""

    name = "workers"
    reads = ()
    writes = ()

    def __init__(self, supervisors: Sequence[WorkerSupervisor]) -> None:
        self._supervisors = supervisors
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(supervisor.keep(), name=supervisor.name) for supervisor in self._supervisors]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def health(self) -> Health:
        ended = [task.get_name() for task in self._tasks if task.done()]
        return Health("down", f"no supervisor for {', '.join(ended)}") if ended else Health("ok")


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
    supervisors = [WorkerSupervisor(worker, context) for worker in workers(context, parts)]
    app = build(
        context,
        [*path_watch(context, parts), SupervisedWorkers(supervisors)],
        authority=authority.authority_id,
        checks={supervisor.name: supervisor.health for supervisor in supervisors},
    )
    started = _ready(bound, context, authority, supervisors)

    def begin() -> None:
        log.info("working", url=started.url, node=started.node, authority=started.authority, workers=started.parts)
        ready(started)

    with tracing("work", context.node, metrics=context.metrics):
        await listen(app, bound, gateway, ready=begin)
    log.info("stopped", node=started.node)
