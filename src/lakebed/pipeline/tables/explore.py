"""Questions to tables from the console: SQL, rows by filter and order, a profile of each column, export.

Every question is one query of `lakebed.pipeline.tables.query` with limits on time, memory, rows and bytes. QUERIES_MAX
run at once in a gateway; others wait for WAIT_S and are then refused.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from lakebed.core.context import Context
from lakebed.core.errors import Invalid
from lakebed.pipeline.tables import query
from lakebed.pipeline.tables.query import (
    QueryLimits,
    QueryResult,
    QuerySlots,
    literal,
    path_of,
    quoted,
    resolve,
    sql_name,
)

QUERIES_MAX = 2  # each may use a core and its memory
WAIT_S = 10.0
SQL_CHARS_MAX = 8000  # it is a part of the URL
PAGE_ROWS = 50
PAGES_MAX = 200  # a page far behind costs a scan of all rows before it
PROFILE_COLUMNS_MAX = 40
CELL_CHARS_MAX = 200
SHOWN = QueryLimits()
EXPORTED = QueryLimits(seconds=50.0, rows=1_000_000, result_bytes=64 * 1024 * 1024)
MEDIA = {"csv": "text/csv; charset=utf-8", "parquet": "application/vnd.apache.parquet"}
OPERATORS = {
    "eq": "=",
    "ne": "<>",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "contains": "contains",
    "null": "is null",
    "set": "is not null",
}

Demand = Callable[[str], None]  # raises Denied for a right that the caller does not have


class QueryRows(msgspec.Struct, frozen=True):
    """Rows as text. `complete` is False when the result has more than is shown."""

    columns: list[str]
    types: list[str]
    rows: list[list[str]]
    complete: bool


class Filter(msgspec.Struct, frozen=True):
    """Which rows of a table, in which order, and which page of them."""

    column: str = ""
    operator: str = ""
    value: str = ""
    sort: str = ""
    descending: bool = False
    page: int = 0

    @property
    def asked(self) -> bool:
        return bool(self.column or self.sort or self.page)


class ColumnProfile(msgspec.Struct, frozen=True):
    name: str
    rows: int
    nulls: int
    distinct: int  # an estimate
    smallest: str
    largest: str


class TableExplorer:
    """`known` lists the tables that exist."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._queries = QuerySlots(QUERIES_MAX, wait_s=WAIT_S)

    def paths(self, text: str, known: Sequence[str], demand: Demand) -> dict[str, str]:
        """The tables of a query, by the path in it, each of which may be read. Raises Invalid, Denied, NotFound."""
        if not query.available():
            raise Invalid("this gateway cannot run SQL", hint="install the extra: pip install 'lakebed[sql]'")
        found = {path_of(name): resolve(path_of(name), known) for name in query.tables_of(text)}
        for path in found.values():
            demand(f"tables:read:{path}")
        return found

    async def rows(self, text: str, paths: dict[str, str]) -> QueryRows:
        """The result for a page. Raises Invalid, QueryTooSlow, Overloaded."""
        return shown(await self._run(text, paths, SHOWN))

    async def export(self, text: str, paths: dict[str, str], form: Literal["csv", "parquet"]) -> bytes:
        """The result as a file. Raises Invalid when it has more than EXPORTED allows: a part would look whole."""
        found = await self._run(text, paths, EXPORTED)
        if not found.complete:
            raise Invalid(
                f"the result has more than {EXPORTED.rows:,} rows or {EXPORTED.result_bytes // 1024**2} MiB",
                hint=f"add a limit, or use: lakebed sql -o {form}",
            )
        return await asyncio.to_thread(encoded, found.table, form)

    async def profile(self, name: str, columns: Sequence[str]) -> list[ColumnProfile]:
        """Each column's nulls, distinct values (estimated), smallest and largest value, by one scan."""
        columns = columns[:PROFILE_COLUMNS_MAX]
        found = await self._run(profile_sql(name, columns), {name: name}, SHOWN)
        (row,) = found.table.to_pylist()
        return [
            ColumnProfile(
                column,
                row["rows"],
                row["rows"] - row[f"known_{at}"],
                row[f"distinct_{at}"],
                _cell(row[f"smallest_{at}"]),
                _cell(row[f"largest_{at}"]),
            )
            for at, column in enumerate(columns)
        ]

    async def _run(self, text: str, paths: dict[str, str], limits: QueryLimits) -> QueryResult:
        return await self._queries.run(lambda: query.run(text, lambda path: self._dataset(paths[path]), limits))

    def _dataset(self, name: str) -> Any:
        return query.delta_table(self._context, name).to_pyarrow_dataset()


def browse_sql(name: str, columns: Sequence[str], chosen: Filter) -> str:
    """Pure: the query of a filtered, ordered page. Raises Invalid for a column or operator that does not exist."""
    where = ""
    if chosen.column:
        column = quoted(_known(chosen.column, columns))
        if chosen.operator not in OPERATORS:
            raise Invalid(f"operator {chosen.operator[:40]!r} does not exist", hint=f"one of {', '.join(OPERATORS)}")
        word = OPERATORS[chosen.operator]
        if chosen.operator == "contains":
            where = f" where contains(lower({column}::varchar), lower({literal(chosen.value)}))"
        elif chosen.operator in ("null", "set"):
            where = f" where {column} {word}"
        else:
            where = f" where {column} {word} {literal(chosen.value)}"
    order = ""
    if chosen.sort:
        order = f" order by {quoted(_known(chosen.sort, columns))}{' desc' if chosen.descending else ''} nulls last"
    page = min(max(1, chosen.page), PAGES_MAX)
    return f"select * from {sql_name(name)}{where}{order} limit {PAGE_ROWS + 1} offset {(page - 1) * PAGE_ROWS}"


def profile_sql(name: str, columns: Sequence[str]) -> str:
    """Pure: one row with the numbers of every column."""
    numbers = ["count(*) as rows"]
    for at, column in enumerate(columns):
        word = quoted(column)
        numbers += [
            f"count({word}) as known_{at}",
            f"approx_count_distinct({word}::varchar) as distinct_{at}",
            f"min({word})::varchar as smallest_{at}",
            f"max({word})::varchar as largest_{at}",
        ]
    return f"select {', '.join(numbers)} from {sql_name(name)}"


def shown(found: QueryResult) -> QueryRows:
    rows = [[_cell(value) for value in row.values()] for row in _distinct(found.table).to_pylist()]
    types = [str(field.type) for field in found.table.schema]
    return QueryRows(list(found.table.column_names), types, rows, found.complete)


def encoded(table: Any, form: Literal["csv", "parquet"]) -> bytes:
    out = io.BytesIO()
    if form == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(table, out)
    else:
        import pyarrow as pa
        import pyarrow.csv

        nested = [at for at, field in enumerate(table.schema) if pa.types.is_nested(field.type)]
        for at in nested:
            text = [
                None if one is None else msgspec.json.encode(one, enc_hook=str).decode()
                for one in table[at].to_pylist()
            ]
            table = table.set_column(at, table.column_names[at], pa.array(text, pa.string()))
        pyarrow.csv.write_csv(table, out)
    return out.getvalue()


def _distinct(table: Any) -> Any:
    """With a name of its own for each column, so that a row has them all."""
    return table.rename_columns([f"{at}" for at in range(table.num_columns)])


def _known(name: str, columns: Sequence[str]) -> str:
    if name not in columns:
        raise Invalid(f"column {name[:80]!r} does not exist")
    return name


def _cell(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= CELL_CHARS_MAX else f"{text[:CELL_CHARS_MAX]}…"
