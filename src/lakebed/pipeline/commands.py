"""`lakebed pipeline`: loads batches and topics into bronze, runs models; compacts and vacuums tables."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Parameter

from lakebed.cli import exits
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, in_loop, job_as_operator
from lakebed.pipeline.models.commands import Models, Org, Project, chosen_projects, opened, rows_of
from lakebed.spark.progress import spark_progress

if TYPE_CHECKING:
    from lakebed.core.context import Context
    from lakebed.pipeline.bronze.runs import IngestReport
    from lakebed.pipeline.runner import PipelineRunner

app = App(name="pipeline", help="Load batches and topics into bronze, run models; compact and vacuum tables.")

Table = Annotated[str, Parameter(help="only this table, as `lakebed tables list` shows it")]
DryRun = Annotated[bool, Parameter(help="show what would be done, and change nothing", negative="")]

COLUMNS = ("table", "version", "steps", "objects", "rows_in", "good", "quarantined", "duplicates", "lag_s", "behind")


@app.command
def run(
    *models: Models,
    full_refresh: Annotated[
        bool, Parameter(help="compute models from everything, not from changes", negative="")
    ] = False,
    from_: Annotated[str, Parameter(name="--from", help="backfill rows from this moment, by the model's `time`")] = "",
    to: Annotated[str, Parameter(help="backfill rows up to before this moment")] = "",
    org: Org = "",
    project: Project = "",
    reason: Annotated[str, Parameter(help="why; recorded with the run and in the audit trail")] = "",
    follow: Annotated[bool, Parameter(help="run until Ctrl-C or SIGTERM", negative="")] = False,
    retry: Annotated[bool, Parameter(help="read quarantined objects again", negative="")] = False,
    every_s: Annotated[float, Parameter(help="pause between two runs with --follow")] = 5.0,
    where: Where = Where(),
    output: Output = "table",
) -> int:
    """Load accepted batches, and new records of topics with a contract, into bronze; then run models.

    With models named, only those run. Exits 1 when objects or records were quarantined, because they are unreadable or
    break their contract, and when a model failed or was refused.
    """
    if models or full_refresh or from_ or to:
        return _run_models(models, full_refresh, (from_, to), (org, project), reason, where, output)
    from lakebed.pipeline.bronze.ingestion import Ingestion

    context = where.context("pipeline")
    ingestion, runner = Ingestion(context), _model_runner(context)
    say("starting Spark")
    sound = True

    def show_step(report: IngestReport) -> None:
        say(f"{report.table} version {report.version}: {report.good} rows of {report.objects} objects")

    with job_as_operator(context, "pipeline.run", {"follow": _yes(follow), "retry": _yes(retry)}):
        while True:
            with spark_progress("bronze"):
                reports = ingestion.run(show_step, retry=retry)
            sound = sound and all(report.sound for report in reports)
            ran = _all_models(runner, org, project, reason, follow=follow) if runner else []
            sound = sound and all(row["state"] not in ("failed", "refused") for row in ran)
            if not follow or any(report.steps for report in reports) or any(row["state"] == "made" for row in ran):
                _show([_row(report) for report in reports], ran, "jsonl" if follow and output == "json" else output)
                sys.stdout.flush()
            for report in reports:
                _explain(report)
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


def _explain(report: IngestReport) -> None:
    """What was loaded and what was not, and where the reasons are."""
    say(f"{report.table}: {report.good} of {report.rows_in} rows loaded, {report.duplicates} duplicates")
    for key in report.unreadable:
        say(f"quarantined: {key}")
    if report.quarantined:
        where = "the reasons are in its quarantine table: lakebed tables list"
        say(f"{report.table}: {report.quarantined} rows were quarantined; {where}")


def _show(bronze: list[dict[str, object]], ran: list[dict[str, Any]], output: str) -> None:
    """Tables one below the other; as data one document, which has both where there are models."""
    if output in ("table", "jsonl") or not ran:
        emit(bronze, output)
        if ran:
            emit(ran, output)
    else:
        emit({"bronze": bronze, "models": ran}, output)


def _model_runner(context: Context) -> PipelineRunner | None:
    from lakebed.pipeline.runner import PipelineRunner
    from lakebed.pipeline.settings import PipelineSettings

    return PipelineRunner(context) if context.settings.of(PipelineSettings).gold else None


def _all_models(runner: PipelineRunner, org: str, project: str, reason: str, *, follow: bool) -> list[dict[str, Any]]:
    """Every model that is not run by hand alone; in a loop those with a schedule are left to `lakebed work`."""
    models = runner.graph.models.values()
    names = [
        m.name for m in models if m.options.on != "manual" and not (follow and (m.options.scheduled or m.options.lag))
    ]
    rows = []
    for org_id, project_id in chosen_projects(runner, org, project):
        reports = runner.run_models(org_id, project_id, names, trigger="command", reason=reason, raises=False)
        rows += rows_of(org_id, project_id, reports)
    return rows


def _run_models(
    models: tuple[str, ...],
    full_refresh: bool,
    window: tuple[str, str],
    chosen: tuple[str, str],
    reason: str,
    where: Where,
    output: str,
) -> int:
    from lakebed.pipeline.models.graph import bare
    from lakebed.pipeline.models.plan import Window
    from lakebed.pipeline.models.runs import failed

    context, span = where.context("pipeline"), Window.parse(*window)
    runner = opened(context)
    names = runner.graph.chosen(models)
    subject = {"models": " ".join(names), "full_refresh": _yes(full_refresh), "from": window[0], "to": window[1]}
    rows: list[dict[str, Any]] = []
    details: list[dict[str, Any]] = []
    sound = True
    with job_as_operator(context, "pipeline.run", subject, reason):
        say("starting Spark")
        for org_id, project_id in chosen_projects(runner, *chosen):
            with spark_progress("models"):
                reports = runner.run_models(
                    org_id,
                    project_id,
                    names,
                    trigger="command",
                    full_refresh=full_refresh,
                    window=span,
                    filled=[*map(bare, models)] or None,
                    reason=reason,
                    shown=lambda each: say(
                        f"{each.table}: {each.state}, {each.rows} rows; {each.error or each.reason}"
                    ),
                    raises=False,
                )
            sound = sound and not failed(reports)
            rows += rows_of(org_id, project_id, reports)
            details += [{"project": f"{org_id}/{project_id}", **msgspec.to_builtins(each)} for each in reports]
    emit(rows if output == "table" else details, output)
    return exits.OK if sound else exits.FAILED


def _recorded(context: Context, what: str, table: str, dry_run: bool) -> AbstractContextManager[Any]:
    return nullcontext() if dry_run else job_as_operator(context, what, {"table": table or "all"})


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _row(report: msgspec.Struct) -> dict[str, object]:
    plain = dict(msgspec.to_builtins(report))
    return {name: plain[name] for name in (*COLUMNS, "unreadable", "through")}


for name in ("plan", "test", "docs", "runs"):
    app.command(f"lakebed.pipeline.models.commands:{name}", name=name)
app.command("lakebed.rollups.commands:rollup", name="rollup")
