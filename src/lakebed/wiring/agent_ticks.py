"""Joins the agent with ticks: uploads of tick folders, and `lakebed agent ticks` to list and retry them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from lakebed.agent.settings import AgentSettings, TickFolder
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where
from lakebed.core.clock import Clock
from lakebed.core.context import Worker
from lakebed.core.errors import Invalid, NotFound
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.ticks.settings import TicksSettings

if TYPE_CHECKING:
    from lakebed.agent.run import Agent
    from lakebed.ticks.outbox import Outbox

SWITCH_TRIES = 4  # of one request, before the next of several addresses is used

app = App(name="ticks", help="Ticks in the agent's outbox.")

QueueDir = Annotated[Path | None, Parameter(help="the agent's queue folder (default: agent.queue_dir)")]


@asynccontextmanager
async def folder_uploader(
    each: TickFolder,
    settings: AgentSettings,
    ticks: TicksSettings,
    agent: Agent,
    clock: Clock,
    ids: Ids,
    metrics: Metrics,
) -> AsyncIterator[Worker]:
    """The worker that uploads one folder. Raises Invalid without an address, an org or a secret."""
    from lakebed.ticks.folder_uploader import FolderUploader
    from lakebed.ticks.uploader import TRIES_MAX, Uploader, client

    org_id, secret = each.org_id or ticks.org_id, each.api_secret or ticks.api_secret
    urls = each.urls or settings.collectors
    if not (org_id and secret and urls):
        raise Invalid(
            f"agent.ticks: {each.folder} of project {each.project_id!r} lacks an org, a secret or an address",
            hint="set org_id, api_secret and urls there, or ticks.org_id, ticks.api_secret and agent.collectors",
        )
    runtime = Runtime(clock=clock, ids=ids, metrics=metrics)
    async with AsyncExitStack() as opened:
        uploaders = []
        for url in urls:
            http = await opened.enter_async_context(client(url, org_id, secret))
            tries = TRIES_MAX if len(urls) == 1 else SWITCH_TRIES
            uploaders.append(Uploader(http, runtime, parallel=settings.ticks_parallel, tries_max=tries))
        made = FolderUploader(
            each.folder.resolve(),
            outbox_of(settings, each, org_id),
            uploaders,
            runtime,
            project_id=each.project_id,
            keys=each.keys,
            mode=each.mode,
            keep=each.keep,
            interval_s=each.interval_s,
            alert=agent.alert,
        )
        yield Worker(f"ticks-{each.project_id}", made.run)


def outbox_of(settings: AgentSettings, each: TickFolder, org_id: str) -> Outbox:
    """The outbox of one project; two projects may use the same tick id."""
    from lakebed.ticks.outbox import Outbox
    from lakebed.ticks.paths import check_name

    folder = f"{check_name('org', org_id)}~{check_name('project', each.project_id)}"
    return Outbox(settings.queue_dir / "ticks" / folder)


@app.command(name="list")
def list_ticks(*, queue_dir: QueueDir = None, where: Where = Where(), output: Output = "table") -> None:
    """List the ticks that wait for their upload, and the rejected ones that need an operator."""
    rows: list[dict[str, Any]] = [
        {
            "project_id": each.project_id,
            "tick_id": waiting.packed.tick_id,
            "state": waiting.state,
            "parts": len(waiting.packed.files),
            "tries": waiting.tries,
            "error_class": waiting.error_class,
            "message": waiting.message,
            "folder": waiting.folder,
        }
        for each, outbox in _outboxes(queue_dir, where)
        for waiting in outbox.waiting()
    ]
    emit(rows, output)


@app.command
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
