"""Large buckets: rules judged over a listing or an inventory report by Spark, and what was found applied.

The rules are lifecycle's, the listing is the pipeline's; here they meet. `scan` blocks as Spark does: call it in a
thread. Applying needs no Spark: it reads the table of candidates and asks the guarded delete.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from lakebed.context import Context
from lakebed.delta.model import Snapshot, TableSpec
from lakebed.delta.plain import PlainTable, schema_json
from lakebed.errors import NotFound
from lakebed.lifecycle.applier import Applied, Applier
from lakebed.lifecycle.candidates import CANDIDATES, SCHEMA, judging
from lakebed.lifecycle.dryrun import DryRun, Wanted
from lakebed.lifecycle.policies import rules_of
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.workers import Site, home_of
from lakebed.store.settings import StoreSettings


def spec_of(bucket: str) -> TableSpec:
    """The table that holds a bucket's candidates, as its last scan found them."""
    return TableSpec(f"lifecycle/candidates/{bucket}", schema_json(CANDIDATES))


def scan(
    context: Context, bucket: str, policy: bytes, *, days_ahead: float = 0.0, inventory: str = "", keep: bool = False
) -> DryRun:
    """What this policy would delete, by a listing taken now or by a report (`s3://bucket/…/manifest.json`, or a file).

    With `keep` the candidates become a table. Raises Invalid for a policy or a report that is wrong.
    """
    from lakebed.pipeline import lifecycle_job
    from lakebed.pipeline.lineage import lineage_of
    from lakebed.pipeline.listing import list_bucket
    from lakebed.pipeline.session import open_session
    from lakebed.pipeline.settings import SparkSettings

    calendar = context.settings.of(LifecycleSettings).calendar
    now_ns = context.clock.now_ns() + round(days_ahead * calendar.day_ns)
    judge = judging(bucket, rules_of(policy), now_ns, calendar, home_of(context))
    spark = open_session(context.settings.of(SparkSettings))
    store = msgspec.structs.replace(context.settings.of(StoreSettings), url=f"s3://{bucket}", prefix="")
    listing = _report(spark, store, inventory) if inventory else list_bucket(spark, store, clock=context.clock)
    try:
        with lineage_of(context).job(f"lifecycle-scan/{bucket}") as run:
            found = lifecycle_job.candidates(listing.rows, judge, SCHEMA, versions=listing.source != "list").persist()
            told = lifecycle_job.tell(found)
            if keep:
                note = f"{listing.source} of {listing.began_ns}"
                kept = lifecycle_job.keep(spark, found, spec_of(bucket), context, note=note)
                run.wrote(spec_of(bucket).root, version=kept.version, rows=told.count + told.undecided)
            found.unpersist()
    finally:
        listing.close()
    sample = [
        Wanted(one["key"], one["verb"], one["kind"], one["rule_id"], one["size"], one["due_at_ns"], one["version_id"])
        for one in told.sample
    ]
    return DryRun(
        bucket,
        listing.objects,
        told.count,
        told.bytes,
        0,
        told.by_action,
        sample,
        undecided=told.undecided,
        undecided_bytes=told.undecided_bytes,
        source=listing.source,
    )


def _report(spark: Any, store: StoreSettings, manifest: str) -> Any:
    from pathlib import Path

    from lakebed.pipeline.inventory import Shelf, inventory
    from lakebed.pipeline.tables.location import Location

    if not manifest.startswith("s3://"):
        path = Path(manifest)
        return inventory(spark, Shelf(folder=str(path.parent)), path.name)
    bucket, _, key = manifest.removeprefix("s3://").partition("/")
    return inventory(spark, Shelf(Location.of(msgspec.structs.replace(store, url=f"s3://{bucket}"))), key)


async def found(site: Site, bucket: str) -> int:
    """How many candidates the last kept scan of the bucket found. Raises NotFound."""
    return (await _kept(site, bucket))[1].rows


async def apply(site: Site, bucket: str) -> Applied:
    """Deletes what the last scan of the bucket found, as far as the policy in force wants it now. Raises NotFound."""
    table, state = await _kept(site, bucket)

    async def keys() -> AsyncIterator[str]:
        for file in state.files:
            for key in (await table.read(file)).column("key").to_pylist():
                yield key

    applier = Applier(site.worker.resolver, site.settings)
    return await applier.run(bucket, keys(), await site.worker.compile())


async def _kept(site: Site, bucket: str) -> tuple[PlainTable, Snapshot]:
    table = PlainTable(site.shelf.store, spec_of(bucket), clock=site.shelf.clock, ids=site.shelf.ids)
    state = await table.snapshot()
    if state.version < 0:
        hint = f"lakebed lifecycle dry-run {bucket} --engine spark --keep"
        raise NotFound(f"{bucket} was not scanned yet", hint=hint)
    return table, state
