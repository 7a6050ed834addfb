"""Tasks in Arrow: the ends of tasks stay cheap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import SparkSession

from lakebed.spark.tasks import Task, in_arrow

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
