"""The audit page: the last audit, one that runs now with its progress, and operator actions."""

from __future__ import annotations

from functools import partial
from typing import Any

from lakebed.batches.settings import ReconcilerSettings
from lakebed.console.page import FAST_S, SLOW_S, Action, DataSource, Fields, PageRequest, PageSamples, PartPage
from lakebed.console.runs import JobRunner, in_thread
from lakebed.core.context import Context
from lakebed.core.runs import ActiveRun, RunReader
from lakebed.pipeline.audit import stored
from lakebed.spark.progress import reporting
from lakebed.spark.settings import SparkSettings

RUN = "audit:run"


def audit(context: Context, quick: bool, run: ActiveRun) -> None:
    """The audit itself, in this thread."""
    from lakebed.pipeline.audit.job import BucketAuditor
    from lakebed.spark.session import open_session

    with reporting(run):
        spark = open_session(context.settings.of(SparkSettings))
        horizon_s = context.settings.of(ReconcilerSettings).gc_horizon_s
        stored.report_to(run, BucketAuditor(spark, context).run(horizon_s=horizon_s, verify=not quick))


async def _start(page: AuditPage, fields: Fields, who: str, reason: str) -> str:
    depth = "quick" if fields["depth"] == "quick" else "full"

    async def work(run: ActiveRun) -> None:
        await in_thread(partial(audit, page.context, depth == "quick", run))

    await page.jobs.begin(stored.AUDIT, depth, work, {"depth": depth})
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
        self.jobs, self._runs = JobRunner(context, self.name), RunReader(context, self.name)

    async def load(self, request: PageRequest) -> tuple[PageSamples, dict[str, Any]]:
        samples = await request.load(audit=self.audit(), run=self.run(), deeds=request.operator_actions)
        return samples, {"who": request.query.text("who"), "what": request.query.text("what")}

    async def stop(self) -> None:
        await self.jobs.stop()

    def audit(self) -> DataSource:
        return DataSource("audit:read", "audit.last", SLOW_S, lambda: stored.last(self.context))

    def run(self) -> DataSource:
        """The last audit that was started, here or elsewhere; its progress is as old as its last report."""
        return DataSource("audit:read", "audit.run", FAST_S, lambda: self._runs.latest(1))
