"""`lakebed bench agent`: what one batch costs the machine it comes from: fsyncs, time on its disk, CPU.

The queue's append is compared with the raw file operations: the same bytes written, fsynced, renamed and their folder
fsynced. CPU is this process's own; the collector's side runs in a thread whose CPU is subtracted.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from lakebed.agent.alerts import Alerts
from lakebed.agent.batcher import make_frame
from lakebed.agent.disk_queue import DiskQueue, QueueLimits
from lakebed.agent.failover import SendLimits, SendOrder
from lakebed.agent.files import Files
from lakebed.agent.model import Frame
from lakebed.agent.sender import Sender
from lakebed.agent.transport import HttpTransport
from lakebed.batches.bench import host_samples
from lakebed.batches.model import BatchIdentity, Sample
from lakebed.bench.harness import BenchEnvironment, Check, at_most, measured, rounds_of
from lakebed.core.ids import Ids
from lakebed.core.runtime import system_runtime

SAMPLES = 4700  # about 64 KiB as a frame
EACH = 40
APPEND_BAR = 1.5  # append ÷ bare fsyncs, medians: a fast disk shows our own work most


async def bench(environment: BenchEnvironment) -> Sequence[Check]:
    samples = host_samples(Ids(), SAMPLES)
    frames = [make_frame(_identity(n), samples) for n in range(8)]
    environment.report(f"batches of {SAMPLES} samples, {len(frames[0].data)} bytes as a frame")
    with tempfile.TemporaryDirectory(prefix="lakebed-bench-") as folder:
        disk_queue = _open(Path(folder) / "queue")
        checks = [_encode(samples), *await _append(environment, disk_queue, Path(folder), frames)]
        disk_queue.close()
        checks += await _send(Path(folder) / "sent", frames)
    return checks


def _encode(samples: Sequence[Sample]) -> Check:
    seen = []
    for n in range(9):
        began = time.process_time()
        make_frame(_identity(n), samples)
        seen.append((time.process_time() - began) * 1e3)
    return measured("CPU to make a frame, hash included", seen, "ms")


async def _append(
    environment: BenchEnvironment, disk_queue: DiskQueue, folder: Path, frames: Sequence[Frame]
) -> list[Check]:
    bare = folder / "bare"
    bare.mkdir()
    number = 0
    cpu: list[float] = []
    fsyncs: list[float] = []

    async def ours() -> float:
        nonlocal number
        before, cpu_began, began = disk_queue.files.fsyncs, time.process_time(), time.perf_counter()
        for frame in (frames[n % len(frames)] for n in range(EACH)):
            number += 1
            disk_queue.append([Frame(_identity(number), frame.data, frame.sha256)])
        took = time.perf_counter() - began
        cpu.append((time.process_time() - cpu_began) / EACH * 1e3)
        fsyncs.append((disk_queue.files.fsyncs - before) / EACH)
        return took / EACH * 1e3

    async def theirs() -> float:
        nonlocal number
        began = time.perf_counter()
        for frame in (frames[n % len(frames)] for n in range(EACH)):
            number += 1
            _bare_write(bare, f"{number}", frame.data)
        return (time.perf_counter() - began) / EACH * 1e3

    seen = await rounds_of(environment.rounds, {"ours": ours, "bare": theirs})
    return [
        measured("fsyncs per batch", fsyncs, ""),
        measured("append to the queue", seen["ours"], "ms"),
        measured("the same bytes without the queue: write, fsync, rename, fsync", seen["bare"], "ms"),
        measured("CPU of an append", cpu, "ms"),
        at_most("append ÷ bare", seen["ours"], seen["bare"], APPEND_BAR),
    ]


async def _send(folder: Path, frames: Sequence[Frame]) -> list[Check]:
    """Sends queued batches to a collector that does nothing, and counts the CPU of reading, sending and deleting."""
    disk_queue, runtime = _open(folder), system_runtime()
    count = 300
    for n in range(count):
        frame = frames[n % len(frames)]
        disk_queue.append([Frame(_identity(n), frame.data, frame.sha256)])
    collector = _Nothing()
    order_limits = SendLimits(4, 0.5, 30.0, 300.0, 60.0, 0.2)
    async with HttpTransport(token="t", timeout_s=30, connect_timeout_s=5, concurrency=4) as transport:
        sender = Sender(
            runtime,
            disk_queue,
            SendOrder([await asyncio.to_thread(collector.start)], order_limits, runtime.ids),
            transport,
            Alerts(folder / "alerts", metrics=runtime.metrics, now_ms=lambda: 0),
            hedge_after_s=0.0,
            concurrency=4,
        )
        cpu_began, began = time.process_time() - collector.cpu_s(), time.perf_counter()
        sending = asyncio.ensure_future(sender.run())
        while disk_queue.batches:
            await runtime.clock.sleep(0.01)
        took, cpu_s = time.perf_counter() - began, time.process_time() - collector.cpu_s() - cpu_began
        sender.stop()
        await sending
    collector.stop()
    disk_queue.close()
    return [
        measured("CPU to read, send and delete a batch", [cpu_s / count * 1e3], "ms"),
        measured("batches sent, catching up", [count / took], "1/s"),
    ]


class _Nothing:
    """A collector in a thread of its own that answers 200 to everything."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._port = 0

    def start(self) -> str:
        self._thread.start()
        self._ready.wait(10)
        return f"http://127.0.0.1:{self._port}"

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def cpu_s(self) -> float:
        return asyncio.run_coroutine_threadsafe(self._thread_time(), self._loop).result(10)

    async def _thread_time(self) -> float:
        return time.thread_time()

    def _run(self) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        serving = asyncio.all_tasks(self._loop)
        for task in serving:
            task.cancel()
        if serving:
            self._loop.run_until_complete(asyncio.wait(serving))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(lengths[0].split(b":")[1]))
                writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 19\r\n\r\n{"duplicate":false}')
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.close()


def _bare_write(folder: Path, name: str, data: bytes) -> None:
    hashlib.sha256(data)  # the queue's name needs it too
    fd = os.open(folder / f"{name}.tmp", os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(fd, data)
    os.fsync(fd)
    os.close(fd)
    (folder / f"{name}.tmp").rename(folder / name)
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _open(folder: Path) -> DiskQueue:
    limits = QueueLimits(1 << 40, 1_000_000, "block")
    return DiskQueue.open(folder, agent_id="bench", boot_id="boot", limits=limits, now_ms=lambda: 0, files=Files())


def _identity(number: int) -> BatchIdentity:
    return BatchIdentity("bench", "boot", number * SAMPLES, (number + 1) * SAMPLES - 1)
