"""A proxy in front of the real bucket that loses answers. Requests are carried out; what comes back is not reliable.

Requests pass byte for byte, the Host header included, so their signatures stay valid. The seed decides what happens
to the n-th request. The proxy runs in a thread of its own, and one proxy may serve any number of processes.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
from asyncio import StreamReader, StreamWriter
from collections import Counter
from contextlib import suppress

import msgspec

HEAD_BYTES_MAX = 1024 * 1024  # S3 clients send some hundred bytes
LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding:[ \t]*chunked", re.IGNORECASE)
CONDITION = re.compile(rb"\r\nif-(none-)?match:", re.IGNORECASE)
REPLACES = re.compile(rb"\r\nif-match:", re.IGNORECASE)
EXPECTS = re.compile(rb"\r\nexpect:[ \t]*100-continue", re.IGNORECASE)
CLOSES = re.compile(rb"\r\nconnection:[ \t]*close", re.IGNORECASE)
READS = frozenset({"GET", "HEAD"})
CHANGES = frozenset({"PUT", "POST", "DELETE"})
NO_BODY = frozenset({204, 304})


class Faults(msgspec.Struct, frozen=True):
    """Shares of requests, between 0 and 1, and how long the late ones are."""

    drop: float = 0.05  # of PUT, POST and DELETE: carried out, and the answer is lost or breaks off
    delay: float = 0.05  # of all: the request arrives late, or its answer does
    delay_max_s: float = 0.06
    # After the answer to a replace was lost, its writer decides by reading. That is when order matters:
    overtake: float = 0.7  # of reads of this key: another write gets in between; of its PUTs: one is late
    overtake_within_s: float = 0.3
    overtake_max_s: float = 0.1  # no other write comes for so long: the read goes on
    cut: float = 0.01  # of GET: the answer breaks off in the middle of its body
    repeat: float = 0.02  # of conditional PUTs: the same request arrives a second time, later
    repeat_max_s: float = 1.0


CALM = Faults(drop=0.0, delay=0.0, overtake=0.0, cut=0.0, repeat=0.0)


class Fate(msgspec.Struct, frozen=True):
    """What happens to one request."""

    drop: bool
    cut: bool
    repeat: bool
    overtaken: bool  # a HEAD waits for another write before it is passed on; the answer to a GET waits for one
    early_s: float  # waited before the request is passed on
    late_s: float  # waited before its answer is
    silent: bool  # of a lost answer, nothing arrives; otherwise its first half does


class LossyProxy:
    """`with LossyProxy(endpoint, seed=1) as proxy:` … `proxy.endpoint`, `proxy.counts["dropped"]`."""

    def __init__(self, endpoint: str, *, seed: int, faults: Faults | None = None) -> None:
        host, _, port = endpoint.removeprefix("http://").rpartition(":")
        self._target = (host, int(port))
        self._dice = random.Random(seed)
        self.faults = faults or Faults()
        self.counts: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._doubted: dict[str, float] = {}  # key of a write whose answer was lost → until when reads are overtaken
        self._writes: dict[str, asyncio.Event] = {}  # key → its next write, where somebody waits for one
        self.endpoint = ""

    def __enter__(self) -> LossyProxy:
        self._thread.start()
        port = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        self.endpoint = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=HEAD_BYTES_MAX)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        upstream: StreamWriter | None = None
        try:
            answers, upstream = await asyncio.open_connection(*self._target, limit=HEAD_BYTES_MAX)
            while await self._pass(reader, writer, answers, upstream):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            self.counts["broken"] += 1  # one of the two went away: a killed process, or an idle connection
        finally:
            for each in (writer, upstream):
                if each is not None:
                    each.close()

    async def _pass(
        self, reader: StreamReader, writer: StreamWriter, answers: StreamReader, upstream: StreamWriter
    ) -> bool:
        """One request and its answer. False when the connection is over."""
        head = await _head(reader)
        if not head:
            return False
        if EXPECTS.search(head):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request = head + await _body(reader, head)
        method, target = (word.decode() for word in head.split(b" ", 2)[:2])
        fate = self._fate(method, target, head)
        await asyncio.sleep(fate.early_s)
        if fate.overtaken and method == "HEAD":
            await self._next_write(target)
        upstream.write(request)
        await upstream.drain()
        answer_head, answer = await _answer(answers, method)
        if fate.repeat:
            self._later(self._repeat(request, method))
        if method == "PUT" and answer_head.startswith(b"HTTP/1.1 200") and target in self._writes:
            self._writes.pop(target).set()
        if fate.overtaken and method == "GET":
            await self._next_write(target)
        await asyncio.sleep(fate.late_s)
        if fate.drop or (fate.cut and len(answer) > len(answer_head)):
            return await self._lose(writer, fate, answer_head, answer)
        writer.write(answer)
        await writer.drain()
        return not CLOSES.search(answer_head) and not CLOSES.search(head)

    def _fate(self, method: str, target: str, head: bytes) -> Fate:
        rolled = [self._dice.random() for _ in range(7)]  # always as many, whatever the request is
        faults, self.counts[method] = self.faults, self.counts[method] + 1
        doubted = self._doubted.get(target, 0.0) > self._loop.time()
        delay = faults.overtake if doubted and method == "PUT" else faults.delay
        late_s = faults.delay_max_s * rolled[2] if rolled[1] < delay else 0.0
        fate = Fate(
            drop=method in CHANGES and rolled[0] < faults.drop,
            cut=method == "GET" and rolled[0] < faults.cut,
            repeat=method == "PUT" and rolled[3] < faults.repeat and bool(CONDITION.search(head)),
            overtaken=doubted and method in READS and rolled[5] < faults.overtake,
            early_s=late_s if rolled[4] < 0.5 else 0.0,
            late_s=late_s if rolled[4] >= 0.5 else 0.0,
            silent=rolled[6] < 0.7,
        )
        if fate.drop and REPLACES.search(head):
            self._doubted[target] = self._loop.time() + faults.overtake_within_s
        if fate.drop:
            self.counts["dropped"] += 1
            self.counts[f"dropped {method}"] += 1
        self.counts["delayed"] += late_s > 0.0
        self.counts["overtaken"] += fate.overtaken
        return fate

    async def _next_write(self, target: str) -> None:
        """Returns when a PUT of this key has been carried out, or after a while."""
        with suppress(TimeoutError):
            written = self._writes.setdefault(target, asyncio.Event())
            await asyncio.wait_for(written.wait(), self.faults.overtake_max_s)

    async def _lose(self, writer: StreamWriter, fate: Fate, head: bytes, answer: bytes) -> bool:
        """Ends the connection; of a GET, and of some others, after half of the answer (of a GET: half of its body)."""
        if fate.drop and fate.silent:
            writer.transport.abort()
            return False
        self.counts["cut"] += fate.cut
        writer.write(answer[: (len(head) + len(answer)) // 2] if fate.cut else answer[: len(answer) // 2])
        await writer.drain()
        return False

    async def _repeat(self, request: bytes, method: str) -> None:
        await asyncio.sleep(self.faults.repeat_max_s * self._dice.random())
        answers, upstream = await asyncio.open_connection(*self._target, limit=HEAD_BYTES_MAX)
        try:
            upstream.write(request)
            await _answer(answers, method)
            self.counts["repeated"] += 1
        finally:
            upstream.close()

    def _later(self, work: object) -> None:
        async def quietly() -> None:
            with suppress(OSError, asyncio.IncompleteReadError):
                await work  # type: ignore[misc]

        task = self._loop.create_task(quietly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _head(reader: StreamReader) -> bytes:
    """A head with its empty line; nothing when the connection ends before one."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return b""


async def _body(reader: StreamReader, head: bytes) -> bytes:
    """The body as it came, chunks with their sizes."""
    if length := LENGTH.search(head):
        return await reader.readexactly(int(length.group(1)))
    if not CHUNKED.search(head):
        return b""
    parts: list[bytes] = []
    while True:
        size = await reader.readline()
        count = int(size.split(b";")[0], 16)
        parts += [size, await reader.readexactly(count + 2)] if count else [size]
        if count == 0:
            break
    while (trailer := await reader.readline()) not in (b"\r\n", b""):
        parts.append(trailer)
    return b"".join([*parts, b"\r\n"])


async def _answer(reader: StreamReader, method: str) -> tuple[bytes, bytes]:
    """The head of the final answer, and the whole answer. Interim answers (1xx) are left out."""
    while True:
        head = await _head(reader)
        if not head:
            raise ConnectionResetError("the store closed the connection")
        status = int(head.split(b" ", 2)[1])
        if status >= 200:
            break
    if method == "HEAD" or status in NO_BODY:
        return head, head
    return head, head + await _body(reader, head)
