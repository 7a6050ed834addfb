"""A step of many slow tasks on the cluster that the environment names: an upsert, half of whose keys are there already.

Prints `tasks` when tasks of the step run, and its result as JSON at the end.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from lakebed.core.settings import load
from lakebed.delta.model import TableSpec, WriteBatch
from lakebed.pipeline.tables.table import Table
from lakebed.spark.location import Location
from lakebed.spark.session import open_session
from lakebed.spark.settings import SparkSettings
from lakebed.store.settings import StoreSettings
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections

TASKS, ROWS = 8, 4_000


def main() -> None:
    context = make_context(load(sections(), env=dict(os.environ)), role="test")
    spark = open_session(context.settings.of(SparkSettings))

    def slow(batches: Iterator[Any]) -> Iterator[Any]:
        time.sleep(2.0)
        yield from batches

    def rows(begin: int, note: str) -> Any:
        return spark.range(begin, begin + ROWS, 1, TASKS).selectExpr("id", f"'{note}' as note")

    spec = TableSpec("bronze/ticks/acme/p/slow", rows(0, "a").schema.json(), keys=("id",))
    table = Table(spark, spec, context, location=Location.of(context.settings.of(StoreSettings)))
    table.append(rows(0, "a"), WriteBatch("first", 1))

    def watch() -> None:
        tracker = spark.sparkContext.statusTracker()
        while not any(
            (stage := tracker.getStageInfo(number)) and stage.numActiveTasks and stage.numTasks == TASKS
            for number in tracker.getActiveStageIds()
        ):
            time.sleep(0.05)
        print("tasks", flush=True)

    threading.Thread(target=watch, daemon=True).start()
    coming = rows(ROWS // 2, "b")
    done = table.upsert(coming.mapInArrow(slow, coming.schema), WriteBatch("step", 1))
    again = table.upsert(rows(ROWS // 2, "c"), WriteBatch("step", 1))
    read = table.read()
    result = {
        "inserted": done.rows_inserted,
        "replaced": done.rows_replaced,
        "repeated": again.repeated,
        "rows": read.count(),
        "keys": read.select("id").distinct().count(),
        "notes": {row["note"]: row["count"] for row in read.groupBy("note").count().collect()},
    }
    print(json.dumps(result), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
    sys.exit(0)
