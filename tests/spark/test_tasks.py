"""Tasks in Arrow: the ends of tasks stay cheap, and rows are sent to them in batches of limited size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from lakebed.spark.tasks import LIMITS, ROW_BYTES_MAX, Task, collect_in_arrow, in_arrow

TASKS = 12


def looking() -> Task:
    """A task that reports what its worker holds; nested, so that it travels to the worker by value."""

    def look(batches: Iterator[Any]) -> Iterator[Any]:
        import gc
        import os

        import pyarrow as pa

        for _ in batches:
            pass
        columns = [os.getpid(), len(gc.get_objects()), gc.get_freeze_count()]
        yield pa.record_batch([pa.array([one]) for one in columns], names=["pid", "looked_at", "apart"])

    return look


def test_a_worker_does_not_look_through_its_modules_after_each_task(spark: SparkSession) -> None:
    """What modules brought is set apart in every worker, and what is set apart does not grow from task to task."""
    # Given workers that have loaded what a task needs
    schema = "pid bigint, looked_at bigint, apart bigint"
    in_arrow(spark.range(0, TASKS, 1, TASKS), looking(), schema).collect()

    # When they run more tasks
    first = in_arrow(spark.range(0, TASKS, 1, TASKS), looking(), schema).collect()
    later = in_arrow(spark.range(0, TASKS, 1, TASKS), looking(), schema).collect()

    # Then collecting garbage looks at few objects, and nothing is added to those apart
    assert all(row["looked_at"] < row["apart"] / 10 for row in later)
    known = {row["pid"]: row["apart"] for row in first}
    assert all(row["apart"] <= known.get(row["pid"], row["apart"]) for row in later)


def sizes() -> Task:
    def measure(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for batch in batches:
            yield pa.RecordBatch.from_pydict({"rows": [batch.num_rows], "size": [batch.nbytes]})

    return measure


SIZES = "rows long, size long"


def test_short_rows_are_sent_by_count_without_a_limit_of_the_session(spark: SparkSession) -> None:
    """Spark's own measuring makes batches of 10,000 rows, and costs more than the rest."""
    before = {name: spark.conf.get(name) for name in LIMITS}
    frame = spark.range(0, 10_000, 1, 1).selectExpr("id", "concat('row ', id) AS `a.text`", "cast(null AS binary) AS b")

    found = collect_in_arrow(frame, sizes(), SIZES)

    assert [row["rows"] for row in found] == [2048] * 4 + [10_000 - 4 * 2048]
    assert {name: spark.conf.get(name) for name in LIMITS} == before, "the session's own jobs keep their limits"


def test_long_rows_are_sent_in_batches_of_limited_bytes(spark: SparkSession) -> None:
    """By count alone this batch would hold 200 MB."""
    text = f"CASE WHEN id < 5 THEN 'short' ELSE repeat('x', {1024 * 1024}) END AS text"
    frame = spark.range(0, 200, 1, 1).selectExpr("id", text, "id % 2 = 0 AS even", "current_date() AS day")

    found = collect_in_arrow(frame, sizes(), SIZES)

    assert sum(row["rows"] for row in found) == 200
    assert max(row["size"] for row in found) < 72 * 1024 * 1024


def test_columns_together_decide_how_long_a_row_is(spark: SparkSession) -> None:
    half = ROW_BYTES_MAX // 2
    frame = spark.range(0, 3000, 1, 1).selectExpr(f"repeat('x', {half}) AS a", f"cast(repeat('y', {half}) AS binary) b")
    assert [row["rows"] for row in collect_in_arrow(frame, sizes(), SIZES)] == [2048, 952]

    wider = frame.selectExpr("a", "b", "a AS c")
    assert 2048 not in [row["rows"] for row in collect_in_arrow(wider, sizes(), SIZES)]


def test_nested_columns_keep_sparks_own_limit(spark: SparkSession) -> None:
    frame = spark.range(0, 3000, 1, 1).selectExpr("id", "array(id) AS ids")
    assert [row["rows"] for row in collect_in_arrow(frame, sizes(), SIZES)] == [3000]


def test_an_error_of_the_task_is_raised_and_not_tried_again(spark: SparkSession, tmp_path: Path) -> None:
    attempts = tmp_path / "attempts"

    def failing(batches: Iterator[Any]) -> Iterator[Any]:
        with attempts.open("a", encoding="utf-8") as file:
            file.write("x")
        for _ in batches:
            raise ValueError("no such row")
        yield from batches

    with pytest.raises(PySparkException, match="no such row"):
        collect_in_arrow(spark.range(0, 10, 1, 1), failing, SIZES)
    assert attempts.read_text(encoding="utf-8") == "x"
