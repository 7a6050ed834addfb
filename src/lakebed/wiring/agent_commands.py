"""Joins the agent with ticks: `lakebed agent run` with its uploads of tick folders, and `lakebed agent ticks`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Parameter

from lakebed.agent.commands import QueueDir, app
from lakebed.agent.settings import AgentSettings, TickFolder
from lakebed.cli import exits
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, in_loop
from lakebed.core.context import Worker
from lakebed.core.errors import Invalid, NotFound
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime, system_runtime
from lakebed.ticks.settings import TicksSettings

if TYPE_CHECKING:
    from lakebed.agent.run import Agent
    from lakebed.agent.snapshot import AgentConfig, ConfigSnapshot
    from lakebed.ticks.outbox import Outbox

REPORT_S = 30.0  # between two lines of counts
ROUND_TRIES = 4  # of one request in one round: the rounds repeat, by the next address if there are several

ticks_app = App(name="ticks", help="Ticks in the agent's outbox.")
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
) -> int:
    """Run an agent until it is stopped. With standard input as its only source, it stops once all input is sent.

    It logs its counts every half minute. Exits 1 when lines of standard input were rejected.
    """
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
    metrics = in_loop(lambda: _run(settings, where.settings().of(TicksSettings)))
    if not settings.stdin:
        return exits.OK
    rejected = round(metrics.value("lakebed_agent_bad_samples_total", source="stdin"))
    read, sent = (round(metrics.value(f"lakebed_agent_{name}_total")) for name in ("samples", "sent_samples"))
    say(f"{read} samples were read, {sent} sent; {rejected} lines were rejected")
    return exits.FAILED if rejected else exits.OK


async def _report(runtime: Runtime) -> None:
    """Logs the agent's counts at an interval, when they have changed."""
    from lakebed.core import logs

    names = ("samples", "sent_samples", "dropped_samples")
    before: dict[str, int] = {}
    while True:
        await runtime.clock.sleep(REPORT_S)
        now = {name: round(runtime.metrics.value(f"lakebed_agent_{name}_total")) for name in names}
        if now != before:
            logs.logger("agent").info("agent runs", **now)
            before = now


async def _run(settings: AgentSettings, ticks: TicksSettings) -> Metrics:
    import asyncio
    import signal
    import socket

    from lakebed.agent.alerts import AlertSources
    from lakebed.agent.run import Agent
    from lakebed.core import logs
    from lakebed.core.traces.start import tracing

    logs.configure()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runtime = system_runtime()
    async with AsyncExitStack() as opened:
        snapshot = await opened.enter_async_context(config_snapshot(settings, runtime)) if settings.config_url else None
        if snapshot is not None and (config := await snapshot.refresh()) is not None:
            settings = pointed(settings, config.urls)
        agent = Agent(runtime, settings)
        node = settings.agent_id or socket.gethostname()
        opened.enter_context(tracing("agent", node, metrics=runtime.metrics))
        alerts = AlertSources(agent.alert)
        for each in settings.ticks:
            uploading = folder_uploader(each, settings, ticks, alerts.source(), runtime, snapshot)
            agent.add_worker(await opened.enter_async_context(uploading))
        if snapshot is not None:
            snapshot.listen(lambda config: _pointed(agent, config))
            snapshot.alert = agent.alert
            agent.add_worker(Worker("config", snapshot.run))
        reporting = asyncio.create_task(_report(runtime))
        opened.callback(reporting.cancel)
        await agent.run(stop)
    return runtime.metrics


@asynccontextmanager
async def config_snapshot(settings: AgentSettings, runtime: Runtime) -> AsyncIterator[ConfigSnapshot]:
    """The configuration snapshot of `agent.config_url`, with its copy in the agent's queue folder."""
    from lakebed.agent.snapshot import BYTES_MAX, TIMEOUT_S, ConfigSnapshot
    from lakebed.agent.transport import HttpTransport

    transport = HttpTransport(timeout_s=TIMEOUT_S, connect_timeout_s=settings.connect_timeout_s, concurrency=1)
    async with transport:

        async def fetch(url: str) -> bytes:
            return await transport.get(url, accept="application/json", timeout_s=TIMEOUT_S, bytes_max=BYTES_MAX)

        yield ConfigSnapshot(
            settings.config_url, settings.queue_dir, fetch, runtime, refresh_s=settings.config_refresh_s
        )


def pointed(settings: AgentSettings, urls: tuple[str, ...]) -> AgentSettings:
    """The settings with these addresses, for batches and for every folder of ticks."""
    folders = tuple(msgspec.structs.replace(each, urls=urls) for each in settings.ticks)
    return msgspec.structs.replace(settings, collectors=urls, ticks=folders)


async def _pointed(agent: Agent, config: AgentConfig) -> None:
    agent.point(config.urls)


