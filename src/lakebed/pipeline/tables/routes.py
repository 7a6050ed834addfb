"""Tables over HTTP, read-only: their list, rows and history, and SQL. Rows are Arrow IPC streams. Needs no Spark.

Each request has limits on rows, time and memory, and few run at once: a gateway is for queries of people and programs
without the bucket's credentials. Whoever has them reads the tables from the bucket, with any engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakebed.core.auth import Principal
from lakebed.core.context import Component, Context, StatelessComponent
from lakebed.core.errors import Invalid, Unavailable
from lakebed.core.http import decode_json, json_response, operation
from lakebed.pipeline.tables.query import QueryLimits, QuerySlots, delta_table, resolve
from lakebed.pipeline.tables.query import run as run_query
from lakebed.pipeline.tables.view import TableRow, Tables

READ = "tables:read"
ARROW = "application/vnd.apache.arrow.stream"
ROWS_MAX = 1_000_000  # of one answer: some 100 MB of narrow rows
LIMITS = QueryLimits(seconds=30.0, memory_mb=512, threads=2, rows=ROWS_MAX, result_bytes=256 * 1024 * 1024)
AT_ONCE = 2  # queries of one gateway; more are refused, since each may use its whole memory
HISTORY_MAX = 1000
R = TypeVar("R")


class SqlQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    query: str


class TableRoutes(StatelessComponent):
    name = "tables"
    writes: Sequence[BaseRoute] = ()

    def __init__(self, context: Context) -> None:
        self._context, self._queries = context, QuerySlots(AT_ONCE)
        self.reads: Sequence[BaseRoute] = (
            Route("/v1/tables", self._list),
            Route("/v1/tables/rows/{name:path}", self._rows),
            Route("/v1/tables/history/{name:path}", self._history),
            Route("/v1/sql", self._sql, methods=["POST"]),
        )

    @operation("Every table with its newest version and number of rows.", answer=list[TableRow], right=READ)
    async def _list(self, request: Request) -> Response:
        principal: Principal = request.state.principal
        principal.demand_list(READ)
        return json_response([row for row in await Tables(self._context).all() if principal.owns(row.name)])

    @operation(
        "Rows of a table, as an Arrow IPC stream: column (repeated), limit, version.",
        media_type=ARROW,
        right=f"{READ}:{{name}}",
    )
    async def _rows(self, request: Request) -> Response:
        columns, version = request.query_params.getlist("column"), _number(request, "version")
        limit, name = _number(request, "limit"), await self._named(request)

        def read() -> Any:
            dataset = delta_table(self._context, name, version).to_pyarrow_dataset()
            if unknown := [column for column in columns if column not in dataset.schema.names]:
                raise Invalid(f"{name} has no column {unknown[0]!r}", hint=f"one of {', '.join(dataset.schema.names)}")
            wanted = columns or None
            if limit is not None:
                return dataset.head(min(limit, ROWS_MAX), columns=wanted)
            if dataset.count_rows() > ROWS_MAX:
                raise Invalid(f"{name} has more than {ROWS_MAX} rows", hint="add limit, or use SQL that aggregates")
            return dataset.to_table(columns=wanted)

        return _stream(await self._in_thread(read))

    @operation(
        "What each version of a table did, newest first: limit.",
        answer=list[dict[str, Any]],
        right=f"{READ}:{{name}}",
    )
    async def _history(self, request: Request) -> Response:
        name, limit = await self._named(request), _number(request, "limit") or HISTORY_MAX
        return json_response(
            await self._in_thread(lambda: delta_table(self._context, name).history(min(limit, HISTORY_MAX)))
        )

    @operation(
        "The result of one select statement over tables, as an Arrow IPC stream.",
        body=SqlQuery,
        media_type=ARROW,
        right=READ,
    )
    async def _sql(self, request: Request) -> Response:
        principal: Principal = request.state.principal
        principal.demand_list(READ)
        text = decode_json(await request.body(), SqlQuery).query
        known = await self._visible(principal)

        def dataset(path: str) -> Any:
            return delta_table(self._context, resolve(path, known)).to_pyarrow_dataset()

        found = await self._in_thread(lambda: run_query(text, dataset, LIMITS))
        if not found.complete:
            raise Invalid(f"the result has more than {LIMITS.rows} rows, or 256 MB", hint="add limit, or aggregate")
        return _stream(found.table)

    async def _named(self, request: Request) -> str:
        """The table that the path names. The right is checked first: who may not read it does not learn of it."""
        principal, path = request.state.principal, path_of(request.path_params["name"])
        known = await self._visible(principal)
        if not principal.may(READ):
            principal.demand(f"{READ}:{path}")
            known = [name for name in known if principal.may(f"{READ}:{name}")]
        return resolve(path, known)

    async def _visible(self, principal: Principal) -> list[str]:
        """The tables that a name may mean, and that an error may name: for a tenant those of the tenant."""
        return [name for name in await Tables(self._context).names() if principal.owns(name)]

    async def _in_thread(self, work: Callable[[], R]) -> R:
        """Runs one query. Raises Overloaded while others run, Unavailable without the extra."""
        try:
            return await self._queries.run(work)
        except ModuleNotFoundError as error:
            raise Unavailable(f"this gateway has no {error.name}", hint="pip install 'lakebed[sql]' there") from error


def path_of(name: str) -> str:
    """A table's path, from its path or its name with dots."""
    return name if "/" in name else name.replace(".", "/")


def _number(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is not None and not (text.isascii() and text.isdigit() and len(text) < 16):
        raise Invalid(f"{name}={text[:40]!r} is not a number")
    return None if text is None else int(text)


def _stream(table: Any) -> Response:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return Response(sink.getvalue().to_pybytes(), media_type=ARROW)


def component(context: Context) -> Component:
    return TableRoutes(context)
