"""Lifecycle rules over a listing: candidates as a frame and as a table. The rules are decided by a function given.

    found = candidates(listing.rows, judge, SCHEMA, versions=listing.source == "versions")
    told = tell(found)                        # how many, how many bytes, by rule, with a sample
    keep(spark, found, spec, context)         # as a table, to be applied by the guarded delete

What lies in a bucket is judged where it is listed; only counts, a sample and file names come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from lakebed.context import Context
from lakebed.delta.model import Committed, TableSpec
from lakebed.pipeline.tables.location import Location
from lakebed.pipeline.tables.table import Table
from lakebed.pipeline.tasks import in_arrow
from lakebed.store.settings import StoreSettings

Judge = Callable[[Iterator[Any]], Iterator[Any]]
SAMPLE = 20


class Told(msgspec.Struct, frozen=True):
    """A frame of candidates in numbers. `certain` is what the listing alone decides."""

    count: int
    bytes: int
    undecided: int
    undecided_bytes: int
    by_action: dict[str, int]
    sample: list[dict[str, Any]]


def candidates(listing: DataFrame, judge: Judge, schema: str, *, versions: bool) -> DataFrame:
    """The rows that `judge` finds. Where there are versions, a key's rows meet in one task, the current one first."""
    if versions:
        newest_first = ["key", F.col("is_latest").desc(), F.col("modified_ns").desc()]
        listing = listing.repartition("key").sortWithinPartitions(*newest_first)
    return in_arrow(listing, judge, schema)


def tell(found: DataFrame, *, sample: int = SAMPLE) -> Told:
    """One pass for the numbers, one short one for the sample."""
    named = found.withColumn("action", F.concat_ws("/", _name(), "kind"))
    groups = named.groupBy("action", "certain").agg(F.count("*").alias("count"), F.sum("size").alias("bytes")).collect()
    sure = [group for group in groups if group["certain"]]
    unsure = [group for group in groups if not group["certain"]]
    by_action: dict[str, int] = {}
    for group in sorted(groups, key=lambda group: str(group["action"])):
        by_action[group["action"]] = by_action.get(group["action"], 0) + group["count"]
    return Told(
        count=sum(group["count"] for group in sure),
        bytes=sum(group["bytes"] for group in sure),
        undecided=sum(group["count"] for group in unsure),
        undecided_bytes=sum(group["bytes"] for group in unsure),
        by_action=by_action,
        sample=[row.asDict() for row in found.limit(sample).collect()],
    )


def keep(spark: SparkSession, found: DataFrame, spec: TableSpec, context: Context, *, note: str = "") -> Committed:
    """Makes the candidates the whole of a table, sorted by key."""
    location = Location.of(context.settings.of(StoreSettings))
    table = Table(spark, spec, store=context.store, location=location, clock=context.clock, ids=context.ids)
    return table.replace(found.sortWithinPartitions("key"), note=note)


def _name() -> Any:
    return F.when(F.col("rule_id") != "", F.col("rule_id")).otherwise(F.col("rule_hash"))
