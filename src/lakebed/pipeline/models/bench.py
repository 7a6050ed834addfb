"""A part of `lakebed bench pipeline`: what an incremental step of gold costs on one million rows of silver, and on six.

Silver grows by files of equal size; a step writes 10,000 rows to it, half new, half in its last large file. Timed is
everything from there to the last gold table: a Python model that adds the change to its own sums, an SQL model that
appends the changed rows, and an SQL model that is replaced whole from the sums.
"""

from __future__ import annotations

import asyncio
from typing import Any

from lakebed.bench.harness import BenchEnvironment, Check, Contender, at_most, measured, rounds_of
from lakebed.core.errors import Corrupt
from lakebed.pipeline.models import definition as lp
from lakebed.spark.settings import SparkSettings
from lakebed.store.settings import StoreSettings

ROWS, ROWS_QUICK = 1_000_000, 200_000
TIMES = 6
ROUNDS, ROUNDS_QUICK = 5, 3
CHANGED = 10_000
CUSTOMERS = 20_000
BAR = 1.5  # time of a step on six times the rows ÷ on the rows
SEEN = "-- incremental: append\nselect id, total from {{ changes('orders') }}"
GROUPS = "select customer % 100 as branch, sum(total) as total from gold.totals group by 1"


async def bench_models(environment: BenchEnvironment) -> list[Check]:
    count = ROWS_QUICK if environment.quick else ROWS
    environment.report(f"Writing silver tables of {count} and {TIMES * count} rows, and their gold")
    small = await asyncio.to_thread(BenchModels, environment, 1, count)
    large = await asyncio.to_thread(BenchModels, environment, TIMES, count)
    contenders: dict[str, Contender] = {
        "small": lambda: asyncio.to_thread(small.step),
        "large": lambda: asyncio.to_thread(large.step),
    }
    for contender in contenders.values():  # the first step of each loads what later ones have
        await contender()
    environment.report(f"Changing {CHANGED} rows of each and running its models, in turn")
    seconds = await rounds_of(ROUNDS_QUICK if environment.quick else ROUNDS, contenders)
    for each in (small, large):
        await asyncio.to_thread(each.check)
    return [
        Check(f"first run of three models over {TIMES * count} rows", round(large.first_s, 2), "s"),
        measured(f"step of {CHANGED} rows to the last gold table, on {count} rows", seconds["small"], "s"),
        measured(f"the same on {TIMES * count} rows", seconds["large"], "s"),
        at_most(f"gold step on {TIMES * count} rows ÷ on {count}", seconds["large"], seconds["small"], BAR),
    ]


def _totals(feed: Any, before: Any) -> Any:
    from pyspark.sql import functions as F

    sign = F.when(F.col("_change_type").isin("insert", "update_postimage"), 1).otherwise(-1)
    delta = feed.groupBy("customer").agg(F.sum(sign * F.col("total")).alias("delta"))
    total = F.coalesce("total", F.lit(0.0)) + F.col("delta")
    return delta.join(before, on="customer", how="left").select("customer", total.alias("total"))


class BenchModels:
    """A project of its own: silver of `times` files, three models, and the steps that change it."""

    def __init__(self, environment: BenchEnvironment, times: int, file_rows: int) -> None:
        from lakebed.delta.model import TableSpec
        from lakebed.pipeline.models.folder import sql_model
        from lakebed.pipeline.models.graph import graph_of
        from lakebed.pipeline.models.job import ModelRunner
        from lakebed.pipeline.tables.table import Table
        from lakebed.spark.location import Location
        from lakebed.spark.session import open_session

        self._context, self._steps = environment.apart(), 0
        self._spark = open_session(environment.settings.of(SparkSettings))
        location = Location.of(self._context.settings.of(StoreSettings))
        spec = TableSpec("silver/bench/p/orders", self._rows(0, 0).schema.json(), keys=("id",))
        self._orders = Table(self._spark, spec, self._context, location=location)
        for number in range(times):
            self._orders.append(self._rows(number * file_rows, (number + 1) * file_rows).coalesce(1))
        self._next, self._old = times * file_rows, (times - 1) * file_rows
        _totals.__annotations__ = {"feed": lp.Feed["silver.orders"], "before": lp.Table["gold.totals"]}
        mark = lp.table(name="totals", keys=["customer"], incremental="merge", schema="customer long, total double")
        models = [lp.model_of(mark(_totals)), sql_model("seen", SEEN), sql_model("groups", GROUPS)]
        self._runner = ModelRunner(self._spark, graph_of(models, {"orders"}), self._context, location=location)
        self.first_s = self._run()

    def step(self) -> float:
        """Half of the rows are new, half are in the last large file; gives the seconds of gold alone."""
        half, self._steps = CHANGED // 2, self._steps + 1
        new = self._rows(self._next, self._next + half)
        old = self._rows(self._old, self._old + half)
        self._orders.upsert(old.union(new).coalesce(1))
        self._next, self._old = self._next + half, self._old + half
        return self._run()

    def check(self) -> None:
        """Raises Corrupt unless gold is what a computation over everything gives."""
        wanted, found = (
            table.read().selectExpr("count(*)", "sum(total)").first() for table in (self._orders, self._gold("totals"))
        )
        groups = self._gold("groups").read().selectExpr("sum(total)").first()
        if wanted is None or found is None or groups is None or not wanted[1] == found[1] == groups[0]:
            raise Corrupt(f"silver adds up to {wanted}, gold to {found} and {groups}")

    def _gold(self, name: str) -> Any:
        return self._runner.table("bench", "p", f"gold.{name}")

    def _run(self) -> float:
        clock = self._context.clock
        began = clock.monotonic_s()
        reports, error = self._runner.run("bench", "p")
        seconds = clock.monotonic_s() - began
        if error is not None or any(each.state != "made" for each in reports):
            raise error or Corrupt(f"not every model was made: {[each.state for each in reports]}")
        return seconds

    def _rows(self, begin: int, end: int) -> Any:
        return self._spark.range(begin, end).selectExpr(
            "id",
            f"id % {CUSTOMERS} as customer",
            f"cast((id + {self._steps}) % 1000 as double) as total",
            "cast(id div 100000 as string) as day",
        )
