"""Which projects this replica owns: a lease in the bucket for each, kept while the project is active (warm).

The lease is acquired at the first finalize and released when the project was idle for too long, when another replica
requests it, when too many are warm (least recently used first) and at shutdown. Every write of a finalize carries the
lease's epoch, so that a replica which paused past its lease is fenced.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from lakebed.core.clock import now_ms
from lakebed.core.context import Context
from lakebed.core.errors import Fenced, LakebedError, NotFound, Overloaded, TooEarly
from lakebed.core.logs import logger
from lakebed.store.lease import HeldByAnother, HeldLease, Lease
from lakebed.ticks import paths
from lakebed.ticks.settings import TicksSettings

RENEWALS_PER_LEASE = 3

Project = tuple[str, str]
log = logger("ticks")


class _Warm:
    def __init__(self, lease: Lease, held: HeldLease) -> None:
        self.lease, self.held = lease, held
        self.busy = 0
        self.used_s = 0.0


class Ownership:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._clock = context.clock
        self._settings = context.settings.of(TicksSettings)
        self._warm: OrderedDict[Project, _Warm] = OrderedDict()
        self._acquiring = 0  # leases that are about to be held: they count too
        self._gauge = context.metrics.gauge("lakebed_ticks_warm_projects")
        self._renewer: asyncio.Task[None] | None = None

    @property
    def projects(self) -> list[Project]:
        return list(self._warm)

    def start(self) -> None:
        self._renewer = asyncio.create_task(self._keep(), name="ticks-ownership")

    async def stop(self) -> None:
        """Releases every lease, so that another replica need not wait for it to expire."""
        if self._renewer is not None:
            self._renewer.cancel()
            with suppress(asyncio.CancelledError):
                await self._renewer
        for project, warm in list(self._warm.items()):
            warm.busy = 0  # no request is served any more
            await self._release(project)

    @asynccontextmanager
    async def of(self, org_id: str, project_id: str) -> AsyncIterator[int]:
        """Holds the project's lease inside the block and yields its epoch. Raises TooEarly when another holds it."""
        project = (org_id, project_id)
        warm = await self._still_warm(project) or await self._acquired(project)
        try:
            if project in self._warm:
                self._warm.move_to_end(project)
            yield warm.held.epoch
        finally:
            warm.busy -= 1
            warm.used_s = self._clock.monotonic_s()

    async def _still_warm(self, project: Project) -> _Warm | None:
        """The project when its lease is held already; marked busy first, because a busy one is never released."""
        warm = self._warm.get(project)
        if warm is None:
            return None
        warm.busy += 1
        try:
            await self._renewed(warm)
        except Fenced:
            warm.busy -= 1
            self._forget(project, warm)
            return None
        except BaseException:
            warm.busy -= 1
            raise
        return warm

    async def _acquired(self, project: Project) -> _Warm:
        self._acquiring += 1
        try:
            await self._make_room()
            warm = await self._held(project)
        finally:
            self._acquiring -= 1
        self._warm[project] = warm
        self._gauge.set(len(self._warm))
        return warm

    async def _held(self, project: Project) -> _Warm:
        """The project with its lease, busy already. Raises TooEarly when another replica holds it."""
        lease = Lease(
            self._context,
            paths.lease(*project),
            owner=self._context.node,
            lease_s=self._settings.lease_s,
        )
        try:
            held = await lease.acquire()
        except HeldByAnother as error:
            await self._request(project)
            raise TooEarly(
                "another replica owns this project",
                hint="retry: that replica was requested to release it",
                retry_after_s=self._settings.retry_after_s,
            ) from error
        warm = _Warm(lease, held)
        warm.busy = 1
        return warm

    async def _renewed(self, warm: _Warm) -> None:
        """Renews a lease of which less than half is left. Raises Fenced when another replica holds it."""
        left_ms = warm.held.expires_at_ms - now_ms(self._clock)
        if left_ms < self._settings.lease_s * 500:
            warm.held = await warm.lease.renew(warm.held)

    async def _make_room(self) -> None:
        if len(self._warm) + self._acquiring <= self._settings.warm_max:
            return
        idle = next((project for project, warm in self._warm.items() if not warm.busy), None)
        if idle is None:
            raise Overloaded(f"this replica finalizes ticks of {self._settings.warm_max} projects, its limit")
        await self._release(idle)

    async def _keep(self) -> None:
        while True:
            await self._clock.sleep(self._settings.lease_s / RENEWALS_PER_LEASE)
            await self.keep()

    async def keep(self) -> None:
        """One round: renews leases in use, releases idle ones."""
        for project, warm in list(self._warm.items()):
            if self._warm.get(project) is not warm:
                continue  # released since the round began, and perhaps acquired again
            idle_s = self._clock.monotonic_s() - warm.used_s
            try:
                if not warm.busy and (idle_s >= self._settings.idle_ttl_s or await self._requested(project)):
                    await self._release(project)
                else:
                    warm.held = await warm.lease.renew(warm.held)
            except Fenced:
                self._forget(project, warm)
            except LakebedError as error:
                log.warning("lease of a project was not renewed", project=project[1], error=error.message)

    async def _request(self, project: Project) -> None:
        """Leaves a note for the lease holder. Best effort: an idle lease is released without it too, later."""
        with suppress(LakebedError):
            await self._context.store.create(paths.wanted(*project), b"wanted")

    async def _requested(self, project: Project) -> bool:
        try:
            await self._context.store.head(paths.wanted(*project))
        except NotFound:
            return False
        await self._context.store.delete(paths.wanted(*project))
        return True

    async def _release(self, project: Project) -> None:
        warm = self._warm.get(project)
        if warm is None or warm.busy:
            return
        self._forget(project, warm)
        try:
            await warm.lease.release(warm.held)
        except LakebedError as error:
            log.warning("lease of a project was not released; it expires", project=project[1], error=error.message)

    def _forget(self, project: Project, warm: _Warm) -> None:
        """Forgets this term of the project; a later one, under another epoch, stays."""
        if self._warm.get(project) is warm:
            del self._warm[project]  # a finalize that still runs is fenced at its next write
        self._gauge.set(len(self._warm))
