"""SQL over all tables, in this process, by DuckDB: `select … from gold.shop.by_customer`.

A table is named by its path with dots (`bronze.acme.shop.orders`); folders behind the first may be left out where that
is clear (`bronze.shop.orders`). Queries read: a statement that changes something is refused, and so is
the file system, the network, and every table function that is not in TABLE_FUNCTIONS. Only the tables that a query
names are opened; filters and columns are pushed down to their files.

`QueryLimits` bound what a query of somebody else may cost: time, memory of the engine, rows and bytes of the result.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import copy_context
from difflib import get_close_matches
from threading import Timer
from typing import Any, TypeVar

import msgspec

from lakebed.core.context import Context
from lakebed.core.errors import Invalid, NotFound, Overloaded, TooLarge
from lakebed.spark.location import Location
from lakebed.store.settings import StoreSettings

ROOT = "tables/"
# Functions in `from` that read no file and take no address: everything else there could leave the engine.
TABLE_FUNCTIONS = frozenset({"range", "generate_series", "unnest", "repeat", "json_each", "json_tree"})

R = TypeVar("R")
Dataset = Callable[[str], Any]  # a table's path -> its PyArrow dataset
TableName = tuple[str, ...]  # its parts in the query, at least two
IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]*")
NAME_CHARS_MAX = 1000  # DuckDB compares an unknown name with all that it knows: 1 s for a function's of 58,000
NAMED = ("function_name", "type_name", "collation", "table_name", "column_names", "path")  # in its tree of a query


class QueryLimits(msgspec.Struct, frozen=True):
    """What a query may cost. The files that it reads are buffered by PyArrow, beside `memory_mb`."""

    seconds: float = 10.0
    memory_mb: int = 256
    threads: int = 1
    rows: int = 1000
    result_bytes: int = 16 * 1024 * 1024


class QuerySlots:
    """So many queries at once, each in a thread. One that nobody waits for any more keeps its slot until its thread has
    ended: it costs as much as before.
    """

    def __init__(self, count: int, *, wait_s: float = 0.0) -> None:
        self._count, self._wait_s = count, wait_s
        self._free = asyncio.Semaphore(count)

    async def run(self, work: Callable[[], R]) -> R:
        """Raises Overloaded when no slot is free within the time to wait."""
        try:
            if self._free.locked() and not self._wait_s:
                raise TimeoutError
            async with asyncio.timeout(self._wait_s or None):
                await self._free.acquire()
        except TimeoutError:
            raise Overloaded(f"{self._count} queries already run", retry_after_s=self._wait_s or 1.0) from None
        thread = asyncio.get_running_loop().run_in_executor(None, copy_context().run, work)
        thread.add_done_callback(self._ended)
        return await asyncio.shield(thread)

    def _ended(self, thread: asyncio.Future[Any]) -> None:
        self._free.release()
        if not thread.cancelled():
            thread.exception()  # perhaps nobody else looks at it any more


class QueryTooSlow(TooLarge):
    """The query was stopped at its limit of time: add a filter, or read fewer columns."""

    code = "query_too_slow"


class QueryResult(msgspec.Struct, frozen=True):
    """An Arrow table; `complete` is False when rows were left out at a limit."""

    table: Any
    complete: bool


def query(text: str, dataset: Dataset) -> Any:
    """The whole result as an Arrow table. Raises Invalid for what is not a query, and what `dataset` raises."""
    return run(text, dataset, None).table


def run(text: str, dataset: Dataset, limits: QueryLimits | None) -> QueryResult:
    """One query. With limits, reading stops at the first that is reached. Raises Invalid, QueryTooSlow."""
    import duckdb

    with duckdb.connect(":memory:") as engine:
        for number, name in enumerate(sorted(tables_of(text))):
            engine.register(f"rows_{number}", dataset(path_of(name)))
            for made in _places(name):
                engine.execute(made).fetchall()
            view = ".".join(map(quoted, name))
            engine.execute(f"create view {view} as select * from temp.main.rows_{number}").fetchall()
        for setting in _locked(limits):
            engine.execute(f"set {setting}").fetchall()
        timer = Timer(limits.seconds, engine.interrupt) if limits else None
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            return _read(engine.sql(text).to_arrow_reader(10_000), limits)
        except duckdb.InterruptException as error:
            seconds = limits.seconds if limits else 0
            raise QueryTooSlow(
                f"the query was stopped after {seconds:g} s", hint="add a filter or a limit, or use: lakebed sql"
            ) from error
        except duckdb.Error as error:
            raise Invalid(f"the query failed: {error}") from error
        finally:
            if timer is not None:
                timer.cancel()


def _places(name: TableName) -> Iterator[str]:
    """What makes the schemas of a name: of two parts, the first is a schema; of more, it is a catalog."""
    schemas = name[:-1]
    if len(schemas) > 1:
        yield f"attach if not exists ':memory:' as {quoted(schemas[0])}"
    for depth in range(min(len(schemas), 2), len(schemas) + 1):
        yield f"create schema if not exists {'.'.join(map(quoted, schemas[:depth]))}"


def _locked(limits: QueryLimits | None) -> Iterator[str]:
    if limits is not None:
        yield f"memory_limit = '{limits.memory_mb}MB'"
        yield f"threads = {limits.threads}"
        yield "temp_directory = ''"  # what does not fit into memory is refused, not written to disk
    yield "python_enable_replacements = false"  # no variable of ours is a table
    yield "enable_external_access = false"
    yield "lock_configuration = true"


def _read(reader: Any, limits: QueryLimits | None) -> QueryResult:
    import pyarrow as pa

    if limits is None:
        return QueryResult(reader.read_all(), True)
    batches, rows, size = [], 0, 0
    for batch in reader:
        batches.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows > limits.rows or size > limits.result_bytes:
            break
    found = pa.Table.from_batches(batches, reader.schema)
    if size > limits.result_bytes and rows <= limits.rows:
        return QueryResult(found, False)
    return QueryResult(found.slice(0, limits.rows), rows <= limits.rows)


def tables_of(text: str) -> set[TableName]:
    """The tables that a query names with at least two parts. Raises Invalid for anything but one plain query."""
    import duckdb

    with duckdb.connect(":memory:") as engine:
        ((found,),) = engine.execute("select json_serialize_sql(?)", [text]).fetchall()
    tree = msgspec.json.decode(found)
    if tree.get("error") or len(tree["statements"]) != 1:
        message = tree.get("error_message") or ("more than one statement" if tree["statements"] else "it is empty")
        message = message.replace(
            "Only SELECT statements can be serialized to json!", "only select statements run here"
        )
        raise Invalid(f"not a query: {message}", hint="one select statement: select … from layer.project.table")
    for node in _nodes(tree):
        if long := [name for key in NAMED for name in _texts(node.get(key)) if len(name) > NAME_CHARS_MAX]:
            raise Invalid(
                f"a name of {len(long[0])} characters is in the query: {long[0][:40]}…",
                hint=f"names have at most {NAME_CHARS_MAX} characters",
            )
        if node.get("type") == "TABLE_FUNCTION" and _function(node) not in TABLE_FUNCTIONS:
            raise Invalid(f"{_function(node)}(…) is not allowed in a query", hint="read tables by their names")
        if node.get("show_type") == "SHOW_SPECIAL":  # `show tables`: only what a query names is open, so it has none
            raise Invalid("a query cannot list the tables", hint="lakebed tables list; columns: describe layer.table")
    names = {_name(node) for node in _nodes(tree) if node.get("type") == "BASE_TABLE"}
    return {name for name in names if len(name) > 1}


def _name(node: dict[str, Any]) -> TableName:
    """`catalog_name`, `schema_name` and `table_name` leave parts out where there are more than three."""
    whole = (node.get("qualified_name") or {}).get("path")
    return tuple(part for part in whole or (node["catalog_name"], node["schema_name"], node["table_name"]) if part)


def path_of(name: TableName) -> str:
    """The path that a name in a query stands for."""
    return "/".join(part.replace(".", "/") for part in name if part)


def sql_name(path: str) -> str:
    """A table's path as it is written in a query."""
    return ".".join(part if IDENTIFIER.fullmatch(part) else quoted(part) for part in path.split("/"))


def literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _function(node: dict[str, Any]) -> str:
    return str((node.get("function") or {}).get("function_name", "")).lower()


def _nodes(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from _nodes(each)


def _texts(value: Any) -> list[str]:
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def delta_table(context: Context, name: str, version: int | None = None) -> Any:
    """The table as a `deltalake.DeltaTable`, at its newest version or at one. Raises NotFound."""
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    location = Location.of(context.settings.of(StoreSettings))
    uri, options = location.uri(f"{ROOT}{name}"), location.storage_options()
    try:
        return DeltaTable(uri, storage_options=options, version=version)
    except TableNotFoundError as error:
        raise NotFound(f"there is no table {name}", hint="lakebed tables list") from error


def resolve(name: str, known: Sequence[str]) -> str:
    """The table that a name means: exactly, or with folders left out behind its first one. Raises NotFound."""
    if name in known:
        return name
    layer, _, rest = name.partition("/")
    meant = [each for each in known if each.startswith(f"{layer}/") and rest and each.endswith(f"/{rest}")]
    if len(meant) == 1:
        return meant[0]
    name = name[:NAME_CHARS_MAX]
    near = meant or get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else "lakebed tables list"
    raise NotFound(f"{'several tables are' if meant else 'there is no table'} {name}", hint=hint)


def available() -> bool:
    """Whether this installation has the engine: the extra `sql`."""
    with suppress(ModuleNotFoundError):
        import deltalake
        import duckdb

        return bool(deltalake and duckdb)
    return False
