"""`lakebed tables`: lists tables, reads their logs and rows, deletes rows and forgets keys. Does not start Spark."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from lakebed.cli import exits
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, in_loop, job_as_operator
from lakebed.core.errors import Invalid

app = App(name="tables", help="Tables: list, schema and versions, rows, deletes by condition or key.")

Name = Annotated[str, Parameter(help="the table as `lakebed tables list` shows it: silver/acme/shop/orders")]
Condition = Annotated[
    str, Parameter(name="--where", help="only rows that match: \"id = 5 and at >= '2026-01-01'\", joined by `and`")
]
Version = Annotated[int | None, Parameter(help="read this version (default: the newest)")]
Reason = Annotated[str, Parameter(help="why; recorded in the audit trail")]
DryRun = Annotated[bool, Parameter(help="show what would be removed, and change nothing", negative="")]
ROWS = 100


@app.command(name="list")
def list_tables(*, where: Where = Where(), output: Output = "table") -> None:
    """Show every table with its version, rows and size."""
    from lakebed.pipeline.tables.view import Tables

    emit(in_loop(lambda: Tables(where.context("cli")).all()), output)


app.command(list_tables, name="ls", show=False)  # the earlier name


@app.command
def show(name: Name, /, *, where: Where = Where(), output: Output = "yaml") -> None:
    """Show a table's columns, and what its last versions did."""
    from lakebed.pipeline.tables.view import Tables

    emit(in_loop(lambda: Tables(where.context("cli")).show(name)), output)


@app.command
def sample(
    name: Name,
    /,
    *,
    count: Annotated[int, Parameter(help="rows to show")] = 20,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Show a few rows of a table, as text."""
    from lakebed.pipeline.tables.view import Tables

    found = in_loop(lambda: Tables(where.context("cli")).sample(name, count=max(1, count)))
    if output != "table":
        emit(found, output)
        return
    if found.note:
        say(found.note)
    emit([dict(zip(found.columns, row, strict=True)) for row in found.rows], output)


@app.command
def how(name: Name, /, *, where: Where = Where(), output: Output = "table") -> None:
    """Show how to read a table with Polars, DuckDB and Spark: lines to copy, without secrets."""
    from lakebed.pipeline.tables.view import Tables

    found = in_loop(lambda: Tables(where.context("cli")).how(name))
    if output != "table":
        emit(found, output)
        return
    for one in found:
        say(f"# {one.name}")
        print(one.text)


@app.command
def read(
    name: Name,
    /,
    *,
    condition: Condition = "",
    columns: Annotated[str, Parameter(help="only these columns, separated by commas")] = "",
    limit: Annotated[int, Parameter(help="most rows to show; 0 means all")] = ROWS,
    version: Version = None,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Read rows by a condition: only the files, row groups and columns that can match are fetched."""
    from lakebed.pipeline.tables.view import Tables

    wanted = [column.strip() for column in columns.split(",") if column.strip()]
    tables = Tables(where.context("cli"))
    emit(in_loop(lambda: tables.read(name, condition, columns=wanted, limit=limit, version=version)), output)


@app.command
def delete(
    name: Name,
    /,
    *,
    condition: Condition,
    reason: Reason = "",
    dry_run: DryRun = False,
    where: Where = Where(),
    output: Output = "yaml",
) -> None:
    """Delete the rows of a table that match a condition, in one version. Older versions keep them until vacuum."""
    from lakebed.pipeline.tables.forget import delete_rows

    context = where.context("cli")
    if dry_run:
        emit(delete_rows(context, name, condition, dry_run=True), output)
        return
    with job_as_operator(context, "tables.delete", {"table": name}, _given(reason)):
        done = delete_rows(context, name, condition)
    emit(done, output)


@app.command
def forget(
    project: Annotated[str, Parameter(help="org/project")],
    /,
    *,
    key: Annotated[list[str], Parameter(help="column=value of the rows to remove, by bronze's names; all must match")],
    table: Annotated[str, Parameter(help="only tables of this name; default: all tables with these columns")] = "",
    reason: Reason = "",
    purge: Annotated[bool, Parameter(help="also delete files of older versions with the rows", negative="")] = False,
    dry_run: DryRun = False,
    where: Where = Where(),
    output: Output = "table",
) -> int:
    """Remove a key from bronze, silver, quarantine and gold of a project, and report when the last copy is gone.

    Exits 1 while silver has not read all of bronze: run it again then.
    """
    from lakebed.pipeline.tables.forget import Forgetter, digest

    keys = dict(_pair(text) for text in key)
    context = where.context("cli")
    if dry_run:
        report = Forgetter(context).run(project, keys, only=table, dry_run=True, purge=purge)
    else:
        subject = {"project": project, "table": table or "all", "columns": ",".join(keys), "sha256": digest(keys)}
        with job_as_operator(context, "tables.forget", subject, _given(reason)) as outcome:
            report = Forgetter(context).run(project, keys, only=table, purge=purge)
            outcome.detail = f"{report.rows} rows"
    emit(report.tables if output == "table" else report, output)
    say(f"{'would remove' if dry_run else 'removed'}: {report.rows} rows")
    if last := max((one.gone_by for one in report.tables), default=""):
        say(f"older versions hold copies until {last}; --purge deletes them at once")
    say(f"uploaded parts of ticks are deleted by {report.parts_gone_by}")
    for one in report.tables:
        if one.refused:
            say(f"{one.table} was refused: {one.note}")
    if not report.complete:
        say("not complete: a table was refused, or silver has not read all of bronze yet. Run this again then")
    return exits.OK if report.complete or dry_run else exits.FAILED


def _pair(text: str) -> tuple[str, str]:
    column, sign, value = text.partition("=")
    if not sign or not column.strip():
        raise Invalid(f"--key {text!r} has not the form column=value")
    return column.strip(), value


def _given(reason: str) -> str:
    if not reason.strip():
        raise Invalid("this deletes rows: a reason is required", hint="add --reason TEXT, or --dry-run")
    return reason
