"""Where ticks and the Spark pipeline meet: the seams of one, filled by the other.

`ticks.pipeline = "twin"` runs without Spark on the twins, for tests and for looking around on a small machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from lakebed.context import Component, Context, Worker
from lakebed.errors import Unavailable
from lakebed.pipeline.settings import SparkSettings
from lakebed.store.settings import StoreSettings
from lakebed.ticks.adapters import open_audit, open_queue, open_vault
from lakebed.ticks.audit import COMMITTED
from lakebed.ticks.model import BronzeResult, BronzeTick, SilverResult, SilverTick
from lakebed.ticks.routes import TicksRoutes
from lakebed.ticks.seams import Bronze, SilverJob
from lakebed.ticks.settings import TicksSettings
from lakebed.ticks.twins import TwinBronze, TwinSilverJob
from lakebed.ticks.workers import workers as tick_workers


def component(context: Context) -> Component:
    return TicksRoutes(
        context,
        vault=open_vault(context),
        bronze=_bronze(context),
        queue=open_queue(context),
        committed=open_audit(context, COMMITTED),
    )


def workers(context: Context) -> Sequence[Worker]:
    return tick_workers(context, _silver(context))


def _bronze(context: Context) -> Bronze:
    return TwinBronze(context) if context.settings.of(TicksSettings).pipeline == "twin" else SparkBronze(context)


def _silver(context: Context) -> SilverJob:
    return TwinSilverJob(context) if context.settings.of(TicksSettings).pipeline == "twin" else SparkSilver(context)


class SparkBronze:
    """Bronze on Spark, in threads. The session starts in the background; until it is there, a finalize waits for it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._opened: Any = None
        self._opening = asyncio.Lock()

    async def commit(self, tick: BronzeTick) -> BronzeResult:
        from lakebed.pipeline.bronze import Tick

        bronze = await self._open()
        asked = Tick(tick.org_id, tick.project_id, tick.tick_id, tick.tables, tick.keys)
        done = await asyncio.to_thread(bronze.commit, asked)
        return BronzeResult(
            sum(table.rows_inserted for table in done),
            sum(table.rows_replaced for table in done),
            {table.name: table.version for table in done},
        )

    async def _open(self) -> Any:
        async with self._opening:
            if self._opened is None:
                self._opened = await asyncio.to_thread(self._build)
            return self._opened

    def _build(self) -> Any:
        from lakebed.pipeline.bronze import Bronze as Tables
        from lakebed.pipeline.session import open_session
        from lakebed.pipeline.tables.location import Location

        context = self._context
        return Tables(
            open_session(context.settings.of(SparkSettings)),
            store=context.store,
            location=Location.of(context.settings.of(StoreSettings)),
            clock=context.clock,
            ids=context.ids,
        )


class SparkSilver:
    """Silver on Spark, in threads."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def run(self, org_id: str, project_id: str, ticks: Sequence[SilverTick]) -> SilverResult:
        raise Unavailable("silver on Spark is not wired yet")
