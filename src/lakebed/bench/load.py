"""The load generator, and CPU time and memory of processes.

The generator uses raw asyncio streams and does not parse response bodies. LoadRequest bytes are made before the clock
starts, so the server is measured; the generator's own CPU time is part of the result, so a bench can see whether the
generator was the bottleneck. CPU time varies less than elapsed time on a machine that other programs use.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

READ_BYTES = 1 << 20


class LoadRequest(msgspec.Struct, frozen=True):
    """The bytes of one HTTP request, and how many records it carries."""

    data: bytes
    records: int
    broker: int = 0
    name: str = ""


class LoadResult(msgspec.Struct, frozen=True):
    requests: int
    records: int
    failed: int
    seconds: float
    cpu_seconds: float
    received_bytes: int
    latencies_ms: tuple[float, float, float]  # p50, p99, largest
    statuses: dict[int, int]

    @property
    def records_per_s(self) -> float:
        return self.records / self.seconds

    @property
    def bytes_per_s(self) -> float:
        return self.received_bytes / self.seconds


def post(
    url: str, path: str, body: bytes, records: int, *, content_type: str, accept: str = "", name: str = ""
) -> LoadRequest:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\n{f'Accept: {accept}' + chr(13) + chr(10) if accept else ''}\r\n"
    )
    return LoadRequest(head.encode() + body, records, name=name)


class LoadConnection:
    """One keep-alive connection, one request at a time."""

    def __init__(self, url: str) -> None:
        split = urlsplit(url)
        self._host, self._port = split.hostname or "", split.port or 80
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def request(self, data: bytes) -> tuple[int, bytes]:
        """Status and body. Raises OSError when the server is gone; the next call opens a new connection."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=READ_BYTES)
        reader, writer = self._streams
        try:
            writer.write(data)
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head[9:12])
            length = 0
            for line in head.split(b"\r\n"):
                if line.lower().startswith(b"content-length:"):
                    length = int(line[15:])
            return status, await reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            self.close()
            raise ConnectionError(str(error)) from error

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def send_load(
    urls: Sequence[str],
    requests: Sequence[LoadRequest],
    *,
    lanes: int,
    seen: Callable[[LoadRequest, int, bytes], None] = lambda *_: None,
) -> LoadResult:
    """Sends every request over `lanes` connections in all, each to the broker it names."""
    waiting = iter(requests)
    latencies: list[float] = []
    statuses: dict[int, int] = {}
    done = [0, 0, 0]
    cpu, began = time.process_time(), time.perf_counter()

    async def lane() -> None:
        connections = [LoadConnection(url) for url in urls]
        for request in waiting:
            at = time.perf_counter()
            try:
                status, body = await connections[request.broker].request(request.data)
            except ConnectionError:
                status, body = 0, b""
            latencies.append((time.perf_counter() - at) * 1e3)
            statuses[status] = statuses.get(status, 0) + 1
            done[2] += len(body)
            seen(request, status, body)
            if status == 200:
                done[0] += request.records
            else:
                done[1] += 1
        for connection in connections:
            connection.close()

    await asyncio.gather(*(lane() for _ in range(lanes)))
    seconds = time.perf_counter() - began
    latencies.sort()
    spread = (latencies[len(latencies) // 2], latencies[int(len(latencies) * 0.99) - 1], latencies[-1])
    return LoadResult(len(requests), done[0], done[1], seconds, time.process_time() - cpu, done[2], spread, statuses)


PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU seconds of the process, or 0 when it is gone or the system has no /proc."""
    fields = _fields(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0


def rss_bytes(pid: int) -> int:
    fields = _fields(pid)
    return int(fields[21]) * os.sysconf("SC_PAGESIZE") if fields else 0


def tree_cpu_s() -> float:
    """CPU seconds of this process and its running descendants: generator, servers, bucket."""
    parents = {pid: int(fields[1]) for pid in _pids() if (fields := _fields(pid))}
    own = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in own and pid not in own}:
        own |= more
    return sum(map(cpu_s, own))


def _pids() -> list[int]:
    try:
        return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]
    except OSError:
        return []


def _fields(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat behind the command, which may hold anything."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
