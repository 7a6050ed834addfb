"""Where batches and the Spark pipeline meet: the roller of one, with an engine of the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lakebed.batches.roller import Roller
from lakebed.batches.rolling import LocalJob, read_groups, store_chunks, store_index
from lakebed.batches.settings import RollupSettings
from lakebed.context import Context, Worker
from lakebed.frame.work import Job


def roller(context: Context, job: Job | None = None) -> Roller:
    """The roller that the settings describe; with another engine, if one is given."""
    settings = context.settings.of(RollupSettings)
    return Roller(
        context.store,
        job or (LocalJob(context.store) if settings.engine == "local" else spark_job(context)),
        windows_s=settings.windows_s,
        overlap_s=settings.overlap_s,
        batches_max=settings.batches_max,
        lease_s=settings.lease_s,
        sweep_after_s=settings.sweep_after_s,
        owner=context.node,
        clock=context.clock,
        ids=context.ids,
        metrics=context.metrics,
    )


def spark_job(context: Context, spark: Any = None) -> Job:
    """The engine on Spark, loaded here; on the session of this process, started with the first batch, or on `spark`."""
    from lakebed.pipeline.lineage import lineage_of
    from lakebed.pipeline.rollups import SparkJob

    return SparkJob(
        context.settings,
        context.store,
        reading=read_groups,
        storing=store_chunks,
        indexing=store_index,
        lineage=lineage_of(context),
        spark=spark,
    )


def workers(context: Context) -> Sequence[Worker]:
    settings = context.settings.of(RollupSettings)
    if not settings.interval_s:
        return []
    return [Worker("rollup", lambda: roller(context).forever(settings.interval_s))]
