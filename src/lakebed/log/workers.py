"""The log's workers: compaction, the sweep of unreferenced blobs, the retention of consumer groups, and the scan behind
the cost estimate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from lakebed.core.clock import Clock
from lakebed.core.context import Context, Worker
from lakebed.core.errors import AlreadyExists, LakebedError
from lakebed.core.logs import logger
from lakebed.log import paths
from lakebed.log.cost import StorageUsage
from lakebed.log.services import LogServices
from lakebed.log.sweeper import LogSweepReport
from lakebed.meta.model import ABSENT
from lakebed.meta.protocol import MetaSession

VACUUM = "log vacuum"  # as a run

log = logger("log")


def workers(context: Context) -> Sequence[Worker]:
    services, clock = LogServices(context), context.clock
    found = [Worker("log-compactor", services.scheduler.run)]
    if (every_s := services.settings.vacuum_every_s) > 0:
        found.append(Worker("log-vacuum", _every(every_s, lambda: _vacuum(context, services), clock)))
        if services.settings.group_retention_s > 0:
            found.append(Worker("log-groups", _every(every_s, services.group_retention.apply_once, clock)))
    if (every_s := services.settings.billing_every_s) > 0:
        found.append(Worker("log-billing", _every(every_s, StoredBytesScan(services).scan, clock)))
    return found


class StoredBytesScan:
    """Measures the stored bytes in one process of a lake: the one that holds the claim, as long as it lives."""

    def __init__(self, services: LogServices) -> None:
        self._services = services
        self._session: MetaSession | None = None

    async def scan(self) -> StorageUsage | None:
        """None where another process measures."""
        return await self._services.store.measure() if await self._claimed() else None

    async def _claimed(self) -> bool:
        if self._session is not None and self._session.alive:
            return True
        session = await self._services.meta.open_session(timeout_s=self._services.settings.claim_s)
        try:
            await self._services.meta.put(paths.BILLING_CLAIM, b"{}", expected=ABSENT, session=session)
        except LakebedError as error:
            await session.close()  # with the claim, where its answer was lost
            if isinstance(error, AlreadyExists):
                return False
            raise
        self._session = session
        return True


async def _vacuum(context: Context, services: LogServices) -> LogSweepReport:
    async with context.run_log("log").record(VACUUM) as run:
        report = await services.sweeper.sweep_once()
        run.rows_in, run.rows_out, run.idle = report.candidates, len(report.orphans), not report.candidates
        run.reason = f"{len(report.orphans)} unreferenced objects deleted, {report.orphan_bytes} bytes"
        return report


def _every(seconds: float, work: Callable[[], Awaitable[Any]], clock: Clock) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        while True:
            await clock.sleep(seconds)
            log.info("worker pass finished", result=str(await work())[:500])

    return run
