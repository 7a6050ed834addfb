"""Hands committed ticks to silver: messages in groups by project, one job for each group, each tick by one job.

Before a job starts, a `silver_dispatched` row is created for each of its ticks, if absent: duplicates of a message, and
other dispatchers, find it. The row says how the job went. A row whose job failed, or whose dispatcher has gone silent
for a visibility timeout, is taken over by compare-and-swap, so a failed job's ticks are dispatched again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from lakebed.clock import now_ms
from lakebed.context import Context
from lakebed.errors import Corrupt, LakebedError
from lakebed.logs import logger
from lakebed.ticks.audit import AuditRow, AuditTable
from lakebed.ticks.model import Message, SilverResult, SilverTick, TickId
from lakebed.ticks.queue import Received, TickQueue
from lakebed.ticks.seams import SilverJob
from lakebed.ticks.settings import TicksSettings
from lakebed.traces import traced

RUNNING, DONE, FAILED = "running", "done", "failed"
HEARTBEATS_PER_TIMEOUT = 3
WINDOW_LEAST_S = 0.001  # less than this is not worth a sleep
SETTLE_TRIES = 3
RETRY_BASE_S = 2.0
RETRY_CAP_S = 300.0

log = logger("ticks")


class _Claimed(msgspec.Struct, frozen=True):
    message: Message
    row: AuditRow
    held: tuple[Received, ...]


class Dispatcher:
    def __init__(self, context: Context, *, queue: TickQueue, dispatched: AuditTable, job: SilverJob) -> None:
        self._context, self._clock = context, context.clock
        self._settings = context.settings.of(TicksSettings)
        self._queue, self._dispatched, self._job = queue, dispatched, job
        self._ticks = context.metrics.counter("lakebed_ticks_dispatched_total")
        self._jobs = context.metrics.counter("lakebed_ticks_jobs_total")
        self._seconds = context.metrics.histogram("lakebed_ticks_job_seconds")

    async def run(self) -> None:
        while True:
            if not await self.round():
                await self._clock.sleep(self._settings.poll_s)

    @traced("ticks dispatch")
    async def round(self) -> int:
        """Takes what waits, up to a batch or a window, and dispatches it. Returns how many messages there were."""
        batch = await self._gather()
        groups: dict[tuple[str, str], list[tuple[Message, Received]]] = {}
        for received in batch:
            try:
                message = received.message()
            except Corrupt as error:  # comes back until it is a dead letter, where a person sees it
                log.error("a message cannot be read", message_id=received.message_id, error=error.message)
                continue
            groups.setdefault((message.org_id, message.project_id), []).append((message, received))
        gate = asyncio.Semaphore(self._settings.jobs_max)
        await asyncio.gather(*(self._dispatch(gate, project, pairs) for project, pairs in groups.items()))
        return len(batch)

    async def _gather(self) -> list[Received]:
        batch = list(await self._queue.receive(self._settings.batch_max))
        until_s = self._clock.monotonic_s() + self._settings.batch_window_s
        while batch and len(batch) < self._settings.batch_max:
            left_s = until_s - self._clock.monotonic_s()
            if left_s < WINDOW_LEAST_S:
                break
            await self._clock.sleep(min(left_s, self._settings.poll_s))
            batch += await self._queue.receive(self._settings.batch_max - len(batch))
        return batch

    async def _dispatch(
        self, gate: asyncio.Semaphore, project: tuple[str, str], pairs: Sequence[tuple[Message, Received]]
    ) -> None:
        by_tick: dict[TickId, list[tuple[Message, Received]]] = {}
        for message, received in pairs:
            by_tick.setdefault(message.tick, []).append((message, received))
        try:
            async with gate:
                claimed = [
                    ours
                    for same in by_tick.values()
                    if (ours := await self._claim(same[-1][0], tuple(r for _, r in same))) is not None
                ]
                if claimed:
                    await self._run(project, claimed)
        except LakebedError as error:  # the messages come back by themselves
            log.warning("a group was not dispatched", project=project[1], error=error.message)

    async def _claim(self, message: Message, held: tuple[Received, ...]) -> _Claimed | None:
        """Makes the tick ours to run; None when its job is done (the messages are dropped) or runs elsewhere."""
        row = self._row(message, RUNNING)
        if await self._dispatched.create(row):
            return _Claimed(message, row, held)
        was = await self._dispatched.get(message.tick)
        if was is None:
            return None
        if was.state == DONE:
            self._ticks.labels(outcome="duplicate").inc()
            for received in held:
                await self._queue.delete(received.receipt)
            return None
        silent_ms = now_ms(self._clock) - was.at_ms
        if was.state == RUNNING and silent_ms < self._settings.visibility_timeout_s * 1000:
            return None
        row = self._row(message, RUNNING, tries=int(was.fields.get("tries", 1)) + 1)
        return _Claimed(message, row, held) if await self._dispatched.change(row, was) else None

    async def _run(self, project: tuple[str, str], claimed: list[_Claimed]) -> None:
        ticks = [
            SilverTick(each.tick_id, each.dt, each.mode, each.versions, each.replay is True)
            for each in (one.message for one in claimed)
        ]
        beating = asyncio.create_task(self._beat(claimed))
        began_s = self._clock.monotonic_s()
        try:
            result = await self._job.run(*project, ticks)
        except Exception as error:
            await _stopped(beating)
            told = error.message if isinstance(error, LakebedError) else type(error).__name__
            log.error("a silver job failed", project=project[1], ticks=len(ticks), error=told)
            await self._failed(claimed, told)
            return
        finally:
            await _stopped(beating)
        self._jobs.labels(outcome=DONE).inc()
        self._seconds.observe(self._clock.monotonic_s() - began_s)
        await self._done(claimed, result)

    async def _done(self, claimed: Sequence[_Claimed], result: SilverResult) -> None:
        detail = msgspec.json.encode(result.detail, enc_hook=str).decode()
        for each in claimed:
            row = self._row(each.message, DONE, tries=int(each.row.fields["tries"]), detail=detail)
            if not await self._settled(row, each.row):
                continue  # another has taken the tick over: its message is the other's to delete
            for received in each.held:
                await self._queue.delete(received.receipt)
            self._ticks.labels(outcome=DONE).inc()

    async def _failed(self, claimed: Sequence[_Claimed], why: str) -> None:
        self._jobs.labels(outcome=FAILED).inc()
        for each in claimed:
            tries = int(each.row.fields["tries"])
            await self._settled(self._row(each.message, FAILED, tries=tries, detail=why[:2000]), each.row)
            pause_s = self._context.ids.jitter_s(tries, base_s=RETRY_BASE_S, cap_s=RETRY_CAP_S)
            for received in each.held:
                await self._queue.hide(received.receipt, round(pause_s))
            self._ticks.labels(outcome=FAILED).inc()

    async def _settled(self, row: AuditRow, was: AuditRow) -> bool:
        """Writes how a job ended. False when the row is another dispatcher's by now.

        A heartbeat that was stopped half-way may have written the row unseen: it is still ours.
        """
        for _ in range(SETTLE_TRIES):
            if await self._dispatched.change(row, was):
                return True
            found = await self._dispatched.get(row.tick)
            if found is None or found.state == DONE:
                return True  # done already, or cleared for a replay, which has a message of its own
            if found.fields.get("by") != self._context.node:
                return False
            was = found
        return False

    async def _beat(self, claimed: list[_Claimed]) -> None:
        """While a job runs, its messages stay hidden and its rows stay fresh, however long it takes."""
        while True:
            await self._clock.sleep(self._settings.visibility_timeout_s / HEARTBEATS_PER_TIMEOUT)
            for number, each in enumerate(claimed):
                try:
                    row = self._row(each.message, RUNNING, tries=int(each.row.fields["tries"]))
                    if await self._dispatched.change(row, each.row):
                        claimed[number] = msgspec.structs.replace(each, row=row)
                    for received in each.held:
                        await self._queue.hide(received.receipt, self._settings.visibility_timeout_s)
                except LakebedError as error:
                    log.warning("a running tick was not kept hidden", tick=each.row.tick_id, error=error.message)

    def _row(self, message: Message, state: str, *, tries: int = 1, detail: str = "") -> AuditRow:
        now = now_ms(self._clock)
        return AuditRow(
            org_id=message.org_id,
            project_id=message.project_id,
            tick_id=message.tick_id,
            state=state,
            attempt_id=self._context.ids.token(),
            at_ms=now,
            expires_at_s=round(now / 1000 + self._settings.audit_ttl_s),
            fields={
                "by": self._context.node,
                "tries": tries,
                "bronze_db_etag": message.bronze_db_etag,
                "detail": detail,
            },
        )


async def _stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
