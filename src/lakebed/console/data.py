"""The data of all pages: which sources there are, who may read them, and one cache for all viewers."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from lakebed.console.live import LiveMetrics, totals
from lakebed.console.page import FAST_S, Counted, DataSource, PageQuery, PageRequest, PageSamples, PartPage
from lakebed.console.pages import PART_PAGES, OverviewPage, RunbookPage, StatusPage, levels
from lakebed.console.runs import RunsPage
from lakebed.console.sampler import LakeSampler
from lakebed.console.samples import DataError, DataSample, SampleCache
from lakebed.console.search import SearchPage
from lakebed.core.auth import Principal
from lakebed.core.clock import now_ms
from lakebed.core.context import Context
from lakebed.core.errors import Denied, LakebedError
from lakebed.core.logs import logger
from lakebed.core.trail import action_of_tenant
from lakebed.gateway.settings import GatewaySettings

STALE_MS = 150_000  # a level that was read longer ago says nothing about now: its state is grey

log = logger("console")


class PageData:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.samples = SampleCache(context.clock)
        self.trail = context.trail
        self.sampler = LakeSampler(
            context,
            count=self.count,
            refresh=self._refresh,
            levels=self.known_levels,
            own=lambda: {f"rate.{name}": value for name, value in totals(context.metrics).items()},
            stores=not context.settings.of(GatewaySettings).read_only,
        )
        self.live = LiveMetrics(context, self.levels, self.sampler.now)
        self.status = StatusPage(context)
        parts = [page(context) for page in PART_PAGES]
        self._overview = {name: source for page in parts for name, source in page.overview().items()}
        overview = OverviewPage(context, self._overview, self.status.health())
        others = (RunbookPage(context), SearchPage(context, parts))
        self.pages: dict[type[PartPage], PartPage] = {
            type(page): page for page in (overview, *parts, RunsPage(context), self.status, *others)
        }
        self._refreshing: asyncio.Task[Any] | None = None

    def page_of(self, action: str) -> PartPage:
        """The page that has this action."""
        return next(page for page in self.pages.values() if action in page.actions)

    def request(self, principal: Principal, query: PageQuery, *, patient: bool = False) -> PageRequest:
        """A request of this principal for a page."""

        async def read(sources: dict[str, DataSource]) -> PageSamples:
            return await self.read(principal, sources)

        return PageRequest(query, self.operator_actions(), read, principal.demand, patient)

    async def read(self, principal: Principal, sources: dict[str, DataSource]) -> PageSamples:
        """The latest sample of each source. What this principal may not read has an error, and is not read."""

        async def one(source: DataSource) -> DataSample:
            try:
                listed = source.owned is not None and source.right.split(":")[2:] in ([], ["*"])
                (principal.demand_list if listed else principal.demand)(source.right)
            except Denied as error:
                return DataSample(error=DataError(error.code, error.message, error.hint))
            found = await self._get(source.of(principal))
            if principal.tenant and source.owned and found.value is not None:
                own = [row for row in found.value if source.owned(principal, row)]
                return msgspec.structs.replace(found, value=own)
            return found

        found = await asyncio.gather(*(one(source) for source in sources.values()))
        return dict(zip(sources, found, strict=True))

    async def stop(self) -> None:
        await self.sampler.stop()
        await self.live.stop()
        if self._refreshing is not None:
            self._refreshing.cancel()
        await self.samples.stop()
        for page in self.pages.values():
            await page.stop()

    def operator_actions(self) -> DataSource:
        return DataSource("trail:read", "trail", FAST_S, self.trail.latest, owned=action_of_tenant)

    def levels(self) -> dict[str, float | None]:
        """The cached levels; old ones are read again in the background."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh())
        return self.known_levels()

    def known_levels(self) -> dict[str, float | None]:
        """Those that were read in the last STALE_MS; None for the others."""
        oldest = now_ms(self.context.clock) - STALE_MS

        def fresh(key: str) -> Any:
            sample = self.samples.last(key)
            return sample.value if sample.at_ms >= oldest else None

        return levels(fresh)

    async def count(self, from_ms: int, to_ms: int) -> Counted:
        """The growing numbers of every part; those of a part that fails are left out."""

        async def one(page: PartPage) -> Counted:
            try:
                return await page.count(from_ms, to_ms)
            except LakebedError as error:
                log.warning("a part was not counted", part=page.name, error=error.code, detail=error.message)
                return Counted()

        found = await asyncio.gather(*map(one, self.pages.values()))
        return Counted(
            {name: value for each in found for name, value in each.totals.items()},
            {name: value for each in found for name, value in each.added.items()},
        )

    async def _refresh(self) -> None:
        for source in self._overview.values():
            await self._get(source)

    async def _get(self, source: DataSource) -> DataSample:
        return await self.samples.get(
            source.key, source.ttl_s, source.load, timeout_s=source.timeout_s, patience_s=source.patience_s
        )
