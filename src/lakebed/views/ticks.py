"""Ticks as people look at them: the latest of every project, and each one's way from its parts to gold."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from lakebed.context import Context
from lakebed.errors import Corrupt, NotFound
from lakebed.ticks import paths
from lakebed.ticks.adapters import open_audit, open_queue
from lakebed.ticks.audit import COMMITTED, DISPATCHED, AuditRow
from lakebed.ticks.auditor import Auditor
from lakebed.ticks.finalizer import decode
from lakebed.ticks.model import CommitRecord, TickId, TickState
from lakebed.ticks.queue import Received
from lakebed.ticks.receiver import register_of
from lakebed.ticks.standing import ProjectStatus, project_status

PROJECTS_MAX = 50
TICKS_SHOWN = 30  # of one project
LETTERS_MAX = 100

StageState = Literal["done", "running", "failed", "waiting"]


class Stage(msgspec.Struct, frozen=True):
    """One step of a tick's way. `at_ms` is 0 for a step that has not been reached."""

    name: str
    state: StageState
    at_ms: int = 0
    end_ms: int = 0
    detail: str = ""


class TickView(msgspec.Struct, frozen=True):
    org_id: str
    project_id: str
    tick_id: str
    state: str
    parts: int
    size_bytes: int
    stages: list[Stage]
    versions: dict[str, int] = {}
    report: Any = None
    message: str = ""


def auditor(context: Context) -> Auditor:
    return Auditor(
        context,
        queue=open_queue(context),
        committed=open_audit(context, COMMITTED),
        dispatched=open_audit(context, DISPATCHED),
    )


async def projects(context: Context) -> list[tuple[str, str]]:
    """Every org and project that has ticks."""
    root = f"{paths.ROOT}/state/"
    found = [
        (org, project)
        for org in await context.store.children(root)
        for project in await context.store.children(f"{root}{org}/")
    ]
    return found[:PROJECTS_MAX]


async def standing(context: Context, org_id: str = "", project_id: str = "") -> list[ProjectStatus]:
    """How every project stands, or one of them, with its latest ticks."""
    chosen = [
        (org, project)
        for org, project in await projects(context)
        if org_id in ("", org) and project_id in ("", project)
    ]
    found = [await project_status(context, org, project) for org, project in chosen]
    return [msgspec.structs.replace(one, ticks=one.ticks[:TICKS_SHOWN]) for one in found]


async def silver_status(context: Context, watch: Auditor | None = None) -> dict[str, Any]:
    """How many messages wait, are in hand and are dead, and how far silver is behind."""
    watch = watch or auditor(context)
    depth, behind = await open_queue(context).depth(), await watch.undispatched()
    lag_s = round(max((each.age_s for each in behind), default=0.0), 1)
    return {**msgspec.to_builtins(depth), "undispatched": len(behind), "lag_s": lag_s}


async def letters(context: Context, count: int = LETTERS_MAX) -> list[dict[str, Any]]:
    """Messages that silver could not work on."""
    return [_letter(letter) for letter in await open_queue(context).dead_letters(count)]


async def view(context: Context, tick: TickId) -> TickView:
    """A tick's way, from what is stored of it. Raises NotFound."""
    state = (await register_of(context, tick).read()).value
    if not state.exists:
        raise NotFound(f"there is no tick {tick.path}", hint="old ticks are swept; lakebed ticks status lists the rest")
    try:
        commit: CommitRecord | None = decode(await context.store.get(paths.commit(tick)))
    except NotFound:
        commit = None
    dispatched = await open_audit(context, DISPATCHED).get(tick)
    report = _report(dispatched)
    return TickView(
        org_id=tick.org_id,
        project_id=tick.project_id,
        tick_id=tick.tick_id,
        state=state.state,
        parts=len(state.parts),
        size_bytes=sum(part.size_bytes for part in state.parts.values()),
        stages=stages(state, commit, dispatched, report),
        versions=commit.bronze.versions if commit else {},
        report=report,
        message=state.failure.message if state.failure else "",
    )


def stages(state: TickState, commit: CommitRecord | None, dispatched: AuditRow | None, report: Any) -> list[Stage]:
    """Pure: parts → finalize → bronze → silver → gold, each with its time and how it stands."""
    received = sorted(part.received_at_ms for part in state.parts.values())
    found = [
        Stage(
            "parts",
            "done" if state.state != "uploading" else "running",
            received[0] if received else state.created_at_ms,
            received[-1] if received else 0,
            f"{len(received)} parts" if received else "swept, or none yet",
        )
    ]
    if state.failure is not None:
        failed = Stage("finalize", "failed", state.updated_at_ms, 0, state.failure.error_class)
        return [*found, failed, *(Stage(name, "waiting") for name in ("bronze", "silver", "gold"))]
    if commit is None:
        now: StageState = "running" if state.state == "finalizing" else "waiting"
        at = state.updated_at_ms if now == "running" else 0
        return [*found, Stage("finalize", now, at), *(Stage(name, "waiting") for name in ("bronze", "silver", "gold"))]
    asked_ms = received[-1] if received else commit.committed_at_ms
    found.append(Stage("finalize", "done", asked_ms, commit.committed_at_ms, f"{commit.mode}, one conditional write"))
    rows = f"{commit.bronze.rows_inserted} inserted, {commit.bronze.rows_replaced} replaced"
    found.append(Stage("bronze", "done", commit.committed_at_ms, 0, rows))
    return found + _downstream(dispatched, report)


def _downstream(dispatched: AuditRow | None, report: Any) -> list[Stage]:
    if dispatched is None:
        return [Stage("silver", "waiting", detail="its message waits"), Stage("gold", "waiting")]
    state: StageState = {"done": "done", "failed": "failed"}.get(dispatched.state, "running")  # type: ignore[assignment]
    tries = dispatched.fields.get("tries", 1)
    told = f"try {tries}" if state == "running" else str(dispatched.fields.get("detail", ""))[:200]
    if state != "done":
        return [Stage("silver", state, dispatched.at_ms, 0, told), Stage("gold", "waiting")]
    steps = report.get("silver", []) if isinstance(report, dict) else []
    rows = ", ".join(f"{step['table']}: {step['good']} good, {step['quarantined']} quarantined" for step in steps)
    made = report.get("gold", []) if isinstance(report, dict) else []
    tables = ", ".join(str(each.get("table", each.get("name", ""))) for each in made if isinstance(each, dict))
    return [
        Stage("silver", "done", dispatched.at_ms, 0, rows or "no contract asks for its tables"),
        Stage("gold", "done", dispatched.at_ms, 0, tables or "no model"),
    ]


def _report(row: AuditRow | None) -> Any:
    """What a finished job said of itself, as it said it."""
    if row is None or row.state != "done":
        return None
    try:
        return msgspec.json.decode(str(row.fields.get("detail", "")))
    except msgspec.DecodeError:
        return None


def _letter(letter: Received) -> dict[str, Any]:
    row = {"message_id": letter.message_id, "receives": letter.receive_count}
    try:
        return {**row, **msgspec.to_builtins(letter.message())}
    except Corrupt as error:
        return {**row, "tick_id": "", "error": error.message, "body": letter.body[:200]}
