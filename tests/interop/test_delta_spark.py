"""Tables with delta-spark's own defaults and features: Lakebed reads the same rows, and writes or refuses by name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession

from lakebed.core.clock import SystemClock
from lakebed.core.errors import Invalid
from lakebed.core.ids import Ids
from lakebed.delta import history
from lakebed.delta.model import DataFile, Snapshot, TableSpec
from lakebed.pipeline.tables.table import Table
from support.delta_tables import Folder
from support.folder_store import folder_store
from support.runtimes import runtime_on

pytestmark = pytest.mark.full

TIMES = "timestamp'2024-01-01 00:00:00.123456', timestamp_ntz'2024-01-01 01:02:03.000004'"
# Of each: the statements that make it ({} is the table), and why Lakebed does not append; none where it does.
TABLES: dict[str, tuple[list[str], str]] = {
    "deletion vectors": (
        [
            "create table {} (id long, name string) using delta tblproperties('delta.enableDeletionVectors'='true')",
            "insert into {} select id, concat('n', id) from range(0, 100, 1, 1)",
            "delete from {} where id % 3 = 0",
            "insert into {} select id, concat('n', id) from range(100, 110, 1, 1)",
        ],
        "deletionVectors",
    ),
    "mapped by name": (
        [
            "create table {} (id long, `a b` struct<x: int, y: string>, p string) using delta partitioned by (p) "
            "tblproperties('delta.columnMapping.mode'='name')",
            "insert into {} values (1, struct(1, 'u'), 'p1'), (2, null, 'p 2')",
            "alter table {} rename column id to key",
            "insert into {} values (3, struct(3, 'w'), 'p1')",
        ],
        "maps column names",
    ),
    "mapped by id": (
        [
            "create table {} (id long, name string) using delta tblproperties('delta.columnMapping.mode'='id')",
            "insert into {} values (1, 'a')",
            "alter table {} rename column name to title",
            "insert into {} values (2, 'b')",
        ],
        "maps column names",
    ),
    "checkpoints of version 2": (
        [
            "create table {} (id long) using delta tblproperties('delta.checkpointPolicy'='v2', "
            "'delta.checkpointInterval'='2')",
            *(f"insert into {{}} values ({number})" for number in range(5)),
        ],
        "",
    ),
    "moments": (
        [
            "create table {} (id long, t timestamp, n timestamp_ntz, d decimal(38,10), p timestamp) using delta "
            "partitioned by (p)",
            f"insert into {{}} values (1, {TIMES}, 1234567890123456789012345678.0123456789, "
            "timestamp'2024-05-05 05:05:05'), (2, timestamp'9999-12-31 00:00:00', null, null, null)",
        ],
        "",
    ),
    "nested": (
        [
            "create table {} (id long, s struct<a: int not null, l: array<struct<b: string>>>, o struct<c: int>, "
            "m map<string, int>) using delta",
            "insert into {} values (1, struct(1, array(struct('x'), null)), null, map('k', 1))",
            "insert into {} values (2, struct(2, null), struct(null), null)",
            "alter table {} add column s.late string",
            "insert into {} values (3, struct(3, null, 'new'), struct(3), map())",
        ],
        "",
    ),
    "a constraint": (
        ["create table {} (id long) using delta", "alter table {} add constraint positive check (id > 0)"],
        "constraint positive",
    ),
    "generated": (
        ["create table {} (id long, twice long generated always as (id * 2)) using delta"],
        "column twice has a generation expression",
    ),
    "append-only": (
        ["create table {} (id long) using delta tblproperties('delta.appendOnly'='true')", "insert into {} values (1)"],
        "",
    ),
}


def opened(folder: Path, spark: SparkSession) -> tuple[Table, Snapshot]:
    """The table as its own log describes it."""
    store = folder_store(folder, SystemClock())
    state = asyncio.run(history.snapshot(store, "tables/t"))
    spec = TableSpec("t", state.schema_json, keys=state.keys, partition_by=state.partition_by)
    runtime = runtime_on(store, SystemClock(), Ids())
    return Table(spark, spec, runtime, location=Folder.at(folder)), state


def values(rows: list[Any]) -> list[str]:
    return sorted(str(row.asDict(recursive=True)) for row in rows)


@pytest.mark.parametrize("name", TABLES)
def test_what_delta_spark_writes_is_read_and_appended_to_or_refused(
    tmp_path: Path, delta_spark: SparkSession, name: str
) -> None:
    """The same rows and the same count; then delta-spark reads what we appended."""
    statements, refused = TABLES[name]
    place = f"delta.`{tmp_path}/tables/t`"
    for statement in statements:
        delta_spark.sql(statement.format(place)).collect()
    theirs = delta_spark.sql(f"select * from {place}")
    expected = values(theirs.collect())

    table, state = opened(tmp_path, delta_spark)

    assert expected == values(table.read().collect())
    assert len(expected) == state.rows
    if refused:
        with pytest.raises(Invalid, match=refused):
            table.append_files([DataFile("never.parquet", 1, 1)])
        return
    table.append(table.read())
    assert sorted(expected * 2) == values(delta_spark.sql(f"select * from {place}").collect())


def test_an_append_only_table_is_not_upserted(tmp_path: Path, delta_spark: SparkSession) -> None:
    """Appends go, replacements do not."""
    place = f"delta.`{tmp_path}/tables/t`"
    for statement in TABLES["append-only"][0]:
        delta_spark.sql(statement.format(place)).collect()
    table, _ = opened(tmp_path, delta_spark)
    table.spec = msgspec.structs.replace(table.spec, keys=("id",))

    with pytest.raises(Invalid, match="append-only"):
        table.upsert(delta_spark.sql("select 1L as id"))


def test_delta_spark_skips_files_by_our_statistics(tmp_path: Path, delta_spark: SparkSession) -> None:
    """A file that cannot hold the value is not even opened: it may be gone."""
    store = folder_store(tmp_path, SystemClock())
    rows = delta_spark.sql("select id, concat('n', id) as name, cast(id as timestamp) as at from range(10)")
    spec = TableSpec("t", rows.schema.json(), keys=("id",))
    table = Table(delta_spark, spec, runtime_on(store, SystemClock(), Ids()), location=Folder.at(tmp_path))
    for begin in (0, 100):
        table.append(rows.selectExpr(f"id + {begin} as id", "concat('n', id) as name", "at").coalesce(1))
    far = next(file for file in table.snapshot().files if file.low["id"] == 100)
    (tmp_path / "tables/t" / far.path).unlink()
    theirs = delta_spark.read.format("delta").load(str(tmp_path / "tables/t"))

    assert [3, 4] == sorted(row["id"] for row in theirs.filter("id between 3 and 4").collect())
    with pytest.raises(Exception, match=r"(?i)not.?exist|not found|no such file"):
        theirs.filter("id >= 0").collect()
