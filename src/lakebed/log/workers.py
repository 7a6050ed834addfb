"""The log's workers: compaction, the sweep of unreferenced blobs, and the scan behind the cost estimate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from lakebed.core.clock import Clock
from lakebed.core.context import Context, Worker
from lakebed.core.logs import logger
from lakebed.log.services import LogServices

log = logger("log")


def workers(context: Context) -> Sequence[Worker]:
    services = LogServices(context)
    found = [Worker("log-compactor", services.scheduler.run)]
    if services.settings.vacuum_every_s > 0:
        found.append(
            Worker("log-vacuum", _every(services.settings.vacuum_every_s, services.sweeper.sweep_once, context.clock))
        )
    if services.settings.billing_every_s > 0:
        found.append(
            Worker("log-billing", _every(services.settings.billing_every_s, services.store.measure, context.clock))
        )
    return found


def _every(seconds: float, work: Callable[[], Awaitable[Any]], clock: Clock) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        while True:
            await clock.sleep(seconds)
            log.info("worker pass finished", result=str(await work())[:500])

    return run
