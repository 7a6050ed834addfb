"""Runs Lakebed's Arrow tasks in Spark, without two costs of Spark's that exceed those of the tasks themselves.

Spark makes a Python worker collect garbage after each task, which visits every object of every loaded module: some
80 ms, more than many of our tasks take. So the objects of loaded modules are frozen (`gc.freeze`) before a task.
Spark also measures a batch after each row that it adds to it: `collect_in_arrow` counts rows instead.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as sql
from pyspark.sql.types import BinaryType, BooleanType, DataType, DatetimeType, NumericType, StringType, StructType
from pyspark.sql.utils import is_remote

Batches = Iterator[Any]
Task = Callable[[Batches], Batches]

VARYING: tuple[type[DataType], ...] = (StringType, BinaryType)
FIXED: tuple[type[DataType], ...] = (NumericType, DatetimeType, BooleanType)
ROWS_AT_ONCE, ROW_BYTES_MAX = 2_048, 32 * 1024  # together 64 MiB, where Spark ends a batch by itself
LONG_ROW = "lakebed: a row is too long to be sent with others"
LIMITS = {
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(ROWS_AT_ONCE),
    "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),  # the value that switches the measuring off
}

_loaded = 0  # modules of this process at the last freeze


def in_arrow(frame: DataFrame, task: Task, schema: str | StructType) -> DataFrame:
    """`frame.mapInArrow`, without the cost of a full garbage collection after each task, for columns of any name.

    Spark takes a dot or a backtick in a column's name for syntax here: such columns travel under others.
    """
    names = frame.columns
    odd = any("." in name or "`" in name for name in names)

    def run(batches: Batches) -> Batches:
        freeze_modules()
        return task((batch.rename_columns(names) for batch in batches) if odd else batches)

    given = frame.toDF(*(f"column_{number}" for number in range(len(names)))) if odd else frame
    return given.mapInArrow(run, schema)


def collect_in_arrow(frame: DataFrame, task: Task, schema: str | StructType) -> list[Row]:
    """The results of `in_arrow` for rows of any width, at less than half of Java's time where they are short.

    Spark measures each column of a batch again after each row, to end it at 64 MiB. Here batches end by their number of
    rows, and a row that is too long for that ends the job: it runs again with Spark's own measuring.
    """
    if (quick := _by_count(frame)) is not None:
        try:
            return list(in_arrow(quick, task, schema).collect())
        except PySparkException as error:
            if LONG_ROW not in str(error):
                raise
    return list(in_arrow(frame, task, schema).collect())


def _by_count(frame: DataFrame) -> DataFrame | None:
    """The frame in a copy of its session whose batches end by count; None where rows cannot be measured cheaply."""
    if is_remote() or not all(isinstance(field.dataType, (*FIXED, *VARYING)) for field in frame.schema.fields):
        return None
    columns = {name: sql.col(f"`{name.replace('`', '``')}`") for name in frame.schema.names}
    varying = [field.name for field in frame.schema.fields if isinstance(field.dataType, VARYING)]
    if varying:
        size = sum((sql.coalesce(sql.octet_length(columns[name]), sql.lit(0)) for name in varying), sql.lit(0))
        held = sql.when(size <= ROW_BYTES_MAX, columns[varying[0]]).otherwise(sql.raise_error(LONG_ROW))
        columns[varying[0]] = held.alias(varying[0])
    checked = frame.select(*columns.values())
    jvm: Any = frame.sparkSession._jvm
    session = frame.sparkSession._jsparkSession.cloneSession()
    for name, value in LIMITS.items():
        session.conf().set(name, value)
    plan = checked._jdf.queryExecution().analyzed()
    return DataFrame(jvm.org.apache.spark.sql.classic.Dataset.ofRows(session, plan), frame.sparkSession)


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
