"""The two long-running processes: `lakebed serve`, the gateway, and `lakebed work`, the workers.

A stop signal cancels all workers and waits until they have ended. Workers have health and metrics on a port of their
own.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import uvloop

from lakebed.core.context import Component, Context
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
from lakebed.wiring.worker_supervisor import SupervisedWorkers, WorkerSupervisor

# Requests leave few cycles behind: collecting every 700 allocations, Python's default, took a tenth of the CPU.
GC_THRESHOLDS = (20_000, 20, 50)

# Jobs of Spark block a thread each. Python's default, cores and four, is less than the jobs of one worker: the calls
# that keep their messages hidden would wait behind them. Threads are started as they are needed.
BLOCKED_MAX = 64

log = logger("work")


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


def work(settings: Settings, parts: Sequence[str] = (), *, ready: Callable[[Ready], None] = lambda _: None) -> None:
    """Runs the parts' workers (all of them by default) until SIGTERM or SIGINT, then cancels and drains them."""
    with asyncio.Runner(loop_factory=_loop_for_jobs) as runner:
        runner.run(_work(settings, parts, ready))


def _loop_for_jobs() -> asyncio.AbstractEventLoop:
    loop = uvloop.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(BLOCKED_MAX, thread_name_prefix="work"))
    return loop


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
