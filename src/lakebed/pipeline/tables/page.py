"""The tables page: SQL, rows by filter, columns with a profile, versions, and how to read a table elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, Literal, cast

from lakebed.console.page import (
    FAST_S,
    SCAN_S,
    SLOW_S,
    DataSource,
    Download,
    PageRequest,
    PageSamples,
    PartPage,
    SearchSource,
    deferred,
    limited_list,
)
from lakebed.console.samples import DataError, DataSample
from lakebed.core.context import Context
from lakebed.core.errors import Invalid, LakebedError, NotFound
from lakebed.pipeline.tables.explore import MEDIA, OPERATORS, PAGE_ROWS, Filter, TableExplorer, browse_sql
from lakebed.pipeline.tables.query import sql_name
from lakebed.pipeline.tables.view import TableRow, Tables, TableSample

LAYERS = ("bronze", "silver", "gold", "quarantine")  # as data flows; others behind them
OPENED_FIRST = ("gold", "silver", "bronze")
REASONS = ("_reasons", "reasons", "reason")  # of a quarantined row: what a reader looks for first
QUERY_WAIT_S = 25.0  # for a slot, and then for the query


def layers(rows: Sequence[TableRow]) -> list[tuple[str, list[TableRow]]]:
    """Tables by layer, the layers in the order data flows through them."""
    found: dict[str, list[TableRow]] = {}
    for row in rows:
        found.setdefault(row.layer, []).append(row)
    rank = {name: number for number, name in enumerate(LAYERS)}
    return sorted(found.items(), key=lambda pair: (rank.get(pair[0], len(LAYERS)), pair[0]))


def opened_first(rows: Sequence[TableRow]) -> str:
    """The table that is shown when none is chosen: one with rows, of the last layer that has one."""
    rank = {name: number for number, name in enumerate(OPENED_FIRST)}
    best = min(rows, key=lambda row: (row.rows <= 0, rank.get(row.layer, len(rank)), row.name), default=None)
    return best.name if best is not None else ""


def reasons_first(sample: TableSample) -> TableSample:
    """The column with the reasons in front."""
    order = sorted(range(len(sample.columns)), key=lambda at: sample.columns[at] not in REASONS)
    rows = [[row[at] for at in order] for row in sample.rows]
    return TableSample([sample.columns[at] for at in order], rows, sample.note)


class TablesPage(PartPage):
    name = "tables"
    manual = "parts/tables.md"
    path = "/tables"
    title = "Tables"
    about = "SQL, rows, columns and versions of every table, and how to read one with other tools."
    exports = True
    helpers = {"layers": layers, "reasons_first": reasons_first, "sql_name": sql_name}

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.tables = Tables(context)
        self.explorer = TableExplorer(context)

    async def load(self, request: PageRequest) -> tuple[PageSamples, dict[str, Any]]:
        samples = await request.load(tables=self.all_tables())
        known = [row.name for row in samples["tables"].value or ()]
        name = request.query.text("table") or opened_first(samples["tables"].value or ())
        sql, chosen = request.query.long_text("sql", "lakebed sql"), filter_of(request)
        if sql:
            samples |= await self._ask(request, "query", lambda: self._query(request, sql, known))
        if name:
            samples |= await request.load(table=self.table(name))
        if name and samples["table"].error is None:
            samples |= await request.load(rows=self.rows(name), snippets=self.snippets(name))
            quarantine = f"quarantine/{name.partition('/')[2]}"
            if name.startswith("silver/") and quarantine in known:
                samples |= await request.load(quarantine=self.table(quarantine), quarantined=self.rows(quarantine))
            columns = [column.name for column in samples["table"].value.columns] if samples["table"].value else []
            if chosen.asked:
                samples |= await self._ask(
                    request, "found", lambda: self._query(request, browse_sql(name, columns, chosen), known)
                )
            if request.query.text("profile") and columns:
                samples |= await request.load(profile=self.profile(name))
        more = {"filter": chosen, "operators": list(OPERATORS), "page_rows": PAGE_ROWS}
        return samples, {"table": name, "sql": sql, "profile": request.query.text("profile"), **more}

    async def _ask(self, request: PageRequest, name: str, made: Callable[[], DataSource]) -> PageSamples:
        """What is wrong with the query itself is the sample's error: the rest of the page stays."""
        try:
            source = made()
        except LakebedError as error:
            return {name: DataSample(error=DataError(error.code, error.message, error.hint))}
        return await request.load(**{name: source})

    def _query(self, request: PageRequest, text: str, known: Sequence[str]) -> DataSource:
        """Raises Invalid, NotFound, and Denied for a table that the caller may not read."""
        paths = self.explorer.paths(text, known, request.demand)
        key = (
            f"tables.sql:{sha256(f'{sorted(paths.items())}{text}'.encode()).hexdigest()}"  # a name may mean two tables
        )
        load = deferred(lambda: self.explorer.rows(text, paths))
        right = f"tables:read:{min(paths.values())}" if paths else "tables:read"  # each was demanded: one names a thing
        return DataSource(right, key, SCAN_S, load, QUERY_WAIT_S, QUERY_WAIT_S)

    async def export(self, request: PageRequest) -> Download:
        form = request.query.text("format") or "csv"
        if form not in MEDIA:
            raise Invalid(f"format {form[:40]!r} does not exist", hint=f"one of {', '.join(MEDIA)}")
        request.demand("tables:read")
        samples = await request.load(tables=self.all_tables())
        known = [row.name for row in samples["tables"].value or ()]
        text, name = request.query.long_text("sql", "lakebed sql"), request.query.text("table")
        if not text:
            if name not in known:
                raise NotFound(f"there is no table {name}", hint="lakebed tables list")
            text = f"select * from {sql_name(name)}"
        paths = self.explorer.paths(text, known, request.demand)
        data = await self.explorer.export(text, paths, cast("Literal['csv', 'parquet']", form))
        stem = "query" if request.query.text("sql") else name.replace("/", "-")
        return Download(f"{stem}.{form}", MEDIA[form], data)

    def searched(self) -> SearchSource:
        return SearchSource("table", self.all_tables(), "name")

    def overview(self) -> dict[str, DataSource]:
        return {"tables": self.all_tables()}

    @staticmethod
    def levels(latest: Callable[[str], Any]) -> dict[str, float | None]:
        listed = latest("tables.all")
        return {
            "tables": None if listed is None else len(listed),
            "table_rows": None if listed is None else sum(max(0, row.rows) for row in listed),
        }

    def all_tables(self) -> DataSource:
        return limited_list("tables:read", "tables.all", SLOW_S, lambda shows: self.tables.first(shows=shows), "name")

    def table(self, name: str) -> DataSource:
        return DataSource(
            f"tables:read:{name}", f"tables.show:{name}", FAST_S, deferred(lambda: self.tables.show(name))
        )

    def rows(self, name: str) -> DataSource:
        return DataSource(
            f"tables:read:{name}", f"tables.rows:{name}", SLOW_S, deferred(lambda: self.tables.sample(name))
        )

    def profile(self, name: str) -> DataSource:
        async def load() -> Any:
            table = await self.tables.show(name)
            return await self.explorer.profile(name, [column.name for column in table.columns])

        return DataSource(f"tables:read:{name}", f"tables.profile:{name}", SCAN_S, load, QUERY_WAIT_S, QUERY_WAIT_S)

    def snippets(self, name: str) -> DataSource:
        return DataSource(f"tables:read:{name}", f"tables.how:{name}", SCAN_S, deferred(lambda: self.tables.how(name)))


def filter_of(request: PageRequest) -> Filter:
    text = request.query.text
    return Filter(
        text("column"),
        text("operator"),
        text("value"),
        text("sort"),
        bool(text("desc")),
        request.query.whole("page") or 0,
    )
