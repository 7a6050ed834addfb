"""Silver and gold: each transform on a handful of rows, then the whole way on the real bucket."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from lakebed.core.errors import Stale, Unavailable
from lakebed.core.ids import Ids
from lakebed.delta import checkpoint
from lakebed.delta.model import TableSpec
from lakebed.pipeline.models.folder import read_models
from lakebed.pipeline.models.graph import graph_of
from lakebed.pipeline.models.job import ModelRunner
from lakebed.pipeline.settings import PipelineSettings
from lakebed.pipeline.silver import transforms as silver
from lakebed.pipeline.silver.contract import BadContract, Contract, read_contract, read_contracts
from lakebed.pipeline.silver.job import Silver, SilverReport
from lakebed.pipeline.tables import rewrite
from lakebed.pipeline.tables.table import Table
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from lakebed.ticks.model import BadManifest
from support.runtimes import runtime_on
from support.stored_ticks import Yard, parquet, table

CONTRACT = """
table: orders
keys: [id]
order_by: [at]
columns:
  id: {type: long, required: true}
  total: {type: "decimal(6,2)", from: amount}
  at: {type: integer}
checks:
  total_not_negative: total >= 0
"""


@pytest.fixture
def env(spark: SparkSession, bucket: Store, bucket_settings: StoreSettings) -> Yard:
    return Yard(spark, bucket, bucket_settings)


def contract(**changed: str) -> Contract:
    text = CONTRACT
    for old, new in changed.items():
        text = text.replace({"drift": "keys: [id]", "check": "total >= 0"}[old], new)
    return read_contract(text, "orders.yaml")


def bronze_rows(spark: SparkSession, columns: str, *rows: tuple[Any, ...]) -> DataFrame:
    lineage = "_tick_id string, _org_id string, _project_id string, _file_seq int, _ingested_at timestamp"
    reported = [(*row, "t1", "acme", "p1", 0, None) for row in rows]
    return spark.createDataFrame(reported, f"{columns}, {lineage}")


def reasons(rows: DataFrame, one: Contract) -> list[list[str]]:
    types = {name: column.type for name, column in one.columns.items()}
    return [row["_reasons"] for row in silver.checked(silver.cast(rows, one, types), one).collect()]


@pytest.mark.full
def test_a_value_that_cannot_be_read_is_a_reason_and_never_a_null(spark: SparkSession) -> None:
    """Text that is no number, numbers that do not fit, digits that would be lost: each row gives the reason."""
    rows = bronze_rows(
        spark,
        "id string, amount string, at double",
        ("1", "10.50", 7.0),
        ("x", "10.50", 7.0),
        (None, "10.505", 7.5),
        ("4", "99999.00", None),
        ("5", "-1", 1e12),
    )

    assert [
        [],
        ["id: cannot be read as long"],
        [
            "id: required, and null",
            "total: would be changed by reading it as decimal(6,2)",
            "at: would be changed by reading it as integer",
        ],
        ["total: cannot be read as decimal(6,2)"],
        ["at: cannot be read as integer", "check total_not_negative"],
    ] == reasons(rows, contract())


def test_a_column_that_bronze_lacks_is_null_or_a_reason(spark: SparkSession) -> None:
    """Only a required one keeps a row out."""
    rows = bronze_rows(spark, "amount string", ("1.00",))

    assert [["id: required, and bronze has no id"]] == reasons(rows, contract())


@pytest.mark.parametrize(
    ("check", "reported"), [("total >=", "PARSE"), ("nothing > 0", "nothing"), ("total + 1", "not true")]
)
def test_a_check_that_is_no_question_is_refused(spark: SparkSession, check: str, reported: str) -> None:
    """A contract's SQL is wrong as a contract, not as a crash in the middle of a job."""
    rows = bronze_rows(spark, "id long, amount string, at int", (1, "1.00", 1))

    with pytest.raises(BadContract, match=reported):
        reasons(rows, contract(check=f'"{check}"'))


