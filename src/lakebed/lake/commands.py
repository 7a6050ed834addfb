"""`lakebed sql`: one query over the tables of the lake."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from lakebed.cli.output import emit, say, shown_bytes
from lakebed.cli.where import Where, in_loop

if TYPE_CHECKING:
    from lakebed.core.context import Context

Format = Annotated[
    Literal["table", "json", "jsonl", "csv", "parquet"],
    Parameter(name=["--output", "-o"], help="format of the rows on stdout"),
]
ROWS_SHOWN = 1000


Engine = Annotated[
    Literal["duckdb", "spark"],
    Parameter(help="duckdb: in this process; spark: on the cluster of spark.master or spark.remote"),
]


def sql(query: str, /, *, engine: Engine = "duckdb", where: Where = Where(), output: Format = "table") -> None:
    """Run a query over the tables it names, such as: select * from gold.shop.by_customer limit 10

    Tables are named by their path with dots; folders in the middle may be left out. Queries only read.

    Parameters
    ----------
    query
        one select statement; - reads it from standard input.
    """
    from lakebed.pipeline.tables.query import delta_table, resolve
    from lakebed.pipeline.tables.query import query as run
    from lakebed.pipeline.tables.view import Tables

    context, text = where.context("cli"), sys.stdin.read() if query == "-" else query
    if engine == "spark":
        _write(_on_spark(context, text), output)
        return
    known = in_loop(Tables(context).names)
    _write(run(text, lambda path: delta_table(context, resolve(path, known)).to_pyarrow_dataset()), output)


def _on_spark(context: Context, text: str) -> Any:
    """The rows of a query that Spark runs, on the settings' master or Connect server."""
    from lakebed.pipeline.tables.sql import SqlTables
    from lakebed.spark.progress import spark_progress
    from lakebed.spark.session import open_session
    from lakebed.spark.settings import SparkSettings

    say("starting Spark")
    with spark_progress("sql"):
        session = open_session(context.settings.of(SparkSettings))
        return SqlTables(session, context.settings).install().sql(text).toArrow()


def _write(found: Any, output: str) -> None:
    if output == "csv":
        import pyarrow.csv

        on_terminal = io.BytesIO()
        pyarrow.csv.write_csv(found, on_terminal if sys.stdout.isatty() else sys.stdout.buffer)
        sys.stdout.buffer.write(shown_bytes(on_terminal.getvalue()))
    elif output == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(found, sys.stdout.buffer)
    else:
        shown = found.slice(0, ROWS_SHOWN) if output == "table" else found
        emit(shown.to_pylist(), output, columns=found.column_names)
        if found.num_rows > shown.num_rows:
            say(f"{shown.num_rows} of {found.num_rows} rows are shown; -o csv, json or parquet has all of them")
