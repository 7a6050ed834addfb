"""Counts rows from bronze to gold, for every source: what a contract calls good is in silver, and the rest quarantined.

Bronze is read at the version that silver has read last and judged again by the contract; a good key that silver lacks,
or a bad row that the quarantine lacks, is lost. Only counts come to the driver.
"""

from __future__ import annotations

import asyncio

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from lakebed.core.context import Context
from lakebed.core.errors import NotFound
from lakebed.delta import history
from lakebed.delta.log import fields_of
from lakebed.pipeline.audit.model import TableFlow
from lakebed.pipeline.bronze.places import projects, tables_of
from lakebed.pipeline.settings import PipelineSettings
from lakebed.pipeline.silver import transforms as silver
from lakebed.pipeline.silver.contract import Contract, read_contracts
from lakebed.pipeline.silver.job import APPLICATION, Silver
from lakebed.spark.location import Location
from lakebed.store.settings import StoreSettings


class FlowCheck:
    """Synchronous, as Spark is. Without contracts there is nothing to check."""

    def __init__(self, spark: SparkSession, context: Context) -> None:
        self._context = context
        folder = context.settings.of(PipelineSettings).contracts_folder
        contracts = read_contracts(folder) if folder is not None and folder.is_dir() else []
        location = Location.of(context.settings.of(StoreSettings))
        self._silver = Silver(spark, contracts, context, location=location)

    def run(self) -> tuple[TableFlow, ...]:
        """One row for each silver table of each project."""
        if not self._silver.contracts:
            return ()
        every = asyncio.run(projects(self._context.store, "silver"))
        found = [self._flow(contract, *project) for project in every for contract in self._silver.contracts]
        return tuple(flow for flow in found if flow is not None)

    def gold(self) -> dict[str, int]:
        """The rows of every gold table, by its name, as its log counts them."""

        async def counted() -> dict[str, int]:
            rows = {}
            store = self._context.store
            for org, project in await projects(store, "gold"):
                for table, name in (await tables_of(store, "gold", org, project)).items():
                    state = await history.snapshot(store, f"tables/{name}")
                    rows[f"{org}/{project}/{table}"] = sum(max(0, file.rows) for file in state.files)
            return rows

        return asyncio.run(counted())

    def _flow(self, contract: Contract, org_id: str, project_id: str) -> TableFlow | None:
        where = (contract, org_id, project_id)
        table = self._silver.table(*where)
        state = table.snapshot()
        read = state.applied.get(APPLICATION, -1)
        try:
            source = self._silver.source(*where)
        except NotFound:
            return None
        newest = source.table.snapshot().version
        if read < 0:
            return None
        at = read if source.readable(-1, read) else newest
        types = {name: kind for name, kind in fields_of(state.schema_json).items() if name in contract.columns}
        judged = silver.checked(silver.cast(source.read(at), contract, types), contract).cache()
        held = table.read(columns=list(contract.keys))
        aside = self._silver.quarantine(*where).read()
        try:
            good, bad = _counts(judged)
            keys = judged.filter(F.size(silver.REASONS) == 0).select(*contract.keys).distinct()
            lost = keys.join(held, on=list(contract.keys), how="left_anti").count()
            return TableFlow(
                org_id,
                project_id,
                contract.table,
                contract.bronze,
                good + bad,
                held.count(),
                aside.count(),
                lost + _short(judged, aside),
                newest - read,
            )
        finally:
            judged.unpersist()


def _counts(judged: DataFrame) -> tuple[int, int]:
    bad = F.size(silver.REASONS) > 0
    found = judged.agg(F.count(F.when(~bad, 1)), F.count(F.when(bad, 1))).first()
    return (found[0], found[1]) if found else (0, 0)


def _short(judged: DataFrame, aside: DataFrame) -> int:
    """Bad rows that the quarantine lacks, by tick or batch: the text of a row changes when bronze gains a column."""
    wanted = judged.filter(F.size(silver.REASONS) > 0).groupBy("_tick_id").agg(F.count("*").alias("bad"))
    kept = aside.groupBy("_tick_id").agg(F.count("*").alias("kept"))
    missing = F.greatest(F.lit(0), F.col("bad") - F.coalesce("kept", F.lit(0)))
    found = wanted.join(kept, on="_tick_id", how="left").agg(F.sum(missing)).first()
    return int(found[0] or 0) if found else 0
