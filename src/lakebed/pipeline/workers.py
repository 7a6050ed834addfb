"""What the pipeline does by itself, once a day: bronze rows past their retention go, then files that nothing needs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lakebed.context import Context, Worker
from lakebed.logs import logger
from lakebed.pipeline.flow_settings import FlowSettings

log = logger("pipeline")


def workers(context: Context) -> Sequence[Worker]:
    """Any number of processes may run it at once: the tables' own commits decide."""
    settings = context.settings.of(FlowSettings)

    def expire() -> dict[str, int]:
        from lakebed.pipeline.flow import Flow  # Spark is loaded when there is something to do, not at the start

        return Flow(context).expire()

    async def run() -> None:
        while True:
            await context.clock.sleep(settings.retention_interval_s)
            from lakebed.pipeline.flow import sweep

            for table, rows in (await asyncio.to_thread(expire)).items():
                log.info("bronze rows removed", table=table, rows=rows, older_than_days=settings.bronze_retention_days)
            for table, files in (await sweep(context)).items():
                log.info("files swept", table=table, files=files)

    return [Worker("bronze-retention", run)]
