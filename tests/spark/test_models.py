# ruff: noqa: UP037, F821 (names of tables in annotations are text)
"""Models on the real bucket: each mode gets exactly the change, once; what fails leaves the table as it was."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.utils import is_remote

from lakebed import pipeline as lp
from lakebed.core.errors import Invalid
from lakebed.core.ids import Ids
from lakebed.delta.model import TableSpec
from lakebed.pipeline.models.changes import apart_by_type, changed_rows
from lakebed.pipeline.models.definition import BadModel, Model, model_of
from lakebed.pipeline.models.expectations import ExpectationFailed
from lakebed.pipeline.models.folder import python_models, read_models, sql_model
from lakebed.pipeline.models.graph import graph_of
from lakebed.pipeline.models.job import ModelRunner
from lakebed.pipeline.models.plan import Window
from lakebed.pipeline.models.runs import ModelReport
from lakebed.pipeline.models.testing import GivenFrame, ModelCase, read_cases, run_case
from lakebed.pipeline.settings import PipelineSettings
from lakebed.pipeline.tables import rewrite
from lakebed.pipeline.tables.table import Table
from lakebed.spark.location import Location
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from support.runtimes import runtime_on

ORDERS = "id long, customer long, total double, day string"


class Project:
    """One project with a silver table of orders, and the models of a test over it."""

    def __init__(self, spark: SparkSession, store: Store, settings: StoreSettings) -> None:
        self.spark, self.store, self.location = spark, store, Location.of(settings)
        self.orders = self.table("silver/acme/shop/orders", keys=("id",))

    def table(self, name: str, schema: str = ORDERS, **layout: Any) -> Table:
        spec = TableSpec(name, self.spark.createDataFrame([], schema).schema.json(), **layout)
        return Table(self.spark, spec, runtime_on(self.store, ids=Ids()), location=self.location)

    def upsert(self, *rows: tuple[int, int, float, str]) -> None:
        self.orders.upsert(self.spark.createDataFrame(list(rows), ORDERS).coalesce(1))

    def runner(self, *models: Model) -> ModelRunner:
        graph = graph_of(models, {"orders", "customers"})
        return ModelRunner(self.spark, graph, runtime_on(self.store, ids=Ids()), location=self.location)

    def run(self, *models: Model, **options: Any) -> list[ModelReport]:
        reports, error = self.runner(*models).run("acme", "shop", **options)
        if error is not None:
            raise error
        return reports

    def rows(self, name: str, layer: str = "gold") -> list[tuple[Any, ...]]:
        return sorted(tuple(row) for row in self.runner().table("acme", "shop", f"{layer}.{name}").read().collect())


@pytest.fixture
def shop(spark: SparkSession, bucket: Store, bucket_settings: StoreSettings) -> Project:
    return Project(spark, bucket, bucket_settings)


@lp.table(keys=["customer"], incremental="merge", schema="customer long, total double")
def totals(feed: lp.Feed["silver.orders"], before: lp.Table["gold.totals"]) -> DataFrame:  # type: ignore[valid-type]
    """What each customer's orders add up to: the sums of before, and what the change adds and takes."""
    sign = F.when(F.col("_change_type").isin("insert", "update_postimage"), 1).otherwise(-1)
    delta = feed.groupBy("customer").agg(F.sum(sign * F.col("total")).alias("delta"))
    return delta.join(before, on="customer", how="left").select(
        "customer", (F.coalesce("total", F.lit(0.0)) + F.col("delta")).alias("total")
    )


def test_a_merge_is_given_the_change_and_adds_it_to_its_own_rows_once(shop: Project) -> None:
    """Inserts, updates and deletes over several versions, with compaction in between; a repeat does nothing."""
    model = model_of(totals)
    waiting = shop.run(model)
    shop.upsert((1, 7, 1.0, "a"), (2, 7, 2.0, "a"), (3, 8, 4.0, "b"))
    first = shop.run(model)
    shop.upsert((2, 7, 5.0, "a"), (4, 9, 8.0, "b"))
    shop.orders.compact()
    shop.upsert((4, 9, 16.0, "b"), (1, 7, 1.0, "a"))
    second = shop.run(model)
    again = shop.run(model)
    shop.orders.delete("id = 3")
    third = shop.run(model)

    assert [("waiting", "waits for silver.orders")] == [(each.state, each.reason) for each in waiting]
    assert [("made", "refresh", 2), ("made", "increment", 2), ("unchanged", "", 0), ("made", "increment", 1)] == [
        (each.state, each.mode, each.rows) for each in (*first, *second, *again, *third)
    ]
    assert ({"silver.orders": 0}, {"silver.orders": 3}) == (second[0].after, second[0].sources)
    assert [(7, 6.0), (8, 0.0), (9, 16.0)] == shop.rows("totals")
    columns = {
        "customer": ("silver.orders.customer",),
        "total": ("gold.totals.total", "silver.orders._change_type", "silver.orders.total"),
    }
    assert ({} if is_remote() else columns) == second[0].columns  # over Connect there is no plan to read


