"""One table, many engines: each operation by each, and random work by seed, compared with a model in plain Python."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession

from support.interop import PARTITIONS, RandomWork, SharedTable, plain, row

pytestmark = pytest.mark.full

READERS = ("delta_rs", "delta_rs_query", "polars", "duckdb", "lakebed")
ENGINES = ("lakebed", "lakebed", "delta_rs", "polars", "duckdb")
COMMON = ("append", "upsert", "delete", "optimize", "vacuum", "clean")
TOURS = {
    "lakebed": (*COMMON, "retire"),
    "delta_rs": (*COMMON, "restore"),
    "polars": ("append", "upsert"),
    "duckdb": ("append",),
}


@pytest.mark.parametrize("engine", ["lakebed", "delta_rs", "polars", "duckdb"])
def test_after_each_operation_of_an_engine_the_others_read_and_upsert(
    tmp_path: Path, spark: SparkSession, engine: str
) -> None:
    """Appends, upserts, deletes, compaction, vacuum, log clean-up and restores, as far as the engine has them."""
    work = RandomWork(SharedTable(tmp_path, spark, partitioned=False), 100, ENGINES[1:], READERS)

    work.tour(engine)

    assert {one.split()[0] for one in work.done if f"by {engine}" in one} >= set(TOURS[engine])


def test_after_each_operation_of_delta_spark_others_read_and_lakebed_upserts(
    tmp_path: Path, delta_spark: SparkSession
) -> None:
    """MERGE, DELETE, OPTIMIZE, VACUUM, checkpoints and RESTORE; one writer at a time."""
    table = SharedTable(tmp_path, delta_spark, partitioned=False)
    work = RandomWork(table, 101, ("delta_spark", "lakebed"), ("delta_rs", "lakebed", "delta_spark"))

    work.tour("delta_spark")

    assert {one.split()[0] for one in work.done if "by delta_spark" in one} >= {*COMMON, "restore"}


@pytest.mark.parametrize("seed", range(4))
def test_lakebed_delta_rs_polars_and_duckdb_share_a_table(tmp_path: Path, spark: SparkSession, seed: int) -> None:
    """Appends, upserts, deletes, compaction, vacuum, restores, checkpoints and log clean-up by each, in any order."""
    work = RandomWork(SharedTable(tmp_path, spark, partitioned=seed % 2 == 1), seed, ENGINES, READERS)

    work.run(16)

    assert len(work.done) == 16


@pytest.mark.parametrize("seed", [10, 11])
def test_delta_spark_shares_a_table_too(tmp_path: Path, delta_spark: SparkSession, seed: int) -> None:
    """With its own MERGE, DELETE, OPTIMIZE, VACUUM, RESTORE and checkpoints; one writer at a time."""
    table = SharedTable(tmp_path, delta_spark, partitioned=seed % 2 == 1)
    engines = ("lakebed", "delta_spark", "delta_spark", "delta_rs")
    work = RandomWork(table, seed, engines, ("delta_rs", "lakebed", "delta_spark"))

    work.run(6)  # a step of delta-spark on a partitioned table takes many seconds

    assert any("delta_spark" in one for one in work.done)


def test_vacuum_of_delta_spark_deletes_no_file_of_an_odd_partition(tmp_path: Path, delta_spark: SparkSession) -> None:
    """It compares encoded paths: folders have only characters that every engine encodes alike."""
    table, dice = SharedTable(tmp_path, delta_spark, partitioned=True), Random(1)
    odd = [*PARTITIONS, "ü", "日本", "(a)!~'*", "a@b&c+d$e,f;g", "nbsp\u00a0", "[x]{y}|^`<>"]
    table.append_by_lakebed([{**row(dice, number), "p": value} for number, value in enumerate(odd)])
    before = plain(table.read_by_delta_spark())

    found = delta_spark.sql(f"vacuum delta.`{table.uri}` retain 0 hours dry run").collect()

    assert ([], len(odd)) == (found, len(before))
    for read in (table.read_by_delta_rs, table.read_by_lakebed):
        assert before == plain(read())
