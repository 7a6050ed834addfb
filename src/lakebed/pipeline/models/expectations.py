"""Expectations: conditions that a model's rows must meet, and what happens to a row that does not. Frames to frames.

A condition that is null is met, as in a contract. A row that is to be quarantined and to be dropped is quarantined.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, LongType, StringType, StructField, StructType, TimestampType

from lakebed.core.errors import Unprocessable
from lakebed.pipeline.models.definition import Action
from lakebed.pipeline.models.runs import ExpectationResult
from lakebed.pipeline.tables.frames import quoted

FAILED = "_lakebed_failed"
QUARANTINE_SCHEMA = StructType(
    [
        StructField("_row", StringType()),
        StructField("_reasons", ArrayType(StringType())),
        StructField("_model", StringType()),
        StructField("_batch", LongType()),
        StructField("_at", TimestampType()),
    ]
)


class ExpectationFailed(Unprocessable):
    code = "expectation_failed"


class ExpectationCounts(msgspec.Struct, frozen=True):
    """rows = kept + quarantined + dropped."""

    rows: int
    quarantined: int = 0
    dropped: int = 0
    results: tuple[ExpectationResult, ...] = ()

    def check(self, model: str) -> None:
        """Raises ExpectationFailed for the first condition that may not fail."""
        for each in self.results:
            if each.action == "fail" and each.failed:
                raise ExpectationFailed(
                    f"model {model}: {each.failed} of {self.rows} rows do not meet {each.condition!r}",
                    hint="nothing was written; correct the rows or the model, or set the expectation to quarantine",
                )


def judged(rows: DataFrame, expect: Mapping[str, Action]) -> DataFrame:
    """The rows, with the conditions that each does not meet."""
    failed = [F.when(~F.coalesce(F.expr(each), F.lit(True)), F.lit(each)) for each in expect]
    return rows.withColumn(FAILED, F.filter(F.array(*failed), lambda one: one.isNotNull()))


def counted(marked: DataFrame, expect: Mapping[str, Action]) -> ExpectationCounts:
    """Counts in one pass."""
    counts = [F.count(F.when(F.array_contains(FAILED, each), 1)) for each in expect]
    aside = [F.count(F.when(where, 1)) for where in (_quarantined(expect), _dropped(expect))]
    row = marked.agg(F.count("*"), *aside, *counts).first()
    assert row is not None
    results = [ExpectationResult(each, action, row[3 + n]) for n, (each, action) in enumerate(expect.items())]
    return ExpectationCounts(row[0], row[1], row[2], tuple(results))


def kept(marked: DataFrame, expect: Mapping[str, Action]) -> DataFrame:
    rows = marked.filter(~_quarantined(expect) & ~_dropped(expect))
    return rows.drop(FAILED)


def quarantined(marked: DataFrame, expect: Mapping[str, Action], model: str, batch: int, at_ms: int) -> DataFrame:
    """The rows that are quarantined, each whole as JSON with its reasons."""
    columns = [quoted(name) for name in marked.columns if name != FAILED]
    return marked.filter(_quarantined(expect)).select(
        F.to_json(F.struct(*columns), {"ignoreNullFields": "false"}).alias("_row"),
        F.col(FAILED).cast("array<string>").alias("_reasons"),
        F.lit(model).alias("_model"),
        F.lit(batch).cast("long").alias("_batch"),
        F.timestamp_millis(F.lit(at_ms)).alias("_at"),
    )


def _quarantined(expect: Mapping[str, Action]) -> Column:
    return _any(expect, "quarantine")


def _dropped(expect: Mapping[str, Action]) -> Column:
    return _any(expect, "drop") & ~_any(expect, "quarantine")


def _any(expect: Mapping[str, Action], action: str) -> Column:
    chosen = [F.lit(each) for each, done in expect.items() if done == action]
    return F.arrays_overlap(F.col(FAILED), F.array(*chosen)) if chosen else F.lit(False)
