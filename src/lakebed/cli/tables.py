"""`lakebed tables`: what lies in the lake, told from the tables' own logs. No Spark is started."""

from __future__ import annotations

from cyclopts import App

from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, in_loop

app = App(name="tables", help="Tables: list, schema and versions, sample rows.")


@app.command(name="ls")
def list_tables(*, where: Where = Where(), output: Output = "table") -> None:
    """Every table with its version, rows and size."""
    from lakebed.views.tables import Tables

    emit(in_loop(lambda: Tables(where.context("cli")).all()), output)


@app.command
def show(name: str, /, *, where: Where = Where(), output: Output = "yaml") -> None:
    """A table's columns, and what its last versions did.

    Parameters
    ----------
    name
        as `lakebed tables ls` shows it, for example bronze/acme/shop/orders.
    """
    from lakebed.views.tables import Tables

    emit(in_loop(lambda: Tables(where.context("cli")).show(name)), output)


@app.command
def sample(name: str, /, *, count: int = 20, where: Where = Where(), output: Output = "table") -> None:
    """A few rows of a table, as text."""
    from lakebed.views.tables import Tables

    found = in_loop(lambda: Tables(where.context("cli")).sample(name, count=max(1, count)))
    if output != "table":
        emit(found, output)
        return
    if found.note:
        say(found.note)
    emit([dict(zip(found.columns, row, strict=True)) for row in found.rows], output)


@app.command
def how(name: str, /, *, where: Where = Where(), output: Output = "table") -> None:
    """How to read a table with Polars, DuckDB and Spark: lines to copy, without a secret in them."""
    from lakebed.views.tables import snippets

    found = snippets(where.context("cli"), name)
    if output != "table":
        emit(found, output)
        return
    for one in found:
        say(f"# {one.name}")
        print(one.text)
