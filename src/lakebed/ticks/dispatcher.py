"""Dispatches committed ticks to silver: messages in groups by project, one job per group, each tick in one job.

Before a job starts, a `silver_dispatched` row is created for each of its ticks, if absent: duplicates of a message, and
other dispatchers, find it. The row records how the job ended. A row whose job failed, or whose dispatcher wrote
nothing for a visibility timeout, is taken over by compare-and-swap, so a failed job's ticks are dispatched again.

A job that fails is tried again at once, a few times, while its messages stay hidden: a short failure costs seconds.
When it still fails, its messages come back after a whole visibility timeout, so that the receives before a dead letter
span `receives_max` timeouts (75 minutes by default), not an outage of a minute.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.context import Context
from lakebed.core.errors import Corrupt, LakebedError
from lakebed.core.logs import captured, logger
from lakebed.core.traces import traced
from lakebed.ticks.audit import LOG, AuditRow, AuditTable
from lakebed.ticks.finalizer import OrgLocks
from lakebed.ticks.model import SilverResult, SilverTick, TickId, TickMessage
from lakebed.ticks.queue import ReceivedMessage, TickQueue
from lakebed.ticks.settings import TicksSettings

RUNNING, DONE, FAILED = "running", "done", "failed"
REPLAY = "replay"  # field of a row whose job computes the tick's tables again
HEARTBEATS_PER_TIMEOUT = 3
BATCH_MAX = 10  # messages of one round; SQS returns at most this many from one receive
WINDOW_LEAST_S = 0.001  # less than this is not worth a sleep
SETTLE_TRIES = 3
WAITING_MAX = 1_000  # groups of one project that wait for its job; more are received again later
TRIES_PER_RECEIVE = 3  # of a failing job before its messages wait for the visibility timeout
RETRY_BASE_S = 2.0
RETRY_CAP_S = 30.0

log = logger("ticks")


class SilverJob(Protocol):
    async def run(self, org_id: str, project_id: str, ticks: Sequence[SilverTick]) -> SilverResult:
        """Processes exactly these ticks, reading bronze at the given versions. Idempotent by tick.

        The tables of a tick with `replay` are computed again, with the same result unless the contract has changed.
        Any LakebedError means that the job failed: all its ticks are dispatched again.
        """


class _Claimed(msgspec.Struct, frozen=True):
    message: TickMessage
    row: AuditRow
    held: tuple[ReceivedMessage, ...]


class Dispatcher:
    def __init__(self, context: Context, *, queue: TickQueue, dispatched: AuditTable, job: SilverJob) -> None:
        self._context, self._clock = context, context.clock
        self._settings = context.settings.of(TicksSettings)
        self._queue, self._dispatched, self._job = queue, dispatched, job
        self._gate = asyncio.Semaphore(self._settings.jobs_max)
        self._turns = OrgLocks(WAITING_MAX)
        self._ticks = context.metrics.counter("lakebed_ticks_dispatched_total")
        self._jobs = context.metrics.counter("lakebed_ticks_jobs_total")
        self._seconds = context.metrics.histogram("lakebed_ticks_job_seconds")

    async def run(self) -> None:
        """Dispatches for ever. Messages are received while a job may start: none waits for a slower one to end."""
        running: set[asyncio.Task[int]] = set()
        try:
            while True:
                async with self._gate:
                    pass
                started: list[asyncio.Task[int]] = []
                try:
                    started = await self.start()
                except LakebedError as error:
                    if not running:
                        raise  # otherwise a restart would cut jobs that run
                    log.warning("messages could not be received: retrying", error=error.message)
                running |= set(started)
                for done in [task for task in running if task.done()]:
                    running.remove(done)
                    done.result()
                if not started:
                    await self._clock.sleep(self._settings.poll_s)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def round(self) -> int:
        """Receives messages, dispatches them, and waits for their jobs. Returns how many messages there were."""
        return sum(await asyncio.gather(*await self.start()))

    @traced("ticks dispatch")
    async def start(self) -> list[asyncio.Task[int]]:
        """Receives messages, up to a batch or a window, and starts a task for each project of them."""
        batch = await self._gather()
        groups: dict[tuple[str, str], list[tuple[TickMessage, ReceivedMessage]]] = {}
        for received in batch:
            try:
                message = received.message()
            except Corrupt as error:  # it is received again until it is a dead letter
                log.error("message does not decode", message_id=received.message_id, error=error.message)
                continue
            groups.setdefault((message.org_id, message.project_id), []).append((message, received))
        return [asyncio.create_task(self._dispatch(project, pairs)) for project, pairs in groups.items()]

    async def _gather(self) -> list[ReceivedMessage]:
        batch = list(await self._queue.receive(BATCH_MAX))
        until_s = self._clock.monotonic_s() + self._settings.batch_window_s
        while batch and len(batch) < BATCH_MAX:
            left_s = until_s - self._clock.monotonic_s()
            if left_s < WINDOW_LEAST_S:
                break
            await self._clock.sleep(min(left_s, self._settings.poll_s))
            try:
                batch += await self._queue.receive(BATCH_MAX - len(batch))
            except LakebedError as error:  # those in hand are hidden, and their receive is counted: they go on
                log.warning("no more messages could be received", error=error.message)
                break
        return batch

    async def _dispatch(self, project: tuple[str, str], pairs: Sequence[tuple[TickMessage, ReceivedMessage]]) -> int:
        """Runs the project's job when it is its turn: after its earlier ones, and when a slot is free. Gives the number
        of messages.
        """
        by_tick: dict[TickId, list[tuple[TickMessage, ReceivedMessage]]] = {}
        for message, received in pairs:
            by_tick.setdefault(message.tick, []).append((message, received))
        try:
            async with self._turn(project, [received for _, received in pairs]):
                claimed = [
                    ours
                    for same in by_tick.values()
                    if (ours := await self._claim(_chosen([m for m, _ in same]), tuple(r for _, r in same))) is not None
                ]
                if claimed:
                    await self._run(project, claimed)
        except LakebedError as error:  # the messages become visible again
            log.warning("group was not dispatched", project=project[1], error=error.message)
        return len(pairs)

    @asynccontextmanager
    async def _turn(self, project: tuple[str, str], held: Sequence[ReceivedMessage]) -> AsyncIterator[None]:
        """Waits until no job of the project runs and a slot is free; messages stay hidden while they wait, so that a
        receive is counted only for a job that is tried.
        """
        waiting = asyncio.create_task(self._hide(held))
        try:
            async with self._turns.of("/".join(project)), self._gate:
                await _stopped(waiting)
                yield
        finally:
            await _stopped(waiting)

    async def _hide(self, held: Sequence[ReceivedMessage]) -> None:
        while True:
            await self._clock.sleep(self._settings.visibility_timeout_s / HEARTBEATS_PER_TIMEOUT)
            for received in held:
                try:
                    await self._queue.hide(received.receipt, self._settings.visibility_timeout_s)
                except LakebedError as error:
                    log.warning("a waiting message was not hidden", error=error.message)

    async def _claim(self, message: TickMessage, held: tuple[ReceivedMessage, ...]) -> _Claimed | None:
        """Claims the tick; None when its job is done (the messages are deleted) or runs elsewhere.

        A job without `replay` does not finish a replay: an ordinary message may be received between the two.
        """
        row = self._row(message, RUNNING)
        if await self._dispatched.create(row):
            return _Claimed(message, row, held)
        was = await self._dispatched.get(message.tick)
        if was is None:
            return None
        if was.state == DONE and (message.replay is not True or was.fields.get(REPLAY)):
            self._ticks.labels(outcome="duplicate").inc()
            for received in held:
                await self._queue.delete(received.receipt)
            return None
        silent_ms = now_ms(self._clock) - was.at_ms
        if was.state == RUNNING and silent_ms < self._settings.visibility_timeout_s * 1000:
            return None
        tries = 1 if was.state == DONE else int(was.fields.get("tries", 1)) + 1
        row = self._row(message, RUNNING, tries=tries)
        return _Claimed(message, row, held) if await self._dispatched.change(row, was) else None

    async def _run(self, project: tuple[str, str], claimed: list[_Claimed]) -> None:
        ticks = [
            SilverTick(each.tick_id, each.dt, each.mode, each.versions, each.replay is True)
            for each in (one.message for one in claimed)
        ]
        beating = asyncio.create_task(self._heartbeat(claimed))
        began_s = self._clock.monotonic_s()
        with captured() as lines:
            log.info("silver job started", project=project[1], ticks=len(ticks), by=self._context.node)
            try:
                result = await self._tried(project, ticks)
            except Exception as error:
                await _stopped(beating)
                reason = error.message if isinstance(error, LakebedError) else type(error).__name__
                log.error("silver job failed", project=project[1], ticks=len(ticks), error=reason)
                await self._failed(claimed, reason, lines)
                return
            finally:
                await _stopped(beating)
            took_s = self._clock.monotonic_s() - began_s
            log.info("silver job done", project=project[1], ticks=len(ticks), seconds=round(took_s, 1))
        self._jobs.labels(outcome=DONE).inc()
        self._seconds.observe(took_s)
        await self._done(claimed, result, lines)

    async def _tried(self, project: tuple[str, str], ticks: Sequence[SilverTick]) -> SilverResult:
        """Runs the job, again after a failure while tries are left; raises the last failure."""
        for tries in range(1, TRIES_PER_RECEIVE):
            try:
                return await self._job.run(*project, ticks)
            except LakebedError as error:
                log.warning("silver job failed: retrying", project=project[1], tries=tries, error=error.message)
                await self._clock.sleep(self._context.ids.jitter_s(tries, base_s=RETRY_BASE_S, cap_s=RETRY_CAP_S))
        return await self._job.run(*project, ticks)

    async def _done(self, claimed: Sequence[_Claimed], result: SilverResult, lines: Iterable[str]) -> None:
        detail = msgspec.json.encode(result.detail, enc_hook=str).decode()
        for each in claimed:
            row = self._row(each.message, DONE, tries=int(each.row.fields["tries"]), detail=detail, lines=lines)
            if not await self._settled(row, each.row):
                continue  # another dispatcher has claimed the tick and deletes its message
            for received in each.held:
                await self._queue.delete(received.receipt)
            self._ticks.labels(outcome=DONE).inc()

    async def _failed(self, claimed: Sequence[_Claimed], why: str, lines: Iterable[str]) -> None:
        self._jobs.labels(outcome=FAILED).inc()
        for each in claimed:
            tries = int(each.row.fields["tries"])
            row = self._row(each.message, FAILED, tries=tries, detail=why[:2000], lines=lines)
            await self._settled(row, each.row)
            for received in each.held:
                await self._queue.hide(received.receipt, self._settings.visibility_timeout_s)
            self._ticks.labels(outcome=FAILED).inc()

    async def _settled(self, row: AuditRow, was: AuditRow) -> bool:
        """Writes how a job ended. False when another dispatcher has the row.

        A heartbeat that was cancelled may have written the row: it is still ours.
        """
        for _ in range(SETTLE_TRIES):
            if await self._dispatched.change(row, was):
                return True
            found = await self._dispatched.get(row.tick)
            if found is None or found.state == DONE:
                return True  # done already, or deleted for a replay, which has its own message
            if found.fields.get("by") != self._context.node:
                return False
            was = found
        return False

    async def _heartbeat(self, claimed: list[_Claimed]) -> None:
        """Keeps the messages of a running job hidden and its rows fresh."""
        while True:
            await self._clock.sleep(self._settings.visibility_timeout_s / HEARTBEATS_PER_TIMEOUT)
            for number, each in enumerate(claimed):
                try:
                    row = self._row(each.message, RUNNING, tries=int(each.row.fields["tries"]))
                    if await self._refreshed(row, each.row):
                        claimed[number] = msgspec.structs.replace(each, row=row)
                    for received in each.held:
                        await self._queue.hide(received.receipt, self._settings.visibility_timeout_s)
                except LakebedError as error:
                    log.warning("heartbeat of a running tick failed", tick=each.row.tick_id, error=error.message)

    async def _refreshed(self, row: AuditRow, was: AuditRow) -> bool:
        """Writes a running job's row again. False when it is not ours any more.

        An earlier heartbeat may have written it and lost its answer: that one is still ours.
        """
        if await self._dispatched.change(row, was):
            return True
        found = await self._dispatched.get(row.tick)
        if found is None or found.state != RUNNING or found.fields.get("by") != self._context.node:
            return False
        return await self._dispatched.change(row, found)

    def _row(
        self, message: TickMessage, state: str, *, tries: int = 1, detail: str = "", lines: Iterable[str] = ()
    ) -> AuditRow:
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
                **({LOG: "\n".join(lines)} if lines else {}),
                **({REPLAY: 1} if message.replay is True else {}),
            },
        )


def _chosen(messages: Sequence[TickMessage]) -> TickMessage:
    """The message that a tick's job is made of: that of a replay, if one is among them."""
    return next((each for each in messages if each.replay is True), messages[-1])


async def _stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