def test_the_latest_row_of_a_key_stays(spark: SparkSession) -> None:
    """By the contract's order first, and never an older row over a newer one that silver has."""
    shape = "id long, total int, at int, _ingested_at timestamp, _tick_id string"
    rows = spark.createDataFrame(
        [(1, 10, 5, None, "a"), (1, 11, 9, None, "a"), (2, 20, 1, None, "a"), (3, 30, 4, None, "b")], shape
    )
    held = spark.createDataFrame([(2, 0, 8, None, "z"), (3, 0, 4, None, "z"), (4, 0, 1, None, "z")], shape)

    alone = silver.latest(rows, contract()).select("id", "total").collect()
    beside = silver.latest(rows, contract(), held).select("id", "total").collect()

    assert [(1, 11), (2, 20), (3, 30)] == sorted(tuple(row) for row in alone)
    assert [(1, 11), (3, 30)] == sorted(tuple(row) for row in beside)


def test_drift_follows_the_contract(spark: SparkSession) -> None:
    """A column nobody requested is refused, left out with a record, or kept."""
    rows = bronze_rows(spark, "id long, amount string, at int, extra string", (1, "1.00", 1, "e"))

    assert ("extra",) == silver.fitted(contract(), rows.schema).discarded
    assert ("extra",) == silver.fitted(contract(drift="keys: [id]\ndrift: evolve"), rows.schema).added
    with pytest.raises(BadManifest, match="frozen"):
        silver.fitted(contract(drift="keys: [id]\ndrift: freeze"), rows.schema)


class Mill:
    """Commits ticks of orders to bronze and runs silver on them."""

    def __init__(self, env: Yard, one: Contract) -> None:
        self.yard, self.contract = env, one
        self.silver = self.made(env.store)

    def made(self, store: Store) -> Silver:
        y = self.yard
        return Silver(y.spark, [self.contract], runtime_on(store, y.clock, Ids()), location=y.location)

    def tick(self, name: str, *rows: tuple[Any, ...], mode: str = "delta") -> int:
        ids, amounts, ats = (list(column) for column in zip(*rows, strict=True))
        body = parquet(id=ids, amount=amounts, at=pa.array(ats, pa.int32()))
        [done] = self.yard.bronze().commit(self.yard.tick(name, table(body, mode=mode)))
        return done.version

    def run(self, version: int) -> list[SilverReport]:
        return self.silver.run("acme", "p1", {"orders": version, "other": 3})

    def held(self) -> list[tuple[Any, ...]]:
        rows = self.silver.table(self.contract, "acme", "p1").read(columns=["id", "total", "at"]).collect()
        return sorted(tuple(row) for row in rows)

    def aside(self) -> list[tuple[str, list[str]]]:
        rows = self.silver.quarantine(self.contract, "acme", "p1").read().collect()
        return sorted((row["_tick_id"], row["_reasons"]) for row in rows)


@pytest.fixture
def mill(env: Yard) -> Mill:
    return Mill(env, contract())


def balance(report: SilverReport) -> tuple[int, int, int, int]:
    assert report.rows_in == report.good + report.quarantined + report.duplicates
    return report.rows_in, report.good, report.quarantined, report.duplicates


def test_silver_goes_from_version_to_version_and_accounts_for_every_row(mill: Mill) -> None:
    """Exactly the pinned version is read, each row is good, quarantined or duplicate, and a repeat finds nothing."""
    first = mill.tick("t1", (1, "1.00", 5), (2, "2.00", 5), (3, "bad", 5))
    second = mill.tick("t2", (1, "9.00", 4), (2, "8.00", 6), (4, "-1", 1), (5, "5.00", 1))
    third = mill.tick("t3", (6, "6.00", 1))

    one = mill.run(first)
    held_at_first = mill.held()
    two = mill.run(second)
    again = mill.run(second) + mill.run(first)

    assert [(3, 2, 1, 0)] == [balance(report) for report in one]
    assert [(1, Decimal("1.00"), 5), (2, Decimal("2.00"), 5)] == held_at_first
    assert [(4, 2, 1, 1)] == [balance(report) for report in two]
    assert [] == again
    assert [(1, Decimal("1.00"), 5), (2, Decimal("8.00"), 6), (5, Decimal("5.00"), 1)] == mill.held()
    assert [("t1", ["total: cannot be read as decimal(6,2)"]), ("t2", ["check total_not_negative"])] == mill.aside()
    assert third == second + 1


