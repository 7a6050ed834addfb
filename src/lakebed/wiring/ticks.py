"""Joins ticks with the Spark pipeline: the pipeline implements the interfaces that ticks declares, and one worker
brings every source to silver and gold.

`ticks.pipeline = "twin"` uses the fakes instead of Spark, for tests and small machines.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from lakebed.core.context import Component, Context, Health, Worker
from lakebed.core.errors import LakebedError
from lakebed.core.logs import logger
from lakebed.gateway.settings import GatewaySettings
from lakebed.pipeline.settings import PipelineSettings
from lakebed.pipeline.workers import maintenance_workers, pipeline_loops, repeated, retention_workers
from lakebed.store.settings import StoreSettings
from lakebed.ticks.adapters import open_audit, open_queue, open_vault
from lakebed.ticks.audit import COMMITTED, DISPATCHED
from lakebed.ticks.dispatcher import Dispatcher
from lakebed.ticks.fakes import FakeBronze, FakeSilverJob
from lakebed.ticks.model import BronzeResult, BronzeTick, SilverResult, SilverTick
from lakebed.ticks.routes import FINALIZE_S, TicksRoutes
from lakebed.ticks.settings import TicksSettings
from lakebed.ticks.workers import workers as tick_workers

if TYPE_CHECKING:
    from lakebed.pipeline.runner import PipelineRunner
    from lakebed.spark.session import SparkPage

log = logger("pipeline")


COMMITS_MAX = 64  # commits at once in a process: one for each org, mostly waiting for Spark


def component(context: Context) -> Component:
    drain_s = context.settings.of(GatewaySettings).drain_s
    if drain_s < FINALIZE_S:
        log.warning("gateway.drain_s is shorter than a finalize may take", drain_s=drain_s, finalize_s=FINALIZE_S)
    seams: dict[str, Any] = {
        "vault": open_vault(context),
        "queue": open_queue(context),
        "committed": open_audit(context, COMMITTED),
    }
    if context.settings.of(TicksSettings).pipeline == "twin":
        return TicksRoutes(context, bronze=FakeBronze(context), **seams)
    flow = SparkFlow(context)
    return WarmTicks(context, flow=flow, bronze=SparkBronze(flow), **seams)


def workers(context: Context) -> Sequence[Worker]:
    twin = context.settings.of(TicksSettings).pipeline == "twin"
    bronze = FakeBronze(context) if twin else SparkBronze(SparkFlow(context))
    return [*tick_workers(context, bronze), *silver_workers(context)]


def bronze_workers(context: Context) -> Sequence[Worker]:
    return [*maintenance_workers(context), *silver_workers(context)]


def pipeline_workers(context: Context) -> Sequence[Worker]:
    return [*retention_workers(context), *silver_workers(context)]


def silver_workers(context: Context) -> Sequence[Worker]:
    """The one worker that brings every source to silver and gold: it dispatches committed ticks, loads batches, topics
    and queues into bronze, and runs models that are due. The parts ticks, bronze, silver and pipeline name it, and a
    process runs it once; `lakebed work --parts silver` has nothing beside it.
    """
    twin = context.settings.of(TicksSettings).pipeline == "twin"
    flow = SparkFlow(context)
    dispatch = Dispatcher(
        context,
        queue=open_queue(context),
        dispatched=open_audit(context, DISPATCHED),
        job=FakeSilverJob(context) if twin else SparkSilver(flow),
    )

    async def run() -> None:
        if context.settings.of(PipelineSettings).contracts and not twin:
            await flow.warm()  # without contracts nothing needs Spark, and the gateway's is enough for a whole stack
        loops = pipeline_loops(context, flow.open)
        # alone, its error restarts the worker; beside others, a restart would cut what they do
        loops.append(
            partial(repeated, context, "ticks could not be dispatched", dispatch.run) if loops else dispatch.run
        )
        tasks = [asyncio.create_task(loop()) for loop in loops]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    return [Worker("pipeline", run)]


class WarmTicks(TicksRoutes):
    """Starts Spark in the background while the gateway already serves; its health shows the state of Spark."""

    def __init__(self, context: Context, *, flow: SparkFlow, **seams: Any) -> None:
        super().__init__(context, **seams)
        self._flow = flow
        self._warming: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await super().start()
        self._warming = asyncio.create_task(self._flow.warm())

    async def stop(self) -> None:
        if self._warming is not None:
            self._warming.cancel()
        await super().stop()

    async def health(self) -> Health:
        found = await super().health()
        return msgspec.structs.replace(found, detail=f"{found.detail}; Spark: {self._flow.state}")


class SparkFlow:
    """The pipeline of this process, made on first use: a command that writes no table loads no Spark."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._opened: Any = None
        self._opening = asyncio.Lock()

    async def open(self) -> PipelineRunner:
        async with self._opening:
            if self._opened is None:
                self._opened = await asyncio.to_thread(self._make)
            opened: PipelineRunner = self._opened
            return opened

    @property
    def state(self) -> str:
        session = sys.modules.get("lakebed.spark.session")  # this loads no Spark
        return str(session.state()) if session else "off"

    def page(self) -> SparkPage | None:
        """Where Spark shows its jobs; None where it did not start, as for ticks without a contract."""
        session = sys.modules.get("lakebed.spark.session")  # this loads no Spark
        return session.page() if session else None

    async def warm(self) -> None:
        """Starts the session in the background, if the settings say so and the store can hold tables."""
        wanted = self._context.settings.of(PipelineSettings).warm
        if wanted and self._context.settings.of(StoreSettings).url.startswith("s3://"):
            try:
                await asyncio.to_thread((await self.open()).warm)
            except LakebedError as error:  # the first job raises it again
                log.warning("Spark did not start", error=error.message, hint=error.hint)

    def _make(self) -> PipelineRunner:
        from lakebed.pipeline.runner import PipelineRunner

        return PipelineRunner(self._context)


