"""What a gateway keeps of what it was sent: nothing of a body that was answered, little of a head that never ends."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lakebed.gateway.protocol import HEAD_BYTES_MAX, HEAD_LINES_MAX
from support.gateway_process import DEADLINE_S, MEMORY, Running, Start, answer_of
from support.hot_gateway import LOOPS, Server, serving

MIB = 1024 * 1024
POST = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
WRONG = b'{"topic_partitions": [{"topic": "t", "partition": 0, "records": 7, "more": "%s"}]}'


def declared(path: bytes, body: bytes) -> bytes:
    return POST % path + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(path: bytes, body: bytes) -> bytes:
    return POST % path + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without the garbage collector, whatever is in a cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("form", [declared, chunked], ids=["declared", "chunked"])
@pytest.mark.parametrize("path", [b"/hot", b"/prompt", b"/nowhere"])
@pytest.mark.parametrize("size", [200 * 1024, 900 * 1024], ids=["small", "large"])
def test_nothing_of_an_answered_body_is_kept(
    loop: str, form: Callable[[bytes, bytes], bytes], path: bytes, size: int
) -> None:
    """Taken or refused, by whatever way it came: after 20 bodies memory is what it was after the first two, without any
    help of the garbage collector.
    """

    async def play(server: Server) -> int:
        async def send(body: bytes) -> None:
            reader, writer = await asyncio.open_connection(*server.address)
            try:
                writer.write(form(path, body))
                await answer_of(reader)
                writer.close()
                await writer.wait_closed()
            except ConnectionError:
                assert path == b"/nowhere"  # refused and closed before the body was sent

        bodies = [b"refuse".ljust(size, b" "), b"x" * size]
        for body in bodies:
            await send(body)
        tracemalloc.start()
        try:
            for _ in range(10):
                for body in bodies:
                    await send(body)
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    grown = serving(loop, play)

    assert grown < 2 * size, f"{grown} bytes are kept of {20 * size}"


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("path", [b"/hot", b"/prompt"])
@pytest.mark.parametrize("body", [b"taken", b"refuse"])
def test_a_connection_keeps_nothing_of_its_answered_requests(loop: str, path: bytes, body: bytes) -> None:
    """1,000 requests on one connection leave less than 100 bytes each, without any help of the garbage collector."""

    async def play(server: Server) -> int:
        reader, writer = await asyncio.open_connection(*server.address)

        async def send(times: int) -> None:
            for _ in range(times):
                writer.write(declared(path, body))
                await answer_of(reader)

        await send(100)
        tracemalloc.start()
        try:
            await send(1000)
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
            writer.close()

    grown = serving(loop, play)

    assert grown < 1000 * 100, f"{grown} bytes are kept of 1,000 requests"


def resident_mib(running: Running) -> int:
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")) // 1024


async def refuse(running: Running, request: bytes, times: int) -> set[int]:
    reader, writer = await running.connect()
    statuses = set()
    for _ in range(times):
        writer.write(request)
        status, headers, _ = await answer_of(reader)
        statuses.add(status)
        if headers.get("connection") == "close":
            writer.close()
            reader, writer = await running.connect()
    writer.close()
    return statuses


async def test_memory_after_a_thousand_refusals_is_what_it_was(start: Start) -> None:
    """A real gateway, the parts that take large bodies: 1,000 refused bodies of 1 MB leave what 20 had left."""
    gateway = await (await start("serve", "--parts", "log,queue,batches", env=MEMORY, probe=False)).ready()
    body = WRONG % (b"a" * MIB)
    requests = {
        declared(b"/v1/produce", body): 400,
        chunked(b"/v1/produce", body): 400,
        declared(b"/v1/queues/q/entries", body): 400,
        declared(b"/v1/batches", body): 400,
    }
    for request, status in requests.items():
        assert {status} == await refuse(gateway, request, 5)
    warm = resident_mib(gateway)

    for request in requests:
        await refuse(gateway, request, 250)

    assert resident_mib(gateway) < warm + 100, f"{warm} MiB before, 1,000 MiB were refused"
    assert await gateway.stop() == 0


LARGE_HEADS = {
    "one long header": b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: " + b"x" * MIB + b"\r\n\r\n",
    "many headers": b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X-A: b\r\n" * 20_000 + b"\r\n",
    "a header too many": b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X-A: b\r\n" * HEAD_LINES_MAX + b"\r\n",
    "a long address": b"GET /healthz?" + b"x" * HEAD_BYTES_MAX + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "of a direct route": b"POST /hot HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\nX-Long: "
    + b"x" * HEAD_BYTES_MAX
    + b"\r\n\r\n",
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("head", LARGE_HEADS)
def test_a_head_over_its_limits_is_431(loop: str, head: str) -> None:
    """In bytes or in lines, on either way: refused with a problem, and the connection closes."""

    async def play(server: Server) -> tuple[int, dict[str, str], bytes]:
        reader, writer = await asyncio.open_connection(*server.address)
        sending = asyncio.create_task(_send(writer, LARGE_HEADS[head]))
        answer = await answer_of(reader)
        sending.cancel()
        writer.close()
        return answer

    status, headers, body = serving(loop, play)

    assert (status, headers["connection"]) == (431, "close")
    assert b"head_too_large" in body


@pytest.mark.parametrize("loop", LOOPS)
def test_a_head_within_its_limits_is_taken_also_with_a_large_body_behind_it(loop: str) -> None:
    """The limit is the head's alone: bytes of a body in the same packets do not count."""
    long = b"X-Long: " + b"x" * (HEAD_BYTES_MAX - 1024) + b"\r\n"
    lines = b"X-A: b\r\n" * (HEAD_LINES_MAX - 3)

    async def play(server: Server) -> list[int]:
        reader, writer = await asyncio.open_connection(*server.address)
        statuses = []
        for more in (long, lines):
            head = b"POST /hot HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n" % (900 * 1024)
            writer.write(head + more + b"\r\n" + b"x" * (900 * 1024))
            statuses.append((await answer_of(reader))[0])
        writer.close()
        return statuses

    assert [200, 200] == serving(loop, play)


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    try:
        writer.write(data)
        await writer.drain()
    except ConnectionError:
        return  # refused meanwhile


async def test_heads_and_trailers_that_never_end_do_not_grow_memory(start: Start) -> None:
    """20 connections send 30 MB each that never become a request: refused while they arrive, and nothing is kept."""
    gateway = await (await start("serve")).ready()
    before = resident_mib(gateway)

    async def endless(first: bytes) -> int:
        _, writer = await gateway.connect()
        sent = 0
        try:
            writer.write(first)
            while sent < 30 * MIB:
                writer.write(b"x" * 65536)
                await asyncio.wait_for(writer.drain(), DEADLINE_S)
                sent += 65536
        except ConnectionError:
            pass
        writer.close()
        return sent

    heads = [endless(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: ") for _ in range(10)]
    trailer = POST % b"/probe" + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX-Long: "
    trailers = [endless(trailer) for _ in range(10)]
    assert all(size < 30 * MIB for size in await asyncio.gather(*heads, *trailers))

    assert resident_mib(gateway) < before + 60
    assert (await gateway.get("/healthz")).status_code == 200
    assert await gateway.stop() == 0