def test_a_full_tick_makes_silver_anew(mill: Mill) -> None:
    """Rows that a full tick does not have are gone from silver too."""
    mill.run(mill.tick("t1", (1, "1.00", 5), (2, "2.00", 5)))
    mill.tick("t2", (2, "3.00", 1), mode="full")

    [report] = mill.run(mill.tick("t3", (7, "7.00", 1)))

    assert (2, 2, 0, 0) == balance(report)
    assert [(2, Decimal("3.00"), 1), (7, Decimal("7.00"), 1)] == mill.held()


@pytest.mark.full
def test_a_replay_of_a_passed_tick_computes_it_again_with_the_same_result(mill: Mill) -> None:
    """Also what bronze has forgotten: a row that a late tick overwrote, and one that was quarantined and replaced."""
    first = mill.tick("t1", (1, "1.00", 5), (2, "2.00", 5), (3, "bad", 5))
    second = mill.tick("t2", (1, "9.00", 4), (3, "3.00", 6), (4, "-1", 1))
    mill.run(first), mill.run(second)
    held, aside = mill.held(), mill.aside()
    before = mill.silver.table(mill.contract, "acme", "p1").snapshot().version

    [once] = mill.silver.run("acme", "p1", {"orders": first}, anew={"orders"})
    [twice] = mill.silver.run("acme", "p1", {"orders": first}, anew={"orders"})

    assert (held, aside) == (mill.held(), mill.aside())
    assert (True, second, before + 1, before + 2) == (
        once.anew,
        once.bronze_version,
        once.silver_version,
        twice.silver_version,
    )
    assert balance(once) == balance(twice) == (5, 3, 1, 1)
    assert [] == mill.run(second)


def test_a_changed_contract_makes_silver_anew(env: Yard, mill: Mill) -> None:
    """Other types, of the key too, another check and layout: old rows are what it says now, or set aside."""
    first = mill.tick("t1", (1, "1.00", 5), (2, "7.00", 5), (3, "bad", 5))
    mill.run(first)
    text = CONTRACT.replace("decimal(6,2)", "decimal(8,3)").replace("total >= 0", "total < 5")
    text = text.replace("id: {type: long,", "id: {type: string,").replace("at: {type: integer}", "at: {type: long}")
    text = text.replace("keys: [id]", "keys: [id]\npartition_by: [at]\ncluster_by: [total]")
    changed = Mill(env, read_contract(text, "orders.yaml"))

    [report] = changed.run(mill.tick("t2", (4, "4.125", 1)))
    again = changed.run(report.bronze_version)

    assert (4, 2, 2, 0) == balance(report)
    assert (True, []) == (report.anew, again)
    assert [("1", Decimal("1.000"), 5), ("4", Decimal("4.125"), 1)] == changed.held()
    state = changed.silver.table(changed.contract, "acme", "p1").snapshot()
    assert (("at",), ("total",)) == (state.partition_by, state.cluster_by)
    assert [{"at": "1"}, {"at": "5"}] == sorted((dict(file.partition) for file in state.files), key=str)
    assert [
        ("t1", ["check total_not_negative"]),
        ("t1", ["total: cannot be read as decimal(8,3)"]),
    ] == changed.aside()


