"""Background work of the pipeline, in `lakebed work`: loads into bronze, models, table maintenance, bronze retention.

Any number of processes may run these at once: the tables' commits decide, and a later process finds the work done.
Spark is imported where it is used, so that a process without such work does not load it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from lakebed.core.context import Context, Worker
from lakebed.core.errors import LakebedError
from lakebed.core.logs import logger
from lakebed.pipeline.settings import BronzeSettings, PipelineSettings

if TYPE_CHECKING:
    from lakebed.pipeline.bronze.runs import IngestReport
    from lakebed.pipeline.runner import PipelineReport, PipelineRunner

PAUSE_S = 1.0
PAUSE_MAX_S = 300.0  # longest pause of a loop that fails again and again
FIRST_UPKEEP_S = 600.0  # after a start
LOADS_MAX = 4  # sources that are loaded at once; others wait for the first that ends
STEADY_S = 60.0  # a loop that ran so long begins with short pauses again

log = logger("pipeline")
bronze_log = logger("bronze")


def retention_workers(context: Context) -> Sequence[Worker]:
    """Bronze rows past their retention are deleted, of every source, then the files that no version needs."""
    settings = context.settings.of(PipelineSettings)

    async def run() -> None:
        async for _ in _every(context, settings.retention_interval_s):
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

    return [Worker("bronze-retention", run)]


def maintenance_workers(context: Context) -> Sequence[Worker]:
    every_s = context.settings.of(BronzeSettings).upkeep_every_s
    return [Worker("bronze-upkeep", lambda: _maintain(context, every_s))] if every_s else []


def pipeline_loops(
    context: Context, opened: Callable[[], Awaitable[PipelineRunner]]
) -> list[Callable[[], Coroutine[Any, Any, None]]]:
    """Loads into bronze, and models that are due, each where its interval is set. They run beside the dispatcher of
    ticks, so an error of one stops none of the others: it is logged, and tried again after a growing pause.
    """
    settings = context.settings.of(PipelineSettings)
    made: list[Callable[[], Coroutine[Any, Any, None]]] = []
    if load_every_s := context.settings.of(BronzeSettings).run_every_s:
        load = partial(_load, context, load_every_s, opened)
        made.append(partial(repeated, context, "a load into bronze failed", load))
    if settings.gold and settings.models_every_s:
        models = partial(_models, context, settings.models_every_s, opened)
        made.append(partial(repeated, context, "models could not be run", models))
    return made


async def repeated(context: Context, what: str, loop: Callable[[], Awaitable[None]]) -> None:
    """Runs a loop that only ends by an error, again and again."""
    failures = 0
    while True:
        began_s = context.clock.monotonic_s()
        try:
            await loop()
        except LakebedError as error:
            bronze_log.error(what, error=error.message, hint=error.hint)
        except Exception as error:  # whatever it is: the other loops of the worker go on
            bronze_log.error(what, error=type(error).__name__, exc_info=error)
        failures = 0 if context.clock.monotonic_s() - began_s >= STEADY_S else failures + 1
        await context.clock.sleep(PAUSE_S + context.ids.jitter_s(failures, base_s=PAUSE_S, cap_s=PAUSE_MAX_S))


async def _models(context: Context, every_s: float, opened: Callable[[], Awaitable[PipelineRunner]]) -> None:
    from lakebed.pipeline.models.worker import ModelWorker

    await ModelWorker(await opened(), context).run(every_s)


async def _load(context: Context, every_s: float, opened: Callable[[], Awaitable[PipelineRunner]]) -> None:
    """Loads each source by itself: none waits for a slower one, or for one that fails."""
    from lakebed.pipeline.bronze.ingestion import Ingestion

    runner, turns = await opened(), asyncio.Semaphore(LOADS_MAX)

    async def source(word: str) -> None:
        ingestion = Ingestion(context, runner)
        while True:
            async with turns:
                reports = await asyncio.to_thread(ingestion.run, only=[word])
            _told(reports, ingestion.refined)
            await context.clock.sleep(every_s)

    async with asyncio.TaskGroup() as group:
        for word in Ingestion(context, runner).sources:
            group.create_task(repeated(context, f"a load of {word} into bronze failed", partial(source, word)))
        group.create_task(context.clock.sleep(every_s))  # where there is none


def _told(reports: Sequence[IngestReport], refined: PipelineReport | None) -> None:
    for report in reports:
        if report.steps:
            counts = {"rows_in": report.rows_in, "good": report.good, "quarantined": report.quarantined}
            bronze_log.info("loaded into bronze", table=report.table, version=report.version, **counts)
        for key in report.unreadable:
            bronze_log.error("an unreadable object was quarantined", table=report.table, key=key)
    for silver in refined.silver if refined is not None else ():
        counts = {"rows_in": silver.rows_in, "good": silver.good, "quarantined": silver.quarantined}
        bronze_log.info("brought to silver", table=silver.table, version=silver.silver_version, **counts)


async def _every(context: Context, interval_s: float) -> AsyncIterator[None]:
    """Soon after the start, and then at the interval: a process that is started every day comes to its daily work."""
    pause_s = min(interval_s, FIRST_UPKEEP_S)
    while True:
        await context.clock.sleep(pause_s)
        yield
        pause_s = interval_s


async def _maintain(context: Context, every_s: float) -> None:
    async for _ in _every(context, every_s):
        from lakebed.pipeline.tables.maintenance import TableMaintenance

        maintenance = TableMaintenance(context)
        for work in (maintenance.compact, maintenance.vacuum):
            for report in await asyncio.to_thread(work):
                done = {name: value for name, value in msgspec.to_builtins(report).items() if value}
                if not report.problem:
                    bronze_log.info("table maintained", **done)
