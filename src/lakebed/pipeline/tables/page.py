"""The tables page: columns, versions, rows, and how to read a table elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lakebed.console.page import FAST_S, SCAN_S, SLOW_S, DataSource, PageRequest, PageSamples, PartPage, deferred, first
from lakebed.core.context import Context
from lakebed.pipeline.tables.view import TableRow, Tables

LAYERS = ("bronze", "silver", "gold", "quarantine")  # as data flows; others behind them


def layers(rows: Sequence[TableRow]) -> list[tuple[str, list[TableRow]]]:
    """Tables by layer, the layers in the order data flows through them."""
    found: dict[str, list[TableRow]] = {}
    for row in rows:
        found.setdefault(row.layer, []).append(row)
    rank = {name: number for number, name in enumerate(LAYERS)}
    return sorted(found.items(), key=lambda pair: (rank.get(pair[0], len(LAYERS)), pair[0]))


class TablesPage(PartPage):
    name = "tables"
    path = "/tables"
    title = "Tables"
    about = "Columns, versions, sample rows, and how to read a table with other tools."
    helpers = {"layers": layers}

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.tables = Tables(context)

    async def load(self, request: PageRequest) -> tuple[PageSamples, dict[str, Any]]:
        samples = await request.load(tables=self.all_tables())
        name = request.query.text("table") or first(samples["tables"], "name")
        if name:
            samples |= await request.load(table=self.table(name), rows=self.rows(name), snippets=self.snippets(name))
            quarantine = f"quarantine/{name.partition('/')[2]}"
            known = {row.name for row in samples["tables"].value or ()}
            if name.startswith("silver/") and quarantine in known:
                samples |= await request.load(quarantine=self.table(quarantine), quarantined=self.rows(quarantine))
        return samples, {"table": name}

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
        return DataSource("tables:read", "tables.all", SLOW_S, self.tables.all)

    def table(self, name: str) -> DataSource:
        return DataSource(
            f"tables:read:{name}", f"tables.show:{name}", FAST_S, deferred(lambda: self.tables.show(name))
        )

    def rows(self, name: str) -> DataSource:
        return DataSource(
            f"tables:read:{name}", f"tables.rows:{name}", SLOW_S, deferred(lambda: self.tables.sample(name))
        )

    def snippets(self, name: str) -> DataSource:
        return DataSource(f"tables:read:{name}", f"tables.how:{name}", SCAN_S, deferred(lambda: self.tables.how(name)))
