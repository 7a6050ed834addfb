"""Finds committed ticks that silver did not finish, resends their messages, and replays a tick on request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.context import Context
from lakebed.core.errors import Conflict, NotFound
from lakebed.ticks import paths
from lakebed.ticks.audit import AuditRow, AuditTable
from lakebed.ticks.dispatcher import DONE
from lakebed.ticks.finalizer import decode, iso, message_of
from lakebed.ticks.model import CommitRecord, TickId, TickMessage
from lakebed.ticks.queue import TickQueue
from lakebed.ticks.settings import TicksSettings

LAG_INTERVAL_S = 60.0  # pause between two measurements; the alert on the lag fires at 30 minutes
REMEMBERED_MAX = 200_000  # finished ticks that one auditor does not check again


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
        self._done: dict[TickId, int] = {}  # when the job of a finished tick ended, ms
        self._messages = context.metrics.gauge("lakebed_ticks_queue_messages")
        self._undispatched = context.metrics.gauge("lakebed_ticks_undispatched")
        self._lag = context.metrics.gauge("lakebed_ticks_lag_seconds")

    async def run(self) -> None:
        while True:
            await self.measure()
            await self._clock.sleep(LAG_INTERVAL_S)

    async def measure(self) -> None:
        """Sets the gauges: messages, committed ticks without a finished job, and the age of the oldest."""
        depth = await self._queue.depth()
        for state in ("waiting", "in_flight", "dead"):
            self._messages.labels(state=state).set(getattr(depth, state))
        found = await self.undispatched()
        self._undispatched.set(len(found))
        self._lag.set(max((each.age_s for each in found), default=0.0))

    async def undispatched(self, *, older_than_s: float = 0.0) -> Sequence[UndispatchedTick]:
        """Every committed tick without a finished job, oldest first."""
        found: list[UndispatchedTick] = []
        replayed = await self._replayed()
        async for tick in self._committed.ticks():
            if self._done.get(tick, -1) >= replayed.get(tick, 0):
                continue
            dispatched = await self._dispatched.get(tick)
            if dispatched is not None and dispatched.state == DONE:
                self._remember(tick, dispatched.at_ms)
                continue
            row = await self._committed.get(tick)
            age_s = (now_ms(self._clock) - row.at_ms) / 1000 if row else 0.0
            if row is not None and age_s >= older_than_s:
                committed_at, state = str(row.fields.get("committed_at", "")), dispatched.state if dispatched else ""
                found.append(UndispatchedTick(row.org_id, row.project_id, row.tick_id, committed_at, age_s, state))
        return sorted(found, key=lambda each: -each.age_s)

    async def _replayed(self) -> dict[TickId, int]:
        """When each tick was last replayed, by any process: a job that ended before that is not its last one."""
        last: dict[TickId, int] = {}
        async for info in self._context.store.list(f"{paths.REPLAYS}/"):
            *of, name = info.key.removeprefix(f"{paths.REPLAYS}/").split("/")
            last[TickId(*of)] = max(last.get(TickId(*of), 0), int(name.partition("-")[0]))
        return last

    def _remember(self, tick: TickId, at_ms: int) -> None:
        if len(self._done) >= REMEMBERED_MAX:
            self._done.clear()
        self._done[tick] = at_ms

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
        await self._dispatched.clear(tick)
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
        record: CommitRecord = decode(await self._context.store.get(paths.commit(tick)))
        return message_of(record, emitted_at)


def row_of(row: AuditRow | None) -> dict[str, str | int]:
    """A row as one flat mapping, for the CLI."""
    if row is None:
        return {}
    return {"tick_id": row.tick_id, "state": row.state, "at": iso(row.at_ms), **row.fields}
