"""Spark on the bucket: a listing becomes a table, exactly once, that other engines read at the same version."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from lakebed.context import Context
from lakebed.demo.audit import prove_conserved
from lakebed.demo.bronze import prove_bronze
from lakebed.demo.rollups import prove_rollups
from lakebed.demo.stage import Stage
from lakebed.gateway.rollups import spark_job
from lakebed.pipeline.settings import SparkSettings
from lakebed.store.settings import StoreSettings

if TYPE_CHECKING:
    from lakebed.pipeline.tables.table import Table

TITLE = "Spark and tables, without jars"
NEXT = ("lakebed env", "lakebed pipeline run", "lakebed audit")

AFTER = ("agents", "queue", "log")  # what they left is what is tabulated

APPLICATION = "demo"


async def play(stage: Stage) -> None:
    context = stage.context()
    listed = [(info.key.split("/")[0], info.key, info.size) async for info in context.store.list("")]
    stage.tell(f"Spark starts; {len(listed)} objects of the bucket become rows")
    await asyncio.to_thread(_tabulate, stage, context, listed)


def _tabulate(stage: Stage, context: Context, listed: list[tuple[str, str, int]]) -> None:
    from lakebed.delta.model import Batch, TableSpec
    from lakebed.pipeline.session import open_session
    from lakebed.pipeline.tables.location import Location
    from lakebed.pipeline.tables.table import Table

    began = context.clock.monotonic_s()
    settings = SparkSettings(quick=True, master=stage.settings.of(SparkSettings).master)
    spark = open_session(settings)
    stage.tell(f"Spark {spark.version} ready in {context.clock.monotonic_s() - began:.1f} s")
    rows = spark.createDataFrame(listed, "folder string, key string, size long")
    table = Table(
        spark,
        TableSpec("demo/objects", rows.schema.json(), keys=("key",)),
        store=context.store,
        location=Location.of(stage.settings.of(StoreSettings)),
        clock=context.clock,
        ids=context.ids,
    )
    table.append(rows, Batch(APPLICATION, 1))
    again = table.append(rows, Batch(APPLICATION, 1))
    newer = [(folder, key, size + 1) for folder, key, size in listed[:3]]
    upserted = table.upsert(spark.createDataFrame(newer, rows.schema), Batch(APPLICATION, 2))
    total = table.read().selectExpr("count(*)", "sum(size)").first()
    assert total is not None
    wanted = (len(listed), sum(size for _, _, size in listed) + min(3, len(listed)))
    stage.check("rows are stored exactly once", again.repeated and total[0] == wanted[0], f"{total[0]} rows")
    stage.check("an upsert replaces by key", upserted.rows_replaced == min(3, len(listed)), f"{total[1]} bytes in all")
    stage.check("totals agree", tuple(total) == wanted, f"{tuple(total)}")
    _read_elsewhere(stage, table, wanted[0])
    prove_bronze(stage, context, spark)
    asyncio.run(prove_rollups(stage, context, spark_job(context, spark)))
    prove_conserved(stage, context, spark)


def _read_elsewhere(stage: Stage, table: Table, wanted: int) -> None:
    import deltalake

    from lakebed.pipeline.tables.location import Location

    location = Location.of(stage.settings.of(StoreSettings))
    delta = deltalake.DeltaTable(location.uri(table.spec.root), storage_options=location.storage_options())
    seen = (delta.version(), delta.to_pyarrow_table().num_rows)
    stage.check("delta-rs reads the same version", seen == (table.snapshot().version, wanted), f"version {seen[0]}")
