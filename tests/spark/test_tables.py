"""Tables on the real bucket, through real Spark: exact counts, pinned versions, no writer loses anything."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from lakebed.core.clock import SystemClock
from lakebed.core.errors import Invalid, NotFound
from lakebed.core.ids import Ids
from lakebed.delta.model import TableSpec, WriteBatch
from lakebed.pipeline.tables import rewrite
from lakebed.pipeline.tables.table import Table
from lakebed.spark.location import Location
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from support.runtimes import runtime_on

Open = Callable[[TableSpec], Table]


@pytest.fixture
def opened(spark: SparkSession, bucket: Store, bucket_settings: StoreSettings) -> Open:
    def open_(spec: TableSpec) -> Table:
        return Table(spark, spec, runtime_on(bucket, SystemClock(), Ids()), location=Location.of(bucket_settings))

    return open_


def rows(spark: SparkSession, start: int, stop: int, note: str = "x") -> DataFrame:
    return spark.range(start, stop, numPartitions=2).select(
        "id",
        F.lit(note).alias("note"),
        (F.col("id") * 0.5).alias("value"),
        F.timestamp_seconds(F.col("id")).alias("at"),
        (F.col("id") % 3).cast("string").alias("colour"),
    )


@pytest.fixture
def spec(spark: SparkSession) -> TableSpec:
    return TableSpec("bronze/things", rows(spark, 0, 1).schema.json(), keys=("id",))


def notes(table: Table, version: int | None = None) -> dict[int, str]:
    return {row["id"]: row["note"] for row in table.read(version, columns=["id", "note"]).collect()}


def test_appended_rows_are_read_back_exactly(spark: SparkSession, opened: Open, spec: TableSpec) -> None:
    """Every column of every row comes back as it went in, types included."""
    table = opened(spec)

    done = table.append(rows(spark, 0, 100))

    assert (done.version, done.rows_inserted, done.rows_replaced) == (0, 100, 0)
    back = table.read()
    assert rows(spark, 0, 100).schema.simpleString() == back.schema.simpleString()
    assert sorted(rows(spark, 0, 100).collect()) == sorted(back.collect())


def test_an_upsert_counts_exactly_and_leaves_no_double(spark: SparkSession, opened: Open, spec: TableSpec) -> None:
    """Inserted and replaced are exact; each key has one row, the newest."""
    table = opened(spec)
    table.append(rows(spark, 0, 100, "old"))

    done = table.upsert(rows(spark, 80, 130, "new"))

    assert (done.rows_inserted, done.rows_replaced) == (30, 20)
    assert {n: "old" if n < 80 else "new" for n in range(130)} == notes(table)
    assert table.snapshot().rows == 130


def test_an_upsert_writes_only_files_that_hold_a_key(spark: SparkSession, opened: Open, spec: TableSpec) -> None:
    """Files outside the keys' range stay as they are."""
    table = opened(spec)
    table.append(rows(spark, 0, 100).coalesce(1))
    table.append(rows(spark, 1000, 1100).coalesce(1))
    before = {file.path for file in table.snapshot().files}

    done = table.upsert(rows(spark, 1050, 1060, "new"))

    assert done.files_removed == 1
    assert len(before & {file.path for file in table.snapshot().files}) == 1


def test_a_replace_makes_the_rows_the_whole_table(spark: SparkSession, opened: Open, spec: TableSpec) -> None:
    """After a replace nothing older is read, and the old version still is."""
    table = opened(spec)
    table.append(rows(spark, 0, 50, "old"))

    done = table.replace(rows(spark, 7, 9, "new"))

    assert (done.rows_inserted, done.rows_replaced) == (2, 50)
    assert notes(table) == {7: "new", 8: "new"}
    assert len(notes(table, version=0)) == 50


def test_the_same_batch_changes_nothing_twice(spark: SparkSession, opened: Open, spec: TableSpec) -> None:
    """A repeated batch is told apart, whichever way it writes and whichever process asks."""
    opened(spec).append(rows(spark, 0, 10), WriteBatch("ticks", 1))
    opened(spec).upsert(rows(spark, 0, 5, "new"), WriteBatch("ticks", 2))

    repeats = [
        opened(spec).append(rows(spark, 0, 10), WriteBatch("ticks", 1)),
        opened(spec).upsert(rows(spark, 0, 5), WriteBatch("ticks", 2)),
        opened(spec).replace(rows(spark, 0, 5), WriteBatch("ticks", 2)),
    ]

    assert all(done.repeated for done in repeats)
    assert opened(spec).snapshot().version == 1
    assert len(notes(opened(spec))) == 10


def test_added_rows_between_versions_are_exactly_those(spark: SparkSession, opened: Open, spec: TableSpec) -> None:
    """An incremental read gives what came between two versions, from the very first on."""
    table = opened(spec)
    for start in (0, 10, 20):
        table.append(rows(spark, start, start + 10))

    assert list(range(10, 30)) == sorted(row["id"] for row in table.added(0, 2).collect())
    assert list(range(10)) == sorted(row["id"] for row in table.added(-1, 0).collect())
    assert table.added(2, 2).collect() == []
    with pytest.raises(NotFound):
        table.added(0, 9)


