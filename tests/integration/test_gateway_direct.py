"""Requests to hot routes over real sockets: whichever way they take, they reach one handler and get one answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pytest
import uvicorn
import uvloop
from starlette.routing import BaseRoute, Route

from lakebed.clock import SystemClock
from lakebed.context import Context, Health
from lakebed.errors import Invalid
from lakebed.gateway.app import Gateway, build
from lakebed.gateway.direct import DIRECT_BYTES_MAX
from lakebed.gateway.listen import _config, bind
from lakebed.gateway.settings import GatewaySettings
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.parts import sections
from lakebed.settings import load
from lakebed.store.memory import MemoryStore
from lakebed.wire import Answered, Buffer, Call, Tell, answered, body_limit, direct

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
    """A part whose one route tells what it was sent, and which way it came."""

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
        """Answers whoever waits."""
        self.go.set()
        for later in self._later:
            later()

    @body_limit(4 * DIRECT_BYTES_MAX)
    async def _tell(self, call: Call) -> Answered:
        body = bytes(await call.body())
        self.begun += 1
        if body == b"wait":
            await self.go.wait()
        if body.startswith(b"wait "):
            await asyncio.sleep(float(body[5:]))
        task = asyncio.current_task()
        return self._told(call, body, task.get_coro().__qualname__ if task is not None else "")

    def _tell_promptly(self, call: Call, body: Buffer, tell: Tell) -> None:
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

    def _told(self, call: Call, body: bytes, way: str) -> Answered:
        if body.strip() == b"refuse":
            raise Invalid("not that", hint="something else")
        if body == b"break":
            raise RuntimeError("a secret of ours")
        self.done += 1
        return answered({"way": way, "bytes": len(body), "who": call.principal.name, "kind": call.header(b"x-kind")})

    async def start(self) -> None:
        return None

    async def stop(self) -> None:
        return None

    async def health(self) -> Health:
        return Health("ok")


class Told(NamedTuple):
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

    async def ask(self, data: bytes) -> Told:
        client = await self.connect()
        client.writer.write(data)
        try:
            return await client.told()
        finally:
            client.writer.close()


class Client(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def told(self) -> Told:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        fields = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await self.reader.readexactly(int(fields["content-length"]))
        return Told(int(first.split()[1]), fields, json.loads(body))


def post(body: bytes, more: str = "", *, path: str = "/hot", version: str = "1.1") -> bytes:
    head = f"POST {path} HTTP/{version}\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\nX-Kind: k\r\n{more}\r\n"
    return head.encode() + body


def serving(loop: str, asked: Callable[[Server], Coroutine[Any, Any, T]], **gateway: Any) -> T:
    """Runs the questions against a gateway on that loop, and gives what they found."""

    async def run() -> T:
        clock = SystemClock()
        settings = load(sections(), flags={f"gateway.{name}": value for name, value in gateway.items()})
        hot, bound = Hot(), bind("127.0.0.1", 0)
        app = build(Context("node-1", settings, MemoryStore(clock=clock), clock, Ids(), Metrics()), [hot])
        server = uvicorn.Server(_config(app, settings.of(GatewaySettings), app.state.direct))
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


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("path", HANDLERS)
@pytest.mark.parametrize(
    ("data", "size", "way"),
    [
        (post(b"small"), 5, DIRECT),
        (post(b""), 0, DIRECT),
        (post(b"small", "Connection: keep-alive\r\n"), 5, DIRECT),
        (post(MUCH[1:]), DIRECT_BYTES_MAX, DIRECT),
        (post(MUCH), DIRECT_BYTES_MAX + 1, USUAL),
        (post(b"small", path="/hot?x=1"), 5, USUAL),
        (post(b"small", version="1.0"), 5, USUAL),
        (post(b"small", "Connection: close\r\n"), 5, USUAL),
        (
            b"POST /hot HTTP/1.1\r\nHost: localhost\r\nX-Kind: k\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"5\r\nsmall\r\n0\r\n\r\n",
            5,
            USUAL,
        ),
    ],
)
def test_both_ways_lead_to_one_handler(loop: str, path: str, data: bytes, size: int, way: str) -> None:
    """A plain small request goes straight to its handler, any other by the usual way; the answer is the same."""

    async def asked(server: Server) -> None:
        told = await server.ask(data.replace(b" /hot", b" " + path.encode(), 1))

        went = HANDLERS[path] if way == DIRECT else way
        assert told.body == {"way": went, "bytes": size, "who": "anybody", "kind": "k"}
        assert (200, "application/json") == (told.status, told.fields["content-type"])
        assert len(told.fields["x-request-id"]) == 16

    serving(loop, asked)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("path", HANDLERS)
def test_pipelined_requests_are_answered_in_their_order(loop: str, path: str) -> None:
    """Requests of both ways, sent at once on one connection, are answered one after another, the slow first too."""

    async def asked(server: Server) -> None:
        client = await server.connect()
        bodies = [b"wait", b"a", b"bb", MUCH, b"ccc", b"refuse", b"dddd"]
        client.writer.write(b"".join(post(body, path=path + "?q" if body == b"bb" else path) for body in bodies))
        await server.has_begun()
        await asyncio.sleep(0.2)  # time for those behind it to overtake it, if they could
        server.hot.let_go()

        told = [await client.told() for _ in bodies]

        assert [4, 1, 2, len(MUCH), 3, None, 4] == [one.body.get("bytes") for one in told]
        assert [200, 200, 200, 200, 200, 400, 200] == [one.status for one in told]
        client.writer.close()

    serving(loop, asked)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("path", HANDLERS)
def test_a_body_may_come_in_pieces_but_not_too_late(loop: str, path: str) -> None:
    """A body in pieces is one body; one that stops coming is given up with 408, as on the usual way."""

    async def asked(server: Server) -> None:
        client = await server.connect()
        data = post(b"in pieces", path=path)
        for at in range(0, len(data), 7):
            client.writer.write(data[at : at + 7])
            await asyncio.sleep(0.005)
        whole = await client.told()

        assert (HANDLERS[path], 9) == (whole.body["way"], whole.body["bytes"])
        client.writer.close()

    async def late(server: Server) -> None:
        client = await server.connect()
        client.writer.write(post(b"never whole", path=path)[:-3])
        late = await client.told()

        assert (408, "slow_body", "close") == (late.status, late.body["code"], late.fields["connection"])
        client.writer.close()

    serving(loop, asked, body_timeout_s=60.0)
    serving(loop, late, body_timeout_s=0.3)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("path", HANDLERS)
def test_what_is_raised_is_told_as_on_the_usual_way(loop: str, path: str) -> None:
    """Errors of the handler and of the door become the same problems by either way, and every answer is counted."""

    async def asked(server: Server) -> None:
        key = f"Authorization: Bearer {SECRET}\r\n"
        for more in (key, key + "Connection: close\r\n"):
            refused = await server.ask(post(b"refuse", more, path=path))
            broken = await server.ask(post(b"break", more, path=path))
            assert (400, "invalid", "something else") == (refused.status, refused.body["code"], refused.body["hint"])
            assert (500, "internal") == (broken.status, broken.body["code"])
            assert "secret" not in json.dumps(broken.body)
        named = await server.ask(post(b"refuse", key + "X-Request-Id: mine-1\r\n", path=path))
        assert ("mine-1", "mine-1") == (named.fields["x-request-id"], named.body["request_id"])
        unknown = await server.ask(post(b"x", path=path))
        assert (401, 'Bearer realm="lakebed"') == (unknown.status, unknown.fields["www-authenticate"])

        numbers = server.app.state.context.metrics.prometheus().decode()
        counted = [line for line in numbers.splitlines() if line.startswith("lakebed_http_requests_total{")]
        assert {("400", 3.0), ("500", 2.0), ("401", 1.0)} == {
            (line.split('status="')[1].split('"')[0], float(line.split()[-1])) for line in counted if path in line
        }

    serving(loop, asked, keys=[{"name": "agent", "secret": SECRET, "rights": ["*"]}])


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("path", HANDLERS)
def test_a_client_that_leaves_takes_nothing_back(loop: str, path: str) -> None:
    """What was asked is done although nobody waits for the answer, and the next client is served."""

    async def asked(server: Server) -> None:
        client = await server.connect()
        client.writer.write(post(b"wait", path=path))
        await server.has_begun()
        client.writer.close()
        await client.writer.wait_closed()
        server.hot.let_go()
        while not server.hot.done:
            await asyncio.sleep(0.01)

        assert (await server.ask(post(b"x", path=path))).body["bytes"] == 1

    serving(loop, asked)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("path", HANDLERS)
def test_a_stopping_server_answers_what_is_under_way(loop: str, path: str) -> None:
    """A direct request that is under way when the server stops is answered, and then the connection closes."""

    async def asked(server: Server) -> None:
        client = await server.connect()
        client.writer.write(post(b"wait", path=path))
        await server.has_begun()
        server.uvicorn.should_exit = True
        await server.refuses()
        server.hot.let_go()

        told = await client.told()

        assert (200, "close") == (told.status, told.fields.get("connection"))
        assert b"" == await client.reader.read()

    serving(loop, asked)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("path", HANDLERS)
def test_a_drain_that_takes_too_long_says_that_the_outcome_is_unknown(loop: str, path: str) -> None:
    """Whoever waits when the drain's time is over is told to read before trying again."""

    async def asked(server: Server) -> None:
        client = await server.connect()
        client.writer.write(post(b"wait", path=path))
        await server.has_begun()
        server.uvicorn.should_exit = True

        told = await client.told()

        assert (503, "outcome_unknown") == (told.status, told.body["code"])

    serving(loop, asked, drain_s=1.0)


