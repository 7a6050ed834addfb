"""`lakebed agent`: run an agent and manage its queue."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from lakebed.agent.settings import AgentSettings
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where
from lakebed.core.clock import SystemClock, now_ms
from lakebed.core.errors import Invalid

app = App(name="agent", help="Collect samples into a disk queue and send them to collectors; upload ticks.")

LISTED_MAX = 1000  # batches `queue --batches` shows

QueueDir = Annotated[Path | None, Parameter(help="the agent's queue folder (default: agent.queue_dir)")]
Reason = Annotated[str, Parameter(help="why, for the ledger")]


@app.command
def queue(
    *,
    batches: Annotated[bool, Parameter(help=f"list each batch, at most the oldest {LISTED_MAX}")] = False,
    queue_dir: QueueDir = None,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """List the batches that wait to be sent: one row per boot, oldest first."""
    from lakebed.agent.alerts import read_alerts
    from lakebed.agent.paths import ALERTS

    inspector, folder = _inspector(queue_dir, where)
    for alert in read_alerts(folder / ALERTS):
        say(f"alert: {alert.kind} ({alert.count}): {alert.message}")
    emit(msgspec.to_builtins(inspector.queued(LISTED_MAX) if batches else inspector.boots()), output)


@app.command
def conflicts(*, queue_dir: QueueDir = None, where: Where = Where(), output: Output = "table") -> None:
    """List parked batches, which are not retried, with both hashes and the reason."""
    columns = (
        "reason",
        "boot_id",
        "seq_start",
        "seq_end",
        "submitted_frame_sha256",
        "accepted_frame_sha256",
        "message",
    )
    emit(msgspec.to_builtins(_inspector(queue_dir, where)[0].parked()), output, columns=columns)


@app.command
def drop(
    *batch: Annotated[str, Parameter(help="first characters of a batch's sha256")],
    reason: Reason,
    all_parked: Annotated[bool, Parameter(help="all parked batches")] = False,
    dry_run: Annotated[bool, Parameter(help="only show what would be dropped")] = False,
    queue_dir: QueueDir = None,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Delete parked or queued batches from this agent; this cannot be undone. Collectors keep what they accepted."""
    inspector, _ = _inspector(queue_dir, where)
    chosen = inspector.select(batch, all_parked=all_parked)
    _demand_some(chosen)
    emit(msgspec.to_builtins(chosen, enc_hook=str), output)
    if not dry_run:
        inspector.drop(chosen, reason=reason)
    say(f"{'would drop' if dry_run else 'dropped'} {len(chosen)} batches")


@app.command
def retry(
    *batch: Annotated[str, Parameter(help="first characters of a parked batch's sha256")],
    reason: Reason,
    all_parked: Annotated[bool, Parameter(help="all parked batches")] = False,
    dry_run: Annotated[bool, Parameter(help="only show what would be sent again")] = False,
    queue_dir: QueueDir = None,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Put parked batches back into the queue, with their original identity."""
    inspector, _ = _inspector(queue_dir, where)
    chosen = inspector.select(batch, all_parked=all_parked, parked_only=True)
    _demand_some(chosen)
    emit(msgspec.to_builtins(chosen, enc_hook=str), output)
    if not dry_run:
        inspector.requeue(chosen, reason=reason)
    say(f"{'would return' if dry_run else 'returned'} {len(chosen)} batches")


def _inspector(queue_dir: Path | None, where: Where) -> tuple[Any, Path]:
    from lakebed.agent.inspector import QueueInspector

    folder = queue_dir or where.settings().of(AgentSettings).queue_dir
    clock = SystemClock()
    return QueueInspector(folder, lambda: now_ms(clock)), folder


def _demand_some(chosen: list[Any]) -> None:
    if not chosen:
        raise Invalid("no batch is named", hint="name batches by their sha256, or give --all-parked")
