"""Bodies: refused before they are read, counted while they stream, given up when they stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message

from lakebed.core.clock import ManualClock
from lakebed.core.http import body_limit, streamed
from lakebed.core.settings import Contradiction
from lakebed.gateway.app import Gateway
from lakebed.gateway.body_limits import BodyLimits, RequestBody
from lakebed.gateway.settings import GatewaySettings
from lakebed.gateway.state import state_of
from support.gateway_fixtures import Sample
from support.runtimes import runtime_of

Make = Callable[..., Gateway]

LENGTH = b"content-length"
CHUNKED = (b"transfer-encoding", b"chunked")


class Exchange:
    """One request by hand: the body's chunks are given when they are requested, then `last` happens."""

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
    """An undeclared body is counted; what comes after the limit is never requested."""
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
    """408 after `body_timeout_s` without bytes, reporting how many came."""
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
    assert state_of(app).context.metrics.value("lakebed_http_requests_total", **labels) == 1


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


class Slow(Exchange):
    """Each chunk arrives `pause_s` after it was requested, by the clock that the gateway reads."""

    def __init__(self, clock: ManualClock, pause_s: float, path: str, headers: Any, chunks: list[bytes]) -> None:
        super().__init__(path, headers, chunks)
        self._clock, self._pause_s = clock, pause_s

    async def receive(self) -> Any:
        await asyncio.sleep(0)
        await self._clock.advance(self._pause_s)
        return await super().receive()


async def test_a_body_that_drips_is_given_up_by_its_rate(make: Make) -> None:
    """A byte a second keeps no connection: 408 and a close once `body_timeout_s` have passed below the minimum rate."""
    clock = ManualClock()
    drip = Slow(clock, 1.0, "/sample", [(LENGTH, b"600")], [b"x"] * 600)

    await drip.through(make(clock=clock, body_timeout_s=20.0))

    assert (drip.status, drip.closes, drip.problem["code"]) == (408, True, "slow_body")
    assert drip.asked == 20


async def test_a_slow_link_passes(make: Make) -> None:
    """10 KB/s for five minutes, with a pause of 15 s in between, is slow and not too slow."""
    clock = ManualClock()
    link = Slow(clock, 1.0, "/sample", [(LENGTH, b"3000000")], [b"x" * 10_000] * 300)

    class Paused(Slow):
        async def receive(self) -> Any:
            if self.asked == 100:
                await asyncio.sleep(0)
                await clock.advance(15.0)
            return await super().receive()

    paused = Paused(clock, 1.0, "/sample", [CHUNKED], [b"x" * 10_000] * 300)

    app = make(clock=clock, body_timeout_s=20.0)

    assert [200, 200] == [(await each.through(app)).status for each in (link, paused)]


async def test_a_route_that_is_slow_itself_does_not_make_its_client_slow(make: Make) -> None:
    """Time between two questions for more is the route's own: only waiting for the client counts."""
    clock = ManualClock()

    async def slow_route(request: Request) -> Response:
        async for _ in request.stream():
            await clock.advance(15.0)
        return Response("done")

    app = make([Sample(more=[Route("/slow", slow_route, methods=["POST"])])], clock=clock, body_timeout_s=20.0)

    assert (await Slow(clock, 0.1, "/slow", [CHUNKED], [b"x"] * 20).through(app)).status == 200


class Held(Exchange):
    """A body whose last byte is not sent before it is released."""

    def __init__(self, headers: Any, chunks: list[bytes], last: str = "end") -> None:
        super().__init__("/sample", headers, chunks, last)
        self.go, self.waits = asyncio.Event(), asyncio.Event()

    async def receive(self) -> Any:
        if self.asked and len(self.chunks) <= 1:
            self.waits.set()
            await self.go.wait()
        return await super().receive()


async def test_bodies_under_way_share_one_budget(make: Make) -> None:
    """What does not fit is 503 with Retry-After, before a byte is read when it is declared and as it grows when not;
    when the others are done there is room again.
    """
    app = make(body_bytes_max=60, bodies_bytes_max=100)
    held = Held([(LENGTH, b"60")], [b"x" * 30, b"x" * 30])
    running = asyncio.create_task(held.through(app))
    await held.waits.wait()

    declared = await Exchange("/sample", [(LENGTH, b"41")], [b"x" * 41]).through(app)
    fits = await Exchange("/sample", [(LENGTH, b"40")], [b"x" * 40]).through(app)
    grows = await Exchange("/sample", [CHUNKED], [b"x" * 20, b"x" * 20, b"x" * 20]).through(app)
    held.go.set()
    await running
    after = await Exchange("/sample", [(LENGTH, b"60")], [b"x" * 60]).through(app)

    assert (declared.status, declared.asked, declared.closes) == (503, 0, True)
    assert (declared.problem["code"], (b"retry-after", b"1") in declared.sent[0]["headers"]) == ("overloaded", True)
    assert (fits.status, grows.status, grows.asked) == (200, 503, 3)
    assert (held.status, after.status) == (200, 200)
    assert state_of(app).context.metrics.value("lakebed_http_bodies_refused_total") == 2
    assert state_of(app).context.metrics.value("lakebed_http_body_bytes") == 0


