"""Where the agent and ticks meet: the folders that an agent uploads, and `lakebed agent ticks` to look after them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from lakebed.agent.settings import AgentSettings, TickFolder
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where
from lakebed.clock import Clock
from lakebed.context import Worker
from lakebed.errors import Invalid, NotFound
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.ticks.settings import TicksSettings

if TYPE_CHECKING:
    from lakebed.agent.run import Agent
    from lakebed.ticks.outbox import Outbox

SWITCH_TRIES = 4  # of one request, before another of several addresses is tried

app = App(name="ticks", help="Ticks that wait in the agent's outbox.")

QueueDir = Annotated[Path | None, Parameter(help="the agent's queue folder (default: agent.queue_dir)")]


@asynccontextmanager
async def courier(
    each: TickFolder,
    settings: AgentSettings,
    ticks: TicksSettings,
    agent: Agent,
    clock: Clock,
    ids: Ids,
    metrics: Metrics,
) -> AsyncIterator[Worker]:
    """The worker that uploads one folder. Raises Invalid when it does not know where to, or as whom."""
    from lakebed.ticks.courier import Courier
    from lakebed.ticks.uploader import TRIES_MAX, Uploader, client

    org_id, secret = each.org_id or ticks.org_id, each.api_secret or ticks.api_secret
    urls = each.urls or settings.collectors
    if not (org_id and secret and urls):
        raise Invalid(
            f"agent.ticks: {each.folder} of project {each.project_id!r} lacks an org, a secret or an address",
            hint="set org_id, api_secret and urls there, or ticks.org_id, ticks.api_secret and agent.collectors",
        )
    async with AsyncExitStack() as opened:
        uploaders = []
        for url in urls:
            http = await opened.enter_async_context(client(url, org_id, secret))
            tries = TRIES_MAX if len(urls) == 1 else SWITCH_TRIES
            uploaders.append(Uploader(http, clock=clock, ids=ids, parallel=settings.ticks_parallel, tries_max=tries))
        made = Courier(
            each.folder.resolve(),
            outbox_of(settings, each, org_id),
            uploaders,
            project_id=each.project_id,
            clock=clock,
            metrics=metrics,
            keys=each.keys,
            mode=each.mode,
            keep=each.keep,
            interval_s=each.interval_s,
            alert=agent.alert,
        )
        yield Worker(f"ticks-{each.project_id}", made.run)


def outbox_of(settings: AgentSettings, each: TickFolder, org_id: str) -> Outbox:
    """The outbox of one project: two of them may use one tick id."""
    from lakebed.ticks.outbox import Outbox
    from lakebed.ticks.paths import check_name

    folder = f"{check_name('org', org_id)}~{check_name('project', each.project_id)}"
    return Outbox(settings.queue_dir / "ticks" / folder)


@app.command(name="list")
def list_ticks(*, queue_dir: QueueDir = None, where: Where = Where(), output: Output = "table") -> None:
    """Show the ticks that wait to be uploaded, and those that a person has to look at."""
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
    dry_run: Annotated[bool, Parameter(help="say what would happen, and do nothing", negative="")] = False,
    queue_dir: QueueDir = None,
    where: Where = Where(),
) -> None:
    """Have a refused tick packed again from its folder, once that is mended. To give it up, move its folder away."""
    for _, outbox in _outboxes(queue_dir, where):
        for waiting in outbox.waiting():
            if waiting.packed.tick_id == tick and waiting.state == "failed_manual":
                if not dry_run:
                    outbox.remove(tick)
                say(f"{'would pack' if dry_run else 'will pack'} {waiting.folder} again: {reason}")
                return
    raise NotFound(f"no refused tick {tick}", hint="lakebed agent ticks list")


def _outboxes(queue_dir: Path | None, where: Where) -> list[tuple[TickFolder, Outbox]]:
    found = where.settings({"agent.queue_dir": queue_dir} if queue_dir else None)
    settings, ticks = found.of(AgentSettings), found.of(TicksSettings)
    return [(each, outbox_of(settings, each, each.org_id or ticks.org_id)) for each in settings.ticks]