class Failing:
    """A store on which no log entry of silver can be created."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def create(self, key: str, data: bytes) -> Any:
        if "tables/silver" in key and "_delta_log" in key:
            raise Unavailable("injected")
        return await self._store.create(key, data)


def test_a_job_that_died_between_its_two_writes_doubles_nothing(mill: Mill, bucket: Store) -> None:
    """The half-done step is finished at its own version before newer rows are looked at."""
    first = mill.tick("t1", (1, "1.00", 5), (2, "bad", 5))
    broken: Any = Failing(bucket)
    with pytest.raises(Unavailable):
        mill.made(broken).run("acme", "p1", {"orders": first})
    second = mill.tick("t2", (3, "bad", 5))

    reports = mill.run(second)

    assert [(2, 1, 1, 0), (1, 0, 1, 0)] == [balance(report) for report in reports]
    assert ["t1", "t2"] == [tick for tick, _ in mill.aside()]
    assert [(1, Decimal("1.00"), 5)] == mill.held()


def test_compaction_between_two_steps_doubles_no_row(mill: Mill, env: Yard) -> None:
    """Silver is behind, files are joined, a tick changes the joined file: each of the ticks' rows is read once, also
    when the old files are gone.
    """
    mill.run(mill.tick("t0", (1, "1.00", 5)))
    mill.tick("t1", (2, "bad", 5), (3, "3.00", 5))
    bronze = env.bronze().table("acme", "p1", "orders")
    old = {file.path for file in bronze.snapshot().files}
    joined = bronze.compact()
    third = mill.tick("t3", (3, "3.50", 6), (4, "4.00", 6))
    for path in old:
        asyncio.run(env.store.delete(f"{bronze.spec.root}/{path}"))

    reports = mill.run(third)

    assert 2 == joined.files_removed
    assert [(3, 2, 1, 0)] == [balance(report) for report in reports]
    assert ["t1"] == [tick for tick, _ in mill.aside()]
    assert [(1, Decimal("1.00"), 5), (3, Decimal("3.50"), 6), (4, Decimal("4.00"), 6)] == mill.held()


@pytest.mark.parametrize("log_too", [pytest.param(False, marks=pytest.mark.full), True])
def test_silver_goes_on_when_the_files_of_its_version_were_swept(mill: Mill, env: Yard, log_too: bool) -> None:
    """Weeks behind: the wanted version's files are deleted, or even its log entries; rows come once."""
    mill.run(mill.tick("t0", (1, "1.00", 5)))
    wanted = mill.tick("t1", (2, "bad", 5), (3, "3.00", 5))
    bronze = env.bronze().table("acme", "p1", "orders")
    old = {file.path for file in bronze.snapshot().files}
    bronze.compact()
    last = mill.tick("t3", (3, "3.50", 6), (4, "4.00", 6))
    for path in old:
        asyncio.run(env.store.delete(f"{bronze.spec.root}/{path}"))
    if log_too:
        _checkpoint_and_trim(bronze, env.store, before=last)

    first, second = mill.run(wanted), mill.run(last)

    assert ([last], []) == ([report.bronze_version for report in first], second)
    assert ["t1"] == [tick for tick, _ in mill.aside()]
    assert [(1, Decimal("1.00"), 5), (3, Decimal("3.50"), 6), (4, Decimal("4.00"), 6)] == mill.held()


@pytest.mark.full
def test_a_step_reads_only_the_files_whose_key_range_it_touches(mill: Mill, env: Yard) -> None:
    """The file of other keys may even be gone: a step of its own range neither reads nor writes it."""
    mill.run(mill.tick("t1", (1, "1.00", 5), (2, "2.00", 5)))
    mill.run(mill.tick("t2", (101, "1.00", 5), (102, "2.00", 5)))
    table = mill.silver.table(mill.contract, "acme", "p1")
    [other] = [file for file in table.snapshot().files if file.low["id"] == 1]
    asyncio.run(env.store.delete(f"{table.spec.root}/{other.path}"))

    [report] = mill.run(mill.tick("t3", (102, "7.00", 6), (103, "3.00", 6), (101, "0.50", 4)))

    assert (3, 2, 0, 1) == balance(report)
    held = table.rows_of(
        [file for file in table.snapshot().files if file.path != other.path], ["id", "total"], table.snapshot()
    ).collect()
    assert [(101, Decimal("1.00")), (102, Decimal("7.00")), (103, Decimal("3.00"))] == sorted(map(tuple, held))


