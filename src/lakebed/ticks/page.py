"""The ticks page: the latest ticks of each project, and the stages of one from its parts to gold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lakebed.console.page import (
    FAST_S,
    SLOW_S,
    Action,
    Counted,
    DataSource,
    Fields,
    PageRequest,
    PageSamples,
    PartPage,
    deferred,
    limited_list,
    link,
)
from lakebed.core.context import Context
from lakebed.ticks import paths, view
from lakebed.ticks.adapters import open_queue
from lakebed.ticks.auditor import DispatchAuditor
from lakebed.ticks.view import TickStage, TickView

PARTS = "parts"
BOX_W, BOX_H, GAP_X, GAP_Y = 176, 62, 24, 14
STEP_X, STEP_Y = BOX_W + GAP_X, BOX_H + GAP_Y


class Step(msgspec.Struct, frozen=True):
    stage: TickStage
    after_ms: int | None  # since the stage before, where both are known


def steps(stages: Sequence[TickStage]) -> list[Step]:
    """Each stage with the time that passed since the one before."""
    found: list[Step] = []
    before_ms = 0
    for stage in stages:
        end_ms = stage.end_ms or stage.at_ms
        found.append(Step(stage, end_ms - before_ms if before_ms and end_ms else None))
        before_ms = end_ms or before_ms
    return found


class LineageBox(msgspec.Struct, frozen=True):
    """A table, or the parts of the tick. `name` is as in a model: `silver.orders`."""

    name: str
    layer: str
    title: str
    note: str
    href: str
    x: int
    y: int


class LineageDrawing(msgspec.Struct, frozen=True):
    width: int
    height: int
    boxes: list[LineageBox]
    edges: list[str]  # paths
    box_w: int = BOX_W
    box_h: int = BOX_H


def lineage(tick: TickView) -> LineageDrawing:
    """Pure: from the parts of a tick to the tables that were made of it, a column for each step."""
    report = tick.report if isinstance(tick.report, dict) else {}
    silver = [step for step in report.get("silver", []) if isinstance(step, dict)]
    gold = [each for each in report.get("gold", []) if isinstance(each, dict) and each.get("table")]
    steps: list[dict[str, tuple[str, list[str]]]] = [
        {PARTS: (f"{tick.parts} parts", [])},
        {f"bronze.{name}": (f"version {version}", [PARTS]) for name, version in tick.versions.items()},
        {f"silver.{step['table']}": (_silver_note(step), [f"bronze.{step['table']}"]) for step in silver},
    ]
    left = {f"gold.{each['table']}": (f"{each.get('rows', 0):,} rows", list(each.get("sources", {}))) for each in gold}
    while left:  # a gold table stands behind those that it is made of
        ready = {name: made for name, made in left.items() if not set(made[1]) & (left.keys() - {name})} or dict(left)
        steps.append(ready)
        left = {name: made for name, made in left.items() if name not in ready}
    steps = [step for step in steps if step]
    boxes = {
        name: LineageBox(name, *_titled(name), note, _table_href(tick, name), column * STEP_X, row * STEP_Y)
        for column, step in enumerate(steps)
        for row, (name, (note, _)) in enumerate(step.items())
    }
    edges = [
        _edge(boxes[source], boxes[name])
        for step in steps
        for name, (_, sources) in step.items()
        for source in sources
        if source in boxes and source != name
    ]
    deepest = max(map(len, steps))
    width, height = len(steps) * STEP_X - GAP_X, deepest * STEP_Y - GAP_Y
    return LineageDrawing(width, height, list(boxes.values()), edges)


def _silver_note(step: dict[str, Any]) -> str:
    quarantined = int(step.get("quarantined", 0))
    return f"{int(step.get('good', 0)):,} rows" + (f", {quarantined:,} quarantined" if quarantined else "")


def _titled(name: str) -> tuple[str, str]:
    layer, _, table = name.partition(".")
    return (layer, table) if table else ("tick", name)


def _table_href(tick: TickView, name: str) -> str:
    layer, _, table = name.partition(".")
    folder = "bronze/ticks" if layer == "bronze" else layer
    return link("/tables", table=f"{folder}/{tick.org_id}/{tick.project_id}/{table}") if table else ""


def _edge(source: LineageBox, target: LineageBox) -> str:
    x1, y1, x2, y2 = source.x + BOX_W, source.y + BOX_H // 2, target.x, target.y + BOX_H // 2
    middle = (x1 + x2) // 2
    return f"M{x1} {y1} C{middle} {y1} {middle} {y2} {x2} {y2}"


async def _replay_tick(page: TicksPage, fields: Fields, who: str, reason: str) -> str:
    tick = paths.tick_id(fields["org"], fields["project"], fields["tick"])
    return f"sent as message {await page.auditor.replay(tick, reason)}"


async def _replay_letters(page: TicksPage, fields: Fields, who: str, reason: str) -> str:
    return f"{await open_queue(page.context).replay(100)} dead letters replayed"


class TicksPage(PartPage):
    name = "ticks"
    manual = "parts/ticks.md"
    path = "/ticks"
    title = "Ticks"
    about = "Each tick from its parts to gold."
    helpers = {"steps": steps, "lineage": lineage}
    actions = {
        "ticks.replay": Action(
            "Run silver again",
            "Replay",
            ("org", "project", "tick"),
            lambda f: f"ticks:operate:{f['org']}/{f['project']}",
            lambda f: "Clears the dispatch of the tick and sends its message again. Silver and gold are idempotent.",
            _replay_tick,
        ),
        "ticks.redrive": Action(
            "Replay dead letters",
            "Replay",
            (),
            lambda f: "ticks:operate:*",
            lambda f: "All messages that silver failed on go back into its queue, with a new retry count.",
            _replay_letters,
        ),
    }

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._auditor: DispatchAuditor | None = None

    async def load(self, request: PageRequest) -> tuple[PageSamples, dict[str, Any]]:
        query = request.query
        samples = await request.load(projects=self.projects(), silver=self.silver(), letters=self.letters())
        org, project, tick = query.text("org"), query.text("project"), query.text("tick")
        if not tick:
            newest = max(
                ((one.ticks[0].updated_at_ms, one) for one in samples["projects"].value or () if one.ticks),
                key=lambda pair: pair[0],
                default=None,
            )
            if newest is not None:
                one = newest[1]
                org, project, tick = one.org_id, one.project_id, one.ticks[0].tick_id
        if tick:
            samples |= await request.load(tick=self.tick(org, project, tick))
        return samples, {"org": org, "project": project, "tick": tick, "state": query.text("state")}

    def overview(self) -> dict[str, DataSource]:
        return {"silver": self.silver()}

    @staticmethod
    def levels(latest: Callable[[str], Any]) -> dict[str, float | None]:
        silver = latest("ticks.silver")
        return {
            "ticks_undispatched": None if silver is None else silver["undispatched"],
            "ticks_lag_s": None if silver is None else silver["lag_s"],
            "ticks_dead": None if silver is None else silver["dead"],
        }

    async def count(self, from_ms: int, to_ms: int) -> Counted:
        ticks, rows = await view.committed_between(self.context, from_ms, to_ms)
        return Counted(added={"ticks_committed": ticks, "ticks_rows": rows})

    @property
    def auditor(self) -> DispatchAuditor:
        if self._auditor is None:
            self._auditor = view.auditor(self.context)
        return self._auditor

    def projects(self) -> DataSource:
        return limited_list(
            "ticks:read",
            "ticks.standing",
            SLOW_S,
            lambda shows: view.project_statuses(self.context, shows=shows),
            "org_id",
        )

    def silver(self) -> DataSource:
        return DataSource("ticks:read", "ticks.silver", SLOW_S, lambda: view.silver_status(self.context, self.auditor))

    def letters(self) -> DataSource:
        return DataSource("ticks:read", "ticks.letters", SLOW_S, lambda: view.letters(self.context))

    def tick(self, org: str, project: str, tick: str) -> DataSource:
        make = deferred(lambda: view.view(self.context, paths.tick_id(org, project, tick)))
        return DataSource(f"ticks:read:{org}/{project}", f"ticks.view:{org}/{project}/{tick}", FAST_S, make)
