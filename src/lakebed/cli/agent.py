"""`lakebed agent`: run an agent, and look after its queue."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from lakebed.agent.settings import AgentSettings
from lakebed.cli.agent_ticks import app as ticks_app
from lakebed.cli.agent_ticks import courier
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, in_loop
from lakebed.clock import SystemClock, now_ms
from lakebed.errors import Invalid, NotFound
from lakebed.ticks.settings import TicksSettings

app = App(name="agent", help="Collect samples into a disk queue and send them to collectors; upload ticks.")
app.command(ticks_app)

LISTED_MAX = 1000  # batches `queue --batches` shows

QueueDir = Annotated[Path | None, Parameter(help="the queue's folder (default: agent.queue_dir)")]
Reason = Annotated[str, Parameter(help="why, for the ledger")]


@app.command
def run(
    *,
    collector: Annotated[tuple[str, ...], Parameter(help="a collector's address; may be given several times")] = (),
    agent_id: Annotated[str | None, Parameter(help="who is sending")] = None,
    queue_dir: QueueDir = None,
    stdin: Annotated[bool | None, Parameter(help="read JSON lines from standard input")] = None,
    host_interval_s: Annotated[float | None, Parameter(help="read host metrics this often; 0: never")] = None,
    otlp_port: Annotated[int | None, Parameter(help="take OTLP/HTTP metrics on this loopback port; 0: any")] = None,
    scrape: Annotated[tuple[str, ...], Parameter(help="a Prometheus text target; may be given several times")] = (),
    where: Where = Where(),
) -> None:
    """Run an agent until it is stopped, or until standard input, as its only source, has ended and been sent."""
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
        say("no source is set: only what is queued already will be sent (see --stdin, --scrape, --otlp-port)")
    in_loop(lambda: _run(settings, where.settings().of(TicksSettings)))


@app.command
def queue(
    *,
    batches: Annotated[bool, Parameter(help=f"list single batches, the oldest {LISTED_MAX}")] = False,
    queue_dir: QueueDir = None,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Show what waits to be sent: a row per boot, oldest first."""
    from lakebed.agent.alerts import read_alerts
    from lakebed.agent.paths import ALERTS

    keeper, folder = _keeper(queue_dir, where)
    for alert in read_alerts(folder / ALERTS):
        say(f"alert: {alert.kind} ({alert.count}): {alert.message}")
    emit(msgspec.to_builtins(keeper.queued(LISTED_MAX) if batches else keeper.boots()), output)


@app.command
def conflicts(*, queue_dir: QueueDir = None, where: Where = Where(), output: Output = "table") -> None:
    """Show what is parked outside the retry order, with both hashes and the reason."""
    columns = (
        "reason",
        "boot_id",
        "seq_start",
        "seq_end",
        "submitted_frame_sha256",
        "accepted_frame_sha256",
        "message",
    )
    emit(msgspec.to_builtins(_keeper(queue_dir, where)[0].parked()), output, columns=columns)


@app.command
def drop(
    *batch: Annotated[str, Parameter(help="first characters of a batch's sha256")],
    reason: Reason,
    all_parked: Annotated[bool, Parameter(help="everything that is parked")] = False,
    dry_run: Annotated[bool, Parameter(help="only show what would be dropped")] = False,
    queue_dir: QueueDir = None,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Delete batches from this agent for good, parked or queued. For a conflict: the accepted batch stands."""
    keeper, _ = _keeper(queue_dir, where)
    chosen = keeper.choose(batch, all_parked=all_parked)
    _explain(chosen, reason)
    emit(msgspec.to_builtins(chosen, enc_hook=str), output)
    if not dry_run:
        keeper.drop(chosen, reason=reason)
    say(f"{'would drop' if dry_run else 'dropped'} {len(chosen)} batches")


@app.command
def retry(
    *batch: Annotated[str, Parameter(help="first characters of a parked batch's sha256")],
    reason: Reason,
    all_parked: Annotated[bool, Parameter(help="everything that is parked")] = False,
    dry_run: Annotated[bool, Parameter(help="only show what would be sent again")] = False,
    queue_dir: QueueDir = None,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Put parked batches back into the queue, under the identity they always had."""
    keeper, _ = _keeper(queue_dir, where)
    chosen = keeper.choose(batch, all_parked=all_parked, parked_only=True)
    _explain(chosen, reason)
    emit(msgspec.to_builtins(chosen, enc_hook=str), output)
    if not dry_run:
        keeper.give_back(chosen, reason=reason)
    say(f"{'would return' if dry_run else 'returned'} {len(chosen)} batches")


async def _run(settings: AgentSettings, ticks: TicksSettings) -> None:
    import asyncio
    import os
    import signal
    import socket
    from contextlib import AsyncExitStack

    from lakebed import logs
    from lakebed.agent.run import Agent
    from lakebed.ids import Ids
    from lakebed.metrics import Metrics
    from lakebed.traces.start import tracing

    logs.configure()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    clock, ids, metrics = SystemClock(), Ids(), Metrics()
    agent = Agent(settings, clock=clock, ids=ids, metrics=metrics)
    async with AsyncExitStack() as opened:
        node = settings.agent_id or socket.gethostname()
        opened.enter_context(tracing("agent", node, os.environ, clock=clock, ids=ids, metrics=metrics))
        for each in settings.ticks:
            agent.beside(await opened.enter_async_context(courier(each, settings, ticks, agent, clock, ids, metrics)))
        await agent.run(stop)


def _stack_gateway(where: Where) -> str:
    """The gateway of the stack in the folder the command looks at; empty when none runs there."""
    from lakebed.embedded.endpoints import find

    try:
        return find(where.folder).gateway
    except NotFound:
        return ""


def _keeper(queue_dir: Path | None, where: Where) -> tuple[Any, Path]:
    from lakebed.agent.keeper import Keeper

    folder = queue_dir or where.settings().of(AgentSettings).queue_dir
    clock = SystemClock()
    return Keeper(folder, lambda: now_ms(clock)), folder


def _explain(chosen: list[Any], reason: str) -> None:
    if not reason.strip():
        raise Invalid("--reason is empty", hint="say why, for the ledger and for whoever looks later")
    if not chosen:
        raise Invalid("no batch is named", hint="name batches by their sha256, or give --all-parked")
