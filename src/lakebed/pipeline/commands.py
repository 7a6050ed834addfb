"""`lakebed pipeline`: loads batches and topics into bronze; compacts and vacuums tables."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Parameter

from lakebed.cli import exits
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, in_loop, job_as_operator
from lakebed.spark.progress import spark_progress

if TYPE_CHECKING:
    from lakebed.core.context import Context

app = App(name="pipeline", help="Load batches and topics into bronze; compact and vacuum tables.")

Table = Annotated[str, Parameter(help="only this table, as `lakebed tables list` shows it")]
DryRun = Annotated[bool, Parameter(help="show what would be done, and change nothing", negative="")]

COLUMNS = ("table", "version", "steps", "objects", "rows_in", "good", "quarantined", "duplicates", "lag_s", "behind")


@app.command
def run(
    *,
    follow: Annotated[bool, Parameter(help="run until Ctrl-C or SIGTERM", negative="")] = False,
    retry: Annotated[bool, Parameter(help="read quarantined objects again", negative="")] = False,
    every_s: Annotated[float, Parameter(help="pause between two runs with --follow")] = 5.0,
    where: Where = Where(),
    output: Output = "table",
) -> int:
    """Load accepted batches, and new records of topics with a contract, into bronze.

    Exits 1 when objects or records were quarantined, because they are unreadable or break their contract.
    """
    from lakebed.pipeline.bronze.ingestion import Ingestion
    from lakebed.pipeline.bronze.runs import IngestReport

    context = where.context("pipeline")
    ingestion = Ingestion(context)
    say("starting Spark")
    sound = True

    def show_step(report: IngestReport) -> None:
        say(f"{report.table} version {report.version}: {report.good} rows of {report.objects} objects")

    with job_as_operator(context, "pipeline.run", {"follow": _yes(follow), "retry": _yes(retry)}):
        while True:
            with spark_progress("bronze"):
                reports = ingestion.run(show_step, retry=retry)
            sound = sound and all(report.sound for report in reports)
            if not follow or any(report.steps for report in reports):
                emit([_row(report) for report in reports], "jsonl" if follow and output == "json" else output)
                sys.stdout.flush()
            for report in reports:
                for key in report.unreadable:
                    say(f"quarantined: {key}")
            if not follow:
                return exits.OK if sound else exits.FAILED
            in_loop(lambda: context.clock.sleep(every_s))


@app.command
def compact(*, table: Table = "", dry_run: DryRun = False, where: Where = Where(), output: Output = "table") -> None:
    """Join the small files of tables. Rows do not change; older versions stay readable until vacuum."""
    from lakebed.pipeline.tables.maintenance import TableMaintenance

    context = where.context("pipeline")
    with _recorded(context, "pipeline.compact", table, dry_run), spark_progress("compaction"):
        done = TableMaintenance(context).compact(table, dry_run=dry_run)
    emit(done, output)


@app.command
def vacuum(*, table: Table = "", dry_run: DryRun = False, where: Where = Where(), output: Output = "table") -> None:
    """Delete the files that no version of the last `bronze.keep_versions_s` refers to."""
    from lakebed.pipeline.tables.maintenance import TableMaintenance

    context = where.context("pipeline")
    with _recorded(context, "pipeline.vacuum", table, dry_run):
        done = TableMaintenance(context).vacuum(table, dry_run=dry_run)
    emit(done, output)


def _recorded(context: Context, what: str, table: str, dry_run: bool) -> AbstractContextManager[Any]:
    return nullcontext() if dry_run else job_as_operator(context, what, {"table": table or "all"})


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _row(report: msgspec.Struct) -> dict[str, object]:
    plain = dict(msgspec.to_builtins(report))
    return {name: plain[name] for name in (*COLUMNS, "unreadable", "through")}


app.command("lakebed.rollups.commands:rollup", name="rollup")
