"""An incremental run of a model on the cluster that the environment names, by a driver that dies where DIES_AT says.

The first driver on a bucket makes the sources and the model's first batch. Then each runs the same step, batch 1, and
prints its result as JSON; one with DIES_AT prints how many files there were, and kills itself inside the commit.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from pyspark.sql import DataFrame

from lakebed.core.settings import load
from lakebed.delta import history
from lakebed.delta.model import TableSpec, WriteBatch
from lakebed.pipeline.models.folder import sql_model
from lakebed.pipeline.models.graph import graph_of
from lakebed.pipeline.models.job import ModelRunner
from lakebed.pipeline.models.plan import APPLICATION
from lakebed.pipeline.tables import table
from lakebed.pipeline.tables.table import Table
from lakebed.spark.location import Location
from lakebed.spark.session import open_session
from lakebed.spark.settings import SparkSettings
from lakebed.store.settings import StoreSettings
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections
from support.finalize_crash_points import deadly

# What is called immediately before, and immediately after, the conditional write of the log entry.
STEPS: dict[str, tuple[Any, str, bool]] = {
    "before_the_log_entry": (table, "encode", False),
    "after_the_log_entry": (history, "committed", True),
}
PROJECT = ("acme", "shop")
TASKS, ROWS, CUSTOMERS = 4, 4_000, 1_000


# Orders of each customer: a change that is taken in twice is counted twice.
COUNTED = """
-- keys: customer
-- incremental: merge
-- schema: customer long, orders long
select new.customer, coalesce(before.orders, 0) + new.orders as orders
from (select customer, count(*) as orders from {{ changes('orders') }} group by customer) new
left join gold.counted before on before.customer = new.customer
"""


def main() -> None:
    context = make_context(load(sections(), env=dict(os.environ)), role="test")
    spark = open_session(context.settings.of(SparkSettings))
    location = Location.of(context.settings.of(StoreSettings))
    runner = ModelRunner(spark, graph_of([sql_model("counted", COUNTED)], {"orders"}), context, location=location)

    def orders(begin: int, customers: int) -> DataFrame:
        return spark.range(begin, begin + ROWS, 1, TASKS).selectExpr("id", f"id % {customers} as customer")

    def count_files(root: str) -> int:
        async def listed() -> int:
            return len([info.key async for info in context.store.list(f"{root}/") if info.key.endswith(".parquet")])

        return asyncio.run(listed())

    gold = runner.table(*PROJECT, "gold.counted")
    if gold.snapshot().version < 0:
        spec = TableSpec("silver/acme/shop/orders", orders(0, 1).schema.json(), keys=("id",))
        silver = Table(spark, spec, context, location=location)
        silver.append(orders(0, CUSTOMERS))
        runner.run(*PROJECT)
        silver.append(orders(ROWS, 2 * CUSTOMERS))
    found = {"version": gold.snapshot().version, "files": count_files(gold.spec.root)}
    if dies_at := os.environ.get("DIES_AT", ""):
        print(json.dumps(found), flush=True)
        where, name, before = STEPS[dies_at]
        deadly(where, name, before=before)

    (report,), error = runner.run(*PROJECT)
    assert error is None, error
    rows = gold.read()
    again = runner.table(*PROJECT, "gold.counted", TableSpec(gold.spec.name, rows.schema.json(), keys=("customer",)))
    same_batch = again.append(rows, WriteBatch(APPLICATION, 1))
    rows = gold.read()
    result = {
        "found": found,
        "version": gold.snapshot().version,
        "batch": gold.snapshot().applied[APPLICATION],
        "repeated": report.repeated,
        "written": report.rows,
        "same_batch_repeated": same_batch.repeated,
        "rows": rows.count(),
        "keys": rows.select("customer").distinct().count(),
        "customers_by_orders": {row["orders"]: row["count"] for row in rows.groupBy("orders").count().collect()},
    }
    print(json.dumps(result), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
    sys.exit(0)
