"""The agent whole: sources → batcher → disk queue → sender, and an orderly stop.

At a stop nothing that was read is left in memory: sources end, the batcher flushes to the disk, the sender finishes
what is in progress within `stop_s`, and the rest waits on disk for the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from lakebed.agent import paths
from lakebed.agent.alerts import Alerts, read_alerts
from lakebed.agent.batcher import Batcher, BatchLimits
from lakebed.agent.disk_queue import DiskQueue, QueueLimits
from lakebed.agent.failover import SendLimits, SendOrder
from lakebed.agent.model import AppendResult, Frame, QueueFull
from lakebed.agent.sender import Sender
from lakebed.agent.settings import AgentSettings
from lakebed.agent.sources.host import HostSource
from lakebed.agent.sources.scrape import ScrapeSource
from lakebed.agent.sources.stdin import StdinSource
from lakebed.agent.transport import HttpTransport
from lakebed.agent.waiting import cancel, in_thread
from lakebed.batches.model import check_id
from lakebed.core import logs
from lakebed.core.clock import now_ms
from lakebed.core.context import Worker
from lakebed.core.errors import Overloaded, Unavailable
from lakebed.core.runtime import Runtime
from lakebed.core.tls import client_context

if TYPE_CHECKING:
    from lakebed.agent.sources.listen import LoopbackServer

RESTART_S = 1.0  # before a source that failed is started again
BACKOFF_BASE_S = 0.5  # first wait after a failed send; doubled each time, with jitter
BACKOFF_CAP_S = 30.0  # longest wait of one collector or batch: an agent finds a collector that is back within this
ACK_LINGER_S = 0.05  # an OTLP request waits for the disk: gather what arrives within this into one fsync
DRAIN_POLL_S = 0.05


class Agent:
    """One run of an agent, from start to stop: a boot."""

    def __init__(self, runtime: Runtime, settings: AgentSettings) -> None:
        clock, ids, metrics = runtime.clock, runtime.ids, runtime.metrics
        self._runtime = runtime
        self._settings, self._clock, self._ids, self._metrics = settings, clock, ids, metrics
        self._log = logs.logger("agent")
        self.agent_id = check_id("agent_id", settings.agent_id or socket.gethostname())
        self.boot_id = ids.uuid()
        self._sources: list[asyncio.Task[None]] = []
        self._stdin: StdinSource | None = None
        self._server: LoopbackServer | None = None
        self._served: asyncio.Task[None] | None = None
        self._fsyncs = 0
        self._workers: list[Worker] = []
        self._order: SendOrder | None = None

    def add_worker(self, worker: Worker) -> None:
        """Has this run as long as the agent does; one that fails is started again."""
        self._workers.append(worker)

    def point(self, urls: Sequence[str]) -> None:
        """Sends batches to these collectors from now on."""
        self._settings = msgspec.structs.replace(self._settings, collectors=tuple(urls))
        if self._order is not None:
            self._order.point(urls)
            self._sender.wake()

    def alert(self, kind: str, message: str | None) -> None:
        """Raises an alert, or ends it; for what runs beside."""
        if message is None:
            self._alerts.off(kind)
        else:
            self._alerts.on(kind, message)

    async def run(self, stop: asyncio.Event) -> None:
        """Runs until `stop` is set, or until standard input, as the only source, has ended and been sent.

        Raises Unavailable when it had to leave something behind: samples that the disk would not take, or, at the end
        of standard input, batches that no collector took within `drain_s` (those are safe on disk).
        """
        settings = self._settings
        self._queue = await asyncio.to_thread(self._open)
        try:
            self._alerts = Alerts(settings.queue_dir / paths.ALERTS, metrics=self._metrics, now_ms=self._now_ms)
            transport = HttpTransport(
                token=settings.token.reveal(),
                timeout_s=settings.request_timeout_s,
                connect_timeout_s=settings.connect_timeout_s,
                concurrency=settings.send_concurrency,
                verify=client_context(settings.tls_ca, settings.tls_cert, settings.tls_key),
            )
            async with transport:
                self._wire(transport)
                await self._live(transport, stop)
        finally:
            self._queue.close()

    def _open(self) -> DiskQueue:
        settings = self._settings
        limits = QueueLimits(settings.queue_bytes_max, settings.queue_batches_max, settings.when_full)
        disk_queue = DiskQueue.open(
            settings.queue_dir, agent_id=self.agent_id, boot_id=self.boot_id, limits=limits, now_ms=self._now_ms
        )
        self._metrics.counter("lakebed_agent_torn_total").inc(disk_queue.torn)
        return disk_queue

    def _wire(self, transport: HttpTransport) -> None:
        settings = self._settings
        self._batcher = Batcher(
            self._runtime,
            self.agent_id,
            self.boot_id,
            BatchLimits(settings.batch_bytes, settings.batch_samples_max, settings.batch_interval_s),
            self._store,
            trouble=self._trouble,
        )
        order_limits = SendLimits(
            concurrency=settings.send_concurrency,
            base_s=BACKOFF_BASE_S,
            cap_s=BACKOFF_CAP_S,
            retry_after_max_s=settings.retry_after_max_s,
            denied_s=settings.denied_retry_s,
            hedge_share_max=settings.hedge_share_max,
        )
        self._order = SendOrder(settings.collectors, order_limits, self._ids)
        self._sender = Sender(
            self._runtime,
            self._queue,
            self._order,
            transport,
            self._alerts,
            hedge_after_s=settings.hedge_after_s,
            concurrency=settings.send_concurrency,
        )

    async def _live(self, transport: HttpTransport, stop: asyncio.Event) -> None:
        waiting, settings = self._queue.batches, self._settings
        self._log.info("agent starts", agent_id=self.agent_id, boot_id=self.boot_id, waiting=waiting)
        if not settings.collectors:
            self._log.warning("no collectors: batches are only queued", setting="agent.collectors")
        batching = asyncio.ensure_future(self._batcher.run())
        sending = asyncio.ensure_future(self._sender.run())
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await self._start_sources(transport)
        except BaseException:
            await cancel([batching, sending, stopped])
            raise
        only_stdin = self._stdin is not None and len(self._sources) == 1 and self._server is None
        ends = [batching, sending, stopped, *(self._sources if only_stdin else ())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await self._stop_sources()
            await self._stop_batcher(batching)
            if only_stdin and not stop.is_set() and not sending.done():
                await self._drain(sending, stop)
            self._sender.stop()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(settings.stop_s):
                    await asyncio.shield(sending)
        finally:
            await cancel([batching, sending, stopped, *self._sources, *([self._served] if self._served else [])])
        for ended in (batching, sending, *([self._sources[0]] if self._stdin is not None else [])):
            if not ended.cancelled() and (error := ended.exception()):
                raise error
        self._log.info("agent stops", waiting=self._queue.batches, parked=self._queue.parked_batches)
        if self._batcher.buffered:
            raise Unavailable(
                f"{self._batcher.buffered} samples could not be written to disk before the stop and are lost"
            )
        if only_stdin and not stop.is_set() and self._queue.batches:
            raise Unavailable(
                f"{self._queue.batches} batches were not sent yet; they are safe in {settings.queue_dir}",
                hint="run the agent again: it sends them first",
            )

    async def _start_sources(self, transport: HttpTransport) -> None:
        settings, batcher = self._settings, self._batcher
        if settings.otlp_port >= 0:
            await self._listen()
        if settings.stdin:
            acks = _print_ack if settings.stdin_acks else None
            self._stdin = StdinSource(self._runtime, batcher, line_bytes_max=settings.line_bytes_max, acks=acks)
            self._sources.append(asyncio.ensure_future(self._stdin.run()))
        for target in settings.scrape:
            source = ScrapeSource(
                self._runtime,
                target,
                batcher,
                transport,
                bytes_max=settings.scrape_bytes_max,
                samples_max=settings.scrape_samples_max,
            )
            self._sources.append(asyncio.ensure_future(self._again(source.run)))
        if settings.host_interval_s:
            host = HostSource(self._runtime, batcher, interval_s=settings.host_interval_s)
            self._sources.append(asyncio.ensure_future(self._again(host.run)))
        self._sources += [asyncio.ensure_future(self._again(worker.run)) for worker in self._workers]

    async def _listen(self) -> None:
        # Only here: an agent without OTLP does not load protobuf and a web server.
        from lakebed.agent.sources.listen import LOOPBACK, LoopbackServer, OtlpListener, bind

        settings = self._settings
        listener = OtlpListener(
            self._runtime,
            self._batcher,
            linger_s=ACK_LINGER_S,
            bytes_max=settings.otlp_bytes_max,
            points_max=settings.otlp_points_max,
            health=self.health,
        )
        bound = bind(settings.otlp_port)
        self._server = LoopbackServer(listener.app)
        self._served = asyncio.ensure_future(self._server.serve(sockets=[bound]))
        while not self._server.started and not self._served.done():
            await self._clock.sleep(DRAIN_POLL_S)
        self._log.info("listening", address=f"http://{LOOPBACK}:{bound.getsockname()[1]}", takes="OTLP/HTTP metrics")

    async def _stop_sources(self) -> None:
        if self._stdin is not None:
            self._stdin.stop()
        if self._server is not None:
            self._server.should_exit = True
        reading = [self._sources[0]] if self._stdin is not None else []
        await cancel(task for task in self._sources if task not in reading)
        ending = [*reading, *([self._served] if self._served else [])]
        if ending:
            await asyncio.wait(ending, timeout=self._settings.stop_s)

    async def _stop_batcher(self, batching: asyncio.Task[None]) -> None:
        self._batcher.stop()
        await asyncio.wait([batching], timeout=self._settings.stop_s)

    async def _drain(self, sending: asyncio.Task[None], stop: asyncio.Event) -> None:
        until_s = self._clock.monotonic_s() + self._settings.drain_s
        while (self._queue.batches or not self._sender.idle) and self._clock.monotonic_s() < until_s:
            if stop.is_set() or sending.done() or not self._settings.collectors:
                return
            await self._clock.sleep(DRAIN_POLL_S)

    async def _again(self, run: Callable[[], Awaitable[None]]) -> None:
        """Keeps a source going: what it did not foresee is logged, and it is started again."""
        while True:
            try:
                await run()
            except Exception as error:
                self._log.error("source failed and is restarted", error=repr(error))
            await self._clock.sleep(RESTART_S)

    async def _store(self, frames: Sequence[Frame]) -> AppendResult:
        stored = await in_thread(lambda: self._queue.append(frames))
        self._metrics.counter("lakebed_agent_fsyncs_total").inc(self._queue.files.fsyncs - self._fsyncs)
        self._fsyncs = self._queue.files.fsyncs
        if stored.dropped_batches:
            what = f"{stored.dropped_batches} batches ({stored.dropped_samples} samples) were dropped for newer ones"
            self._alerts.on("queue_full", f"the queue is full: {what}")
        else:
            self._alerts.off("queue_full")
        self._sender.wake()
        return stored

    def _trouble(self, error: Overloaded | Unavailable | None) -> None:
        if error is None:
            self._alerts.off("disk_trouble")
        else:
            self._alerts.on("queue_full" if isinstance(error, QueueFull) else "disk_trouble", error.message)

    def health(self) -> dict[str, Any]:
        disk_queue = self._queue
        alerts = [alert.kind for alert in read_alerts(self._settings.queue_dir / paths.ALERTS)]
        return {
            "status": "degraded" if alerts else "ok",
            "agent_id": self.agent_id,
            "boot_id": self.boot_id,
            "buffered_samples": self._batcher.buffered,
            "queue_batches": disk_queue.batches,
            "queue_bytes": disk_queue.pending_bytes,
            "parked_batches": disk_queue.parked_batches,
            "alerts": alerts,
        }

    def _now_ms(self) -> int:
        return now_ms(self._clock)


def _print_ack(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
