"""Finds committed ticks that silver did not finish, resends their messages, and replays a tick on request.

The search goes by a watermark: a pass reads what was noted since the last one, and the ticks that were unfinished then.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence, Set

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.context import Context
from lakebed.core.errors import Conflict, NotFound
from lakebed.store.model import read_record
from lakebed.store.register import Register
from lakebed.ticks import commit_times, paths
from lakebed.ticks.audit import AuditRow, AuditTable
from lakebed.ticks.dispatcher import DONE
from lakebed.ticks.finalizer import iso, message_of
from lakebed.ticks.model import CommitRecord, TickId, TickMessage
from lakebed.ticks.queue import TickQueue
from lakebed.ticks.settings import TicksSettings

LAG_INTERVAL_S = 60.0  # pause between two measurements; the alert on the lag fires at 30 minutes
OVERLAP_MS = 600_000  # notes so long before the watermark are read again: clocks differ, and a note may come late
PENDING_MAX = 10_000  # unfinished ticks that the watermark carries; with more it waits


class AuditWatermark(msgspec.Struct, frozen=True):
    """Every tick that was noted before `until_ms` is finished, or is in `pending` (path → when it was last seen)."""

    schema: str = "lakebed.tick-watermark.v1"
    until_ms: int = 0
    pending: dict[str, int] = {}

    def moved(self, until_ms: int, found: Mapping[str, int], finished: Set[str]) -> AuditWatermark:
        kept = {path: at for path, at in self.pending.items() if path not in finished}
        return AuditWatermark(self.schema, max(self.until_ms, until_ms), {**kept, **found})


class UndispatchedTick(msgspec.Struct, frozen=True):
    """A committed tick without a finished job. `state` is that of its dispatch; empty when it was never dispatched."""

    org_id: str
    project_id: str
    tick_id: str
    committed_at: str
    age_s: float
    state: str


class DispatchAuditor:
    def __init__(self, context: Context, *, queue: TickQueue, committed: AuditTable, dispatched: AuditTable) -> None:
        self._context, self._clock = context, context.clock
        self._settings = context.settings.of(TicksSettings)
        self._queue, self._committed, self._dispatched = queue, committed, dispatched
        self._done: dict[TickId, int] = {}  # finished ticks of the overlap, by the time of their note
        self._watermark = Register(context, paths.WATERMARK, AuditWatermark, AuditWatermark(), name="tick_watermark")
        self._messages = context.metrics.gauge("lakebed_ticks_queue_messages")
        self._undispatched = context.metrics.gauge("lakebed_ticks_undispatched")
        self._lag = context.metrics.gauge("lakebed_ticks_lag_seconds")

    async def run(self) -> None:
        while True:
            await self.measure()
            await self._clock.sleep(LAG_INTERVAL_S)

    async def measure(self) -> None:
        """Sets the gauges: messages, committed ticks without a finished job, and the age of the oldest. Moves the
        watermark: what is finished before it is not looked at again.
        """
        depth = await self._queue.depth()
        for state in ("waiting", "in_flight", "dead"):
            self._messages.labels(state=state).set(getattr(depth, state))
        until_ms = now_ms(self._clock)
        found, finished = await self._compared()
        self._undispatched.set(len(found))
        self._lag.set(max((each.age_s for each in found.values()), default=0.0))
        if len(found) <= PENDING_MAX:
            pending = {tick.path: until_ms for tick in found}
            await self._watermark.change(lambda now: (now.moved(until_ms, pending, finished), None))

    async def undispatched(self, *, older_than_s: float = 0.0) -> Sequence[UndispatchedTick]:
        """Every committed tick without a finished job, oldest first."""
        found, _ = await self._compared()
        return sorted((each for each in found.values() if each.age_s >= older_than_s), key=lambda each: -each.age_s)

    async def _compared(self) -> tuple[dict[TickId, UndispatchedTick], set[str]]:
        """The ticks without a finished job, and those that were checked and have one."""
        found: dict[TickId, UndispatchedTick] = {}
        finished: set[str] = set()
        seen: dict[TickId, int] = {}
        async for tick, noted_ms in self._noted():
            if tick in found or tick.path in finished:
                continue
            if noted_ms and self._done.get(tick, -1) >= noted_ms:  # by an earlier pass, and not replayed since
                seen[tick] = self._done[tick]
                continue
            dispatched = await self._dispatched.get(tick)
            if dispatched is not None and dispatched.state == DONE:
                finished.add(tick.path)
                if noted_ms:
                    seen[tick] = noted_ms
            elif (late := await self._unfinished(tick, dispatched)) is not None:
                found[tick] = late
            else:
                finished.add(tick.path)  # its row expired; or it is not written yet, and is looked for again
        self._done = seen  # of the overlap alone: what left it is never noted again without a replay
        return found, finished

    async def _noted(self) -> AsyncIterator[tuple[TickId, int]]:
        """Ticks that may be unfinished: those that were at the last watermark, and all that were noted since."""
        mark = (await self._watermark.read()).value
        for path in mark.pending:
            yield TickId(*path.split("/")), 0
        if not mark.until_ms:  # the first pass: rows of before there were notes
            async for tick in self._committed.ticks():
                yield tick, 0
        async for at_ms, tick in commit_times.since(self._context, mark.until_ms - OVERLAP_MS):
            yield tick, at_ms

    async def _unfinished(self, tick: TickId, dispatched: AuditRow | None) -> UndispatchedTick | None:
        row = await self._committed.get(tick)
        if row is None:
            return None
        age_s = (now_ms(self._clock) - row.at_ms) / 1000
        committed_at, state = str(row.fields.get("committed_at", "")), dispatched.state if dispatched else ""
        return UndispatchedTick(row.org_id, row.project_id, row.tick_id, committed_at, age_s, state)

    async def resend(self, tick: TickId) -> str:
        """Sends the message of a committed tick again; the dispatcher drops it when the tick's job is done."""
        return await self._queue.send(await self._message(tick))

    async def replay(self, tick: TickId, reason: str) -> str:
        """Runs silver for this tick again: deletes its row, then sends its message as a replay, so that the job
        computes its tables again. The reason is kept.
        """
        message = await self._message(tick)
        note = {"at": iso(now_ms(self._clock)), "by": self._context.node, "reason": reason}
        key = f"{paths.REPLAYS}/{tick.path}/{now_ms(self._clock)}-{self._context.ids.token()}.json"
        await self._context.store.create(key, msgspec.json.encode(note))
        await commit_times.note(self._context, tick)
        await self._dispatched.clear(tick)
        await commit_times.note(self._context, tick)  # an audit in between has found the row that was cleared
        return await self._queue.send(msgspec.structs.replace(message, replay=True))

    async def find(self, tick_id: str, *, org_id: str = "", project_id: str = "") -> TickId:
        """The committed tick with this id. Raises NotFound, and Conflict when more than one org or project has it."""
        if org_id and project_id:
            return paths.tick_id(org_id, project_id, tick_id)
        found = [
            tick
            async for tick in self._committed.ticks()
            if tick.tick_id == tick_id and org_id in ("", tick.org_id) and project_id in ("", tick.project_id)
        ]
        if not found:
            raise NotFound(f"no committed tick {tick_id}", hint="give --org and --project: old rows expire")
        if len(found) > 1:
            raise Conflict(f"{len(found)} projects have a tick {tick_id}", hint="give --org and --project")
        return found[0]

    async def _message(self, tick: TickId) -> TickMessage:
        emitted_at = iso(now_ms(self._clock))
        record = read_record(await self._context.store.get(paths.commit(tick)), CommitRecord)
        return message_of(record, emitted_at)


def row_of(row: AuditRow | None) -> dict[str, str | int]:
    """A row as one flat mapping, for the CLI."""
    if row is None:
        return {}
    return {"tick_id": row.tick_id, "state": row.state, "at": iso(row.at_ms), **row.fields}
