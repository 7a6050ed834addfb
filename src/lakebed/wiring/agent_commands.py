"""`lakebed agent run`: the agent together with its uploads of tick folders."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from lakebed.agent.commands import QueueDir, app
from lakebed.agent.settings import AgentSettings
from lakebed.cli.output import say
from lakebed.cli.where import Where, in_loop
from lakebed.core.clock import SystemClock
from lakebed.core.errors import NotFound
from lakebed.ticks.settings import TicksSettings
from lakebed.wiring.agent_ticks import app as ticks_app
from lakebed.wiring.agent_ticks import folder_uploader

app.command(ticks_app)


@app.command
def run(
    *,
    collector: Annotated[tuple[str, ...], Parameter(help="a collector's address; may be given several times")] = (),
    agent_id: Annotated[str | None, Parameter(help="id of this agent")] = None,
    queue_dir: QueueDir = None,
    stdin: Annotated[bool | None, Parameter(help="read JSON lines from standard input")] = None,
    host_interval_s: Annotated[float | None, Parameter(help="seconds between reads of host metrics; 0: never")] = None,
    otlp_port: Annotated[int | None, Parameter(help="receive OTLP/HTTP metrics on this loopback port; 0: any")] = None,
    scrape: Annotated[tuple[str, ...], Parameter(help="a Prometheus text target; may be given several times")] = (),
    where: Where = Where(),
) -> None:
    """Run an agent until it is stopped. With standard input as its only source, it stops once all input is sent."""
    flags: dict[str, Any] = {
        "agent.collectors": collector or None,
        "agent.agent_id": agent_id,
        "agent.queue_dir": queue_dir,
        "agent.stdin": stdin,
        "agent.host_interval_s": host_interval_s,
        "agent.otlp_port": otlp_port,
        "agent.scrape": tuple({"url": url} for url in scrape) or None,
    }
    settings = where.settings({key: value for key, value in flags.items() if value is not None}).of(AgentSettings)
    if not settings.collectors and (url := _stack_gateway(where)):
        say(f"sending to the running stack's gateway, {url}")
        settings = msgspec.structs.replace(settings, collectors=(url,))
    sources = (settings.stdin, settings.scrape, settings.host_interval_s, settings.ticks, settings.otlp_port >= 0)
    if not any(sources):
        say("no source is set: only batches in the queue are sent (see --stdin, --scrape, --otlp-port)")
    in_loop(lambda: _run(settings, where.settings().of(TicksSettings)))


async def _run(settings: AgentSettings, ticks: TicksSettings) -> None:
    import asyncio
    import signal
    import socket
    from contextlib import AsyncExitStack

    from lakebed.agent.run import Agent
    from lakebed.core import logs
    from lakebed.core.ids import Ids
    from lakebed.core.metrics import Metrics
    from lakebed.core.runtime import Runtime
    from lakebed.core.traces.start import tracing

    logs.configure()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    clock, ids, metrics = SystemClock(), Ids(), Metrics()
    agent = Agent(Runtime(clock=clock, ids=ids, metrics=metrics), settings)
    async with AsyncExitStack() as opened:
        node = settings.agent_id or socket.gethostname()
        opened.enter_context(tracing("agent", node, metrics=metrics))
        for each in settings.ticks:
            agent.add_worker(
                await opened.enter_async_context(folder_uploader(each, settings, ticks, agent, clock, ids, metrics))
            )
        await agent.run(stop)


def _stack_gateway(where: Where) -> str:
    """The gateway of the stack in the command's folder; empty when none runs there."""
    from lakebed.embedded.endpoints import find

    try:
        return find(where.folder).gateway
    except NotFound:
        return ""
