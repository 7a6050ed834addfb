"""`lakebed serve`: the gateway as a process."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Sequence

import msgspec
import uvloop

from lakebed.context import make_context
from lakebed.gateway.app import build
from lakebed.gateway.listen import bind, listen, url_of
from lakebed.gateway.path_watch import path_watch
from lakebed.gateway.settings import GatewaySettings
from lakebed.gateway.waiting import boot_when_ready
from lakebed.logs import logger
from lakebed.parts import components
from lakebed.settings import Settings
from lakebed.traces.start import tracing

# Requests leave few cycles behind, so looking for them every 700 allocations, as Python does, was a tenth of the CPU.
GC_THRESHOLDS = (20_000, 20, 50)

log = logger("gateway")


class Ready(msgspec.Struct, frozen=True):
    """Said once, when requests are answered."""

    url: str
    node: str
    authority: str
    pid: int
    parts: tuple[str, ...]


def serve(settings: Settings, parts: Sequence[str] = (), *, ready: Callable[[Ready], None] = lambda _: None) -> None:
    """Serves the parts (all of them by default) until SIGTERM or SIGINT, then drains and returns.

    While the store is away it waits, answering 503. Raises what else `boot` and the components raise at start.
    """
    gc.set_threshold(*GC_THRESHOLDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, parts, ready))


async def _serve(settings: Settings, parts: Sequence[str], ready: Callable[[Ready], None]) -> None:
    gateway = settings.of(GatewaySettings)
    bound = bind(gateway.host, gateway.port)  # first: a port that is taken should be known at once
    context = make_context(settings, role="gateway")
    authority = await boot_when_ready(context, parts, bound)
    if authority is None:
        return
    served = components(context, parts)
    app = build(context, [*path_watch(context, parts), *served], authority=authority.authority_id)
    said = Ready(
        url=url_of(bound),
        node=context.node,
        authority=authority.authority_id,
        pid=os.getpid(),
        parts=tuple(component.name for component in served),
    )

    def begin() -> None:
        gc.freeze()  # what has been loaded by now stays: not looked through again
        log.info("serving", url=said.url, node=said.node, authority=said.authority, parts=said.parts)
        ready(said)

    with tracing("gateway", context.node, os.environ, clock=context.clock, ids=context.ids, metrics=context.metrics):
        await listen(app, bound, gateway, ready=begin)
    log.info("stopped", node=said.node)
