"""Progress of a running job, from Spark's own count of tasks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from pyspark.sql import SparkSession

from lakebed.spark.progress import JobProgress, StageCounter, watching


def test_the_tasks_of_a_running_job_are_counted_up_to_the_end(spark: SparkSession) -> None:
    """While the job runs some of its tasks are done and some run; at the end all were seen."""
    seen: list[JobProgress] = []

    def slowly(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            time.sleep(0.4)
            yield batch

    with watching(seen.append, poll_s=0.05):
        rows = spark.range(0, 8, 1, 8).mapInArrow(slowly, "id long").count()

    most = max(seen, key=lambda each: (each.tasks, each.done))
    assert 8 == rows
    assert 8 <= most.tasks
    assert any(0 < each.running for each in seen)
    assert sorted(each.done for each in seen) == [each.done for each in seen], "it never goes back"
    assert {"ready"} == {each.spark for each in seen}


def test_a_stage_that_spark_has_forgotten_is_done() -> None:
    """Stages come and go; the sum continues."""
    stages = StageCounter()

    first = stages.look({"1": (4, 1, 0)}, running=2)
    second = stages.look({"2": (6, 0, 1)}, running=1)

    assert JobProgress("ready", 1, 4, 1, 2, 0) == first
    assert JobProgress("ready", 2, 10, 4, 1, 1) == second
