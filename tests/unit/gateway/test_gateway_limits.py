"""Bodies: refused before they are read, counted while they stream, given up when they stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from conftest_gateway import Sample
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lakebed.gateway.app import Gateway
from lakebed.wire import body_limit

Make = Callable[..., Gateway]

LENGTH = b"content-length"
CHUNKED = (b"transfer-encoding", b"chunked")


class Exchange:
    """One request by hand: the body's chunks are given when they are asked for, then `last` happens."""

    def __init__(self, path: str, headers: list[tuple[bytes, bytes]], chunks: list[bytes], last: str = "end") -> None:
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": headers,
            "query_string": b"",
            "root_path": "",
        }
        self.chunks, self.last = chunks, last
        self.asked = 0
        self.sent: list[Any] = []

    async def receive(self) -> Any:
        self.asked += 1
        if self.chunks:
            chunk = self.chunks.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(self.chunks) or self.last != "end"}
        if self.last == "leaves":
            return {"type": "http.disconnect"}
        return await asyncio.Event().wait()

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def through(self, app: Gateway) -> Exchange:
        await app(self.scope, self.receive, self.send)
        return self

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def problem(self) -> Any:
        return msgspec.json.decode(self.sent[1]["body"])

    @property
    def closes(self) -> bool:
        return (b"connection", b"close") in self.sent[0]["headers"]


async def test_a_declared_length_over_the_limit_is_refused_before_a_byte_is_asked_for(make: Make) -> None:
    """413, nothing read, and the connection closes so that the rest never has to be."""
    done = await Exchange("/sample", [(LENGTH, b"11")], [b"x" * 11]).through(make(body_bytes_max=10))

    assert (done.status, done.asked, done.closes) == (413, 0, True)
    assert (done.problem["code"], done.problem["limit_bytes"]) == ("too_large", 10)


async def test_a_length_that_no_route_takes_is_refused_before_the_route_is_known(make: Make) -> None:
    """Even where nobody would read it, a body over every limit is 413."""
    done = await Exchange("/nope", [(LENGTH, b"11")], [b"x" * 11]).through(make(body_bytes_max=10))

    assert (done.status, done.asked) == (413, 0)


async def test_a_body_at_the_limit_is_taken(make: Make) -> None:
    """The limit itself is allowed, declared or streamed."""
    app = make(body_bytes_max=10)

    declared = await Exchange("/sample", [(LENGTH, b"10")], [b"x" * 10]).through(app)
    streamed = await Exchange("/sample", [CHUNKED], [b"x" * 4, b"x" * 6]).through(app)

    assert (declared.status, streamed.status) == (200, 200)
    assert not declared.closes


async def test_a_streamed_body_is_cut_at_the_limit(make: Make) -> None:
    """An undeclared body is counted; what comes after the limit is never asked for."""
    done = await Exchange("/sample", [CHUNKED], [b"x" * 6, b"x" * 6, b"x" * 6]).through(make(body_bytes_max=10))

    assert (done.status, done.asked, done.closes) == (413, 2, True)


async def test_a_length_that_lies_is_still_counted(make: Make) -> None:
    """What arrives counts, whatever was declared."""
    done = await Exchange("/sample", [(LENGTH, b"3")], [b"x" * 20]).through(make(body_bytes_max=10))

    assert done.status == 413


@pytest.mark.parametrize("length", [b"", b"-1", b"1e3", b"0x10", b"9" * 40, b"+5", b" 5"])
async def test_a_length_that_is_no_number_is_refused(make: Make, length: bytes) -> None:
    """Only digits are a length."""
    done = await Exchange("/sample", [(LENGTH, length)], [b"x"]).through(make())

    assert (done.status, done.asked) == (400, 0)


async def test_a_client_that_stops_sending_times_out(make: Make) -> None:
    """408 after `body_timeout_s` without bytes, saying how many came."""
    done = await Exchange("/sample", [CHUNKED], [b"abc"], last="stalls").through(make(body_timeout_s=0.02))

    assert (done.status, done.closes) == (408, True)
    assert (done.problem["code"], done.problem["received_bytes"]) == ("slow_body", 3)


async def test_a_client_that_trickles_times_out(make: Make) -> None:
    """Bytes that keep coming, but too slowly, end at `body_total_s`."""

    class Trickle(Exchange):
        async def receive(self) -> Any:
            self.asked += 1
            await asyncio.sleep(0.01)
            return {"type": "http.request", "body": b"x", "more_body": True}

    done = await Trickle("/sample", [CHUNKED], []).through(make(body_total_s=0.5, body_timeout_s=100))

    assert done.status == 408
    assert 2 < done.asked < 100


async def test_a_client_that_leaves_is_counted_and_not_answered(make: Make) -> None:
    """Nobody is there to hear: nothing is sent, the status 499 is counted."""
    app = make()

    done = await Exchange("/sample", [CHUNKED], [b"abc"], last="leaves").through(app)

    labels = {"route": "/sample", "method": "POST", "status": "499"}
    assert done.sent == []
    assert app.state.context.metrics.value("lakebed_http_requests_total", **labels) == 1


async def test_waiting_for_the_client_after_the_body_has_no_limit(make: Make) -> None:
    """A long answer may wait for the client to leave longer than any body may take."""

    async def patient(request: Request) -> Response:
        await request.body()
        left = asyncio.create_task(request.receive())
        await asyncio.sleep(0.1)
        assert not left.done()
        left.cancel()
        return Response("still here")

    app = make([Sample(more=[Route("/patient", patient, methods=["POST"])])], body_timeout_s=0.02)

    assert (await Exchange("/patient", [(LENGTH, b"1")], [b"x"]).through(app)).status == 200


async def test_a_marked_route_has_its_own_limit(make: Make) -> None:
    """A stream may be larger, a command smaller; others keep the setting."""

    @body_limit(100)
    async def large(request: Request) -> Response:
        return Response(str(len(await request.body())))

    @body_limit(2)
    async def small(request: Request) -> Response:
        return Response(str(len(await request.body())))

    routes = [Route("/large", large, methods=["POST"]), Route("/small", small, methods=["POST"])]
    app = make([Sample(more=routes)], body_bytes_max=10)

    statuses = {
        (path, size): (await Exchange(path, [(LENGTH, b"%d" % size)], [b"x" * size]).through(app)).status
        for path in ("/large", "/small", "/sample")
        for size in (2, 10, 11, 100, 101)
    }

    assert {key for key, status in statuses.items() if status == 200} == {
        ("/large", 2),
        ("/large", 10),
        ("/large", 11),
        ("/large", 100),
        ("/small", 2),
        ("/sample", 2),
        ("/sample", 10),
    }
    assert set(statuses.values()) == {200, 413}


async def test_a_refused_request_whose_body_was_not_read_closes_the_connection(make: Make) -> None:
    """Any refusal before the body leaves its bytes on the wire: the connection is not reused."""
    unread = await Exchange("/nope", [(LENGTH, b"5")], [b"hello"]).through(make())
    bodiless = await Exchange("/nope", [], []).through(make())

    assert (unread.status, unread.closes) == (404, True)
    assert (bodiless.status, bodiless.closes) == (404, False)
