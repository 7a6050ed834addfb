"""Requests to hot routes over real sockets: with the fast path and through ASGI alone, they get the same answers."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct

import pytest

from lakebed.gateway.fast.direct import DIRECT_BYTES_MAX
from lakebed.gateway.state import state_of
from support.hot_gateway import DIRECT, HANDLERS, LOOPS, MUCH, SECRET, USUAL, Server, post, serving

FAST_PATH = [pytest.param(True, id="fast"), pytest.param(False, id="asgi")]


@pytest.mark.parametrize("fast_path", FAST_PATH)
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
def test_a_request_reaches_one_handler_with_and_without_the_fast_path(
    fast_path: bool, loop: str, path: str, data: bytes, size: int, way: str
) -> None:
    """A plain small request takes the fast path, any other goes through ASGI; the answer is the same."""

    async def requested(server: Server) -> None:
        reported = await server.ask(data.replace(b" /hot", b" " + path.encode(), 1))

        went = HANDLERS[path] if way == DIRECT and fast_path else USUAL
        assert reported.body == {"way": went, "bytes": size, "who": "anybody", "kind": "k"}
        assert (200, "application/json") == (reported.status, reported.fields["content-type"])
        assert len(reported.fields["x-request-id"]) == 16

    serving(loop, requested, fast_path=fast_path)


@pytest.mark.parametrize("fast_path", FAST_PATH)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("path", HANDLERS)
def test_pipelined_requests_are_answered_in_their_order(fast_path: bool, loop: str, path: str) -> None:
    """Requests of both ways, sent at once on one connection, are answered one after another, the slow first too."""

    async def requested(server: Server) -> None:
        client = await server.connect()
        bodies = [b"wait", b"a", b"bb", MUCH, b"ccc", b"refuse", b"dddd"]
        client.writer.write(b"".join(post(body, path=path + "?q" if body == b"bb" else path) for body in bodies))
        await server.has_begun()
        await asyncio.sleep(0.2)  # time for those behind it to overtake it, if they could
        server.hot.let_go()

        reported = [await client.told() for _ in bodies]

        assert [4, 1, 2, len(MUCH), 3, None, 4] == [one.body.get("bytes") for one in reported]
        assert [200, 200, 200, 200, 200, 400, 200] == [one.status for one in reported]
        client.writer.close()

    serving(loop, requested, fast_path=fast_path)


@pytest.mark.parametrize("fast_path", FAST_PATH)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("path", HANDLERS)
def test_a_body_may_come_in_pieces_but_not_too_late(fast_path: bool, loop: str, path: str) -> None:
    """A body in pieces is one body; one that stops coming is given up with 408, as through ASGI."""

    async def requested(server: Server) -> None:
        client = await server.connect()
        data = post(b"in pieces", path=path)
        for at in range(0, len(data), 7):
            client.writer.write(data[at : at + 7])
            await asyncio.sleep(0.005)
        whole = await client.told()

        assert (HANDLERS[path] if fast_path else USUAL, 9) == (whole.body["way"], whole.body["bytes"])
        client.writer.close()

    async def late(server: Server) -> None:
        client = await server.connect()
        client.writer.write(post(b"never whole", path=path)[:-3])
        late = await client.told()

        assert (408, "slow_body", "close") == (late.status, late.body["code"], late.fields["connection"])
        client.writer.close()

    serving(loop, requested, fast_path=fast_path, body_timeout_s=60.0)
    serving(loop, late, fast_path=fast_path, body_timeout_s=0.3)


@pytest.mark.parametrize("fast_path", FAST_PATH)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("path", HANDLERS)
def test_an_error_is_answered_with_the_same_problem(fast_path: bool, loop: str, path: str) -> None:
    """Errors of the handler and of the middleware become the same problems, and every answer is counted."""

    async def requested(server: Server) -> None:
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

        numbers = state_of(server.app).context.metrics.prometheus().decode()
        counted = [line for line in numbers.splitlines() if line.startswith("lakebed_http_requests_total{")]
        assert {(path, "400", 3.0), (path, "500", 2.0), ("(none)", "401", 1.0)} == {
            (*re.findall(r'(?:route|status)="([^"]*)"', line), float(line.split()[-1])) for line in counted
        }

    serving(loop, requested, fast_path=fast_path, keys=[{"name": "agent", "secret": SECRET, "rights": ["*"]}])


@pytest.mark.parametrize("fast_path", FAST_PATH)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("path", HANDLERS)
def test_a_client_that_leaves_takes_nothing_back(fast_path: bool, loop: str, path: str) -> None:
    """What was requested is done although nobody waits for the answer, and the next client is served."""

    async def requested(server: Server) -> None:
        client = await server.connect()
        client.writer.write(post(b"wait", path=path))
        await server.has_begun()
        client.writer.close()
        await client.writer.wait_closed()
        server.hot.let_go()
        while not server.hot.done:
            await asyncio.sleep(0.01)

        assert (await server.ask(post(b"x", path=path))).body["bytes"] == 1

    serving(loop, requested, fast_path=fast_path)


@pytest.mark.parametrize("fast_path", FAST_PATH)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("path", HANDLERS)
def test_a_stopping_server_answers_what_is_under_way(fast_path: bool, loop: str, path: str) -> None:
    """A direct request that is under way when the server stops is answered, and then the connection closes."""

    async def requested(server: Server) -> None:
        client = await server.connect()
        client.writer.write(post(b"wait", path=path))
        await server.has_begun()
        server.uvicorn.should_exit = True
        await server.refuses()
        server.hot.let_go()

        reported = await client.told()

        assert (200, "close") == (reported.status, reported.fields.get("connection"))
        assert b"" == await client.reader.read()

    serving(loop, requested, fast_path=fast_path)


@pytest.mark.parametrize("fast_path", FAST_PATH)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("path", HANDLERS)
def test_a_drain_that_takes_too_long_says_that_the_outcome_is_unknown(fast_path: bool, loop: str, path: str) -> None:
    """Anyone who waits when the drain's time is over gets OutcomeUnknown."""

    async def requested(server: Server) -> None:
        client = await server.connect()
        client.writer.write(post(b"wait", path=path))
        await server.has_begun()
        server.uvicorn.should_exit = True

        reported = await client.told()

        assert (503, "outcome_unknown") == (reported.status, reported.body["code"])

    serving(loop, requested, fast_path=fast_path, drain_s=1.0)


