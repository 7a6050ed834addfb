"""The roller with the engine that the settings choose, and the worker that runs it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from lakebed.batches.settings import BatchesSettings
from lakebed.core.context import Context, Worker
from lakebed.core.logs import logger
from lakebed.core.runs import ActiveRun
from lakebed.rollups.local_job import LocalJob, read_groups, store_chunks, store_index
from lakebed.rollups.model import RollupJob
from lakebed.rollups.roller import Roller
from lakebed.rollups.settings import RollupSettings
from lakebed.store.lease import HeldByAnother

ROLLUP = "rollups"

log = logger("batches")


def roller(context: Context, job: RollupJob | None = None) -> Roller:
    """The roller that the settings describe; with another engine, if one is given."""
    settings = context.settings.of(RollupSettings)
    return Roller(
        context,
        job or (LocalJob(context.store) if settings.engine == "local" else spark_job(context)),
        windows_s=settings.windows_s,
        overlap_s=settings.overlap_s,
        batches_max=settings.batches_max,
        lease_s=settings.lease_s,
        sweep_after_s=settings.sweep_after_s,
        owner=context.node,
        retain_s=context.settings.of(BatchesSettings).retention_days * 86_400,
    )


async def rolled(role: Roller, run: ActiveRun) -> None:
    """One run, reported. Raises HeldByAnother, which is no failure."""
    run.answers = (HeldByAnother,)
    report = await role.run()
    if report.batches or report.unreadable:
        log.info("rolled up", batches=report.batches, samples=report.samples, chunks=report.chunks)
    for each in report.unreadable:
        log.error("accepted batch is missing in rollups", key=each.key, error=each.problem)
    report.report_to(run)


def spark_job(context: Context, spark: Any = None) -> RollupJob:
    """The engine on Spark, loaded here; on the session of this process, started with the first batch, or on `spark`."""
    from lakebed.rollups.spark_job import SparkJob
    from lakebed.spark.lineage import lineage_of

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
    runs = context.run_log("rollups")
    return [
        Worker(
            "rollup",
            lambda: runs.forever(ROLLUP, "batches", partial(rolled, roller(context)), every_s=settings.interval_s),
        )
    ]
