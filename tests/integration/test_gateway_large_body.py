"""Large bodies over real sockets: whatever way they arrive, the app sees their bytes, and the connection continues."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from lakebed.core.http import whole_body
from lakebed.gateway.fast.large_body import LARGE_BYTES, UNREAD_BYTES_MAX
from lakebed.gateway.listen import bind, server_config
from lakebed.gateway.settings import GatewaySettings

Loop = Callable[[], asyncio.AbstractEventLoop]
LOOPS: dict[str, Loop] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}
SOME, MUCH = os.urandom(LARGE_BYTES + 1), os.urandom(3 * UNREAD_BYTES_MAX + 17)


class App:
    """Answers with what came: `/whole` in one piece, `/slowly` a chunk at a time, anything else without looking."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.gone = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for _ in range(2):
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
            return
        request = Request(scope, receive)
        try:
            await (await self._answer(request))(scope, receive, send)
        except ClientDisconnect:
            self.gone.set()

    async def _answer(self, request: Request) -> Response:
        if request.url.path == "/whole":
            body = await whole_body(request)
            self.kinds.append(type(body).__name__)
            return PlainTextResponse(hashlib.sha256(body).hexdigest())
        if request.url.path == "/slowly":
            digest = hashlib.sha256()
            async for chunk in request.stream():
                await asyncio.sleep(0.002)
                digest.update(chunk)
            return PlainTextResponse(digest.hexdigest())
        return PlainTextResponse("not read")


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, path: str, body: bytes, *, more: str = "") -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{more}\r\n"
        self.writer.write(head.encode() + body)

    async def answer(self) -> str:
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        return (await self.reader.readexactly(length)).decode()


def sha(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def serving(loop: str, requested: Callable[[App, Client], Coroutine[Any, Any, None]], fast_path: bool) -> None:
    """Runs the questions against a server on that loop."""

    async def run() -> None:
        app, bound = App(), bind("127.0.0.1", 0)
        server = uvicorn.Server(server_config(app, GatewaySettings(fast_path=fast_path)))  # type: ignore[arg-type]
        serve = asyncio.create_task(server.serve(sockets=[bound]))
        while not server.started:
            await asyncio.sleep(0.01)
        streams = await asyncio.open_connection(*bound.getsockname())
        try:
            async with asyncio.timeout(100):
                await requested(app, Client(*streams))
        finally:
            streams[1].close()
            server.should_exit = True
            await serve

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(run())


@pytest.mark.parametrize("fast_path", [True, False], ids=["fast", "asgi"])
@pytest.mark.parametrize("loop", LOOPS)
def test_large_and_small_bodies_share_a_connection(loop: str, fast_path: bool) -> None:
    """A connection carries bodies of any size one after another; on the fast path, a large one is not joined."""

    async def requested(app: App, client: Client) -> None:
        for body in (MUCH, b"small", SOME, MUCH, b""):
            client.send("/whole", body)
            assert sha(body) == await client.answer()
        large = "memoryview" if fast_path else "bytes"
        assert [large, "bytes", large, large, "bytes"] == app.kinds

    serving(loop, requested, fast_path)


@pytest.mark.parametrize("fast_path", [True, False], ids=["fast", "asgi"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_body_in_odd_pieces_arrives_whole(loop: str, fast_path: bool) -> None:
    """It does not matter where the packets end: not in the head, not in the body."""

    async def requested(app: App, client: Client) -> None:
        head = f"POST /whole HTTP/1.1\r\nHost: x\r\nContent-Length: {len(SOME)}\r\n\r\n".encode()
        for piece in (head[:20], head[20:], SOME[:1], SOME[1:5000], SOME[5000:]):
            client.writer.write(piece)
            await asyncio.sleep(0.02)
        assert sha(SOME) == await client.answer()

    serving(loop, requested, fast_path)


@pytest.mark.parametrize("fast_path", [True, False], ids=["fast", "asgi"])
@pytest.mark.parametrize("loop", LOOPS)
def test_requests_sent_without_waiting_are_answered_in_order(loop: str, fast_path: bool) -> None:
    """Pipelined requests with large bodies do not get into each other's bytes."""

    async def requested(app: App, client: Client) -> None:
        for body in (SOME, MUCH, b"small", MUCH):
            client.send("/whole", body)
        assert [sha(SOME), sha(MUCH), sha(b"small"), sha(MUCH)] == [await client.answer() for _ in range(4)]

    serving(loop, requested, fast_path)


@pytest.mark.parametrize("fast_path", [True, False], ids=["fast", "asgi"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_slow_app_makes_the_client_wait(loop: str, fast_path: bool) -> None:
    """An app that takes its time over the chunks still sees every byte once."""

    async def requested(app: App, client: Client) -> None:
        client.send("/slowly", MUCH)
        assert sha(MUCH) == await client.answer()

    serving(loop, requested, fast_path)


@pytest.mark.parametrize("fast_path", [True, False], ids=["fast", "asgi"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_body_nobody_reads_does_not_spoil_the_connection(loop: str, fast_path: bool) -> None:
    """An answer without a look at the body is followed by the next request's answer."""

    async def requested(app: App, client: Client) -> None:
        client.send("/unread", MUCH)
        assert "not read" == await client.answer()
        client.send("/whole", SOME)
        assert sha(SOME) == await client.answer()

    serving(loop, requested, fast_path)


@pytest.mark.parametrize("fast_path", [True, False], ids=["fast", "asgi"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_that_goes_away_is_noticed(loop: str, fast_path: bool) -> None:
    """A body that ends too early is a disconnect, not a short body."""

    async def requested(app: App, client: Client) -> None:
        client.writer.write(f"POST /whole HTTP/1.1\r\nHost: x\r\nContent-Length: {len(MUCH)}\r\n\r\n".encode() + SOME)
        await asyncio.sleep(0.05)
        client.writer.close()
        await app.gone.wait()
        assert [] == app.kinds

    serving(loop, requested, fast_path)


@pytest.mark.parametrize("fast_path", [True, False], ids=["fast", "asgi"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_client_that_asks_first_is_told_to_go_on(loop: str, fast_path: bool) -> None:
    """Expect: 100-continue is direct_response before the body is sent."""

    async def requested(app: App, client: Client) -> None:
        head = f"POST /whole HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {len(SOME)}\r\n\r\n"
        client.writer.write(head.encode())
        assert b"HTTP/1.1 100 Continue\r\n\r\n" == await client.reader.readuntil(b"\r\n\r\n")
        client.writer.write(SOME)
        assert sha(SOME) == await client.answer()

    serving(loop, requested, fast_path)
