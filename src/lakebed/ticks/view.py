"""Ticks for the CLI and the console: the latest of every project, and the stages of one from its parts to gold."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from lakebed.core.auth import Shows, every_name
from lakebed.core.clock import now_ms
from lakebed.core.context import Context
from lakebed.core.errors import Corrupt, Invalid, NotFound
from lakebed.core.runs import read_run
from lakebed.store.lease import Lease
from lakebed.store.model import read_record
from lakebed.ticks import commit_times, paths
from lakebed.ticks.adapters import open_audit, open_queue
from lakebed.ticks.audit import COMMITTED, DISPATCHED, LOG, AuditRow
from lakebed.ticks.auditor import DispatchAuditor
from lakebed.ticks.model import CommitRecord, TickId, TickState
from lakebed.ticks.queue import ReceivedMessage
from lakebed.ticks.receiver import register_of

TICKS_MAX = 100  # the latest ticks of a project; ids start with their time
READS_AT_ONCE = 16
COUNTED_MAX = 500  # ticks read by one count
FINISHED_MS = 60_000  # a commit is noted so long before its state has the result, at most
LOOK_BACK_S = (86_400.0, 30 * 86_400.0)  # the latest are searched here before everything is listed
LISTED_MAX = 20_000  # keys of one such search


class TickStatus(msgspec.Struct, frozen=True):
    tick_id: str
    state: str
    parts: int
    size_bytes: int
    updated_at_ms: int
    rows_inserted: int | None = None
    rows_replaced: int | None = None
    error_class: str | None = None
    message: str | None = None
    created_at_ms: int = 0
    rows_sent: int | None = None  # by its manifest
    run: str = ""  # the record of the finalize that failed
    logged: bool = False  # its state has the log of the finalize that committed it


class ProjectStatus(msgspec.Struct, frozen=True):
    org_id: str
    project_id: str
    owner: str
    states: dict[str, int]
    ticks: tuple[TickStatus, ...]


async def project_status(context: Context, org_id: str, project_id: str) -> ProjectStatus:
    """The latest ticks of a project, newest first, and its owner; empty when no replica owns it now."""
    listed = await _latest(context, paths.states(org_id, project_id))
    names = [key.rpartition("/")[2].removesuffix(".json") for key in listed]
    read = await _states(context, [TickId(org_id, project_id, name) for name in reversed(names)])
    found = [state for state in read if state.exists]
    states: dict[str, int] = {}
    for state in found:
        states[state.state] = states.get(state.state, 0) + 1
    return ProjectStatus(
        org_id, project_id, await _owner(context, org_id, project_id), states, tuple(map(_tick_status, found))
    )


async def _states(context: Context, ticks: Iterable[TickId]) -> list[TickState]:
    gate = asyncio.Semaphore(READS_AT_ONCE)

    async def read(tick: TickId) -> TickState:
        async with gate:
            return (await register_of(context, tick).read()).value

    return await asyncio.gather(*map(read, ticks))


async def _latest(context: Context, folder: str) -> list[str]:
    """The keys of the latest ticks, oldest first: of the last day, else further back, within a limit of listed keys."""
    found: list[str] = []
    now_s = now_ms(context.clock) / 1000
    for after in (*(f"{folder}{_stamp(now_s - back_s)}" for back_s in LOOK_BACK_S), ""):
        seen, count = deque[str](maxlen=TICKS_MAX), 0
        async for info in context.store.list(folder, after=after):
            seen.append(info.key)
            count += 1
            if count == LISTED_MAX:
                break
        if count == LISTED_MAX and found:
            break  # too many to list to the end: the shorter search found later ones
        found = list(seen)
        if count >= TICKS_MAX:
            break
    return found


def _stamp(at_s: float) -> str:
    """The start of a tick's id."""
    return datetime.fromtimestamp(max(0.0, at_s), UTC).strftime("%Y%m%dT%H%M%S")


async def _owner(context: Context, org_id: str, project_id: str) -> str:
    lease = Lease(context, paths.lease(org_id, project_id), owner=context.node, lease_s=1.0)
    record = await lease.holder()
    return record.owner if record.expires_at_ms > now_ms(context.clock) else ""


