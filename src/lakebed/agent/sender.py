"""Sends what the queue holds, oldest first, and deletes a batch only when a collector returned 200.

Several batches are sent at once; each goes to one collector and, when that is slow, to a second one as well, which is
safe because a batch's identity and bytes never change. A batch that can never be accepted is parked, and the later
ones go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lakebed.agent.alerts import PARKED_KINDS, Alerts
from lakebed.agent.disk_queue import DiskQueue
from lakebed.agent.failover import CollectorState, SendOrder
from lakebed.agent.model import DiskTrouble, ParkedBatch, ParkedFor, QueuedBatch
from lakebed.agent.transport import Transport
from lakebed.agent.verdict import SendOutcome, SendVerdict, judge
from lakebed.agent.waiting import Offload, cancel, in_thread, wait_for_any, wait_for_first
from lakebed.core import logs
from lakebed.core.clock import now_ms
from lakebed.core.errors import Corrupt, NotFound, OutcomeUnknown, Unavailable
from lakebed.core.runtime import Runtime

RETURNED_POLL_S = 5.0  # how soon a batch its owner returned is seen

_PARKED_FOR: dict[SendOutcome, ParkedFor] = {
    SendOutcome.CONFLICT: "identity_conflict",
    SendOutcome.QUARANTINED: "boot_quarantined",
    SendOutcome.REJECTED: "rejected",
}
_CHECK = {SendOutcome.DENIED: "agent.token and the rights of its key", SendOutcome.MISROUTED: "agent.collectors"}


class Sender:
    def __init__(
        self,
        runtime: Runtime,
        disk_queue: DiskQueue,
        order: SendOrder,
        transport: Transport,
        alerts: Alerts,
        *,
        hedge_after_s: float,
        concurrency: int,
        offload: Offload = in_thread,
    ) -> None:
        clock, metrics = runtime.clock, runtime.metrics
        self._queue, self._order, self._transport, self._alerts = disk_queue, order, transport, alerts
        self._hedge_after_s, self._concurrency = hedge_after_s, concurrency
        self._clock, self._metrics, self._offload = clock, metrics, offload
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
        """Begins nothing new; `run` returns when what is in progress has ended."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        poll_s = 0.0
        try:
            while not (self._stopping and not self._sends):
                self._wake.clear()
                now_s = self._clock.monotonic_s()
                if now_s >= poll_s:
                    await self._check_parked()
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
        collector = self._order.collector(now_s)
        if collector is None or (entry := self._next_batch(collector, now_s)) is None:
            return False
        task = asyncio.ensure_future(self._send(entry, collector))
        self._order.started(collector)  # before the task first runs, so that a probe stays the only one
        self._sends.add(task)
        task.add_done_callback(lambda done: self._done(done, entry))
        return True

    def _next_batch(self, collector: CollectorState, now_s: float) -> QueuedBatch | None:
        order = self._order
        if collector.failures and (
            probe := self._queue.claim(lambda e: order.failed_before(e) or order.waits(e, now_s))
        ):
            return probe
        return self._queue.claim(lambda entry: order.waits(entry, now_s))

    def _done(self, task: asyncio.Task[None], entry: QueuedBatch) -> None:
        self._sends.discard(task)
        self._queue.release(entry)
        self._wake.set()
        if not task.cancelled() and (error := task.exception()):
            self._order.set_back(entry, self._clock.monotonic_s())
            self._log.error("send failed unexpectedly", error=repr(error))

    async def _send(self, entry: QueuedBatch, collector: CollectorState) -> None:
        try:
            data = await self._offload(lambda: self._queue.read(entry))
        except NotFound:
            await self._forget(entry, self._queue.gone)
            return
        except Corrupt as error:
            await self._park(entry, "corrupt", SendVerdict(SendOutcome.REJECTED, message=error.message), "")
            return
        except DiskTrouble as error:
            self._alerts.on("disk_trouble", error.message)
            self._order.set_back(entry, self._clock.monotonic_s())
            return
        finally:
            self._order.ended(collector)  # the request itself counts anew
        verdict, collector = await self._upload(entry, data, collector)
        await self._act(entry, verdict, collector)

    async def _act(self, entry: QueuedBatch, verdict: SendVerdict, collector: CollectorState) -> None:
        outcome = verdict.outcome
        if outcome in (SendOutcome.ACCEPTED, SendOutcome.DUPLICATE):
            await self._forget(entry, self._queue.complete)
            self._metrics.counter("lakebed_agent_sent_samples_total").inc(entry.samples)
        elif outcome in _PARKED_FOR:
            await self._park(entry, _PARKED_FOR[outcome], verdict, collector.url)
        elif outcome in (SendOutcome.BUSY, SendOutcome.LOST, SendOutcome.MISROUTED):
            self._order.set_back(entry, self._clock.monotonic_s())

    async def _upload(
        self, entry: QueuedBatch, data: bytes, collector: CollectorState
    ) -> tuple[SendVerdict, CollectorState]:
        """The verdict of the first collector that returns a final one; of the last response when none does."""
        requests = {self._request(entry, data, collector): collector}
        hedge_s: float | None = self._hedge_after_s or None
        verdict, by = SendVerdict(SendOutcome.UNREACHED), collector
        try:
            while requests:
                await wait_for_first(self._clock, hedge_s, requests)
                for task in [task for task in requests if task.done()]:
                    verdict, by = task.result(), requests.pop(task)
                    if verdict.outcome.final:
                        for slow in requests.values():
                            self._order.lost_hedge(slow, self._clock.monotonic_s())
                        return verdict, by
                if requests and hedge_s is not None:
                    hedge_s = None
                    if second := self._second(collector):
                        requests[self._request(entry, data, second)] = second
            return verdict, by
        finally:
            await cancel(requests)

    def _second(self, collector: CollectorState) -> CollectorState | None:
        second = self._order.collector(self._clock.monotonic_s(), other_than=collector)
        if second is None or not self._order.may_hedge():
            return None
        self._metrics.counter("lakebed_agent_hedges_total").inc()
        return second

    def _request(self, entry: QueuedBatch, data: bytes, collector: CollectorState) -> asyncio.Task[SendVerdict]:
        self._order.started(collector)
        task = asyncio.ensure_future(self._upload_to(entry, data, collector))
        task.add_done_callback(lambda done: self._order.ended(collector))
        return task

    async def _upload_to(self, entry: QueuedBatch, data: bytes, collector: CollectorState) -> SendVerdict:
        """One request, and what it teaches about its collector."""
        pauses = collector.pauses
        try:
            answer = await self._transport.post(collector.url, data)
            verdict = judge(answer, frame_sha256=entry.sha256, now_s=self._clock.now_ns() / 1e9)
        except OutcomeUnknown as error:
            verdict = SendVerdict(SendOutcome.LOST, message=error.message)
        except Unavailable as error:
            verdict = SendVerdict(SendOutcome.UNREACHED, message=error.message)
        self._metrics.counter("lakebed_agent_answers_total").labels(verdict.outcome.value).inc()
        self._learn(collector, verdict, pauses)
        return verdict

    def _learn(self, collector: CollectorState, verdict: SendVerdict, pauses: int) -> None:
        now_s, outcome = self._clock.monotonic_s(), verdict.outcome
        if outcome.final:
            self._order.succeeded(collector, pauses=pauses)
            self._alerts.off("denied")
            self._alerts.off("misrouted")
        elif outcome in (SendOutcome.DENIED, SendOutcome.MISROUTED):
            if outcome is SendOutcome.MISROUTED and not collector.failures:
                self._order.failed(collector, now_s)  # a proxy may reject this batch alone: the next one tells
            else:
                self._order.refused(collector, now_s)
            message = f"{collector.url} returned {verdict.status}: {verdict.message}; check {_CHECK[outcome]}"
            self._alerts.on(outcome.value, message, url=collector.url)
        else:
            if collector.failures == 0:
                self._log.warning("collector failed", url=collector.url, status=verdict.status, message=verdict.message)
            self._order.failed(collector, now_s, retry_after_s=verdict.retry_after_s)

    async def _park(self, entry: QueuedBatch, reason: ParkedFor, verdict: SendVerdict, url: str) -> None:
        parked = ParkedBatch(
            agent_id=self._queue.agent_id,
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
            await self._offload(lambda: self._queue.park(entry, parked))
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

    async def _forget(self, entry: QueuedBatch, how: Callable[[QueuedBatch], None]) -> None:
        await self._offload(lambda: how(entry))
        self._order.forget(entry)

    async def _check_parked(self) -> None:
        try:
            await self._offload(self._queue.take_returned)
            await self._offload(self._queue.refresh_parked)
        except OSError as error:
            self._alerts.on("disk_trouble", f"the queue cannot be read: {error}")
            return
        if not self._queue.parked_batches:
            for kind in PARKED_KINDS:
                self._alerts.off(kind)

    def _gauge(self) -> None:
        self._metrics.gauge("lakebed_agent_queue_batches").set(self._queue.batches)
        self._metrics.gauge("lakebed_agent_queue_bytes").set(self._queue.pending_bytes)
        self._metrics.gauge("lakebed_agent_parked_batches").set(self._queue.parked_batches)
