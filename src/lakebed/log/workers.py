"""The log's workers: compaction, the sweep of unreferenced blobs, the retention of consumer groups, and the scan behind
the cost estimate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from lakebed.core.clock import Clock, now_ms
from lakebed.core.context import Context, Worker
from lakebed.core.errors import AlreadyExists, LakebedError, NotFound, Stale
from lakebed.core.logs import logger
from lakebed.log import paths
from lakebed.log.cost import StorageUsage
from lakebed.log.records import decoded
from lakebed.log.services import LogServices
from lakebed.log.settings import LogSettings
from lakebed.log.sweeper import LogSweepReport
from lakebed.meta.model import ABSENT
from lakebed.meta.protocol import MetaSession

VACUUM = "log vacuum"  # as a run
FIRST_SCAN_S = 60.0  # after the start: a process that fails at once costs no scan

log = logger("log")


class PassTime(msgspec.Struct, frozen=True):
    began_at_ms: int


class LogSchedule:
    """Passes of one name at an interval, each in one process of the lake: who swaps the time of the last one works.

    The time is in meta, so a process that is restarted waits for the rest of the interval, not for all of it again.
    """

    def __init__(self, services: LogServices, name: str, every_s: float) -> None:
        self._meta, self._clock, self._key = services.meta, services.runtime.clock, paths.last_pass(name)
        self._name, self._every_s = name, every_s

    async def run(self, work: Callable[[], Awaitable[Any]]) -> None:
        """Until cancelled."""
        while True:
            if await self._taken():
                log.info("worker pass finished", name=self._name, result=str(await work())[:500])

    async def _taken(self) -> bool:
        """Waits until a pass is due; False where another process has taken it meanwhile."""
        at_ms, version = now_ms(self._clock), ABSENT
        try:
            found = decoded(await self._meta.get(self._key), PassTime)
            at_ms, version = found.value.began_at_ms, found.version
        except NotFound:
            pass
        wait_s = self._every_s - (now_ms(self._clock) - at_ms) / 1000
        began = version != ABSENT and wait_s <= self._every_s  # or else the count begins now: the clock was set back
        if began and wait_s > 0:
            await self._clock.sleep(wait_s)
            return False  # others have waited too: look again
        value = msgspec.json.encode(PassTime(now_ms(self._clock)))
        try:
            await self._meta.put(self._key, value, expected=version)
        except (AlreadyExists, Stale):
            return False
        return began


def workers(context: Context) -> Sequence[Worker]:
    services, settings = LogServices(context), context.settings.of(LogSettings)
    found = [Worker("log-compactor", services.scheduler.run)]
    if settings.vacuum_every_s > 0:
        vacuum = LogSchedule(services, "vacuum", settings.vacuum_every_s)
        found.append(Worker("log-vacuum", lambda: vacuum.run(lambda: _vacuum(context, services))))
        if settings.group_retention_s > 0:
            groups = LogSchedule(services, "groups", settings.vacuum_every_s)
            found.append(Worker("log-groups", lambda: groups.run(services.group_retention.apply_once)))
    if settings.billing_every_s > 0:
        scan = StoredBytesScan(services)
        found.append(Worker("log-billing", lambda: scan.run(settings.billing_every_s, context.clock)))
    return found


class StoredBytesScan:
    """Measures the stored bytes in one process of a lake: the one that holds the claim, as long as it lives."""

    def __init__(self, services: LogServices) -> None:
        self._services = services
        self._session: MetaSession | None = None

    async def scan(self) -> StorageUsage | None:
        """None where another process measures."""
        return await self._services.store.measure() if await self._claimed() else None

    async def run(self, every_s: float, clock: Clock) -> None:
        """Until cancelled. Soon after the start, so that a process that does not live for long shows them too."""
        await clock.sleep(min(FIRST_SCAN_S, every_s))
        while True:
            log.info("worker pass finished", name="billing", result=str(await self.scan()))
            await clock.sleep(every_s)

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
