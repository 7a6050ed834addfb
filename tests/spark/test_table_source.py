"""`lakebed.table` on the real bucket: read, written and streamed by Spark's own verbs, and queried by name in SQL."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from lakebed.core.settings import Settings, load
from lakebed.delta import history
from lakebed.pipeline.tables.sql import SqlTables
from lakebed.spark import register
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from lakebed.wiring.parts import sections

FORMAT, NAME = "lakebed.table", "silver/acme/shop/orders"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def settings(spark: SparkSession, bucket_settings: StoreSettings) -> Settings:
    settings = load(sections(), stack=bucket_settings.as_layer(), env={})
    register(spark, settings)
    return settings


def rows(spark: SparkSession, start: int, stop: int, note: str = "x") -> DataFrame:
    return spark.range(start, stop, numPartitions=2).select(
        "id",
        F.lit(note).alias("note"),
        F.timestamp_seconds(F.col("id")).alias("at"),
        F.array(F.col("id")).alias("many"),
        (F.col("id") / 4).cast("decimal(12,2)").alias("price"),
    )


def write(frame: DataFrame, name: str = NAME, mode: str = "append", **options: str) -> None:
    frame.write.format(FORMAT).mode(mode).options(**options).save(name)


def read(spark: SparkSession, name: str = NAME, **options: str) -> DataFrame:
    return spark.read.format(FORMAT).options(**options).load(name)


def notes(frame: DataFrame) -> dict[int, str]:
    return {row["id"]: row["note"] for row in frame.select("id", "note").collect()}


@pytest.mark.full
def test_rows_are_appended_upserted_replaced_and_read(spark: SparkSession, settings: Settings) -> None:
    """Every verb is one version; older versions, changes between versions and filters read what they should."""
    write(rows(spark, 0, 100, "old"), keys="id")
    write(rows(spark, 90, 120, "new"), write="upsert")

    assert sorted(rows(spark, 0, 90, "old").collect()) == sorted(read(spark).filter("note = 'old'").collect())
    assert {n: "old" if n < 90 else "new" for n in range(120)} == notes(read(spark))
    assert 100 == read(spark, version="0").count()
    narrow = spark.read.format(FORMAT).schema("note string, id long").load(NAME)
    assert [("new", 95)] == [tuple(row) for row in narrow.filter("id = 95").collect()]
    early = read(spark).filter("at < timestamp'1970-01-01 00:00:05' and price > 0.5")
    assert [3, 4] == sorted(row["id"] for row in early.collect())
    changes = read(spark, after="0").groupBy("_change_type", "_commit_version").count().collect()
    expected = {("insert", 1, 20), ("update_preimage", 1, 10), ("update_postimage", 1, 10)}
    assert expected == {tuple(row) for row in changes}

    write(rows(spark, 7, 9, "all"), mode="overwrite", keys="id")

    assert {7: "all", 8: "all"} == notes(read(spark))


@pytest.mark.full
def test_a_stream_reads_and_writes_tables_exactly_once(spark: SparkSession, settings: Settings, tmp_path: Path) -> None:
    """First the table as it is, then what each version adds; a stream that starts again continues."""
    write(rows(spark, 0, 10))

    def copy() -> None:
        stream = spark.readStream.format(FORMAT).load(NAME).select("id", "note").writeStream.format(FORMAT)
        stream = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).option("application", "copy")
        stream = stream.option("write", "upsert").option("keys", "id").option("path", "copied/orders")
        stream.trigger(availableNow=True).start().awaitTermination()

    copy()
    write(rows(spark, 10, 15))
    copy()
    copy()

    assert list(range(15)) == sorted(notes(read(spark, "copied/orders")))


def test_sql_finds_tables_by_name_at_their_newest_version(spark: SparkSession, settings: Settings) -> None:
    """Names of three and four parts, joins, aliases; a later statement sees a later version and new tables."""
    write(rows(spark, 0, 10), keys="id")
    tables = SqlTables(spark, settings)
    count = "select count(*) from silver.shop.orders"

    assert 10 == tables.sql(count).first()[0]  # type: ignore[index]
    write(rows(spark, 10, 12))
    write(rows(spark, 5, 30, "c"), "gold/acme/shop/spent")

    assert 12 == tables.sql(count).first()[0]  # type: ignore[index]
    joined = tables.sql(
        "select orders.id, s.note from silver.acme.shop.orders join gold.shop.spent s on s.id = orders.id "
        "where silver.acme.shop.orders.id > 10"
    )
    assert [(11, "c")] == [tuple(row) for row in joined.collect()]
    try:
        assert 12 == tables.install().sql(count).first()[0]  # type: ignore[index]
    finally:
        del spark.sql
    assert NAME in tables.refresh()


def test_a_filter_opens_only_files_that_can_match(spark: SparkSession, settings: Settings, bucket: Store) -> None:
    """Spark pushes it, and the log's ranges leave a file out: one that is gone is not missed."""
    write(rows(spark, 0, 100))
    state = asyncio.run(history.snapshot(bucket, f"tables/{NAME}"))
    (far,) = [file for file in state.files if file.low["id"] == 50]
    asyncio.run(bucket.delete(f"tables/{NAME}/{far.path}"))

    assert [7, 49] == sorted(row["id"] for row in read(spark).filter("id in (7, 49)").collect())
    with pytest.raises(Exception, match=r"No such file|does not exist"):
        read(spark).filter("id in (7, 50)").collect()


def test_what_does_not_fit_is_refused(spark: SparkSession, settings: Settings) -> None:
    """A wrong option, an unknown table, another type and an upsert without keys name what is wrong."""
    write(rows(spark, 0, 3))

    for wrong, work in (
        ("no column 'nope'", lambda: read(spark, columns="nope").collect()),
        ("there is no table", lambda: read(spark, "silver/none").collect()),
        ("is none of append, upsert", lambda: write(rows(spark, 0, 1), write="merge")),
        ("no keys to upsert by", lambda: write(rows(spark, 0, 1), write="upsert")),
        ("column 'note' is string", lambda: write(rows(spark, 0, 1).withColumn("note", F.lit(1)))),
    ):
        with pytest.raises(Exception, match=wrong):
            work()
