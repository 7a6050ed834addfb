"""Background work of the pipeline, in `lakebed work`: loads into bronze, table maintenance and bronze retention.

Any number of processes may run these at once: the tables' commits decide, and a later process finds the work done.
Spark is imported where it is used, so that a process without such work does not load it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from lakebed.core.context import Context, Worker
from lakebed.core.logs import logger
from lakebed.pipeline.settings import BronzeSettings, PipelineSettings

log = logger("pipeline")
bronze_log = logger("bronze")


def workers(context: Context) -> Sequence[Worker]:
    """Bronze rows past their retention are deleted, of every source, then the files that no version needs."""
    settings = context.settings.of(PipelineSettings)

    async def run() -> None:
        while True:
            await context.clock.sleep(settings.retention_interval_s)
            from lakebed.pipeline.models.runs import expire_runs
            from lakebed.pipeline.runner import vacuum_tables
            from lakebed.pipeline.tables.maintenance import TableMaintenance

            for report in await asyncio.to_thread(TableMaintenance(context).expire):
                if not report.problem:
                    log.info("bronze rows removed", table=report.table, rows=report.rows_removed)
            for table, files in (await vacuum_tables(context)).items():
                log.info("table vacuumed", table=table, files=files)
            if gone := await expire_runs(context.store, context.clock.now_ns()):
                log.info("records of runs deleted", runs=gone)

    made = [Worker("bronze-retention", run)]
    if settings.gold and settings.models_every_s:
        made.append(Worker("models", lambda: _models(context, settings.models_every_s)))
    return made


async def _models(context: Context, every_s: float) -> None:
    from lakebed.pipeline.models.worker import ModelWorker
    from lakebed.pipeline.runner import PipelineRunner

    runner = await asyncio.to_thread(PipelineRunner, context)
    await ModelWorker(runner, context).run(every_s)


def bronze_workers(context: Context) -> Sequence[Worker]:
    """Loads into bronze and table maintenance, each where its interval is set."""
    settings = context.settings.of(BronzeSettings)
    made = []
    if settings.run_every_s:
        made.append(Worker("bronze-ingest", lambda: _ingest(context, settings.run_every_s)))
    if settings.upkeep_every_s:
        made.append(Worker("bronze-upkeep", lambda: _maintain(context, settings.upkeep_every_s)))
    return made


async def _ingest(context: Context, every_s: float) -> None:
    from lakebed.pipeline.bronze.ingestion import Ingestion

    ingestion = Ingestion(context)
    while True:
        for report in await asyncio.to_thread(ingestion.run):
            if report.steps:
                counts = {"rows_in": report.rows_in, "good": report.good, "quarantined": report.quarantined}
                bronze_log.info("loaded into bronze", table=report.table, version=report.version, **counts)
            for key in report.unreadable:
                bronze_log.error("an unreadable object was quarantined", table=report.table, key=key)
        if ingestion.refined is not None:
            for silver in ingestion.refined.silver:
                counts = {"rows_in": silver.rows_in, "good": silver.good, "quarantined": silver.quarantined}
                bronze_log.info("brought to silver", table=silver.table, version=silver.silver_version, **counts)
        await context.clock.sleep(every_s)


async def _maintain(context: Context, every_s: float) -> None:
    while True:
        await context.clock.sleep(every_s)
        from lakebed.pipeline.tables.maintenance import TableMaintenance

        maintenance = TableMaintenance(context)
        for work in (maintenance.compact, maintenance.vacuum):
            for report in await asyncio.to_thread(work):
                done = {name: value for name, value in msgspec.to_builtins(report).items() if value}
                if not report.problem:
                    bronze_log.info("table maintained", **done)