def test_a_merge_deletes_the_keys_that_its_rows_mark(shop: Project) -> None:
    """A feed that is passed on follows its source, deletes included, and so does a model that reads it in turn; a key
    that another row writes stays, and what is marked needs no other column and meets no expectation.
    """
    by_id = "-- keys: id\n-- incremental: merge\n"
    mirror = sql_model(
        "mirror",
        f"{by_id}-- expect: total > 0 | fail\n"
        "select id, customer, if(_change_type = 'delete', -1.0, total) as total, _change_type\n"
        "from {{ feed('orders') }}",
    )
    second = sql_model("second", by_id + "select id, total, _change_type from {{ feed('mirror') }}")
    last = sql_model(
        "last",
        "-- keys: customer\n-- incremental: merge\nselect customer, max(total) as total,\n"
        "if(every(_change_type = 'delete'), 'delete', 'insert') as _change_type\n"
        "from {{ feed('orders') }} group by customer",
    )
    models = (mirror, second, last)
    shop.upsert((1, 7, 1.0, "a"), (2, 7, 2.0, "a"), (3, 8, 4.0, "b"), (4, 9, 8.0, "b"))
    first = shop.run(*models)
    shop.orders.delete("id = 3")
    shop.upsert((1, 7, 3.0, "a"), (5, 5, 5.0, "b"))
    shop.orders.delete("id = 2")
    made = shop.run(*models)
    again = shop.run(*models)
    whole = shop.run(*models, full_refresh=True)

    assert {"refresh"} == {each.mode for each in first}
    assert {"mirror": (2, 2), "second": (2, 2), "last": (2, 1)} == {
        each.table: (each.rows, each.deleted) for each in made
    }
    assert {"unchanged"} == {each.state for each in again}
    assert [(1, 7, 3.0), (4, 9, 8.0), (5, 5, 5.0)] == shop.rows("mirror")
    assert [(1, 3.0), (4, 8.0), (5, 5.0)] == shop.rows("second")
    assert [5, 7, 9] == [row[0] for row in shop.rows("last")]
    assert {"made"} == {each.state for each in whole}
    assert {"id", "customer", "total"} == set(shop.runner().table("acme", "shop", "gold.mirror").read().columns)