@pytest.mark.parametrize("path", HANDLERS)
def test_an_idle_connection_is_closed_and_a_busy_one_is_not(path: str) -> None:
    """The time a connection may rest counts from its last answer, whichever way that went."""

    async def asked(server: Server) -> None:
        server.uvicorn.config.timeout_keep_alive = 3
        client = await server.connect()
        answers = []
        for body in (b"a", b"wait 3.5", MUCH, b"b", b"c"):
            client.writer.write(post(body, path=path))
            answers.append((await client.told()).status)

        ended = await client.reader.read()

        assert ([200] * 5, b"") == (answers, ended)

    serving("uvloop", asked)


def held(server: Server) -> float:
    return server.app.state.context.metrics.value("lakebed_http_body_bytes")


async def until_held(server: Server, size: float) -> None:
    while held(server) != size:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("path", HANDLERS)
def test_a_body_on_the_short_way_takes_from_the_budget_and_gives_it_back(loop: str, path: str) -> None:
    """From its head on, until it is answered or its client leaves; without room it is 503."""

    async def play(server: Server) -> None:
        head = post(b"x" * 600, path=path)[:-600]
        waiting, leaving = await server.connect(), await server.connect()
        waiting.writer.write(head)
        await until_held(server, 600)
        refused = await server.ask(post(b"x" * 500, path=path))
        waiting.writer.write(b"x" * 600)
        answered = await waiting.told()
        await until_held(server, 0)
        leaving.writer.write(head)
        await until_held(server, 600)
        leaving.writer.close()
        await until_held(server, 0)
        broken = await server.ask(post(b"refuse", path=path))

        assert (refused.status, refused.body["code"], refused.fields["retry-after"]) == (503, "overloaded", "1")
        assert (answered.status, broken.status) == (200, 400)
        assert held(server) == 0

    serving(loop, play, body_bytes_max=1000, bodies_bytes_max=1000)


@pytest.mark.parametrize("loop", LOOPS)
def test_pipelined_bodies_whose_client_leaves_are_given_back(loop: str) -> None:
    """The client leaves while its first request is under way and its second waits: both give back what they took."""

    async def play(server: Server) -> None:
        client = await server.connect()
        client.writer.write(post(b"wait", path="/prompt") + post(b"second", path="/prompt"))
        await until_held(server, 10)
        client.writer.transport.abort()
        server.hot.let_go()
        await until_held(server, 0)

    serving(loop, play)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("path", HANDLERS)
@pytest.mark.parametrize("body", [b"small", b"refuse"])
def test_a_direct_answer_runs_nothing_in_a_browser(loop: str, path: str, body: bytes) -> None:
    """As on the usual way: its type is meant, and nothing may be loaded."""

    async def play(server: Server) -> None:
        told = await server.ask(post(body, path=path))

        assert told.fields["x-content-type-options"] == "nosniff"
        assert told.fields["content-security-policy"].startswith("default-src 'none'")

    serving(loop, play)
