"""A gateway on a real socket with two hot routes, and a client that sends it raw bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import uvicorn
import uvloop
from starlette.routing import BaseRoute, Route

from lakebed.core.clock import SystemClock
from lakebed.core.context import Context, Health
from lakebed.core.errors import Invalid
from lakebed.core.http import Buffer, DirectRequest, DirectResponse, Respond, body_limit, direct, direct_response
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.gateway.app import Gateway, build
from lakebed.gateway.fast.direct import DIRECT_BYTES_MAX
from lakebed.gateway.listen import bind, server_config
from lakebed.gateway.settings import GatewaySettings
from lakebed.store.memory import MemoryStore
from lakebed.wiring.parts import sections

T = TypeVar("T")
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}
SECRET = "0123456789abcdef-very-secret"
DIRECT, PROMPT, USUAL = "DirectCycle.run_asgi", "DirectCycle.run_promptly", "RequestResponseCycle.run_asgi"
HANDLERS = {"/hot": DIRECT, "/prompt": PROMPT}  # one that waits in a task, one that tells when it knows
MUCH = b"m" * (DIRECT_BYTES_MAX + 1)


class Hot:
    """A part whose one route reports what it was sent, and which way it came."""

    name = "hot"

    def __init__(self) -> None:
        self.reads: Sequence[BaseRoute] = ()
        self.writes: Sequence[BaseRoute] = (
            Route("/hot", direct(self._tell), methods=["POST"]),
            Route("/prompt", direct(self._tell, self._tell_promptly), methods=["POST"]),
        )
        self.begun = self.done = 0
        self.go = asyncio.Event()
        self._later: list[Callable[[], None]] = []

    def let_go(self) -> None:
        """Answers anyone who waits."""
        self.go.set()
        for later in self._later:
            later()

    @body_limit(4 * DIRECT_BYTES_MAX)
    async def _tell(self, call: DirectRequest) -> DirectResponse:
        body = bytes(await call.body())
        self.begun += 1
        if body == b"wait":
            await self.go.wait()
        if body.startswith(b"wait "):
            await asyncio.sleep(float(body[5:]))
        task = asyncio.current_task()
        return self._told(call, body, task.get_coro().__qualname__ if task is not None else "")

    def _tell_promptly(self, call: DirectRequest, body: Buffer, tell: Respond) -> None:
        data = bytes(body)
        self.begun += 1
        later = partial(tell, partial(self._told, call, data, PROMPT))
        if data == b"wait":
            self._later.append(later)
        elif data.startswith(b"wait "):
            asyncio.get_running_loop().call_later(float(data[5:]), later)
        elif data == b"break":
            tell(partial(self._told, call, data, PROMPT))  # raised where the answer is made
        else:
            answer = self._told(call, data, PROMPT)  # raised here, before anything is told
            tell(lambda: answer)

    def _told(self, call: DirectRequest, body: bytes, way: str) -> DirectResponse:
        if body.strip() == b"refuse":
            raise Invalid("not that", hint="something else")
        if body == b"break":
            raise RuntimeError("a secret of ours")
        self.done += 1
        way = "" if call.header(b"x-blind") else way
        return direct_response(
            {"way": way, "bytes": len(body), "who": call.principal.name, "kind": call.header(b"x-kind")}
        )

    async def start(self) -> None:
        return None

    async def stop(self) -> None:
        return None

    async def health(self) -> Health:
        return Health("ok")


class Reply(NamedTuple):
    status: int
    fields: dict[str, str]
    body: dict[str, Any]


class Server(NamedTuple):
    app: Gateway
    hot: Hot
    uvicorn: uvicorn.Server
    address: tuple[str, int]

    async def has_begun(self) -> None:
        while not self.hot.begun:
            await asyncio.sleep(0.01)

    async def refuses(self) -> None:
        """Until it takes no new connections: it has seen that it is to stop."""
        while True:
            try:
                _, writer = await asyncio.open_connection(*self.address)
            except OSError:
                return
            writer.close()
            await asyncio.sleep(0.01)

    async def connect(self) -> Client:
        return Client(*await asyncio.open_connection(*self.address))

    async def ask(self, data: bytes) -> Reply:
        client = await self.connect()
        client.writer.write(data)
        try:
            return await client.told()
        finally:
            client.writer.close()


class Client(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def told(self) -> Reply:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        fields = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await self.reader.readexactly(int(fields["content-length"]))
        return Reply(int(first.split()[1]), fields, json.loads(body))


def post(body: bytes, more: str = "", *, path: str = "/hot", version: str = "1.1") -> bytes:
    head = f"POST {path} HTTP/{version}\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\nX-Kind: k\r\n{more}\r\n"
    return head.encode() + body


def serving(loop: str, asked: Callable[[Server], Coroutine[Any, Any, T]], **gateway: Any) -> T:
    """Runs the questions against a gateway on that loop, and gives what they found."""

    async def run() -> T:
        clock = SystemClock()
        settings = load(sections(), flags={f"gateway.{name}": value for name, value in gateway.items()})
        hot, bound = Hot(), bind("127.0.0.1", 0)
        app = build(
            Context(
                node="node-1",
                settings=settings,
                store=MemoryStore(clock=clock),
                clock=clock,
                ids=Ids(),
                metrics=Metrics(),
            ),
            [hot],
        )
        server = uvicorn.Server(server_config(app, settings.of(GatewaySettings)))
        serve = asyncio.create_task(server.serve(sockets=[bound]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            async with asyncio.timeout(100):
                return await asked(Server(app, hot, server, bound.getsockname()))
        finally:
            server.should_exit = True
            await serve

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(run())