@pytest.mark.full
def test_a_large_first_run_with_a_key_twice_publishes_nothing(shop: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many rows the keys are counted by Spark, not in the driver; a key of a partition's column too."""
    monkeypatch.setattr(rewrite, "KEYS_MAX", 0)
    header = "-- incremental: merge\n-- partitions: day\n-- keys: day, customer\n"
    reads = "select day, customer, total from {{ changes('orders') }}"
    shop.upsert((1, 7, 1.0, "a"), (2, 7, 2.0, "b"))
    (good,) = shop.run(sql_model("once", header + reads))
    shop.upsert((3, 7, 4.0, "b"))

    with pytest.raises(Invalid, match="more than once"):
        shop.run(sql_model("twice", header + reads))

    assert ("made", 2) == (good.state, good.rows)
    assert -1 == shop.runner().table("acme", "shop", "gold.twice").snapshot().version


def test_changes_are_exactly_the_rows_that_were_written(shop: Project) -> None:
    """Rows that an upsert or a compaction only copied are none; of several versions the last counts."""
    shop.upsert(*((n, n, 1.0, "a") for n in range(50)))
    shop.upsert((5, 5, 2.0, "a"), (60, 6, 2.0, "a"))
    shop.upsert((5, 5, 3.0, "a"))
    shop.orders.compact()
    shop.orders.delete("id = 60")

    def changed(after: int, until: int, *, feed: bool = False) -> list[tuple[Any, ...]]:
        rows = changed_rows(shop.store, shop.orders, after, until, feed=feed).drop("customer", "day")
        return sorted(tuple(row) for row in rows.collect())

    assert [(5, 2.0), (60, 2.0)] == changed(0, 1)
    assert [(5, 3.0), (60, 2.0)] == changed(0, 3)
    assert [(5, 3.0)] == changed(0, 4)
    assert [(5, 1.0, "update_preimage"), (5, 3.0, "update_postimage"), (60, 2.0, "insert")] == changed(0, 3, feed=True)
    assert [(60, 2.0, "delete")] == changed(3, 4, feed=True)
    assert [] == changed(4, 4)


def test_append_and_partitions_and_full_in_one_graph(shop: Project) -> None:
    """SQL and Python read each other; a partition is replaced whole and others stay; nothing empty is published."""
    of_a_letter = "where day rlike '^[a-z]{1}$'"  # braces of the statement's own stay
    new = sql_model("seen", f"-- incremental: append\nselect id, day from {{{{ changes('orders') }}}} {of_a_letter}")
    days = sql_model(
        "days",
        "-- incremental: replace\n-- partitions: day\n"
        "select day, count(*) as n, sum(total) as total from silver.orders\n"
        "where day in (select day from {{ changes('orders') }}) group by day",
    )

    @lp.table
    def all_days(days: lp.Table["gold.days"], seen: lp.Table["seen"]) -> DataFrame:  # type: ignore[valid-type]
        return days.join(seen.groupBy("day").agg(F.count("id").alias("seen")), on="day", how="left")

    models = (new, days, model_of(all_days))
    shop.upsert((1, 7, 1.0, "a"), (2, 7, 2.0, "b"))
    first = shop.run(*models)
    shop.upsert((3, 7, 4.0, "b"))
    second = shop.run(*models)

    assert {"made"} == {each.state for each in (*first, *second)}
    assert [("seen", 1, 0), ("days", 1, 1), ("all_days", 2, 2)] == sorted(
        ((each.table, each.rows, each.replaced) for each in second), key=lambda one: one[1:]
    )
    assert [(1, "a"), (2, "b"), (3, "b")] == shop.rows("seen")
    assert [("a", 1, 1.0, 1), ("b", 2, 6.0, 2)] == shop.rows("all_days")
    columns = {"id": ("silver.orders.id",), "day": ("silver.orders.day",)}
    assert ({} if is_remote() else columns) == second[0].columns
    untouched = [file.path for file in shop.runner().table("acme", "shop", "gold.days").snapshot().files]
    assert 2 == len(untouched)


def test_expectations_count_and_decide_what_is_written(shop: Project) -> None:
    """in = kept + quarantined + dropped; `fail` writes nothing; a refresh quarantines anew, an increment adds."""
    header = (
        "-- incremental: append\n-- expect: total >= 0 | quarantine\n-- expect: day <> 'x' | drop\n"
        "-- expect: customer < 100 | warn\n"
    )
    rows = "select id, customer, total, day from {{ changes('orders') }}"

    @lp.table(expect={"id < 9": "fail", "id <> 1": "warn"})
    def strict(good: lp.Table["gold.good"]) -> DataFrame:  # type: ignore[valid-type]
        return good.select("id")

    @lp.table(expect={"id > 1": "quarantine", "id < 3": "drop"})
    def alike(good: lp.Table["gold.good"]) -> DataFrame:  # type: ignore[valid-type]
        return good.select("id", "total")

    models = (sql_model("good", header + rows), model_of(strict), model_of(alike))
    shop.upsert((1, 7, 1.0, "a"), (2, 7, -2.0, "x"), (3, 700, 3.0, "a"), (4, 7, 4.0, "x"))
    first, in_python, aside_too = shop.run(*models)
    shop.upsert((10, 7, -5.0, "a"), (11, 7, 5.0, "a"))
    with pytest.raises(ExpectationFailed, match="1 of 3 rows do not meet 'id < 9'"):
        shop.run(*models)

    assert (4, 2, 1, 1) == (first.rows_in, first.rows, first.quarantined, first.dropped)
    assert {"total >= 0": 1, "day <> 'x'": 2, "customer < 100": 1} == {
        each.condition: each.failed for each in first.expectations
    }
    assert [1, 3, 11] == [row[0] for row in shop.rows("good")]
    aside = shop.rows("good", "quarantine")
    assert [["total >= 0", "day <> 'x'"], ["total >= 0"]] == [row[1] for row in sorted(aside, key=lambda r: r[3])]
    assert [(1,), (3,)] == shop.rows("strict"), "as it was"
    assert [0, 1] == [each.failed for each in in_python.expectations]
    assert (2, 0, 1, 1) == (aside_too.rows_in, aside_too.rows, aside_too.quarantined, aside_too.dropped)
    assert [["id > 1"]] == [row[1] for row in shop.rows("alike", "quarantine")]


@pytest.mark.full
def test_other_code_a_backfill_and_a_request_make_rows_again(shop: Project, tmp_path: Path) -> None:
    """A change of the function is seen; a window is computed again at the same versions; --full-refresh takes all."""
    text = (
        "from lakebed import pipeline as lp\n"
        "@lp.table(keys=['id'], incremental='merge', time='day')\n"
        "def flat(orders: lp.Changes['silver.orders']):\n    return orders.selectExpr('id', 'total * 1 as total')\n"
    )

    def model(text: str) -> Model:
        (tmp_path / "flat.py").write_text(text)
        return python_models(tmp_path / "flat.py")[0]

    shop.upsert((1, 7, 1.0, "2026-11-01"), (2, 7, 2.0, "2026-11-02"))
    shop.run(model(text))
    changed = shop.run(model(text.replace("* 1", "* 10")))
    rows = shop.rows("flat")
    below = sql_model("below", "select sum(total) as total from gold.flat")
    shop.run(model(text.replace("* 1", "* 10")), below)
    window = Window.parse("2026-11-02", "")
    filled = shop.run(model(text.replace("* 1", "* 10")), below, window=window, filled=["flat"])
    shop.upsert((3, 7, 3.0, "2026-11-03"))
    requested = shop.run(model(text.replace("* 1", "* 10")), full_refresh=True)

    assert [
        ("refresh", "its code changed", 2),
        ("backfill", "requested", 1),
        ("refresh", "gold.flat 1 → 2", 1),
        ("refresh", "requested", 3),
    ] == [(each.mode, each.reason, each.rows) for each in (*changed, *filled, *requested)]
    assert [(1, 10.0), (2, 20.0)] == rows
    assert {"silver.orders": 0} == filled[0].sources


def test_a_model_that_fails_stops_only_what_reads_it(shop: Project) -> None:
    """Directly or through others. Its error names it; the others are made, and its table is as it was."""
    bad = sql_model("bad", "select nothing from silver.orders")
    below, beside = sql_model("below", "select * from gold.bad"), sql_model("beside", "select id from silver.orders")
    far_below = sql_model("far_below", "select * from gold.below")
    shop.upsert((1, 7, 1.0, "a"))

    reports, error = shop.runner(bad, below, far_below, beside).run("acme", "shop")

    states = {each.table: each.state for each in reports}
    assert {"bad": "failed", "below": "skipped", "far_below": "skipped", "beside": "made"} == states
    assert isinstance(error, BadModel)
    assert "bad.sql" in error.message
    assert -1 == shop.runner().table("acme", "shop", "gold.bad").snapshot().version


@pytest.mark.full
def test_changes_that_vacuum_deleted_make_a_table_again_or_are_refused(shop: Project) -> None:
    """Never a part of them: a merge is computed from everything, and rows that are only added wait for a decision."""
    merge, append = (
        sql_model("merged", "-- incremental: merge\n-- keys: id\nselect id, total from {{ changes('orders') }}"),
        sql_model("added", "-- incremental: append\nselect id, total from {{ changes('orders') }}"),
    )
    shop.upsert((1, 7, 1.0, "a"))
    shop.run(merge, append)
    shop.upsert((2, 7, 2.0, "a"))
    (gone,) = [file for file in shop.orders.snapshot().files if file.low["id"] == 2]
    shop.orders.compact()
    asyncio.run(shop.store.delete(f"{shop.orders.spec.root}/{gone.path}"))

    made, refused = shop.run(merge, append)

    assert ("made", "refresh", 2) == (made.state, made.mode, made.rows)
    assert "deleted by vacuum" in made.reason
    assert ("refused", [(1, 1.0)]) == (refused.state, shop.rows("added"))
    assert "lakebed pipeline run added --full-refresh" in refused.reason


def test_the_examples_cases_pass_and_a_wrong_one_says_what_differs(spark: SparkSession) -> None:
    """`lakebed pipeline test` runs these; a case names rows that are missing and rows that are too many."""
    folder = PipelineSettings(gold="examples").gold_folder
    assert folder is not None
    models = graph_of(read_models(folder), {"orders", "customers"}).models.values()
    cases = [(model, case) for model in models for case in read_cases(folder, model)]

    results = [run_case(spark, model, case) for model, case in cases]
    country = next((model, case) for model, case in cases if model.name == "spent_by_country")
    country[1].expect[0]["orders"] = 4
    wrong = run_case(spark, *country)

    assert ([True, True], 2) == ([each.passed for each in results], len(results)), results
    assert (False, 1, 1) == (wrong.passed, len(wrong.missing), len(wrong.extra))
    assert "'orders': 4" in wrong.missing[0]


@pytest.mark.parametrize(
    ("sql", "expect", "missing", "extra"),
    [
        ("select id, note from silver.orders", [(2, None), (1, "a"), (1, "a")], 0, 0),
        ("select id, note from silver.orders", [(1, "a"), (2, None)], 0, 1),
        ("select distinct id, note from silver.orders", [(1, "a"), (1, "a"), (2, None)], 1, 0),
        ("select * from silver.orders union all select * from silver.orders", [(1, "a"), (1, "a"), (2, None)], 0, 3),
        ("select id, note from silver.orders", [(1, "a"), (1, "a"), (2, "")], 1, 1),
        ("select id, note from silver.orders", [(1,), (1,), (2,)], 0, 0),
        ("select id, note from silver.orders", [], 0, 3),
        ("select id, note from silver.orders where id > 2", [], 0, 0),
        ("select id, note from silver.orders where id > 2", [(1, "a")], 1, 0),
    ],
)
def test_a_case_counts_rows_that_are_equal(
    spark: SparkSession, sql: str, expect: list[tuple[Any, ...]], missing: int, extra: int
) -> None:
    """A model that gives a row too often, or too seldom, fails its case; the order of rows does not matter, nor do
    columns that the case does not name."""
    given = GivenFrame("id long, note string", [[1, "a"], [1, "a"], [2, None]])
    wanted = [dict(zip(("id", "note"), row, strict=False)) for row in expect]

    found = run_case(spark, sql_model("m", sql), ModelCase("c", {"silver.orders": given}, wanted))

    assert (missing, extra, not missing and not extra, "") == (
        len(found.missing), len(found.extra), found.passed, found.error,
    )  # fmt: skip


def test_a_case_that_names_an_unknown_column_says_which(spark: SparkSession) -> None:
    """It is no difference of rows: the case itself is wrong."""
    given = GivenFrame("id long", [[1]])
    found = run_case(
        spark, sql_model("m", "select id from silver.orders"), ModelCase("c", {"silver.orders": given}, [{"ident": 1}])
    )

    assert (False, (), "it gives no column 'ident'") == (found.passed, found.missing, found.error)


def test_a_model_is_a_function_of_small_frames(spark: SparkSession) -> None:
    """`lp.run_model` gives what the model gives; a frame that is missing or not read is named."""
    orders = spark.createDataFrame(
        [(1, 7, 1.0, "a", "insert"), (2, 7, 2.0, "a", "delete")], f"{ORDERS}, _change_type string"
    )
    before = spark.createDataFrame([(7, 10.0)], "customer long, total double")

    rows = lp.run_model(totals, {"silver.orders": orders, "before": before}).collect()

    assert [(7, 9.0)] == [tuple(row) for row in rows]
    with pytest.raises(BadModel, match="no frame is given"):
        lp.run_model(totals, {"silver.orders": orders})
    with pytest.raises(BadModel, match="does not read 'silver"):
        lp.run_model(totals, {"silver.orders": orders, "before": before, "silver.others": before})


def test_a_key_is_written_or_deleted_and_never_both(spark: SparkSession) -> None:
    """A write wins over a delete of its key; the rows before an update do nothing; a row without a mark is written."""
    said = [
        (1, "insert"),
        (2, "delete"),
        (3, "delete"),
        (3, "insert"),
        (4, "update_preimage"),
        (4, "update_postimage"),
        (5, None),
        (6, "delete"),
        (6, "delete"),
        (7, "update_preimage"),
    ]
    rows = spark.createDataFrame([(id, float(id), kind) for id, kind in said], "id int, v double, _change_type string")

    kept, gone = apart_by_type(rows, ["id"])

    assert [(1, 1.0), (3, 3.0), (4, 4.0), (5, 5.0)] == sorted(map(tuple, kept.collect()))
    assert [(2, None), (6, None)] == sorted(map(tuple, gone.collect()))
