"""Runs of the roller, and how it runs again."""

from __future__ import annotations

from functools import partial

from lakebed.console.runs import RecordedRuns
from lakebed.core.runs import RecordedRun, Work
from lakebed.rollups.workers import ROLLUP, rolled, roller


class RollupRuns(RecordedRuns):
    part, right, again_right, repeats = "rollups", "batches:read", "batches:admin", (ROLLUP,)

    def href(self, run: RecordedRun) -> str:
        return "/batches"

    def work(self, run: RecordedRun) -> Work:
        return partial(rolled, roller(self.context))
