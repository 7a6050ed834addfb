"""Where ticks and the Spark pipeline meet: the seams of one, filled by the other.

`ticks.pipeline = "twin"` runs without Spark on the twins, for tests and for looking around on a small machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from lakebed.context import Component, Context, Worker
from lakebed.pipeline.flow_settings import FlowSettings
from lakebed.ticks.adapters import open_audit, open_queue, open_vault
from lakebed.ticks.audit import COMMITTED
from lakebed.ticks.model import BronzeResult, BronzeTick, SilverResult, SilverTick
from lakebed.ticks.routes import TicksRoutes
from lakebed.ticks.seams import Bronze, SilverJob
from lakebed.ticks.settings import TicksSettings
from lakebed.ticks.twins import TwinBronze, TwinSilverJob
from lakebed.ticks.workers import workers as tick_workers

if TYPE_CHECKING:
    from lakebed.pipeline.flow import Flow


def component(context: Context) -> Component:
    bronze: Bronze = TwinBronze(context) if _twin(context) else _spark(context)
    return TicksRoutes(
        context,
        vault=open_vault(context),
        bronze=bronze,
        queue=open_queue(context),
        committed=open_audit(context, COMMITTED),
    )


def workers(context: Context) -> Sequence[Worker]:
    job: SilverJob = TwinSilverJob(context) if _twin(context) else SparkPipeline(context)
    return tick_workers(context, job)


class SparkPipeline:
    """Bronze and silver on Spark, in threads. Spark is loaded and started by the first tick, or by `warm`."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def warm(self) -> None:
        self._flow.warm()

    async def commit(self, tick: BronzeTick) -> BronzeResult:
        return await asyncio.to_thread(self._commit, tick)

    async def run(self, org_id: str, project_id: str, ticks: Sequence[SilverTick]) -> SilverResult:
        return await asyncio.to_thread(self._run, org_id, project_id, ticks)

    def _commit(self, tick: BronzeTick) -> BronzeResult:
        from lakebed.pipeline.bronze import Tick

        done = self._flow.bronze.commit(Tick(tick.org_id, tick.project_id, tick.tick_id, tick.tables, tick.keys))
        return BronzeResult(
            sum(table.rows_inserted for table in done),
            sum(table.rows_replaced for table in done),
            {table.name: table.version for table in done},
        )

    def _run(self, org_id: str, project_id: str, ticks: Sequence[SilverTick]) -> SilverResult:
        versions: dict[str, int] = {}
        for tick in ticks:
            for name, version in tick.versions.items():
                versions[name] = max(version, versions.get(name, version))
        report = self._flow.run_silver(org_id, project_id, [tick.tick_id for tick in ticks], versions)
        return SilverResult(msgspec.to_builtins(report))

    @cached_property
    def _flow(self) -> Flow:
        from lakebed.pipeline.flow import Flow

        return Flow(self._context)


def _spark(context: Context) -> SparkPipeline:
    pipeline = SparkPipeline(context)
    if context.settings.of(FlowSettings).warm:
        pipeline.warm()
    return pipeline


def _twin(context: Context) -> bool:
    return context.settings.of(TicksSettings).pipeline == "twin"
