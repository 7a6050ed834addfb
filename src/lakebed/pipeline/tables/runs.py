"""Runs that wrote to tables: loads into bronze, silver, models and maintenance; and how each runs again.

Silver of a tick is among the runs of ticks, with its tick.
"""

from __future__ import annotations

from functools import partial
from urllib.parse import urlencode

from lakebed.console.runs import RecordedRuns, in_thread
from lakebed.core.runs import RecordedRun, Work
from lakebed.pipeline.models.runs import COMPACTION, LOAD, MODELS, SILVER, VACUUM


class TablesRuns(RecordedRuns):
    part, right, again_right = "tables", "tables:read", "pipeline:run"
    repeats = (LOAD, SILVER, MODELS, COMPACTION, VACUUM)

    def href(self, run: RecordedRun) -> str:
        """Its table, or the tables of its project."""
        return "/tables" if run.kind in (SILVER, MODELS) else f"/tables?{urlencode({'table': run.subject})}"

    def work(self, run: RecordedRun) -> Work:
        return lambda active: in_thread(partial(self.repeat, run))

    def repeat(self, run: RecordedRun) -> None:
        """The job itself, in this thread, with Spark on this machine. What it reports is the run's."""
        if run.kind == LOAD:
            from lakebed.pipeline.bronze.ingestion import Ingestion

            Ingestion(self.context).run(only=[run.fields["word"]])
        elif run.kind in (COMPACTION, VACUUM):
            from lakebed.pipeline.tables.maintenance import TableMaintenance

            maintenance = TableMaintenance(self.context)
            (maintenance.compact if run.kind == COMPACTION else maintenance.vacuum)(run.subject)
        else:
            from lakebed.pipeline.runner import PipelineRunner

            runner, whose = PipelineRunner(self.context), (run.fields["org"], run.fields["project"])
            if run.kind == SILVER:
                runner.rebuild(*whose)
            else:
                runner.run_models(*whose, run.fields["models"].split() or None, trigger="command")
