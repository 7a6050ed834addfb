"""Runs of ticks and of silver, from the ticks' states and the rows of their dispatch."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from lakebed.console.runs import RecordedRuns, RunRecord, RunState, run_link
from lakebed.core.runs import RecordedRun
from lakebed.ticks import view
from lakebed.ticks.adapters import open_audit
from lakebed.ticks.audit import DISPATCHED, LOG, AuditRow
from lakebed.ticks.model import TickId
from lakebed.ticks.view import ProjectStatus, TickStatus

STATES: dict[str, RunState] = {"committed": "done", "failed": "failed", "uploading": "waiting"}


class TicksRuns(RecordedRuns):
    """Ticks, their silver jobs, and finalizes that failed or take long."""

    part, right = "ticks", "ticks:read"

    async def latest(self, limit: int) -> list[RunRecord]:
        """The cost of the ticks page, and one request for each of the last committed ticks; and recorded runs."""
        ticks = [(one, tick) for one in await view.project_statuses(self.context) for tick in one.ticks]
        newest = sorted(ticks, key=lambda pair: pair[1].updated_at_ms, reverse=True)[: limit // 2]
        rows = open_audit(self.context, DISPATCHED)
        found: list[RunRecord] = await super().latest(limit // 2)
        for project, tick in newest:
            found.append(_tick(project, tick))
            if tick.state == "committed":
                row = await rows.get(TickId(project.org_id, project.project_id, tick.tick_id))
                found += [silver(row, tick)] if row is not None else []
        return found

    def href(self, run: RecordedRun) -> str:
        return f"/ticks?{urlencode(run.fields)}"


def _tick(project: ProjectStatus, tick: TickStatus) -> RunRecord:
    named = {"org": project.org_id, "project": project.project_id, "tick": tick.tick_id}
    rows = None if tick.rows_inserted is None else tick.rows_inserted + (tick.rows_replaced or 0)
    href = f"/ticks?{urlencode(named)}"
    return RunRecord(
        "tick",
        f"{project.org_id}/{project.project_id}/{tick.tick_id}",
        STATES.get(tick.state, "running"),
        tick.updated_at_ms,
        tick.created_at_ms,
        rows_in=tick.rows_sent,
        rows_out=rows,
        reason=tick.message or f"{tick.parts} parts",
        href=href,
        log_href=run_link(tick.run) if tick.run else href if tick.logged else "",
    )


def silver(row: AuditRow, tick: TickStatus) -> RunRecord:
    """Pure: the job of one tick. Its start is the tick's commit, where that is known to be earlier."""
    state: RunState = {"done": "done", "failed": "failed"}.get(row.state, "running")  # type: ignore[assignment]
    report: Any = view.report_of(row)
    steps = report.get("silver", []) if isinstance(report, dict) else []
    named = {"org": row.org_id, "project": row.project_id, "tick": row.tick_id}
    href = f"/ticks?{urlencode(named)}"
    started = tick.updated_at_ms if 0 < tick.updated_at_ms <= row.at_ms else 0
    return RunRecord(
        "silver and gold",
        f"{row.org_id}/{row.project_id}/{row.tick_id}",
        state,
        row.at_ms,
        started,
        rows_in=sum(int(step.get("rows_in", 0)) for step in steps) if steps else None,
        rows_out=sum(int(step.get("good", 0)) for step in steps) if steps else None,
        reason="" if state == "done" else str(row.fields.get("detail", ""))[:200],
        href=href,
        action="ticks.replay",
        fields=named,
        spark_page=view.spark_page(report),
        log_href=href if LOG in row.fields else "",
    )