@pytest.mark.full
def test_a_large_upsert_into_one_file_is_spread_over_tasks(env: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file's rows are written by as many tasks as they need, not by one."""
    monkeypatch.setattr(rewrite, "KEYS_MAX", 5)
    monkeypatch.setattr(rewrite, "ROWS_PER_TASK", 25)
    spec = TableSpec(
        "spread", '{"type":"struct","fields":[{"name":"id","type":"long","nullable":true,"metadata":{}}]}', keys=("id",)
    )
    spread = Table(env.spark, spec, runtime_on(env.store, env.clock, Ids()), location=env.location)
    spread.append(env.spark.range(100).select("id").coalesce(1))

    done = spread.upsert(env.spark.range(90, 110).select("id").coalesce(1))

    assert (10, 10, 1, 5) == (done.rows_inserted, done.rows_replaced, done.files_removed, done.files_added)
    assert list(range(110)) == sorted(row["id"] for row in spread.read().collect())


def _checkpoint_and_trim(bronze: Table, store: Store, *, before: int) -> None:
    """The log begins at this version, as after thirty days of clean-up."""
    names = [f"{number:020d}.json" for number in range(before + 1)]
    asyncio.run(checkpoint.write(store, bronze.spec.root, before, names))
    for name in names[:-1]:
        asyncio.run(store.delete(f"{bronze.spec.root}/_delta_log/{name}"))


def test_a_batch_out_of_turn_is_stale(env: Yard, mill: Mill) -> None:
    """A job that planned on another last version than the table has must look again."""
    from lakebed.delta.model import WriteBatch

    mill.run(mill.tick("t1", (1, "1.00", 5)))
    held = mill.silver.table(mill.contract, "acme", "p1")

    with pytest.raises(Stale):
        held.append(held.read(), WriteBatch("silver", 5, after=3))


def test_the_examples_go_from_bronze_to_gold_and_other_engines_read_it(env: Yard) -> None:
    """Two tables, two models in order; a repeat makes no version; DuckDB and delta-rs see the same numbers."""
    import deltalake
    import duckdb

    settings = PipelineSettings(contracts="examples", gold="examples")
    assert settings.contracts_folder and settings.gold_folder
    runtime = runtime_on(env.store, env.clock, Ids())
    flow = Silver(env.spark, read_contracts(settings.contracts_folder), runtime, location=env.location)
    graph = graph_of(read_models(settings.gold_folder), {"orders", "customers"})
    gold = ModelRunner(env.spark, graph, runtime, location=env.location)
    customers = parquet(customer_id=[1, 2], name=["Ada", "Bo"], country=["PT", "BR"], vip=[True, False])
    at = pa.array([1, 2, 3, 4], pa.timestamp("us", "UTC"))
    orders = parquet(
        order_id=[10, 11, 12, 13],
        customer_id=[1, 1, 2, 2],
        amount=["10.00", "5.50", "7.25", "-3"],
        status=["paid", "cancelled", "open", "open"],
        updated_at=at,
    )
    tick = env.tick(
        "t1",
        table(customers, name="customers", primary_keys=("customer_id",)),
        table(orders, name="orders", first_seq=1, primary_keys=("order_id",)),
    )
    versions = {done.name: done.version for done in env.bronze().commit(tick)}

    reports = flow.run("acme", "p1", versions)
    (made, _), (again, _) = gold.run("acme", "p1"), gold.run("acme", "p1")

    assert {"customers": (2, 2, 0, 0), "orders": (4, 3, 1, 0)} == {r.table: balance(r) for r in reports}
    assert ["spent_by_customer", "spent_by_country"] == [report.table for report in made]
    assert [False, False, True, True] == [report.repeated for report in (*made, *again)]
    uri = env.location.uri("tables/gold/acme/p1/spent_by_country")
    spent = deltalake.DeltaTable(uri, storage_options=env.location.storage_options()).to_pyarrow_table()
    assert [("BR", 1, Decimal("7.25")), ("PT", 1, Decimal("10.00"))] == duckdb.sql(
        "select country, orders, spent from spent order by country"
    ).fetchall()
    assert spent.num_rows == flow.table(flow.contracts[0], "acme", "p1").read().filter(F.col("vip").isNotNull()).count()
