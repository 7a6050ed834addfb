"""`lakebed pipeline plan|test|docs|runs`: models before, beside and after their runs; and as `lakebed gold`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from lakebed.cli import exits
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, in_loop
from lakebed.core.errors import NotFound

if TYPE_CHECKING:
    from lakebed.core.context import Context
    from lakebed.pipeline.models.runs import ModelReport
    from lakebed.pipeline.runner import PipelineRunner

Models = Annotated[str, Parameter(help="models; `name+` also means those that read it, `+name` those it reads")]
Org = Annotated[str, Parameter(help="only projects of this org")]
Project = Annotated[str, Parameter(name=["--project", "-p"], help="only this project")]

RAN = ("project", "table", "state", "mode", "version", "rows", "quarantined", "dropped", "seconds", "reason")


def plan(
    *models: Models,
    full_refresh: Annotated[bool, Parameter(help="as if run with --full-refresh", negative="")] = False,
    org: Org = "",
    project: Project = "",
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Show what a run would do with each model, and why. Starts no Spark and changes nothing."""
    runner = opened(where.context("pipeline"))
    names = runner.graph.chosen(models)
    rows = []
    for org_id, project_id in chosen_projects(runner, org, project):
        for name, step in runner.plan_models(org_id, project_id, names, full_refresh=full_refresh).items():
            versions = ", ".join(f"{source} {_span(source, step)}" for source in step.sources)
            rows.append(
                {
                    "project": f"{org_id}/{project_id}",
                    "table": name,
                    "incremental": runner.graph.models[name].options.incremental,
                    "action": step.action,
                    "reason": step.reason,
                    "sources": versions,
                }
            )
    emit(rows, output)


def _span(source: str, step: Any) -> str:
    return f"{step.after[source]} → {step.sources[source]}" if source in step.after else str(step.sources[source])


def test(
    *models: Models,
    where: Where = Where(),
    output: Output = "table",
) -> int:
    """Run the cases of models on small frames: tests/<model>.yaml in the models' folder. Exits 1 if one fails."""
    from lakebed.pipeline.models.testing import read_cases, run_case
    from lakebed.spark.session import open_session
    from lakebed.spark.settings import SparkSettings

    settings = where.settings()
    graph, folder = _read(settings)
    chosen = [graph.models[name] for name in graph.chosen(models)]
    cases = [(model, case) for model in chosen for case in read_cases(folder, model)]
    if not cases:
        say(f"no case: write {folder}/tests/{chosen[0].name if chosen else 'model'}.yaml")
        return exits.OK
    say("starting Spark")
    spark = open_session(settings.of(SparkSettings))
    results = [run_case(spark, model, case) for model, case in cases]
    emit(results, output)
    return exits.OK if all(each.passed for each in results) else exits.FAILED


def docs(
    *,
    to: Annotated[Path | None, Parameter(help="the file to write (default: standard output)")] = None,
    where: Where = Where(),
) -> None:
    """Write a page about the models: their graph, what each reads, its options and expectations. Markdown."""
    from lakebed.pipeline.models.pages import graph_page

    graph, _ = _read(where.settings())
    page = graph_page(graph)
    if to is None:
        print(page, end="")
    else:
        to.write_text(page)
        say(f"{len(graph.models)} models: {to}")


def runs(
    *,
    model: Annotated[str, Parameter(help="only runs with this model")] = "",
    org: Org = "",
    project: Project = "",
    limit: Annotated[int, Parameter(help="most runs to show")] = 20,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """List the last runs of models, newest first."""
    from lakebed.pipeline.models import runs as records

    context = where.context("cli")
    found = in_loop(lambda: records.runs(context.store, org_id=org, project_id=project, model=model, limit=limit))
    if output != "table":
        emit(found, output)
        return
    emit([row for record in found for row in _run_rows(record)], output)


def _run_rows(record: Any) -> list[dict[str, Any]]:
    from datetime import UTC, datetime

    at = datetime.fromtimestamp(record.began_ms / 1000, UTC).isoformat(timespec="seconds")
    ran = [each for each in record.models if each.state not in ("unchanged", "waiting")]
    return [{"at": at, "trigger": record.trigger, **row} for row in rows_of(record.org_id, record.project_id, ran)]


def rows_of(org_id: str, project_id: str, reports: Sequence[ModelReport]) -> list[dict[str, Any]]:
    """What a run did, a row for each model."""
    rows = []
    for each in reports:
        plain = {name: getattr(each, name) for name in RAN if name not in ("project", "reason")}
        rows.append({"project": f"{org_id}/{project_id}", **plain, "reason": each.error or each.reason})
    return rows


def opened(context: Context) -> PipelineRunner:
    """The pipeline of the settings. Raises NotFound when they name no models."""
    from lakebed.pipeline.runner import PipelineRunner

    runner = PipelineRunner(context)
    if not runner.graph.models:
        raise NotFound("there are no models", hint="set pipeline.gold to a folder of *.sql and *.py")
    return runner


def chosen_projects(runner: PipelineRunner, org: str, project: str) -> list[tuple[str, str]]:
    """The projects that have tables, of this org and name where given. Raises NotFound."""
    found = [each for each in runner.projects() if org in ("", each[0]) and project in ("", each[1])]
    if not found and (org or project):
        raise NotFound(f"no project {org or '*'}/{project or '*'} has tables", hint="lakebed tables list")
    return found


def _read(settings: Any) -> tuple[Any, Path]:
    """The graph and its folder, from the settings alone: no store is needed."""
    from lakebed.pipeline.models.folder import read_models
    from lakebed.pipeline.models.graph import graph_of
    from lakebed.pipeline.settings import PipelineSettings
    from lakebed.pipeline.silver.contract import read_contracts

    own = settings.of(PipelineSettings)
    if own.gold_folder is None or not own.gold_folder.is_dir():
        raise NotFound("there are no models", hint="set pipeline.gold to a folder of *.sql and *.py")
    contracts = read_contracts(own.contracts_folder) if own.contracts_folder else []
    return graph_of(read_models(own.gold_folder), {each.table for each in contracts}), own.gold_folder


gold = App(name="gold", help="Gold models: dry run, tests, last runs.")
gold.command(plan, name="dry-run")
gold.command(test)
gold.command(runs)
