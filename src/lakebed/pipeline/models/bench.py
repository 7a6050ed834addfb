"""A part of `lakebed bench pipeline`: what a tick costs on one million rows, and on six, from its parts to gold.

Tables grow by ticks of equal size; a step is a tick of 10,000 rows, half new, half of the last large tick. Timed is
everything from its stored parts on: bronze, silver by a contract, and three models: one in Python that adds the change
to its own sums, one in SQL that appends the changed rows, and one in SQL that is replaced whole from the sums.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lakebed.bench.harness import BenchEnvironment, Check, Contender, at_most, measured, rounds_of
from lakebed.core.errors import Corrupt
from lakebed.pipeline.models import definition as lp
from lakebed.spark.settings import SparkSettings
from lakebed.store.settings import StoreSettings
from lakebed.ticks.model import BronzeTick, ManifestPart, TickColumn, TickTable

ROWS, ROWS_QUICK = 1_000_000, 200_000
TIMES = 6
ROUNDS, ROUNDS_QUICK = 5, 3
CHANGED = 10_000
CUSTOMERS = 20_000
PROJECT = ("bench", "p")
COLUMNS = {"id": "long", "customer": "long", "total": "double", "day": "string"}
CONTRACT = """
table: orders
keys: [id]
columns: {id: {type: long, required: true}, customer: long, total: double, day: string}
checks: {not_negative: total >= 0}
"""
BAR = 1.5  # time of a step on six times the rows ÷ on the rows
SEEN = "-- incremental: append\nselect id, total from {{ changes('orders') }}"
GROUPS = "select customer % 100 as branch, sum(total) as total from gold.totals group by 1"


async def bench_models(environment: BenchEnvironment) -> list[Check]:
    count = ROWS_QUICK if environment.quick else ROWS
    environment.report(f"Bringing ticks of {count} rows to gold: one, and {TIMES}")
    small = await asyncio.to_thread(BenchModels, environment, 1, count)
    large = await asyncio.to_thread(BenchModels, environment, TIMES, count)
    contenders: dict[str, Contender] = {
        "small": lambda: asyncio.to_thread(small.step),
        "large": lambda: asyncio.to_thread(large.step),
    }
    for contender in contenders.values():  # the first step of each loads what later ones have
        await contender()
    environment.report(f"A tick of {CHANGED} rows to each, in turn")
    rounds = ROUNDS_QUICK if environment.quick else ROUNDS
    seconds = await rounds_of(rounds, contenders)
    gold = {name: each.gold_s[-rounds:] for name, each in (("small", small), ("large", large))}
    for each in (small, large):
        await asyncio.to_thread(each.check)
    return [
        Check(f"first run of three models over {TIMES * count} rows", round(large.first_s, 2), "s"),
        measured(f"tick of {CHANGED} rows to the last gold table, on {count} rows", seconds["small"], "s"),
        measured(f"the same on {TIMES * count} rows", seconds["large"], "s"),
        at_most(f"tick to gold on {TIMES * count} rows ÷ on {count}", seconds["large"], seconds["small"], BAR),
        at_most(f"gold step alone on {TIMES * count} rows ÷ on {count}", gold["large"], gold["small"], BAR),
    ]


def _totals(feed: Any, before: Any) -> Any:
    from pyspark.sql import functions as F

    sign = F.when(F.col("_change_type").isin("insert", "update_postimage"), 1).otherwise(-1)
    delta = feed.groupBy("customer").agg(F.sum(sign * F.col("total")).alias("delta"))
    total = F.coalesce("total", F.lit(0.0)) + F.col("delta")
    return delta.join(before, on="customer", how="left").select("customer", total.alias("total"))


class BenchModels:
    """A project of its own: `times` ticks in bronze and silver, three models, and the steps that change it."""

    def __init__(self, environment: BenchEnvironment, times: int, tick_rows: int) -> None:
        from lakebed.pipeline.bronze.ticks import BronzeWriter
        from lakebed.pipeline.models.folder import sql_model
        from lakebed.pipeline.models.graph import graph_of
        from lakebed.pipeline.models.job import ModelRunner
        from lakebed.pipeline.silver.contract import read_contract
        from lakebed.pipeline.silver.job import Silver
        from lakebed.spark.location import Location
        from lakebed.spark.session import open_session

        self._context, self._steps, self.gold_s = environment.apart(), 0, list[float]()
        spark = open_session(environment.settings.of(SparkSettings))
        location = Location.of(self._context.settings.of(StoreSettings))
        self._contract = read_contract(CONTRACT, "orders.yaml")
        self._bronze = BronzeWriter(spark, self._context, location=location)
        self._silver = Silver(spark, [self._contract], self._context, location=location)
        _totals.__annotations__ = {"feed": lp.Feed["silver.orders"], "before": lp.Table["gold.totals"]}
        mark = lp.table(name="totals", keys=["customer"], incremental="merge", schema="customer long, total double")
        models = [lp.model_of(mark(_totals)), sql_model("seen", SEEN), sql_model("groups", GROUPS)]
        self._runner = ModelRunner(spark, graph_of(models, {"orders"}), self._context, location=location)
        for number in range(times):
            self._refined(self._tick([(number * tick_rows, (number + 1) * tick_rows)]))
        self._next, self._old = times * tick_rows, (times - 1) * tick_rows
        self.first_s = self._gold()

    def step(self) -> float:
        """A tick of which half of the rows are new, half are of the last large one; the seconds to the last table."""
        half, self._steps = CHANGED // 2, self._steps + 1
        tick = self._tick([(self._old, self._old + half), (self._next, self._next + half)])
        self._next, self._old = self._next + half, self._old + half
        began = self._context.clock.monotonic_s()
        self._refined(tick)
        self.gold_s.append(self._gold())
        return self._context.clock.monotonic_s() - began

    def check(self) -> None:
        """Raises Corrupt unless gold is what a computation over everything gives, and no row was set aside."""
        orders = self._silver.table(self._contract, *PROJECT)
        wanted, found = (
            table.read().selectExpr("count(*)", "sum(total)").first() for table in (orders, self._made("totals"))
        )
        groups = self._made("groups").read().selectExpr("sum(total)").first()
        if wanted is None or found is None or groups is None or not wanted[1] == found[1] == groups[0]:
            raise Corrupt(f"silver adds up to {wanted}, gold to {found} and {groups}")
        if wanted[0] != self._next:
            raise Corrupt(f"{self._next} orders were sent, but silver has {wanted[0]}")

    def _made(self, name: str) -> Any:
        return self._runner.table(*PROJECT, f"gold.{name}")

    def _refined(self, tick: BronzeTick) -> None:
        done = self._bronze.commit(tick)
        self._silver.run(*PROJECT, {table.name: table.version for table in done})

    def _gold(self) -> float:
        clock = self._context.clock
        began = clock.monotonic_s()
        reports, error = self._runner.run(*PROJECT)
        seconds = clock.monotonic_s() - began
        if error is not None or any(each.state != "made" for each in reports):
            raise error or Corrupt(f"not every model was made: {[each.state for each in reports]}")
        return seconds

    def _tick(self, spans: list[tuple[int, int]]) -> BronzeTick:
        """A tick with a part for each span of ids, whose bytes are in the bucket."""
        name, keys, parts = self._context.ids.token(), {}, []
        for seq, (begin, end) in enumerate(spans):
            body = self._parquet(begin, end)
            keys[seq] = f"parts/{name}/{seq}"
            asyncio.run(self._context.store.create(keys[seq], body))
            parts.append(ManifestPart(seq, hashlib.sha256(body).hexdigest(), end - begin, len(body)))
        schema = tuple(TickColumn(column, kind) for column, kind in COLUMNS.items())
        rows = sum(end - begin for begin, end in spans)
        table = TickTable("orders", "delta", schema, rows, tuple(parts), ("id",))
        return BronzeTick(*PROJECT, name, "20261117", (table,), keys)

    def _parquet(self, begin: int, end: int) -> bytes:
        ids = np.arange(begin, end)
        total = ((ids + self._steps) % 1000).astype("float64")
        days = pa.array((ids // 100_000).astype(str))
        sink = io.BytesIO()
        pq.write_table(pa.table({"id": ids, "customer": ids % CUSTOMERS, "total": total, "day": days}), sink)
        return sink.getvalue()
