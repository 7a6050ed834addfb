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
    """Bronze rows of ticks past their retention are deleted, then the files that no version needs."""
    settings = context.settings.of(PipelineSettings)

    def expire() -> dict[str, int]:
        from lakebed.pipeline.runner import PipelineRunner

        return PipelineRunner(context).expire()

    async def run() -> None:
        while True:
            await context.clock.sleep(settings.retention_interval_s)
            from lakebed.pipeline.runner import vacuum_tables

            for table, rows in (await asyncio.to_thread(expire)).items():
                log.info("bronze rows removed", table=table, rows=rows, older_than_days=settings.bronze_retention_days)
            for table, files in (await vacuum_tables(context)).items():
                log.info("table vacuumed", table=table, files=files)

    return [Worker("bronze-retention", run)]


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
        await context.clock.sleep(every_s)


async def _maintain(context: Context, every_s: float) -> None:
    while True:
        await context.clock.sleep(every_s)
        from lakebed.pipeline.tables.maintenance import TableMaintenance

        maintenance = TableMaintenance(context)
        for work in (maintenance.compact, maintenance.expire, maintenance.vacuum):
            for report in await asyncio.to_thread(work):
                done = {name: value for name, value in msgspec.to_builtins(report).items() if value}
                bronze_log.info("table maintained", **done)
