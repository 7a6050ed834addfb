"""`lakebed silver`: the dispatch of ticks to silver, dead letters, replays and rebuilds."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from lakebed.cli import exits
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, as_operator, in_loop, job_as_operator
from lakebed.core.errors import Invalid
from lakebed.spark.progress import spark_progress
from lakebed.ticks.adapters import open_audit, open_queue
from lakebed.ticks.audit import COMMITTED, DISPATCHED
from lakebed.ticks.auditor import row_of
from lakebed.ticks.model import TickId
from lakebed.ticks.view import auditor as _auditor
from lakebed.ticks.view import letters as _letters
from lakebed.ticks.view import silver_status

app = App(name="silver", help="Silver: dispatch, dead letters, replays.")
dlq = App(name="dlq", help="Dead letters: messages that silver could not process.")
app.command(dlq)

Tick = Annotated[str, Parameter(help="the tick")]
Org = Annotated[str, Parameter(help="its org, if the id is not unique")]
Project = Annotated[str, Parameter(help="its project, if the id is not unique")]
Reason = Annotated[str, Parameter(help="why; recorded in the audit trail")]
Count = Annotated[int, Parameter(help="most dead letters to take")]
DryRun = Annotated[bool, Parameter(help="print what would happen, change nothing", negative="")]


@app.command
def status(*, where: Where = Where(), output: Output = "table") -> None:
    """Show how many messages wait, are claimed or are dead, and the lag of silver."""
    context = where.context("cli")
    emit(in_loop(lambda: silver_status(context)), output)


@app.command
def show(*, tick: Tick, org: Org = "", project: Project = "", where: Where = Where(), output: Output = "yaml") -> None:
    """Show both audit rows of a tick."""
    context = where.context("cli")

    async def work() -> dict[str, Any]:
        of = await _auditor(context).find(tick, org_id=org, project_id=project)
        tables = {name: await open_audit(context, name).get(of) for name in (COMMITTED, DISPATCHED)}
        return {name: row_of(row) for name, row in tables.items()}

    emit(in_loop(work), output)


@app.command
def replay(
    *,
    tick: Tick,
    reason: Reason,
    org: Org = "",
    project: Project = "",
    dry_run: DryRun = False,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Run silver for a tick again: clear its audit row, then send its message.

    The silver tables of its bronze tables are recomputed completely, even if silver has already processed the tick.
    """
    context = where.context("cli")

    async def work() -> dict[str, str]:
        auditor = _auditor(context)
        of = await auditor.find(tick, org_id=org, project_id=project)
        if dry_run:
            return {**msgspec.to_builtins(of), "message_id": ""}
        async with as_operator(context, "ticks.replay", msgspec.to_builtins(of), reason):
            return {**msgspec.to_builtins(of), "message_id": await auditor.replay(of, reason)}

    emit(in_loop(work), output)


@app.command
def rebuild(
    *,
    org: Annotated[str, Parameter(help="the org")],
    project: Annotated[str, Parameter(name=["--project", "-p"], help="the project")],
    reason: Reason,
    table: Annotated[tuple[str, ...], Parameter(help="a silver table; several, or none for all")] = (),
    dry_run: DryRun = False,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Rebuild silver and gold of a project from bronze, by the current contracts. Runs Spark in this process.

    A job that finds a changed contract does this automatically; this command does it at once.
    """
    from lakebed.pipeline.runner import PipelineRunner

    context = where.context("cli")
    if dry_run:
        say(f"would rebuild {', '.join(table) or 'every silver table'} of {org}/{project}: {reason}")
        return
    subject = {"org": org, "project": project, "tables": ", ".join(table)}
    with job_as_operator(context, "silver.rebuild", subject, reason), spark_progress("silver"):
        report = PipelineRunner(context).rebuild(org, project, table)
    say(f"rebuilt: {reason}; gold: {len(report.gold)} tables")
    emit(msgspec.to_builtins(report.silver), output)


@app.command
def audit(
    *,
    older_than_s: Annotated[float, Parameter(help="only ticks committed at least this long ago")] = 900.0,
    resend: Annotated[bool, Parameter(help="send their messages again", negative="")] = False,
    reason: Annotated[str, Parameter(help="why; needed with --resend")] = "",
    where: Where = Where(),
    output: Output = "table",
) -> int:
    """List ticks that are committed and not in silver; with --resend, resend their messages. Exit 1 if any.

    Sending a message again is safe: a tick whose job runs or is done is not dispatched twice.
    """
    context = where.context("cli")

    async def work() -> list[Any]:
        auditor = _auditor(context)
        found = list(await auditor.undispatched(older_than_s=older_than_s))
        if resend:
            async with as_operator(context, "silver.resend", {"older_than_s": f"{older_than_s:g}"}, reason) as outcome:
                for each in found:
                    await auditor.resend(TickId(each.org_id, each.project_id, each.tick_id))
                outcome.detail = f"{len(found)} messages"
        return found

    if resend and not reason.strip():
        raise Invalid("--resend needs a reason", hint="lakebed silver audit --resend --reason 'why'")
    found = in_loop(work)
    emit(found, output)
    if resend:
        say(f"sent {len(found)} messages again: {reason}")
        return exits.OK
    return exits.FAILED if found else exits.OK


@dlq.command(name="list")
def list_dead(*, count: Count = 100, where: Where = Where(), output: Output = "table") -> None:
    """List dead letters."""
    context = where.context("cli")
    letters = in_loop(lambda: _letters(context, count))
    emit(letters, output)


@dlq.command(name="redrive", show=False)  # the earlier name
@dlq.command(name="replay")
def replay_dead(
    *,
    reason: Reason,
    tick: Annotated[str, Parameter(help="only those of this tick")] = "",
    count: Count = 100,
    dry_run: DryRun = False,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Send dead letters back to the queue and reset their receive counts."""
    context = where.context("cli")

    async def work() -> int:
        if dry_run:
            return sum(not tick or row["tick_id"] == tick for row in await _letters(context, count))
        async with as_operator(context, "ticks.redrive", {"tick": tick} if tick else {}, reason):
            return await open_queue(context).replay(count, tick_id=tick)

    moved = in_loop(work)
    say(f"{'would replay' if dry_run else 'replayed'} {moved} dead letters: {reason}")
    emit({"redriven": moved}, output)