async def test_a_body_that_could_never_fit_is_413(make: Make) -> None:
    """Waiting would not help, so nobody is instructed to wait: declared, or as it grows."""

    @body_limit(1000)
    async def large(request: Request) -> Response:
        return Response(str(len(await request.body())))

    routes = [Route("/large", large, methods=["POST"])]
    app = make([Sample(more=routes)], body_bytes_max=60, bodies_bytes_max=100)

    declared = await Exchange("/large", [(LENGTH, b"101")], [b"x" * 101]).through(app)
    grows = await Exchange("/large", [CHUNKED], [b"x" * 60, b"x" * 60]).through(app)

    assert (declared.status, grows.status) == (413, 413)
    assert state_of(app).context.metrics.value("lakebed_http_body_bytes") == 0


async def test_a_route_that_streams_takes_what_it_holds_and_no_more(make: Make) -> None:
    """A stream longer than the whole budget passes, and takes its share while it does."""
    seen: list[float] = []

    @body_limit(10_000)
    @streamed(40)
    async def stream(request: Request) -> Response:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            seen.append(state_of(app).context.metrics.value("lakebed_http_body_bytes"))
        return Response(str(size))

    routes = [Route("/stream", stream, methods=["POST"])]
    app = make([Sample(more=routes)], body_bytes_max=60, bodies_bytes_max=100)

    declared = await Exchange("/stream", [(LENGTH, b"500")], [b"x" * 50] * 10).through(app)
    chunked = await Exchange("/stream", [CHUNKED], [b"x" * 30] * 10).through(app)

    assert (declared.status, chunked.status) == (200, 200)
    assert (seen[:10], 30 in seen, max(seen)) == ([40] * 10, True, 40)
    assert state_of(app).context.metrics.value("lakebed_http_body_bytes") == 0


@pytest.mark.parametrize(
    ("headers", "chunks", "last", "options"),
    [
        ([CHUNKED], [b"abc"], "leaves", {}),
        ([(LENGTH, b"9")], [b"abc"], "leaves", {}),
        ([(LENGTH, b"9")], [b"abc"], "stalls", {"body_timeout_s": 0.02}),
        ([CHUNKED], [b"x" * 50, b"x" * 50], "end", {"body_bytes_max": 60, "bodies_bytes_max": 80}),
        ([(LENGTH, b"3")], [b"x" * 20], "end", {"body_bytes_max": 10, "bodies_bytes_max": 80}),
    ],
    ids=["leaves", "leaves early", "stalls", "too large", "lies"],
)
async def test_what_a_body_took_is_given_back_however_it_ends(
    make: Make, headers: Any, chunks: list[bytes], last: str, options: dict[str, Any]
) -> None:
    """Refused, gone, given up or wrong: the budget is whole again."""
    app = make(**options)

    await Exchange("/sample", headers, chunks, last).through(app)

    assert state_of(app).context.metrics.value("lakebed_http_body_bytes") == 0


async def test_what_a_cancelled_request_took_is_given_back(make: Make) -> None:
    """A drain that is over ends requests in the middle of their bodies."""
    app = make(body_bytes_max=60, bodies_bytes_max=100)
    held = Held([(LENGTH, b"60")], [b"x" * 30, b"x" * 30])
    running = asyncio.create_task(held.through(app))
    await held.waits.wait()
    assert state_of(app).context.metrics.value("lakebed_http_body_bytes") == 60

    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert state_of(app).context.metrics.value("lakebed_http_body_bytes") == 0


def test_a_largest_body_over_the_budget_is_a_contradiction(make: Make) -> None:
    """Such a body could never be taken: reported at start."""
    with pytest.raises(Contradiction):
        make(body_bytes_max=101, bodies_bytes_max=100)


async def test_an_answer_that_did_not_read_its_body_closes_the_connection(make: Make) -> None:
    """Otherwise a client could continue dripping it for ever, on a request that was direct_response long ago."""
    done = await Exchange("/sample", [(LENGTH, b"5")], [b"hello"], "end").through(make([Sample(more=[UNREAD])]))
    unread = await Exchange("/unread", [(LENGTH, b"5")], [b"hello"], "end").through(make([Sample(more=[UNREAD])]))

    assert (done.status, done.closes, unread.status, unread.closes) == (200, False, 200, True)


async def _unread(request: Request) -> Response:
    return Response("not read")


UNREAD = Route("/unread", _unread, methods=["POST"])


async def test_requests_in_flight_are_counted_until_they_are_answered(make: Make) -> None:
    """The autoscaler's gauge goes up while a request is answered and comes back, also after a refusal."""
    seen: list[float] = []

    async def look(request: Request) -> Response:
        seen.append(state_of(app).context.metrics.value("lakebed_http_in_flight"))
        return Response()

    app = make([Sample(more=[Route("/look", look, methods=["POST"])])])
    for path in ("/look", "/nowhere", "/look"):
        await Exchange(path, [(LENGTH, b"1")], [b"x"]).through(app)

    assert ([1.0, 1.0], 0.0) == (seen, state_of(app).context.metrics.value("lakebed_http_in_flight"))


def test_what_a_body_took_is_given_back_once() -> None:
    """Its end may be seen twice, by the request and by the connection: the budget never grows by that."""
    limits = BodyLimits(GatewaySettings(), runtime_of(ManualClock()))
    body = RequestBody(limits, {"type": "http"}, _never, 100)
    body._begin()
    other = limits.budget.held

    body.release()
    body.release()

    assert (100, 0) == (other, limits.budget.held)


async def _never() -> Message:
    raise AssertionError("nothing is received")
