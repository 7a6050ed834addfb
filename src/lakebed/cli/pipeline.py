"""`lakebed pipeline`: batches and topics into bronze, and the upkeep of tables."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Parameter

from lakebed.cli import exits
from lakebed.cli.jobs import spark_progress
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, in_loop, job_by_hand

if TYPE_CHECKING:
    from lakebed.context import Context

app = App(name="pipeline", help="Batches and topics into bronze; compaction and vacuum of tables.")

Table = Annotated[str, Parameter(help="only this table, as `lakebed tables ls` names it")]
DryRun = Annotated[bool, Parameter(help="say what would happen, and do nothing", negative="")]

COLUMNS = ("table", "version", "steps", "objects", "rows_in", "good", "quarantined", "duplicates", "lag_s", "behind")


@app.command
def run(
    *,
    follow: Annotated[bool, Parameter(help="go on until Ctrl-C or SIGTERM", negative="")] = False,
    retry: Annotated[bool, Parameter(help="read again what was set aside before", negative="")] = False,
    every_s: Annotated[float, Parameter(help="pause between two runs with --follow")] = 5.0,
    where: Where = Where(),
    output: Output = "table",
) -> int:
    """Bring what was accepted, and what topics with a contract have gained, into bronze.

    Exits 1 when something could not be read or broke its contract: it is set aside, and the rest is in the table.
    """
    from lakebed.pipeline.ingested import IngestReport
    from lakebed.pipeline.ingestion import Ingestion

    context = where.context("pipeline")
    ingestion = Ingestion(context)
    say("Spark starts")
    sound = True

    def told(report: IngestReport) -> None:
        say(f"{report.table} version {report.version}: {report.good} rows of {report.objects} objects")

    with job_by_hand(context, "pipeline.run", {"follow": _yes(follow), "retry": _yes(retry)}):
        while True:
            with spark_progress("bronze"):
                reports = ingestion.run(told, retry=retry)
            sound = sound and all(report.sound for report in reports)
            if not follow or any(report.steps for report in reports):
                emit([_row(report) for report in reports], "jsonl" if follow and output == "json" else output)
                sys.stdout.flush()
            for report in reports:
                for key in report.unreadable:
                    say(f"set aside: {key}")
            if not follow:
                return exits.OK if sound else exits.FAILED
            in_loop(lambda: context.clock.sleep(every_s))


@app.command
def compact(*, table: Table = "", dry_run: DryRun = False, where: Where = Where(), output: Output = "table") -> None:
    """Join the small files of tables. Rows stay as they are; older versions stay readable until vacuum."""
    from lakebed.pipeline.upkeep import Upkeep

    context = where.context("pipeline")
    with _recorded(context, "pipeline.compact", table, dry_run), spark_progress("compaction"):
        done = Upkeep(context).compact(table, dry_run=dry_run)
    emit(done, output)


@app.command
def vacuum(*, table: Table = "", dry_run: DryRun = False, where: Where = Where(), output: Output = "table") -> None:
    """Delete the files that no version of the last `bronze.keep_versions_s` refers to."""
    from lakebed.pipeline.upkeep import Upkeep

    context = where.context("pipeline")
    with _recorded(context, "pipeline.vacuum", table, dry_run):
        done = Upkeep(context).vacuum(table, dry_run=dry_run)
    emit(done, output)


def _recorded(context: Context, what: str, table: str, dry_run: bool) -> AbstractContextManager[Any]:
    return nullcontext() if dry_run else job_by_hand(context, what, {"table": table or "all"})


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _row(report: msgspec.Struct) -> dict[str, object]:
    plain = dict(msgspec.to_builtins(report))
    return {name: plain[name] for name in (*COLUMNS, "unreadable", "through")}


app.command("lakebed.cli.rollup:rollup", name="rollup")
