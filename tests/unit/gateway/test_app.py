"""The app: routes, request ids, labels, modes and lifespan."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from lakebed.core import errors
from lakebed.core.http import decode_json, operation
from lakebed.gateway import app as module
from lakebed.gateway import middleware
from lakebed.gateway.app import Gateway
from lakebed.gateway.state import state_of
from support.gateway_fixtures import Sample, client_of

Make = Callable[..., Gateway]
Ask = Callable[..., Any]


class Thing(msgspec.Struct):
    size: int
    names: list[str] = []


async def test_an_unknown_path_is_a_problem(make: Make, ask: Ask) -> None:
    """Nothing there: 404, with the path, a hint and the request id of the header."""
    answer = await ask(make(), "GET", "/nope")

    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "no_such_route"
    assert "/nope" in answer.json()["message"]
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


async def test_a_wrong_method_names_every_method_of_the_path(make: Make, ask: Ask) -> None:
    """405 lists what all routes of the path answer, not only the first one's."""
    answer = await ask(make(), "DELETE", "/sample")

    assert answer.status_code == 405
    assert answer.json()["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "GET, HEAD, POST"


async def test_a_head_request_gets_no_body_even_when_refused(make: Make, ask: Ask) -> None:
    """HEAD is direct_response by headers alone."""
    answer = await ask(make(), "HEAD", "/nope")

    assert (answer.status_code, answer.content) == (404, b"")


@pytest.mark.parametrize("sane", ["r-1", "0af7651916cd43dd8448eb211c80319c", "a/b:c=d@e+f.g_h"])
async def test_a_sane_request_id_is_kept(make: Make, ask: Ask, sane: str) -> None:
    """A caller's own id comes back, so that it can be followed through."""
    answer = await ask(make(), "GET", "/sample", headers={"x-request-id": sane})

    assert answer.headers["x-request-id"] == sane


@pytest.mark.parametrize("odd", ["", "x" * 129, "a b", 'a"b', "ä".encode("latin-1")])
async def test_an_odd_request_id_is_replaced(make: Make, ask: Ask, odd: str | bytes) -> None:
    """What could harm a log or a header is not repeated."""
    answer = await ask(make(), "GET", "/sample", headers={b"x-request-id": odd})

    assert len(answer.headers["x-request-id"]) == 16


async def test_what_a_part_raises_is_a_problem(make: Make, ask: Ask, part: Sample) -> None:
    """Errors are just raised; the gateway maps them."""
    part.error = errors.Conflict("two hashes", accepted="aa")

    answer = await ask(make(), "GET", "/raise")

    assert (answer.status_code, answer.json()["accepted"]) == (409, "aa")


async def test_an_unexpected_error_is_answered_once_without_its_text(make: Make, ask: Ask, part: Sample) -> None:
    """A bug is a 500 with a request id, and the server continues."""
    part.error = RuntimeError("hunter2")
    app = make()

    answer = await ask(app, "GET", "/raise")

    assert answer.status_code == 500
    assert "hunter2" not in answer.text
    assert (await ask(app, "GET", "/sample")).status_code == 200


async def test_path_parameters_reach_the_route_and_the_label_is_the_template(make: Make, ask: Ask) -> None:
    """Metrics count by template, however many things there are."""
    app = make()

    seen = await ask(app, "GET", "/sample/one/part")
    await ask(app, "GET", "/sample/two/part")
    await ask(app, "GET", "/nope")
    await ask(app, "BREW", "/nope")

    metrics = state_of(app).context.metrics
    count = "lakebed_http_requests_total"
    assert seen.text == "anybody {'thing': 'one'}"
    assert metrics.value(count, route="/sample/{thing}/part", method="GET", status="200") == 2
    assert metrics.value(count, route="(none)", method="any", status="404") == 2
    assert metrics.value("lakebed_http_seconds_count", route="/sample/{thing}/part") == 2


async def test_read_only_registers_no_write(make: Make, ask: Ask) -> None:
    """A read-only gateway does not refuse writes: it has no route for them."""
    app = make(read_only=True)

    assert (await ask(app, "GET", "/sample")).status_code == 200
    assert (await ask(app, "POST", "/sample", content=b"x")).status_code == 405
    assert not any("POST" in (getattr(route, "methods", None) or ()) for route in app.routes)


def test_two_parts_with_one_route_are_refused(make: Make) -> None:
    """Which part would answer must never depend on their order."""
    with pytest.raises(errors.Invalid, match="two components serve GET /sample"):
        make([Sample("one"), Sample("two")])


async def test_mounts_and_routes_that_are_no_coroutines_are_served_like_all_others(make: Make, ask: Ask) -> None:
    """They get the same problems and labels as plain routes."""

    def threaded(request: Request) -> Response:
        if request.path_params["number"] == 0:
            raise errors.Unprocessable("not zero")
        return Response(str(request.path_params["number"]))

    async def inner(request: Request) -> Response:
        return Response("inner")

    mounted = Mount("/mounted", app=Starlette(routes=[Route("/inner", inner)]))
    app = make([Sample(more=[Route("/threads/{number:int}", threaded), mounted])])

    good, bad = await ask(app, "GET", "/threads/7"), await ask(app, "GET", "/threads/0")

    assert good.text == "7"
    assert (bad.status_code, bad.json()["code"]) == (422, "unprocessable")
    assert (await ask(app, "GET", "/mounted/inner")).text == "inner"
    assert "/threads/{number}" in (await ask(app, "GET", "/openapi.json")).json()["paths"]
    value = state_of(app).context.metrics.value
    assert value("lakebed_http_requests_total", route="/threads/{number:int}", method="GET", status="422") == 1
    assert value("lakebed_http_requests_total", route="/mounted", method="GET", status="200") == 1


async def test_openapi_lists_plain_routes_as_their_marks_say(make: Make, ask: Ask) -> None:
    """A hot route is described by its mark, or at least by its docstring."""

    @operation("Keep a thing", body=Thing, answer=Thing)
    async def keep(request: Request) -> Response:
        decode_json(await request.body(), Thing)
        return Response()

    app = make([Sample(more=[Route("/things/{name:path}", keep, methods=["PUT"])])])

    tree = (await ask(app, "GET", "/openapi.json")).json()

    put = tree["paths"]["/things/{name}"]["put"]
    assert put["summary"] == "Keep a thing"
    assert put["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Thing"}
    assert put["parameters"][0]["name"] == "name"
    assert tree["components"]["schemas"]["Thing"]["required"] == ["size"]
    assert tree["paths"]["/sample"]["get"]["summary"] == "Who asks, and for what."
    assert tree == (await ask(app, "GET", "/openapi.json")).json()


async def test_a_wrong_json_body_names_the_path_of_the_field(make: Make, ask: Ask) -> None:
    """The client is informed which field to repair."""

    async def keep(request: Request) -> Response:
        decode_json(await request.body(), Thing)
        return Response()

    app = make([Sample(more=[Route("/things", keep, methods=["POST"])])])

    answer = await ask(app, "POST", "/things", content=b'{"size": 1, "names": ["a", 2]}')

    assert (answer.status_code, answer.json()["code"]) == (400, "invalid")
    assert "$.names[1]" in answer.json()["message"]


async def test_components_start_in_order_and_stop_in_reverse(make: Make) -> None:
    """Started before anything is served, drained after; one that cannot drain does not stop the others."""
    order: list[str] = []

    class Noted(Sample):
        async def start(self) -> None:
            order.append(f"start {self.name}")

        async def stop(self) -> None:
            order.append(f"stop {self.name}")
            if self.name == "b":
                raise RuntimeError("cannot")

    parts = [Noted("a"), Noted("b"), Noted("c")]
    for part in parts[1:]:
        part.reads = part.writes = ()
    app = make(parts)

    async with app.router.lifespan_context(app):
        order.append("serving")

    assert order == ["start a", "start b", "start c", "serving", "stop c", "stop b", "stop a"]


async def test_a_component_that_hangs_while_draining_does_not_take_the_others_time(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is shared, yet each is given a moment of its own."""
    monkeypatch.setattr(module, "DRAIN_LEAST_S", 0.5)
    first, last = Sample("first"), Sample("last")
    last.reads = last.writes = ()

    class Slow(Sample):
        async def stop(self) -> None:
            await asyncio.sleep(0.01)
            await super().stop()

    class Hanging(Slow):
        async def stop(self) -> None:
            await asyncio.Event().wait()

    slow, hanging = Slow("slow"), Hanging("hanging")
    slow.reads = slow.writes = hanging.reads = hanging.writes = ()
    app = make([first, slow, hanging, last], drain_s=0.5)

    async with app.router.lifespan_context(app), asyncio.timeout(100):
        pass

    assert [part.lived[-1] for part in (first, slow, hanging, last)] == ["stopped", "stopped", "started", "stopped"]


async def test_components_have_time_to_drain_after_requests_used_up_theirs(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they have accepted is made durable then: a little time is theirs, however late it is."""
    monkeypatch.setattr(module, "DRAIN_EACH_S", 0.0)
    monkeypatch.setattr(module, "DRAIN_LEAST_S", 60.0)

    class Slow(Sample):
        async def stop(self) -> None:
            await asyncio.sleep(0.01)
            await super().stop()

    slow = Slow("slow")
    app = make([slow])
    async with app.router.lifespan_context(app):
        state_of(app).shutdown.drain_until_s = state_of(app).context.clock.monotonic_s() - 1.0

    assert ["started", "stopped"] == slow.lived


async def test_a_component_that_does_not_start_stops_those_that_did(make: Make) -> None:
    """Nothing half-started is left behind, and the cause is kept for the caller."""
    first = Sample("first")

    class Broken(Sample):
        async def start(self) -> None:
            raise errors.Unavailable("no disk")

    broken = Broken("broken")
    broken.reads = broken.writes = ()
    app = make([first, broken])

    with pytest.raises(errors.Unavailable):
        async with app.router.lifespan_context(app):
            raise AssertionError("it must not serve")

    assert first.lived == ["started", "stopped"]
    assert isinstance(state_of(app).shutdown.failure, errors.Unavailable)


async def test_a_request_cut_off_by_the_drain_is_told_that_its_outcome_is_unknown(make: Make) -> None:
    """When the drain's time is over, the client still hears that it must read before it retries."""
    reached = asyncio.Event()

    async def forever(request: Request) -> Response:
        reached.set()
        await asyncio.Event().wait()
        return Response()

    app = make([Sample(more=[Route("/forever", forever)])])
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("it has no body")

    scope = {"type": "http", "method": "GET", "path": "/forever", "headers": [], "query_string": b"", "root_path": ""}
    task = asyncio.create_task(app(scope, receive, send))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert sent[0]["status"] == 503
    assert msgspec.json.decode(sent[1]["body"])["code"] == "outcome_unknown"


async def test_many_requests_at_once_keep_their_own_ids(make: Make) -> None:
    """Ids and principals never leak from one request into another."""
    async with client_of(make()) as client:
        requested = [client.get("/sample", headers={"x-request-id": f"r-{n}"}) for n in range(50)]
        answers = await asyncio.gather(*requested)

    assert [f"r-{n}" for n in range(50)] == [answer.headers["x-request-id"] for answer in answers]


async def test_the_series_that_are_kept_by_hand_are_bounded(
    make: Make, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers beyond the bound are counted all the same."""
    monkeypatch.setattr(middleware, "SERIES_MAX", 2)
    app = make()
    for path in ("/healthz", "/metrics", "/nope", "/openapi.json", "/nope"):
        await ask(app, "GET", path)

    assert isinstance(app.middleware_stack, middleware.Middleware)
    assert 2 == len(app.middleware_stack._series)
    counted = state_of(app).context.metrics.value(
        "lakebed_http_requests_total", route="(none)", method="any", status="404"
    )
    assert 2 == counted


async def test_an_app_that_is_no_gateway_has_no_state(make: Make) -> None:
    """The accessor gives the whole typed value, or reports that there is none."""
    app = make()

    assert state_of(app).context.node == "node-1"
    assert not state_of(app).stopping.is_set()
    with pytest.raises(TypeError):
        state_of(Starlette())
