"""Sends what the queue holds, oldest first, and deletes a batch only when a collector said 200.

Several batches are under way at once; each goes to one collector and, when that is slow, to a second one as well, which
is safe because a batch's identity and bytes never change. A batch that can never be accepted is parked, and the later
ones go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lakebed import logs
from lakebed.agent.alerts import PARKED_KINDS, Alerts
from lakebed.agent.model import DiskTrouble, Parked, ParkedFor, Queued
from lakebed.agent.order import Lane, Order
from lakebed.agent.spool import Spool
from lakebed.agent.transport import Transport
from lakebed.agent.verdict import Outcome, Verdict, judge
from lakebed.agent.waiting import Aside, cancel, in_thread, wait_for_any, wait_for_first
from lakebed.clock import Clock, now_ms
from lakebed.errors import Corrupt, NotFound, OutcomeUnknown, Unavailable
from lakebed.metrics import Metrics

RETURNED_POLL_S = 5.0  # how soon a batch its owner returned is seen

_PARKED_FOR: dict[Outcome, ParkedFor] = {
    Outcome.CONFLICT: "identity_conflict",
    Outcome.QUARANTINED: "boot_quarantined",
    Outcome.REJECTED: "rejected",
}
_CHECK = {Outcome.DENIED: "agent.token and the rights of its key", Outcome.MISROUTED: "agent.collectors"}


class Sender:
    def __init__(
        self,
        spool: Spool,
        order: Order,
        transport: Transport,
        alerts: Alerts,
        *,
        hedge_after_s: float,
        concurrency: int,
        clock: Clock,
        metrics: Metrics,
        aside: Aside = in_thread,
    ) -> None:
        self._spool, self._order, self._transport, self._alerts = spool, order, transport, alerts
        self._hedge_after_s, self._concurrency = hedge_after_s, concurrency
        self._clock, self._metrics, self._aside = clock, metrics, aside
        self._log = logs.logger("agent")
        self._wake = asyncio.Event()
        self._stopping = False
        self._sends: set[asyncio.Task[None]] = set()

    @property
    def idle(self) -> bool:
        return not self._sends

    def wake(self) -> None:
        """Something was queued."""
        self._wake.set()

    def stop(self) -> None:
        """Begins nothing new; `run` returns when what is under way has ended."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        poll_s = 0.0
        try:
            while not (self._stopping and not self._sends):
                self._wake.clear()
                now_s = self._clock.monotonic_s()
                if now_s >= poll_s:
                    await self._look_at_parked()
                    poll_s = now_s + RETURNED_POLL_S
                while not self._stopping and self._begin(now_s):
                    pass
                self._gauge()
                until_s = min(poll_s, self._order.next_s(now_s) or poll_s)
                await wait_for_any(self._clock, max(0.001, until_s - self._clock.monotonic_s()), self._wake)
        finally:
            await cancel(self._sends)

    def _begin(self, now_s: float) -> bool:
        if len(self._sends) >= self._concurrency:
            return False
        lane = self._order.lane(now_s)
        if lane is None or (entry := self._choose(lane, now_s)) is None:
            return False
        task = asyncio.ensure_future(self._send(entry, lane))
        self._order.started(lane)  # before the task first runs, so that a probe stays the only one
        self._sends.add(task)
        task.add_done_callback(lambda done: self._done(done, entry))
        return True

    def _choose(self, lane: Lane, now_s: float) -> Queued | None:
        order = self._order
        if lane.failures and (probe := self._spool.claim(lambda e: order.failed_before(e) or order.waits(e, now_s))):
            return probe
        return self._spool.claim(lambda entry: order.waits(entry, now_s))

    def _done(self, task: asyncio.Task[None], entry: Queued) -> None:
        self._sends.discard(task)
        self._spool.release(entry)
        self._wake.set()
        if not task.cancelled() and (error := task.exception()):
            self._order.set_back(entry, self._clock.monotonic_s())
            self._log.error("a send failed in an unforeseen way", error=repr(error))

    async def _send(self, entry: Queued, lane: Lane) -> None:
        try:
            data = await self._aside(lambda: self._spool.read(entry))
        except NotFound:
            await self._forget(entry, self._spool.gone)
            return
        except Corrupt as error:
            await self._park(entry, "corrupt", Verdict(Outcome.REJECTED, message=error.message), "")
            return
        except DiskTrouble as error:
            self._alerts.on("disk_trouble", error.message)
            self._order.set_back(entry, self._clock.monotonic_s())
            return
        finally:
            self._order.ended(lane)  # the request itself counts anew
        verdict, lane = await self._ask(entry, data, lane)
        await self._act(entry, verdict, lane)

    async def _act(self, entry: Queued, verdict: Verdict, lane: Lane) -> None:
        outcome = verdict.outcome
        if outcome in (Outcome.ACCEPTED, Outcome.DUPLICATE):
            await self._forget(entry, self._spool.complete)
            self._metrics.counter("lakebed_agent_sent_samples_total").inc(entry.samples)
        elif outcome in _PARKED_FOR:
            await self._park(entry, _PARKED_FOR[outcome], verdict, lane.url)
        elif outcome in (Outcome.BUSY, Outcome.LOST):
            self._order.set_back(entry, self._clock.monotonic_s())

    async def _ask(self, entry: Queued, data: bytes, lane: Lane) -> tuple[Verdict, Lane]:
        """The verdict of the first collector that gives a final one; of the last that answered when none does."""
        asked = {self._request(entry, data, lane): lane}
        hedge_s: float | None = self._hedge_after_s or None
        verdict, by = Verdict(Outcome.UNREACHED), lane
        try:
            while asked:
                await wait_for_first(self._clock, hedge_s, asked)
                for task in [task for task in asked if task.done()]:
                    verdict, by = task.result(), asked.pop(task)
                    if verdict.outcome.final:
                        for slow in asked.values():
                            self._order.lost_hedge(slow, self._clock.monotonic_s())
                        return verdict, by
                if asked and hedge_s is not None:
                    hedge_s = None
                    if second := self._second(lane):
                        asked[self._request(entry, data, second)] = second
            return verdict, by
        finally:
            await cancel(asked)

    def _second(self, lane: Lane) -> Lane | None:
        second = self._order.lane(self._clock.monotonic_s(), other_than=lane)
        if second is None or not self._order.may_hedge():
            return None
        self._metrics.counter("lakebed_agent_hedges_total").inc()
        return second

    def _request(self, entry: Queued, data: bytes, lane: Lane) -> asyncio.Task[Verdict]:
        self._order.started(lane)
        task = asyncio.ensure_future(self._ask_one(entry, data, lane))
        task.add_done_callback(lambda done: self._order.ended(lane))
        return task

    async def _ask_one(self, entry: Queued, data: bytes, lane: Lane) -> Verdict:
        """One request, and what it teaches about its collector."""
        falls = lane.falls
        try:
            answer = await self._transport.post(lane.url, data)
            verdict = judge(answer, frame_sha256=entry.sha256, now_s=self._clock.now_ns() / 1e9)
        except OutcomeUnknown as error:
            verdict = Verdict(Outcome.LOST, message=error.message)
        except Unavailable as error:
            verdict = Verdict(Outcome.UNREACHED, message=error.message)
        self._metrics.counter("lakebed_agent_answers_total").labels(verdict.outcome.value).inc()
        self._learn(lane, verdict, falls)
        return verdict

    def _learn(self, lane: Lane, verdict: Verdict, falls: int) -> None:
        now_s, outcome = self._clock.monotonic_s(), verdict.outcome
        if outcome.final:
            self._order.succeeded(lane, falls=falls)
            self._alerts.off("denied")
            self._alerts.off("misrouted")
        elif outcome in (Outcome.DENIED, Outcome.MISROUTED):
            self._order.refused(lane, now_s)
            told = f"{lane.url} answered {verdict.status}: {verdict.message}; check {_CHECK[outcome]}"
            self._alerts.on(outcome.value, told, url=lane.url)
        else:
            if lane.failures == 0:
                self._log.warning("collector fails", url=lane.url, status=verdict.status, message=verdict.message)
            self._order.failed(lane, now_s, retry_after_s=verdict.retry_after_s)

    async def _park(self, entry: Queued, reason: ParkedFor, verdict: Verdict, url: str) -> None:
        parked = Parked(
            agent_id=self._spool.agent_id,
            boot_id=entry.boot_id,
            seq_start=entry.seq_start,
            seq_end=entry.seq_end,
            reason=reason,
            submitted_frame_sha256=entry.sha256,
            accepted_frame_sha256=verdict.accepted_frame_sha256,
            parked_at_ms=now_ms(self._clock),
            size_bytes=entry.size_bytes,
            collector=url,
            status=verdict.status,
            message=verdict.message,
        )
        try:
            await self._aside(lambda: self._spool.park(entry, parked))
        except DiskTrouble as error:
            self._alerts.on("disk_trouble", error.message)
            self._order.set_back(entry, self._clock.monotonic_s())
            return
        self._order.forget(entry)
        self._metrics.counter("lakebed_agent_parked_total").labels(reason).inc()
        self._alerts.on(
            reason,
            f"batch {entry.seq_start}-{entry.seq_end} of boot {entry.boot_id} is parked: {verdict.message}",
            boot_id=entry.boot_id,
            seq_start=entry.seq_start,
            seq_end=entry.seq_end,
            accepted_frame_sha256=verdict.accepted_frame_sha256,
            submitted_frame_sha256=entry.sha256,
        )

    async def _forget(self, entry: Queued, how: Callable[[Queued], None]) -> None:
        await self._aside(lambda: how(entry))
        self._order.forget(entry)

    async def _look_at_parked(self) -> None:
        try:
            await self._aside(self._spool.take_returned)
            await self._aside(self._spool.refresh_parked)
        except OSError as error:
            self._alerts.on("disk_trouble", f"the queue cannot be looked at: {error}")
            return
        if not self._spool.parked_batches:
            for kind in PARKED_KINDS:
                self._alerts.off(kind)

    def _gauge(self) -> None:
        self._metrics.gauge("lakebed_agent_queue_batches").set(self._spool.batches)
        self._metrics.gauge("lakebed_agent_queue_bytes").set(self._spool.pending_bytes)
        self._metrics.gauge("lakebed_agent_parked_batches").set(self._spool.parked_batches)
