"""Rollups in `lakebed bench pipeline`: accepted batches to chunks, by the roller on Spark."""

from __future__ import annotations

import msgspec

from lakebed.batches.bench import BenchFleet
from lakebed.core.clock import ManualClock
from lakebed.core.errors import Corrupt
from lakebed.core.feed import ahead
from lakebed.rollups import paths
from lakebed.rollups.roller import Roller
from lakebed.rollups.settings import RollupSettings
from lakebed.rollups.workers import spark_job

MADE = (paths.ROLLUP, paths.INDEX, paths.MANIFESTS, paths.ROLLER)


async def roll(fleet: BenchFleet) -> float:
    """Everything there is, from nothing, in samples a second. Raises Corrupt unless every sample is in."""
    context = fleet.context
    for prefix in MADE:
        keys = [info.key async for info in context.store.list(prefix)]
        async for _ in ahead(keys, context.store.delete):
            pass
    settings = context.settings.of(RollupSettings)
    roller = Roller(
        msgspec.structs.replace(context, clock=ManualClock(fleet.until_ns)),
        spark_job(context),
        windows_s=settings.windows_s,
        overlap_s=settings.overlap_s,
        batches_max=settings.batches_max,
        lease_s=settings.lease_s,
        owner=context.node,
    )
    began = context.clock.monotonic_s()
    report = await roller.run()
    seconds = context.clock.monotonic_s() - began
    if report.samples != fleet.samples or report.unreadable:
        raise Corrupt(f"{fleet.samples} samples were accepted, but rollups report {report}")
    return fleet.samples / seconds
