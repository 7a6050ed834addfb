"""How a project stands: its latest ticks, how many are in each state, and who owns it."""

from __future__ import annotations

import asyncio
from collections import deque
from datetime import UTC, datetime

import msgspec

from lakebed.clock import now_ms
from lakebed.context import Context
from lakebed.store.lease import Lease
from lakebed.ticks import paths
from lakebed.ticks.model import TickId, TickState
from lakebed.ticks.receiver import register_of

TICKS_MAX = 100  # the latest ticks that are looked at; ids begin with their time
READS_AT_ONCE = 16
LOOK_BACK_S = (86_400.0, 30 * 86_400.0)  # where the latest are looked for before everything is listed
LISTED_MAX = 20_000  # keys of one such look


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


class ProjectStatus(msgspec.Struct, frozen=True):
    org_id: str
    project_id: str
    owner: str
    states: dict[str, int]
    ticks: tuple[TickStatus, ...]


async def project_status(context: Context, org_id: str, project_id: str) -> ProjectStatus:
    """The latest ticks of a project, newest first, and its owner; empty when nobody owns it now."""
    listed = await _latest(context, paths.states(org_id, project_id))
    names = [key.rpartition("/")[2].removesuffix(".json") for key in listed]
    gate = asyncio.Semaphore(READS_AT_ONCE)

    async def read(name: str) -> TickState:
        async with gate:
            return (await register_of(context, TickId(org_id, project_id, name)).read()).value

    found = [state for state in await asyncio.gather(*map(read, reversed(names))) if state.exists]
    states: dict[str, int] = {}
    for state in found:
        states[state.state] = states.get(state.state, 0) + 1
    return ProjectStatus(
        org_id, project_id, await _owner(context, org_id, project_id), states, tuple(map(_told, found))
    )


async def _latest(context: Context, folder: str) -> list[str]:
    """The keys of the latest ticks, oldest first: of the last day, else further back, never listing without an end."""
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
            break  # too many to come to their end: what a shorter look found is later
        found = list(seen)
        if count >= TICKS_MAX:
            break
    return found


def _stamp(at_s: float) -> str:
    """How the ids of ticks begin."""
    return datetime.fromtimestamp(max(0.0, at_s), UTC).strftime("%Y%m%dT%H%M%S")


async def _owner(context: Context, org_id: str, project_id: str) -> str:
    lease = Lease(
        context.store,
        paths.lease(org_id, project_id),
        owner=context.node,
        lease_s=1.0,
        clock=context.clock,
        ids=context.ids,
        metrics=context.metrics,
    )
    record = await lease.holder()
    return record.owner if record.expires_at_ms > now_ms(context.clock) else ""


def _told(state: TickState) -> TickStatus:
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
    )