def test_partitions_are_folders_and_come_back_as_columns(spark: SparkSession, opened: Open) -> None:
    """Partition columns keep their type and their nulls, also when small files are joined: each with its own kind."""
    frame = rows(spark, 0, 30).withColumn("day", F.expr("date_add(date'2026-01-01', cast(id % 2 as int))"))
    frame = frame.withColumn("colour", F.when(F.col("colour") == "0", None).otherwise(F.col("colour")))
    table = opened(TableSpec("parted", frame.schema.json(), partition_by=("day", "colour")))

    table.append(frame)

    assert sorted(frame.collect(), key=lambda row: row["id"]) == sorted(
        table.read().collect(), key=lambda row: row["id"]
    )
    parts = {tuple(file.partition.items()) for file in table.snapshot().files}
    assert any(file.path.startswith("day=2026-01-02/colour=1/") for file in table.snapshot().files)
    before = table.snapshot().version
    table.append(frame.withColumn("id", F.col("id") + 30))
    small = len(table.snapshot().files)
    done = table.compact()
    state = table.snapshot()

    assert (small, len(parts)) == (done.files_removed, done.files_added)
    assert len(parts) == len(state.files)
    assert parts == {tuple(file.partition.items()) for file in state.files}
    assert all(file.path.startswith(f"day={file.partition['day']}/colour=") for file in state.files)
    twice = [tuple(row) for row in frame.collect()] + [(row["id"] + 30, *tuple(row)[1:]) for row in frame.collect()]
    assert sorted(twice, key=str) == sorted((tuple(row) for row in table.read().collect()), key=str)
    assert 30 == table.read(before).count()
    assert table.compact().repeated


def test_writers_racing_on_one_table_lose_nothing(spark: SparkSession, opened: Open, spec: TableSpec) -> None:
    """Appends and upserts of several writers at once all count, each once."""
    opened(spec).append(rows(spark, 0, 10, "old"))

    def write(number: int) -> int:
        table = opened(spec)  # each writer has its own view, as another process would
        if number % 2:
            return table.append(rows(spark, 100 * number, 100 * number + 10)).rows_inserted
        return table.upsert(rows(spark, number, number + 1, f"by-{number}")).rows_replaced

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(write, range(6)))

    assert results == [1, 10] * 3
    held = notes(opened(spec))
    assert len(held) == 10 + 30
    assert all(f"by-{n}" == held[n] for n in range(0, 6, 2))
    assert opened(spec).snapshot().version == 6


def test_rows_that_do_not_fit_are_refused_before_anything_is_written(
    spark: SparkSession, opened: Open, spec: TableSpec
) -> None:
    """A missing column, a column too many or another type is Invalid; the table stays as it was."""
    table = opened(spec)
    good = rows(spark, 0, 3)

    for bad in (good.drop("note"), good.withColumn("more", F.lit(1)), good.withColumn("value", F.lit("text"))):
        with pytest.raises(Invalid, match="do not fit"):
            table.append(bad)

    assert table.snapshot().version == -1
    assert table.read().count() == 0


def test_other_engines_read_the_same_rows(
    spark: SparkSession, opened: Open, spec: TableSpec, bucket_settings: StoreSettings
) -> None:
    """delta-rs, Polars and DuckDB see what Spark wrote, upserts included."""
    import deltalake
    import duckdb
    import polars

    table = opened(spec)
    table.append(rows(spark, 0, 40, "old"))
    table.upsert(rows(spark, 30, 50, "new"))
    location = Location.of(bucket_settings)
    uri, options = location.uri(spec.root), location.storage_options()

    delta = deltalake.DeltaTable(uri, storage_options=options).to_pyarrow_table()
    by_polars = polars.scan_delta(uri, storage_options=options).filter(polars.col("note") == "new").collect()
    by_duckdb = duckdb.sql("select note, count(*) from delta group by note order by note").fetchall()

    assert delta.num_rows == 50
    assert by_polars.height == 20
    assert by_duckdb == [("new", 20), ("old", 30)]


def test_delta_rs_may_write_beside_us(
    spark: SparkSession, opened: Open, spec: TableSpec, bucket_settings: StoreSettings
) -> None:
    """A version committed by delta-rs is read, and built upon, by us."""
    import deltalake

    table = opened(spec)
    table.append(rows(spark, 0, 10, "ours"))
    location = Location.of(bucket_settings)
    theirs = rows(spark, 10, 15, "theirs").toArrow()
    deltalake.write_deltalake(
        location.uri(spec.root), theirs, mode="append", storage_options=location.storage_options()
    )

    table.upsert(rows(spark, 12, 13, "ours again"))

    held = notes(table)
    assert len(held) == 15
    assert (held[11], held[12]) == ("theirs", "ours again")


@pytest.mark.parametrize("keys_max", [100, 3], ids=["few", "many"])
def test_columns_may_have_dots_and_backticks_in_their_names(
    spark: SparkSession, opened: Open, monkeypatch: pytest.MonkeyPatch, keys_max: int
) -> None:
    """Headers of CSV files do. Spark itself took them for syntax; `count` is what it calls a column of its own."""
    monkeypatch.setattr(rewrite, "KEYS_MAX", keys_max)
    made = "1 AS count", "{} AS `a ``note.`"
    rows = spark.range(0, 10).selectExpr("id AS `order.id`", made[0], made[1].format("concat('note ', id)"))
    table = opened(TableSpec("silver/odd", rows.schema.json(), keys=("order.id", "count")))
    table.append(rows)

    coming = spark.range(8, 12).selectExpr("id AS `order.id`", made[0], made[1].format("'new'"))
    result = table.upsert(coming)

    assert (result.rows_inserted, result.rows_replaced) == (2, 2)
    found = {(row[0], row[2]) for row in table.read().collect()}
    assert found == {(id_, f"note {id_}") for id_ in range(8)} | {(id_, "new") for id_ in range(8, 12)}
    with pytest.raises(Invalid, match="more than once"):
        table.upsert(coming.union(coming))
