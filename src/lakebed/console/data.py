"""The data of all pages: which sources there are, who may read them, and one cache for all viewers."""

from __future__ import annotations

import asyncio
from typing import Any

from lakebed.console.live import LiveMetrics
from lakebed.console.page import FAST_S, DataSource, PageQuery, PageRequest, PageSamples, PartPage
from lakebed.console.pages import PART_PAGES, OverviewPage, StatusPage, levels
from lakebed.console.samples import DataError, DataSample, SampleCache
from lakebed.core.auth import Principal
from lakebed.core.context import Context
from lakebed.core.errors import Denied


class PageData:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.samples = SampleCache(context.clock)
        self.trail = context.trail
        self.live = LiveMetrics(context.metrics, context.clock, self.levels)
        self.status = StatusPage(context)
        parts = [page(context) for page in PART_PAGES]
        self._overview = {name: source for page in parts for name, source in page.overview().items()}
        overview = OverviewPage(context, self._overview, self.status.health())
        self.pages: dict[type[PartPage], PartPage] = {type(page): page for page in (overview, *parts, self.status)}
        self._refreshing: asyncio.Task[Any] | None = None

    def page_of(self, action: str) -> PartPage:
        """The page that has this action."""
        return next(page for page in self.pages.values() if action in page.actions)

    def request(self, principal: Principal, query: PageQuery, *, patient: bool = False) -> PageRequest:
        """A request of this principal for a page."""

        async def read(sources: dict[str, DataSource]) -> PageSamples:
            return await self.read(principal, sources)

        return PageRequest(query, self.operator_actions(), read, patient)

    async def read(self, principal: Principal, sources: dict[str, DataSource]) -> PageSamples:
        """The latest sample of each source. What this principal may not read has an error, and is not read."""

        async def one(source: DataSource) -> DataSample:
            try:
                principal.demand(source.right)
            except Denied as error:
                return DataSample(error=DataError(error.code, error.message, error.hint))
            return await self._get(source)

        found = await asyncio.gather(*(one(source) for source in sources.values()))
        return dict(zip(sources, found, strict=True))

    async def stop(self) -> None:
        await self.live.stop()
        if self._refreshing is not None:
            self._refreshing.cancel()
        await self.samples.stop()
        for page in self.pages.values():
            await page.stop()

    def operator_actions(self) -> DataSource:
        return DataSource("console:read", "trail", FAST_S, self.trail.latest)

    def levels(self) -> dict[str, float | None]:
        """The cached levels; old ones are read again in the background."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh())
        return self.known_levels()

    def known_levels(self) -> dict[str, float | None]:
        return levels(lambda key: self.samples.last(key).value)

    async def _refresh(self) -> None:
        for source in self._overview.values():
            await self._get(source)

    async def _get(self, source: DataSource) -> DataSample:
        return await self.samples.get(
            source.key, source.ttl_s, source.load, timeout_s=source.timeout_s, patience_s=source.patience_s
        )
