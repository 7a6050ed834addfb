"""`lakebed silver`: how ticks reach silver: messages, dead letters, what was never dispatched, and replays."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from lakebed.cli import exits
from lakebed.cli.jobs import spark_progress
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, by_hand, in_loop, job_by_hand
from lakebed.errors import Invalid
from lakebed.ticks.adapters import open_audit, open_queue
from lakebed.ticks.audit import COMMITTED, DISPATCHED
from lakebed.ticks.auditor import row_of
from lakebed.ticks.model import TickId
from lakebed.views.ticks import auditor as _auditor
from lakebed.views.ticks import letters as _letters
from lakebed.views.ticks import silver_status

app = App(name="silver", help="Silver: dispatch, dead letters, replays.")
dlq = App(name="dlq", help="Dead letters: messages that silver could not work on.")
app.command(dlq)

Tick = Annotated[str, Parameter(help="the tick")]
Org = Annotated[str, Parameter(help="its org, where the id alone is not enough")]
Project = Annotated[str, Parameter(help="its project, where the id alone is not enough")]
Reason = Annotated[str, Parameter(help="why; kept with what was done")]
Count = Annotated[int, Parameter(help="dead letters at most")]
DryRun = Annotated[bool, Parameter(help="say what would happen, and do nothing", negative="")]


@app.command
def status(*, where: Where = Where(), output: Output = "table") -> None:
    """Show how many messages wait, are in hand and are dead, and how far silver is behind."""
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
    """Run silver for a tick again: its row is cleared, then its message is sent.

    The silver tables of its bronze tables are computed again as a whole, whether or not silver has passed the tick.
    """
    context = where.context("cli")

    async def work() -> dict[str, str]:
        auditor = _auditor(context)
        of = await auditor.find(tick, org_id=org, project_id=project)
        if dry_run:
            return {**msgspec.to_builtins(of), "message_id": ""}
        async with by_hand(context, "ticks.replay", msgspec.to_builtins(of), reason):
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
    """Make silver and gold of a project anew from bronze, by the contracts as they are now. Runs Spark here.

    A job that meets a changed contract does this by itself; here it is done at once.
    """
    from lakebed.pipeline.flow import Flow

    context = where.context("cli")
    if dry_run:
        say(f"would make {', '.join(table) or 'every silver table'} of {org}/{project} anew: {reason}")
        return
    subject = {"org": org, "project": project, "tables": ", ".join(table)}
    with job_by_hand(context, "silver.rebuild", subject, reason), spark_progress("silver"):
        report = Flow(context).rebuild(org, project, table)
    say(f"made anew: {reason}; gold: {len(report.gold)} tables")
    emit(msgspec.to_builtins(report.silver), output)


@app.command
def audit(
    *,
    older_than_s: Annotated[float, Parameter(help="only ticks that were committed this long ago")] = 900.0,
    resend: Annotated[bool, Parameter(help="send their messages again", negative="")] = False,
    reason: Annotated[str, Parameter(help="why; needed with --resend")] = "",
    where: Where = Where(),
    output: Output = "table",
) -> int:
    """List ticks that are committed and not in silver; with --resend, enqueue them again. Exits 1 when there are any.

    Sending a message again is harmless: a tick whose job is done, or runs, is not dispatched twice.
    """
    context = where.context("cli")

    async def work() -> list[Any]:
        auditor = _auditor(context)
        found = list(await auditor.undispatched(older_than_s=older_than_s))
        if resend:
            async with by_hand(context, "silver.resend", {"older_than_s": f"{older_than_s:g}"}, reason) as told:
                for each in found:
                    await auditor.resend(TickId(each.org_id, each.project_id, each.tick_id))
                told.detail = f"{len(found)} messages"
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


@dlq.command
def redrive(
    *,
    reason: Reason,
    tick: Annotated[str, Parameter(help="only this tick's")] = "",
    count: Count = 100,
    dry_run: DryRun = False,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Send dead letters back into the queue, with their receives counted anew."""
    context = where.context("cli")

    async def work() -> int:
        if dry_run:
            return sum(not tick or row["tick_id"] == tick for row in await _letters(context, count))
        async with by_hand(context, "ticks.redrive", {"tick": tick} if tick else {}, reason):
            return await open_queue(context).redrive(count, tick_id=tick)

    moved = in_loop(work)
    say(f"{'would send' if dry_run else 'sent'} {moved} back: {reason}")
    emit({"redriven": moved}, output)
