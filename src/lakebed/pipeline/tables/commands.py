"""`lakebed tables`: lists tables and reads their logs. Does not start Spark."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, in_loop

app = App(name="tables", help="Tables: list, schema and versions, sample rows.")

Name = Annotated[str, Parameter(help="the table as `lakebed tables list` shows it: bronze/acme/shop/orders")]


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