def _stack_gateway(where: Where) -> str:
    """The gateway of the stack in the command's folder; empty when none runs there."""
    from lakebed.embedded.endpoints import find

    try:
        return find(where.folder).gateway
    except NotFound:
        return ""


@asynccontextmanager
async def folder_uploader(
    each: TickFolder,
    settings: AgentSettings,
    ticks: TicksSettings,
    alert: Callable[[str, str | None], None],
    runtime: Runtime,
    snapshot: ConfigSnapshot | None = None,
) -> AsyncIterator[Worker]:
    """The worker that uploads one folder. Raises Invalid without an address, an org or a secret."""
    from lakebed.ticks.folder_uploader import FolderUploader
    from lakebed.ticks.uploader import Uploader, client

    org_id, secret = each.org_id or ticks.org_id, each.api_secret or ticks.api_secret
    urls = each.urls or settings.collectors
    if not (org_id and secret and urls):
        raise Invalid(
            f"agent.ticks: {each.folder} of project {each.project_id!r} lacks an org, a secret or an address",
            hint="set org_id, api_secret and urls there, or ticks.org_id, ticks.api_secret and agent.collectors",
        )
    async with AsyncExitStack() as opened:
        generations: list[AsyncExitStack] = []  # of clients: the last, and the one that a delivery may still use

        async def uploaders(urls: tuple[str, ...]) -> list[Uploader]:
            clients = await opened.enter_async_context(AsyncExitStack())
            generations.append(clients)
            if len(generations) > 2:
                await generations.pop(0).aclose()
            made = []
            for url in urls:
                http = await clients.enter_async_context(client(url, org_id, secret, settings.tls_ca))
                made.append(Uploader(http, runtime, parallel=settings.ticks_parallel, tries_max=ROUND_TRIES))
            return made

        made = FolderUploader(
            each.folder.resolve(),
            outbox_of(settings, each, org_id),
            await uploaders(urls),
            runtime,
            project_id=each.project_id,
            keys=each.keys,
            mode=each.mode,
            keep=each.keep,
            interval_s=each.interval_s,
            alert=alert,
        )

        async def changed(config: AgentConfig) -> None:
            made.use(await uploaders(config.urls))

        if snapshot is not None:
            snapshot.listen(changed)
        yield Worker(f"ticks-{each.project_id}", made.run)


def outbox_of(settings: AgentSettings, each: TickFolder, org_id: str) -> Outbox:
    """The outbox of one project; two projects may use the same tick id."""
    from lakebed.ticks.outbox import Outbox
    from lakebed.ticks.paths import check_name

    folder = f"{check_name('org', org_id)}~{check_name('project', each.project_id)}"
    return Outbox(settings.queue_dir / "ticks" / folder)


@ticks_app.command(name="list")
def list_ticks(*, queue_dir: QueueDir = None, where: Where = Where(), output: Output = "table") -> None:
    """List the ticks that wait for their upload, and the rejected ones that need an operator."""
    rows: list[dict[str, Any]] = [
        {
            "project_id": each.project_id,
            "tick_id": waiting.packed.tick_id,
            "state": waiting.state,
            "parts": len(waiting.packed.files),
            "tries": waiting.tries,
            "part_attempts": dict(sorted(outbox.attempts(waiting.packed.tick_id).items())),
            "error_class": waiting.error_class,
            "message": waiting.message,
            "folder": waiting.folder,
        }
        for each, outbox in _outboxes(queue_dir, where)
        for waiting in outbox.waiting()
    ]
    emit(rows, output)


@ticks_app.command
def retry(
    tick: Annotated[str, Parameter(help="the tick's id")],
    *,
    reason: Annotated[str, Parameter(help="why")],
    dry_run: Annotated[bool, Parameter(help="print what would happen, change nothing", negative="")] = False,
    queue_dir: QueueDir = None,
    where: Where = Where(),
) -> None:
    """Retry a rejected tick after fixing its folder. To give it up, move its folder away."""
    for _, outbox in _outboxes(queue_dir, where):
        for waiting in outbox.waiting():
            if waiting.packed.tick_id == tick and waiting.state == "failed_manual":
                if not dry_run:
                    outbox.remove(tick)
                say(f"{'would pack' if dry_run else 'will pack'} {waiting.folder} again: {reason}")
                return
    raise NotFound(f"no rejected tick {tick}", hint="lakebed agent ticks list")


def _outboxes(queue_dir: Path | None, where: Where) -> list[tuple[TickFolder, Outbox]]:
    found = where.settings({"agent.queue_dir": queue_dir} if queue_dir else None)
    settings, ticks = found.of(AgentSettings), found.of(TicksSettings)
    return [(each, outbox_of(settings, each, each.org_id or ticks.org_id)) for each in settings.ticks]
