"""Large buckets: Spark evaluates the rules over a listing or an inventory report; `apply` deletes the candidates.

`scan` blocks as Spark does: call it in a thread. Objects are evaluated where they are listed; only counts, a sample and
file names come back. `apply` needs no Spark, which is why Spark is imported inside functions: it reads the table of
candidates and deletes each by the guarded delete.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from lakebed.core.context import Context
from lakebed.core.errors import NotFound
from lakebed.delta.model import CommitResult, Snapshot, TableSpec
from lakebed.delta.plain import PlainTable, schema_json
from lakebed.lifecycle.drainer import Applier, ApplyReport
from lakebed.lifecycle.dry_run import CANDIDATES, SCHEMA, DryRun, PlannedDelete, judging
from lakebed.lifecycle.model import Rule
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.workers import LifecycleServices, reserved_of
from lakebed.store.settings import StoreSettings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Judge = Callable[[Iterator[Any]], Iterator[Any]]
SAMPLE = 20


class CandidateSummary(msgspec.Struct, frozen=True):
    """A frame of candidates in numbers. `certain` is what the listing alone decides."""

    count: int
    bytes: int
    undecided: int
    undecided_bytes: int
    by_action: dict[str, int]
    sample: list[dict[str, Any]]


def candidates(listing: DataFrame, judge: Judge, schema: str, *, versions: bool) -> DataFrame:
    """The rows that `judge` finds. Where there are versions, a key's rows meet in one task, the current one first."""
    from pyspark.sql import functions as F

    from lakebed.spark.tasks import in_arrow

    if versions:
        newest_first = ["key", F.col("is_latest").desc(), F.col("modified_ns").desc()]
        listing = listing.repartition("key").sortWithinPartitions(*newest_first)
    return in_arrow(listing, judge, schema)


def summarize(found: DataFrame, *, sample: int = SAMPLE) -> CandidateSummary:
    """One pass for the numbers, one short one for the sample."""
    from pyspark.sql import functions as F

    rule = F.when(F.col("rule_id") != "", F.col("rule_id")).otherwise(F.col("rule_hash"))
    named = found.withColumn("action", F.concat_ws("/", rule, "kind"))
    groups = named.groupBy("action", "certain").agg(F.count("*").alias("count"), F.sum("size").alias("bytes")).collect()
    sure = [group for group in groups if group["certain"]]
    unsure = [group for group in groups if not group["certain"]]
    by_action: dict[str, int] = {}
    for group in sorted(groups, key=lambda group: str(group["action"])):
        by_action[group["action"]] = by_action.get(group["action"], 0) + group["count"]
    return CandidateSummary(
        count=sum(group["count"] for group in sure),
        bytes=sum(group["bytes"] for group in sure),
        undecided=sum(group["count"] for group in unsure),
        undecided_bytes=sum(group["bytes"] for group in unsure),
        by_action=by_action,
        sample=[row.asDict() for row in found.limit(sample).collect()],
    )


def store_candidates(
    spark: SparkSession, found: DataFrame, spec: TableSpec, context: Context, *, note: str = ""
) -> CommitResult:
    """Makes the candidates the whole of a table, sorted by key."""
    from lakebed.pipeline.tables.table import Table
    from lakebed.spark.location import Location

    location = Location.of(context.settings.of(StoreSettings))
    table = Table(spark, spec, context, location=location)
    return table.replace(found.sortWithinPartitions("key"), note=note)


def spec_of(bucket: str) -> TableSpec:
    """The table that holds a bucket's candidates, as its last scan found them."""
    return TableSpec(f"lifecycle/candidates/{bucket}", schema_json(CANDIDATES))


def scan(
    context: Context,
    bucket: str,
    rules: Sequence[Rule],
    *,
    days_ahead: float = 0.0,
    inventory: str = "",
    keep: bool = False,
) -> DryRun:
    """What these rules would delete, by a listing taken now or by a report (`s3://bucket/…/manifest.json`, or a file).

    With `keep` the candidates become a table. Raises Invalid for a report that is wrong.
    """
    from lakebed.spark.lineage import lineage_of
    from lakebed.spark.listing import list_bucket
    from lakebed.spark.session import open_session
    from lakebed.spark.settings import SparkSettings

    calendar = context.settings.of(LifecycleSettings).calendar
    now_ns = context.clock.now_ns() + round(days_ahead * calendar.day_ns)
    judge = judging(bucket, rules, now_ns, calendar, reserved_of(context))
    spark = open_session(context.settings.of(SparkSettings))
    store = msgspec.structs.replace(context.settings.of(StoreSettings), url=f"s3://{bucket}", prefix="")
    listing = _report(spark, store, inventory) if inventory else list_bucket(spark, store, clock=context.clock)
    try:
        with lineage_of(context).job(f"lifecycle-scan/{bucket}") as run:
            found = candidates(listing.rows, judge, SCHEMA, versions=listing.source != "list").persist()
            summary = summarize(found)
            if keep:
                note = f"{listing.source} of {listing.began_ns}"
                kept = store_candidates(spark, found, spec_of(bucket), context, note=note)
                run.wrote(spec_of(bucket).root, version=kept.version, rows=summary.count + summary.undecided)
            found.unpersist()
    finally:
        listing.close()
    sample = [
        PlannedDelete(
            one["key"], one["verb"], one["kind"], one["rule_id"], one["size"], one["due_at_ns"], one["version_id"]
        )
        for one in summary.sample
    ]
    return DryRun(
        bucket,
        listing.objects,
        summary.count,
        summary.bytes,
        0,
        summary.by_action,
        sample,
        undecided=summary.undecided,
        undecided_bytes=summary.undecided_bytes,
        source=listing.source,
    )


def _report(spark: Any, store: StoreSettings, manifest: str) -> Any:
    from pathlib import Path

    from lakebed.spark.inventory import ReportLocation, inventory
    from lakebed.spark.location import Location

    if not manifest.startswith("s3://"):
        path = Path(manifest)
        return inventory(spark, ReportLocation(folder=str(path.parent)), path.name)
    bucket, _, key = manifest.removeprefix("s3://").partition("/")
    return inventory(spark, ReportLocation(Location.of(msgspec.structs.replace(store, url=f"s3://{bucket}"))), key)


async def candidate_count(services: LifecycleServices, bucket: str) -> int:
    """How many candidates the last kept scan of the bucket found. Raises NotFound."""
    return (await _kept(services, bucket))[1].rows


async def apply(services: LifecycleServices, bucket: str) -> ApplyReport:
    """Deletes what the last scan of the bucket found, as far as the policy in force wants it now. Raises NotFound."""
    table, state = await _kept(services, bucket)

    async def keys() -> AsyncIterator[str]:
        for file in state.files:
            for key in (await table.read(file)).column("key").to_pylist():
                yield key

    applier = Applier(services.enforcer.resolver, services.settings)
    return await applier.run(bucket, keys(), await services.enforcer.compile())


async def _kept(services: LifecycleServices, bucket: str) -> tuple[PlainTable, Snapshot]:
    runtime = services.state.runtime
    table = PlainTable(runtime, spec_of(bucket))
    state = await table.snapshot()
    if state.version < 0:
        hint = f"lakebed lifecycle dry-run {bucket} --engine spark --keep"
        raise NotFound(f"{bucket} was not scanned yet", hint=hint)
    return table, state
