"""Rollups inside `lakebed bench pipeline`: accepted batches to chunks, by the real roller on Spark."""

from __future__ import annotations

from lakebed.batches import paths
from lakebed.batches.roller import Roller
from lakebed.batches.settings import RollupSettings
from lakebed.bench.fleet import Fleet
from lakebed.clock import ManualClock
from lakebed.errors import Corrupt
from lakebed.feed import ahead
from lakebed.gateway.rollups import spark_job

MADE = (paths.ROLLUP, paths.INDEX, paths.MANIFESTS, paths.ROLLER)


async def roll(fleet: Fleet) -> float:
    """Everything there is, from nothing, in samples a second. Raises Corrupt unless every sample is in."""
    context = fleet.context
    for prefix in MADE:
        keys = [info.key async for info in context.store.list(prefix)]
        async for _ in ahead(keys, context.store.delete):
            pass
    settings = context.settings.of(RollupSettings)
    roller = Roller(
        context.store,
        spark_job(context),
        windows_s=settings.windows_s,
        overlap_s=settings.overlap_s,
        batches_max=settings.batches_max,
        lease_s=settings.lease_s,
        owner=context.node,
        clock=ManualClock(fleet.until_ns),
        ids=context.ids,
        metrics=context.metrics,
    )
    began = context.clock.monotonic_s()
    report = await roller.run()
    seconds = context.clock.monotonic_s() - began
    if report.samples != fleet.samples or report.unreadable:
        raise Corrupt(f"{fleet.samples} samples were accepted, but rollups say {report}")
    return fleet.samples / seconds
