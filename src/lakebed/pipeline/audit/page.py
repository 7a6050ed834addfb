"""The audit page: the last audit, one that runs now with its progress, and operator actions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from lakebed.batches.settings import ReconcilerSettings
from lakebed.console.page import SLOW_S, Action, DataSource, Fields, PageRequest, PageSamples, PartPage
from lakebed.core.clock import now_ms
from lakebed.core.context import Context
from lakebed.core.errors import Conflict, LakebedError
from lakebed.core.logs import logger
from lakebed.pipeline.audit import stored
from lakebed.spark.progress import JobProgress, watching
from lakebed.spark.settings import SparkSettings

RUN = "audit:run"

log = logger("audit")


class AuditRun(msgspec.Struct, frozen=True):
    """An audit that was started here. `phase` is what it does now; `error` is why it was not completed."""

    running: bool = False
    started_at_ms: int = 0
    ended_at_ms: int = 0
    phase: str = ""
    tasks: int = 0
    tasks_done: int = 0
    error: str = ""
    audit_id: str = ""


class AuditRunner:
    """Runs one audit at a time, in a thread, as `lakebed audit` does. A gateway that stops ends it: nothing is lost."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.run = AuditRun()
        self._task: asyncio.Task[None] | None = None

    async def latest(self) -> AuditRun:
        return self.run

    def begin(self, *, quick: bool) -> None:
        """Raises Conflict while one runs."""
        if self.run.running:
            raise Conflict("an audit is running already", hint="wait for its end")
        self.run = AuditRun(True, now_ms(self._context.clock), phase="starting Spark")
        self._task = asyncio.create_task(self._run(quick))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, quick: bool) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[str] = loop.create_future()

        def post(call: Callable[..., Any], *args: Any) -> None:
            with suppress(RuntimeError):  # the gateway has stopped: nobody reads the result
                loop.call_soon_threadsafe(call, *args)

        def work() -> None:
            try:
                with watching(lambda progress: post(self._show, progress)):
                    found = self.audit(quick)
                post(_settle, done, found)
            except BaseException as error:
                post(_settle, done, error if isinstance(error, Exception) else OSError())

        threading.Thread(target=work, name="audit", daemon=True).start()  # Spark cannot be cancelled: nobody waits
        error, audit_id = "", ""
        try:
            audit_id = await done
        except LakebedError as failure:
            error = failure.message
        except Exception as failure:
            log.error("the audit was not completed", error=type(failure).__name__, exc_info=failure)
            error = f"failed: {type(failure).__name__}; run: lakebed audit"
        ended = now_ms(self._context.clock)
        self.run = msgspec.structs.replace(
            self.run, running=False, ended_at_ms=ended, phase="", error=error, audit_id=audit_id
        )

    def _show(self, progress: JobProgress) -> None:
        phase = "comparing" if progress.tasks else "starting Spark"
        self.run = msgspec.structs.replace(self.run, phase=phase, tasks=progress.tasks, tasks_done=progress.done)

    def audit(self, quick: bool) -> str:
        """The audit itself, in this thread. Gives its id."""
        from lakebed.pipeline.audit.job import BucketAuditor
        from lakebed.spark.session import open_session

        spark = open_session(self._context.settings.of(SparkSettings))
        horizon_s = self._context.settings.of(ReconcilerSettings).gc_horizon_s
        return BucketAuditor(spark, self._context).run(horizon_s=horizon_s, verify=not quick).audit_id


def _settle(done: asyncio.Future[str], result: str | Exception) -> None:
    if done.done():
        return  # the page was stopped meanwhile
    if isinstance(result, Exception):
        done.set_exception(result)
    else:
        done.set_result(result)


async def _start(page: AuditPage, fields: Fields, who: str, reason: str) -> str:
    page.runner.begin(quick=fields["depth"] == "quick")
    return "the audit runs; its progress is on this page"


class AuditPage(PartPage):
    name = "audit"
    manual = "parts/audit.md"
    path = "/audit"
    title = "Audit"
    about = "Samples at every stage from agent to gold, and operator actions."
    actions = {
        "audit.run": Action(
            "Run an audit",
            "Run",
            ("depth",),
            lambda f: RUN,
            lambda f: "Lists the bucket and compares it with all indexes, with Spark on this machine. Changes no data.",
            _start,
            needs_reason=False,
        ),
    }

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.runner = AuditRunner(context)

    async def load(self, request: PageRequest) -> tuple[PageSamples, dict[str, Any]]:
        samples = await request.load(audit=self.audit(), run=self.run(), deeds=request.operator_actions)
        return samples, {"who": request.query.text("who"), "what": request.query.text("what")}

    async def stop(self) -> None:
        await self.runner.stop()

    def audit(self) -> DataSource:
        return DataSource("audit:read", "audit.last", SLOW_S, lambda: stored.last(self.context))

    def run(self) -> DataSource:
        return DataSource("audit:read", "audit.run", 0.3, self.runner.latest)
