"""What bronze does by itself, where the settings say so: runs, and the upkeep of tables.

Any number of processes may do both at once: the tables' own commits decide, and who comes second finds it done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lakebed.context import Context, Worker
from lakebed.logs import logger
from lakebed.pipeline.bronze_settings import BronzeSettings

log = logger("bronze")


def workers(context: Context) -> Sequence[Worker]:
    settings = context.settings.of(BronzeSettings)
    made = []
    if settings.run_every_s:
        made.append(Worker("bronze-ingest", lambda: _ingest(context, settings.run_every_s)))
    if settings.upkeep_every_s:
        made.append(Worker("bronze-upkeep", lambda: _upkeep(context, settings.upkeep_every_s)))
    return made


async def _ingest(context: Context, every_s: float) -> None:
    from lakebed.pipeline.ingestion import Ingestion  # Spark is loaded where it is used

    ingestion = Ingestion(context)
    while True:
        for report in await asyncio.to_thread(ingestion.run):
            if report.steps:
                told = {"rows_in": report.rows_in, "good": report.good, "quarantined": report.quarantined}
                log.info("into bronze", table=report.table, version=report.version, **told)
            for key in report.unreadable:
                log.error("an object could not be read and is set aside", table=report.table, key=key)
        await context.clock.sleep(every_s)


async def _upkeep(context: Context, every_s: float) -> None:
    while True:
        await context.clock.sleep(every_s)
        from lakebed.pipeline.upkeep import Upkeep

        keeper = Upkeep(context)
        for work in (keeper.compact, keeper.expire, keeper.vacuum):
            for done in await asyncio.to_thread(work):
                log.info("table kept", **{name: value for name, value in _shown(done).items() if value})


def _shown(done: object) -> dict[str, object]:
    import msgspec

    return dict(msgspec.to_builtins(done))
