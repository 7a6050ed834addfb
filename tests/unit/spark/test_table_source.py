"""The pure parts of `lakebed.table`: which filters are pushed, how files are shared out, what a write may change."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import pytest
from pyspark.sql.datasource import EqualTo, GreaterThan, In, IsNotNull, LessThan, Not, StringStartsWith
from pyspark.sql.types import DoubleType, IntegerType, LongType, StringType, StructField, StructType

from lakebed.core.errors import Invalid
from lakebed.delta.model import DataFile, Snapshot
from lakebed.delta.plain import schema_json
from lakebed.delta.predicate import Comparison
from lakebed.pipeline.tables.source import FileTask, TableSource, file_tasks, predicate_of
from lakebed.pipeline.tables.writers import spec_of
from lakebed.spark.native import CATALOG, EXTENSION, delta_conf

SCHEMA = schema_json((("id", "long"), ("note", "string"), ("x", "double"), ("at", "timestamp"), ("d", "decimal(5,2)")))


def test_filters_that_arrow_and_spark_decide_alike_are_pushed() -> None:
    """Others stay with Spark, which applies all of them anyway."""
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    filters = [
        EqualTo(("id",), 5),
        In(("note",), ["a", None]),
        LessThan(("at",), moment),
        GreaterThan(("d",), Decimal("1.50")),
        IsNotNull(("id",)),
        LessThan(("x",), 1.5),
        GreaterThan(("x",), 1.5),  # NaN is above every number in Spark, and above none in Arrow
        Not(EqualTo(("id",), 7)),
        StringStartsWith(("note",), "a"),
        EqualTo(("s", "inner"), 1),
        EqualTo(("id",), "no number"),
    ]

    assert (
        Comparison("id", "=", 5),
        Comparison("note", "in", ("a",)),
        Comparison("at", "<", moment),
        Comparison("d", ">", Decimal("1.50")),
        Comparison("id", "is not null"),
        Comparison("x", "<", 1.5),
    ) == predicate_of(filters, SCHEMA).terms


@pytest.mark.parametrize("sizes", [[], [1], [10] * 100, [500_000_000], [1, 900_000_000, 5, 64_000_000]])
@pytest.mark.parametrize("tasks", [0, 1, 7])
def test_every_part_of_every_file_is_read_by_exactly_one_task(sizes: list[int], tasks: int) -> None:
    """Small files share a task, large ones are read by several."""
    files = [DataFile(str(n), size, 1) for n, size in enumerate(sizes)]

    shared = [one for one in file_tasks(files, tasks) if isinstance(one, FileTask)]

    parts = [(file.path, number, of) for task in shared for file, number, of in task.parts]
    wanted = {path: of for path, _, of in parts}
    assert sorted((path, n, of) for path, of in wanted.items() for n in range(of)) == sorted(parts)
    assert {file.path for file in files} == wanted.keys()
    if sizes == [500_000_000]:
        assert len(shared) >= 7


def test_a_write_keeps_the_table_s_columns_and_adds_its_own() -> None:
    """Columns keep their order; keys and partitions are the table's, unless it is replaced."""
    state = Snapshot(3, schema_json((("id", "long"), ("note", "string"))), ("note",), keys=("id",))
    more, note = StructField("more", DoubleType()), StructField("note", StringType())
    rows = StructType([more, note, StructField("id", LongType())])

    appended = spec_of("t", state, rows, {})
    replaced = spec_of("t", state, rows, {"keys": "note", "partition_by": "more"}, overwrite=True)

    assert (["id", "note", "more"], ("id",), ("note",)) == (appended.columns, appended.keys, appended.partition_by)
    assert (["more", "note", "id"], ("note",), ("more",)) == (replaced.columns, replaced.keys, replaced.partition_by)
    assert appended == spec_of("t", state, StructType([more, note, StructField("id", IntegerType())]), {})  # narrower
    for wrong in ([StructField("id", LongType())], [StructField("id", StringType()), note]):
        with pytest.raises(Invalid, match=r"column '(note|id)' is"):
            spec_of("t", state, StructType(wrong), {})


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({}, "no name"),
        ({"table": "t", "write": "merge"}, "none of append, upsert"),
        ({"table": "t", "colour": "red"}, "no option"),
    ],
)
def test_wrong_options_are_refused_when_a_read_is_defined(options: dict[str, str], wrong: str) -> None:
    """Before anything runs."""
    with pytest.raises(Invalid, match=wrong):
        TableSource(options)


def test_delta_is_configured_only_where_its_jars_are_named() -> None:
    """A session without them is as it was."""
    assert {} == delta_conf({"spark.jars.packages": "org.example:other:1.0"})
    wanted = {"spark.sql.extensions": EXTENSION, "spark.sql.catalog.spark_catalog": CATALOG}
    assert wanted == delta_conf({"spark.jars.packages": "io.delta:delta-spark_4.2_2.13:4.4.0"})