class SparkBronze:
    """Bronze on Spark, in threads of its own: the orgs' commits do not wait for each other, nor for the rest of the
    process, whose default threads are as few as its cores and four. A finalize waits until the session has started.
    """

    def __init__(self, flow: SparkFlow, *, commits_max: int = COMMITS_MAX) -> None:
        self._flow = flow
        self._threads = ThreadPoolExecutor(commits_max, thread_name_prefix="bronze-commit")

    async def commit(self, tick: BronzeTick) -> BronzeResult:
        flow = await self._flow.open()
        done = await asyncio.get_running_loop().run_in_executor(self._threads, flow.commit, tick)
        return BronzeResult(
            sum(table.rows_inserted for table in done),
            sum(table.rows_replaced for table in done),
            {table.name: table.version for table in done},
        )


class SparkSilver:
    """Silver and gold on Spark, in threads: each bronze table at the latest version that the ticks of the job name."""

    def __init__(self, flow: SparkFlow) -> None:
        self._flow = flow

    async def run(self, org_id: str, project_id: str, ticks: Sequence[SilverTick]) -> SilverResult:
        flow = await self._flow.open()
        versions: dict[str, int] = {}
        for tick in ticks:
            for table, version in tick.versions.items():
                versions[table] = max(version, versions.get(table, -1))
        names = [tick.tick_id for tick in ticks]
        anew = {table for tick in ticks if tick.replay for table in tick.versions}
        try:
            report = await asyncio.to_thread(
                flow.run_silver, org_id, project_id, names, versions, anew=anew, raises=False
            )
        finally:  # of a failed job too: its log says where to look
            page = self._flow.page()
            if page is not None:
                log.info("Spark ran the job", application=page.application, page=page.address or "off: spark.ui")
        detail = msgspec.to_builtins(report)
        return SilverResult(detail if page is None else detail | {"spark": msgspec.to_builtins(page)})
