"""Runs of the reconciler, of garbage collection and of retention, and how the reconciler runs again."""

from __future__ import annotations

from functools import partial

from lakebed.batches import workers
from lakebed.batches.incremental import SCAN
from lakebed.console.runs import RecordedRuns
from lakebed.core.runs import ActiveRun, RecordedRun, Work


class BatchesRuns(RecordedRuns):
    part, right, again_right, repeats = "batches", "batches:read", "batches:admin", (SCAN, workers.COLD)

    def href(self, run: RecordedRun) -> str:
        return "/batches"

    def work(self, run: RecordedRun) -> Work:
        role = workers.reconciler(self.context)
        if run.kind == workers.COLD:
            return partial(workers.audited, role)

        async def scanned(run: ActiveRun) -> None:
            (await workers.incremental_scan(self.context, role).scan()).report_to(run)

        return scanned