def _tick_status(state: TickState) -> TickStatus:
    result, failure = state.result, state.failure
    return TickStatus(
        tick_id=state.tick_id,
        state=state.state,
        parts=len(state.parts),
        size_bytes=sum(part.size_bytes for part in state.parts.values()),
        updated_at_ms=state.updated_at_ms,
        rows_inserted=result.rows_inserted if result else None,
        rows_replaced=result.rows_replaced if result else None,
        error_class=failure.error_class if failure else None,
        message=failure.message if failure else None,
        created_at_ms=state.created_at_ms,
        rows_sent=_rows_sent(state.manifest),
        run=failure.run if failure else "",
        logged=bool(state.log),
    )


def _rows_sent(manifest: Any) -> int | None:
    tables = manifest.get("tables") if isinstance(manifest, dict) else None
    counts = [each.get("row_count") for each in tables if isinstance(each, dict)] if isinstance(tables, list) else []
    return sum(count for count in counts if isinstance(count, int)) if counts else None


PROJECTS_MAX = 50
TICKS_SHOWN = 30  # of one project
LETTERS_MAX = 100

StageState = Literal["done", "running", "failed", "waiting"]


class TickStage(msgspec.Struct, frozen=True):
    """One stage of a tick. `at_ms` is 0 for a stage that was not reached."""

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
    stages: list[TickStage]
    versions: dict[str, int] = {}
    report: Any = None
    message: str = ""
    log: str = ""  # what the finalize logged, and then the silver job
    spark_page: str = ""  # where Spark shows the jobs of its session, while that runs


def auditor(context: Context) -> DispatchAuditor:
    return DispatchAuditor(
        context,
        queue=open_queue(context),
        committed=open_audit(context, COMMITTED),
        dispatched=open_audit(context, DISPATCHED),
    )


async def projects(
    context: Context, org_id: str = "", project_id: str = "", *, shows: Shows = every_name
) -> list[tuple[str, str]]:
    """Every org that it `shows` and project that has ticks, or those that are asked for; up to a limit."""
    root = f"{paths.ROOT}/state/"
    found = [
        (org, project)
        for org in await context.store.children(root)
        if org_id in ("", org) and shows(org)
        for project in await context.store.children(f"{root}{org}/")
        if project_id in ("", project)
    ]
    return found[:PROJECTS_MAX]


async def project_statuses(
    context: Context, org_id: str = "", project_id: str = "", *, shows: Shows = every_name
) -> list[ProjectStatus]:
    """The status of every project, or of one, with its latest ticks."""
    chosen = await projects(context, org_id, project_id, shows=shows)
    found = [await project_status(context, org, project) for org, project in chosen]
    return [msgspec.structs.replace(one, ticks=one.ticks[:TICKS_SHOWN]) for one in found]


async def committed_between(context: Context, from_ms: int, to_ms: int) -> tuple[int, int]:
    """Ticks committed in (from_ms, to_ms] and their rows, by any replica, whatever the time in their id.

    Lists the notes of commits from FINISHED_MS before the span on, and reads the states of at most COUNTED_MAX ticks.
    """
    noted: set[TickId] = set()
    async for at_ms, tick in commit_times.since(context, from_ms - FINISHED_MS):
        if at_ms > to_ms or len(noted) == COUNTED_MAX:
            break
        noted.add(tick)
    states = [state for state in await _states(context, noted) if from_ms < state.updated_at_ms <= to_ms]
    results = [state.result for state in states if state.result is not None]
    return len(results), sum(result.rows_inserted + result.rows_replaced for result in results)


async def silver_status(context: Context, watch: DispatchAuditor | None = None) -> dict[str, Any]:
    """How many messages wait, are in flight and are dead, and the lag of silver."""
    watch = watch or auditor(context)
    depth, behind = await open_queue(context).depth(), await watch.undispatched()
    lag_s = round(max((each.age_s for each in behind), default=0.0), 1)
    return {**msgspec.to_builtins(depth), "undispatched": len(behind), "lag_s": lag_s}


async def letters(context: Context, count: int = LETTERS_MAX) -> list[dict[str, Any]]:
    """Messages that silver could not process."""
    return [_letter(letter) for letter in await open_queue(context).dead_letters(count)]


async def view(context: Context, tick: TickId) -> TickView:
    """A tick's stages, from what is stored of it. Raises NotFound."""
    state = (await register_of(context, tick).read()).value
    if not state.exists:
        raise NotFound(f"no tick {tick.path}", hint="old ticks are swept; lakebed ticks status lists the rest")
    try:
        commit: CommitRecord | None = read_record(await context.store.get(paths.commit(tick)), CommitRecord)
    except NotFound:
        commit = None
    dispatched = await open_audit(context, DISPATCHED).get(tick)
    report = report_of(dispatched)
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
        log="\n".join(filter(None, (await _finalize_log(context, state), _silver_log(dispatched)))),
        spark_page=spark_page(report),
    )


