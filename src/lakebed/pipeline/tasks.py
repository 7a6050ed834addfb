"""Every task of ours in Arrow starts here.

Spark has a Python worker collect garbage after each task, and that means looking at every object of every module it has
loaded: some 80 ms, more than many of our tasks take. So what modules brought is set apart, once they are loaded.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

from pyspark.sql import DataFrame

Batches = Iterator[Any]
Task = Callable[[Batches], Batches]

_loaded = 0  # modules of this process when it last set its objects apart


def in_arrow(frame: DataFrame, task: Task, schema: str) -> DataFrame:
    """`frame.mapInArrow`, with cheap ends of tasks."""

    def run(batches: Batches) -> Batches:
        settle()
        return task(batches)

    return frame.mapInArrow(run, schema)


def settle() -> None:
    """Sets apart what this process holds, if modules were loaded since the last time: it is not looked through again.

    Between two tasks of one worker garbage was just collected, so hardly anything is kept that nobody needs.
    """
    global _loaded
    if len(sys.modules) != _loaded:
        gc.freeze()
        _loaded = len(sys.modules)
