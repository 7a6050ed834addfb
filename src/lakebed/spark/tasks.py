"""Runs Lakebed's Arrow tasks in Spark.

Spark makes a Python worker collect garbage after each task, which visits every object of every loaded module: some
80 ms, more than many of our tasks take. So the objects of loaded modules are frozen (`gc.freeze`) before a task.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

Batches = Iterator[Any]
Task = Callable[[Batches], Batches]

_loaded = 0  # modules of this process at the last freeze


def in_arrow(frame: DataFrame, task: Task, schema: str | StructType) -> DataFrame:
    """`frame.mapInArrow`, without the cost of a full garbage collection after each task."""

    def run(batches: Batches) -> Batches:
        freeze_modules()
        return task(batches)

    return frame.mapInArrow(run, schema)


def freeze_modules() -> None:
    """Freezes the objects of this process if modules were loaded since the last time: later collections skip them.

    Between two tasks of one worker garbage was just collected, so little is frozen that nothing needs.
    """
    global _loaded
    if len(sys.modules) != _loaded:
        gc.freeze()
        _loaded = len(sys.modules)


def line_of(error: BaseException) -> str:
    """The first line of an error's message that is not empty."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