async def _finalize_log(context: Context, state: TickState) -> str:
    if state.failure is None or not state.failure.run:
        return "\n".join(state.log)
    with suppress(NotFound, Corrupt, Invalid):  # records are kept for less long than ticks
        return "\n".join((await read_run(context, state.failure.run)).log)
    return ""


def _silver_log(dispatched: AuditRow | None) -> str:
    return str(dispatched.fields.get(LOG, "")) if dispatched else ""


def spark_page(report: Any) -> str:
    """The address in the report of a job, where it is one."""
    spark = report.get("spark") if isinstance(report, dict) else None
    address = str(spark.get("address", "")) if isinstance(spark, dict) else ""
    return address if address.startswith(("http://", "https://")) else ""


def stages(state: TickState, commit: CommitRecord | None, dispatched: AuditRow | None, report: Any) -> list[TickStage]:
    """Pure: parts → finalize → bronze → silver → gold, each with its time and state."""
    received = sorted(part.received_at_ms for part in state.parts.values())
    found = [
        TickStage(
            "parts",
            "done" if state.state != "uploading" else "running",
            received[0] if received else state.created_at_ms,
            received[-1] if received else 0,
            f"{len(received)} parts" if received else "deleted, or none yet",
        )
    ]
    if state.failure is not None:
        failed = TickStage("finalize", "failed", state.updated_at_ms, 0, state.failure.error_class)
        return [*found, failed, *_waiting("bronze", "silver", "gold")]
    if commit is None:
        now: StageState = "running" if state.state == "finalizing" else "waiting"
        at = state.updated_at_ms if now == "running" else 0
        return [
            *found,
            TickStage("finalize", now, at),
            *_waiting("bronze", "silver", "gold"),
        ]
    requested_ms = received[-1] if received else commit.committed_at_ms
    found.append(
        TickStage("finalize", "done", requested_ms, commit.committed_at_ms, f"{commit.mode}, one conditional write")
    )
    rows = f"{commit.bronze.rows_inserted} inserted, {commit.bronze.rows_replaced} replaced"
    found.append(TickStage("bronze", "done", commit.committed_at_ms, 0, rows))
    return found + _downstream(dispatched, report)


def _waiting(*names: str) -> list[TickStage]:
    return [TickStage(name, "waiting") for name in names]


def _downstream(dispatched: AuditRow | None, report: Any) -> list[TickStage]:
    if dispatched is None:
        return [TickStage("silver", "waiting", detail="its message waits"), TickStage("gold", "waiting")]
    state: StageState = {"done": "done", "failed": "failed"}.get(dispatched.state, "running")  # type: ignore[assignment]
    tries = dispatched.fields.get("tries", 1)
    detail = f"attempt {tries}" if state == "running" else str(dispatched.fields.get("detail", ""))[:200]
    if state != "done":
        return [TickStage("silver", state, dispatched.at_ms, 0, detail), TickStage("gold", "waiting")]
    steps = report.get("silver", []) if isinstance(report, dict) else []
    rows = ", ".join(f"{step['table']}: {step['good']} good, {step['quarantined']} quarantined" for step in steps)
    made = [each for each in (report.get("gold", []) if isinstance(report, dict) else []) if isinstance(each, dict)]
    tables = ", ".join(_gold_table(each) for each in made)
    return [
        TickStage("silver", "done", dispatched.at_ms, 0, rows or "no contract for its tables"),
        TickStage("gold", "done", dispatched.at_ms, 0, tables or "no model"),
    ]


def _gold_table(made: dict[str, Any]) -> str:
    name, state = str(made.get("table", made.get("name", ""))), made.get("state", "made")
    return name if state in ("made", "unchanged") else f"{name} ({state})"


def report_of(row: AuditRow | None) -> Any:
    """The report of a finished job."""
    if row is None or row.state != "done":
        return None
    try:
        return msgspec.json.decode(str(row.fields.get("detail", "")))
    except msgspec.DecodeError:
        return None


def _letter(letter: ReceivedMessage) -> dict[str, Any]:
    row = {"message_id": letter.message_id, "receives": letter.receive_count}
    try:
        return {**row, **msgspec.to_builtins(letter.message())}
    except Corrupt as error:
        return {**row, "tick_id": "", "error": error.message, "body": letter.body[:200]}