@pytest.mark.parametrize("fast_path", FAST_PATH)
@pytest.mark.parametrize("path", HANDLERS)
@pytest.mark.full
def test_an_idle_connection_is_closed_and_a_busy_one_is_not(fast_path: bool, path: str) -> None:
    """The time a connection may rest counts from its last answer."""

    async def requested(server: Server) -> None:
        server.uvicorn.config.timeout_keep_alive = 3
        client = await server.connect()
        answers = []
        for body in (b"a", b"wait 3.5", MUCH, b"b", b"c"):
            client.writer.write(post(body, path=path))
            answers.append((await client.told()).status)

        ended = await client.reader.read()

        assert ([200] * 5, b"") == (answers, ended)

    serving("uvloop", requested, fast_path=fast_path)


def held(server: Server) -> float:
    return state_of(server.app).context.metrics.value("lakebed_http_body_bytes")


async def until_held(server: Server, size: float) -> None:
    while held(server) != size:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("fast_path", FAST_PATH)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("path", HANDLERS)
def test_a_small_body_takes_from_the_budget_and_gives_it_back(fast_path: bool, loop: str, path: str) -> None:
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

    serving(loop, play, fast_path=fast_path, body_bytes_max=1000, bodies_bytes_max=1000)


@pytest.mark.parametrize("fast_path", FAST_PATH)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_connection_too_many_is_told_to_come_back(fast_path: bool, loop: str) -> None:
    """503 like any other overload, which runs nothing in a browser; the connection closes, and then there is room."""

    async def play(server: Server) -> None:
        others = [await server.connect() for _ in range(2)]
        refused = await server.ask(post(b"x"))
        for other in others:
            other.writer.close()
        while server.uvicorn.server_state.connections:
            await asyncio.sleep(0.01)
        answered = await server.ask(post(b"x"))

        assert (refused.status, refused.body["code"], refused.fields["retry-after"]) == (503, "overloaded", "1")
        assert (refused.fields["connection"], refused.fields["x-content-type-options"]) == ("close", "nosniff")
        assert answered.status == 200

    serving(loop, play, fast_path=fast_path, connections_max=3)


@pytest.mark.parametrize("loop", LOOPS)
def test_pipelined_bodies_whose_client_leaves_are_given_back(loop: str) -> None:
    """The client leaves while its first request is under way and its second waits: both give back what they took."""

    async def play(server: Server) -> None:
        with socket.create_connection(server.address) as client:
            client.sendall(post(b"wait", path="/prompt") + post(b"second", path="/prompt"))
            await until_held(server, 10)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
        server.hot.let_go()
        await until_held(server, 0)

        assert 1 == server.hot.begun  # the second was never started

    serving(loop, play)


@pytest.mark.parametrize("fast_path", FAST_PATH)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("path", HANDLERS)
@pytest.mark.parametrize("body", [b"small", b"refuse"])
def test_a_direct_answer_runs_nothing_in_a_browser(fast_path: bool, loop: str, path: str, body: bytes) -> None:
    """Its type is binding, and nothing may be loaded."""

    async def play(server: Server) -> None:
        reported = await server.ask(post(body, path=path))

        assert reported.fields["x-content-type-options"] == "nosniff"
        assert reported.fields["content-security-policy"].startswith("default-src 'none'")

    serving(loop, play, fast_path=fast_path)
