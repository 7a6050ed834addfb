"""The middleware around every request: direct and prompt handlers, ids, counts, times and the log."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from lakebed.core.clock import ManualClock, settle
from lakebed.core.errors import Invalid, Overloaded, Unavailable
from lakebed.core.http import DirectRequest, DirectResponse
from lakebed.core.quotas import count_records
from lakebed.gateway import middleware as module
from lakebed.gateway.auth import Keyring
from lakebed.gateway.body_limits import BodyLimits, HeadTooLarge
from lakebed.gateway.middleware import DirectRoute, Middleware
from lakebed.gateway.settings import GatewaySettings
from support.gateway_fixtures import context_with

SECRET = "0123456789abcdef-writer"


async def _endpoint(request: Any) -> Any:
    raise AssertionError("nobody calls it")


async def _found(cookie: str) -> None:
    raise AssertionError("no request here has a session")


class Env:
    """One middleware, its clock and metrics, and every answer that was written."""

    def __init__(
        self, app: Any = None, *, keys: bool = False, verbose: bool = False, limits: dict[str, float] | None = None
    ) -> None:
        self.clock = ManualClock()
        context = context_with(self.clock)
        key = {"name": "writer", "secret": SECRET, "rights": ["*"], "limits": limits or {}}
        reported = [key] if keys else []
        settings = GatewaySettings.of({"keys": reported})
        self.metrics = context.metrics
        self.middleware = Middleware(
            app,
            keyring=Keyring.of(settings, self.clock),
            find_session=_found,
            limits=BodyLimits(settings, context),
            runtime=context,
            verbose=verbose,
        )
        self.written: list[tuple[int, dict[bytes, bytes], bytes]] = []
        self.headers: list[tuple[bytes, bytes]] = [(b"host", b"127.0.0.1")]

    def write(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        assert len({name for name, _ in headers}) == len(headers)
        self.written.append((status, dict(headers), body))

    @property
    def scope(self) -> dict[str, Any]:
        route = Route("/hot/{thing}", _endpoint, methods=["POST"])
        return {"type": "http", "method": "POST", "path": "/hot/1", "headers": self.headers, "route": route}

    def route(self, handler: Any = None, prompt: Any = None) -> DirectRoute:
        return DirectRoute(self.scope["route"], handler, prompt, 1024)

    def counted(self, status: int) -> float:
        labels = {"route": "/hot/{thing}", "method": "POST", "status": str(status)}
        return self.metrics.value("lakebed_http_requests_total", **labels)

    def seconds(self) -> float:
        return self.metrics.value("lakebed_http_seconds_sum", route="/hot/{thing}")


async def test_a_direct_answer_is_written_whole_with_its_id_and_counted_with_its_time() -> None:
    """The handler knows who queries and what was sent; the answer has the request's own id and a strict policy."""
    env = Env(keys=True)
    env.headers += [(b"x-request-id", b"r-7"), (b"x-api-key", SECRET.encode()), (b"x-more", b"m")]
    seen: list[Any] = []

    async def handler(call: DirectRequest) -> DirectResponse:
        await env.clock.advance(2.5)
        seen.append((call.principal.name, call.header(b"x-more"), bytes(await call.body())))
        return DirectResponse(b"{}", 202, more={"x-own": "1"})

    await env.middleware.direct(env.route(handler), env.scope, b"body", env.write)

    ((status, headers, body),) = env.written
    assert [("writer", "m", b"body")] == seen
    assert (202, b"{}", b"r-7", b"1") == (status, body, headers[b"x-request-id"], headers[b"x-own"])
    assert b"nosniff" == headers[b"x-content-type-options"]
    assert headers[b"content-security-policy"].startswith(b"default-src 'none'")
    assert (1, 2.5) == (env.counted(202), env.seconds())


async def test_a_direct_request_without_a_key_never_reaches_its_handler() -> None:
    env = Env(keys=True)

    async def handler(call: DirectRequest) -> DirectResponse:
        raise AssertionError("it must not be asked")

    await env.middleware.direct(env.route(handler), env.scope, b"", env.write)
    env.middleware.promptly(env.route(prompt=lambda *_: pytest.fail("it must not be asked")), env.scope, b"", env.write)

    assert [401, 401] == [status for status, _, _ in env.written]
    assert 2 == env.counted(401)


async def test_what_a_direct_handler_raises_is_its_answer() -> None:
    env = Env()

    async def handler(call: DirectRequest) -> DirectResponse:
        raise Invalid("no frame")

    await env.middleware.direct(env.route(handler), env.scope, b"", env.write)

    ((status, headers, body),) = env.written
    reported = msgspec.json.decode(body)
    assert (400, "invalid", "no frame") == (status, reported["code"], reported["message"])
    assert headers[b"x-request-id"].decode() == reported["request_id"]
    assert 1 == env.counted(400)


async def test_a_direct_request_that_is_cut_short_says_that_its_outcome_is_unknown() -> None:
    """It is direct_response before the cancellation continues, and counted once."""
    env = Env()
    reached = asyncio.Event()

    async def handler(call: DirectRequest) -> DirectResponse:
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError

    task = asyncio.create_task(env.middleware.direct(env.route(handler), env.scope, b"", env.write))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    ((status, _, body),) = env.written
    assert (503, "outcome_unknown") == (status, msgspec.json.decode(body)["code"])
    assert 1 == env.counted(503)


async def test_a_prompt_handler_answers_when_it_is_known_and_once() -> None:
    """The answer is counted with the time until then; what ends it afterwards changes nothing."""
    env = Env()
    env.headers.append((b"x-request-id", b"r-8"))
    kept: list[Any] = []

    def handler(call: DirectRequest, body: Any, report: Any) -> None:
        kept.append((call.principal.name, bytes(body), report))

    cut = env.middleware.promptly(env.route(prompt=handler), env.scope, b"body", env.write)
    before = list(env.written)
    await env.clock.advance(3.0)
    ((name, body, report),) = kept
    report(lambda: DirectResponse(b"done"))
    cut()
    report(lambda: DirectResponse(b"again"))

    assert ([], "anybody", b"body") == (before, name, body)
    ((status, headers, answer),) = env.written
    assert (200, b"r-8", b"done") == (status, headers[b"x-request-id"], answer)
    assert b"nosniff" == headers[b"x-content-type-options"]
    assert (1, 3.0) == (env.counted(200), env.seconds())


async def test_a_prompt_request_that_is_cut_short_is_answered_once() -> None:
    env = Env()
    kept: list[Any] = []

    cut = env.middleware.promptly(
        env.route(prompt=lambda call, body, report: kept.append(report)), env.scope, b"", env.write
    )
    cut()
    kept[0](lambda: DirectResponse(b"late"))

    ((status, _, body),) = env.written
    assert (503, "outcome_unknown") == (status, msgspec.json.decode(body)["code"])
    assert (1, 0) == (env.counted(503), env.counted(200))


@pytest.mark.parametrize("late", [False, True])
async def test_what_a_prompt_handler_raises_is_its_answer(late: bool) -> None:
    """Raised at once, or when the answer is made."""
    env = Env()

    def fails() -> DirectResponse:
        raise Invalid("no frame")

    def handler(call: DirectRequest, body: Any, report: Any) -> None:
        if not late:
            fails()
        report(fails)

    env.middleware.promptly(env.route(prompt=handler), env.scope, b"", env.write)

    assert [400] == [status for status, _, _ in env.written]
    assert 1 == env.counted(400)


@pytest.mark.parametrize("end", ["raises", "fails late", "cut short"])
async def test_a_prompt_request_without_a_result_uses_its_keys_upload_no_longer(end: str) -> None:
    """Else each error would take one place of `uploads_max` for ever, and the key be refused until a restart."""
    env = Env(keys=True, limits={"uploads_max": 1})
    env.headers.append((b"x-api-key", SECRET.encode()))

    def fails() -> DirectResponse:
        raise Invalid("no frame")

    def handler(call: DirectRequest, body: Any, report: Any) -> None:
        if end == "raises":
            fails()
        if end == "fails late":
            report(fails)

    for _ in range(3):
        cut = env.middleware.promptly(env.route(prompt=handler), env.scope, b"x", env.write)
        cut()

    assert [503 if end == "cut short" else 400] * 3 == [status for status, _, _ in env.written]


def test_a_request_without_a_whole_head_is_counted_under_no_route() -> None:
    env = Env()

    reported = env.middleware.unread(HeadTooLarge("too much"))

    assert (431, "head_too_large") == (reported.status, reported.code)
    assert 1 == env.metrics.value("lakebed_http_requests_total", route="(none)", method="any", status="431")


async def test_requests_in_flight_are_counted_until_their_answer() -> None:
    """On every way through the middleware; a head that was refused is no request under way, before or after."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    async def handler(call: DirectRequest) -> DirectResponse:
        await asyncio.Event().wait()
        raise AssertionError

    env, wire = Env(app), Asgi()
    env.middleware.unread(HeadTooLarge("too much"))
    seen = [env.metrics.value("lakebed_http_in_flight")]
    tasks = [
        asyncio.create_task(env.middleware(env.scope, wire.receive, wire.send)),
        asyncio.create_task(env.middleware.direct(env.route(handler), env.scope, b"", env.write)),
    ]
    await settle()
    cut = env.middleware.promptly(env.route(prompt=lambda *_: None), env.scope, b"", env.write)
    seen.append(env.metrics.value("lakebed_http_in_flight"))
    cut()
    cut()
    seen.append(env.metrics.value("lakebed_http_in_flight"))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    seen.append(env.metrics.value("lakebed_http_in_flight"))

    assert [0, 3, 2, 0] == seen


async def test_each_request_without_an_id_gets_one_of_its_own() -> None:
    """Ids of one gateway begin alike and differ; an id of 128 characters is kept, a longer one is not."""
    env = Env()

    async def handler(call: DirectRequest) -> DirectResponse:
        return DirectResponse(b"")

    for sent in ([], [], [b"x" * 128], [b"x" * 129], [b""]):
        env.headers = [(b"host", b"127.0.0.1"), *((b"x-request-id", one) for one in sent)]
        await env.middleware.direct(env.route(handler), env.scope, b"", env.write)

    first, second, kept, longer, empty = (headers[b"x-request-id"] for _, headers, _ in env.written)
    assert b"x" * 128 == kept
    assert 4 == len({first, second, longer, empty})
    assert {first[:8]} == {one[:8] for one in (second, longer, empty)}
    assert {16} == {len(one) for one in (first, second, longer, empty)}


@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (RuntimeError("why"), 1),
        (Unavailable("away"), 0),
        (Overloaded("full", retry_after_s=1.0), 0),
        (Invalid("wrong"), 0),
    ],
)
async def test_only_failures_of_our_own_are_logged_with_their_cause(
    monkeypatch: pytest.MonkeyPatch, error: Exception, logged: int
) -> None:
    """A path is logged without its query and without control characters."""
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(module.log, "error", lambda _, **fields: lines.append(fields))
    env = Env()

    async def handler(call: DirectRequest) -> DirectResponse:
        raise error

    await env.middleware.direct(env.route(handler), env.scope | {"raw_path": b"/hot/\xff?key=secret"}, b"", env.write)

    assert logged == len(lines)
    if lines:
        assert ("POST", "/hot/\\xff", error) == (lines[0]["method"], lines[0]["path"], lines[0]["exc_info"])


@pytest.mark.parametrize("verbose", [False, True])
async def test_every_answer_is_logged_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, verbose: bool) -> None:
    lines: list[dict[str, Any]] = []
    monkeypatch.setattr(module.log, "debug", lambda _, **fields: lines.append(fields))
    env = Env(verbose=verbose)

    async def handler(call: DirectRequest) -> DirectResponse:
        await env.clock.advance(0.25)
        return DirectResponse(b"", 204)

    await env.middleware.direct(env.route(handler), env.scope, b"", env.write)

    assert [{"method": "POST", "path": "/hot/1", "status": 204, "ms": 250.0}] * verbose == lines


class Asgi:
    """One request through the whole middleware: what was sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def receive(self) -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}


async def test_an_error_after_the_head_was_sent_is_raised_and_counted_with_its_status() -> None:
    """It is too late to send another answer."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("in the middle")

    env, wire = Env(app), Asgi()
    with pytest.raises(RuntimeError, match="in the middle"):
        await env.middleware(env.scope, wire.receive, wire.send)

    assert [200] == [message["status"] for message in wire.sent]
    assert 1 == env.counted(200)


async def test_a_client_that_leaves_during_its_answer_is_counted_with_the_answers_status() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ClientDisconnect

    env, wire = Env(app), Asgi()
    await env.middleware(env.scope, wire.receive, wire.send)

    assert (1, 0) == (env.counted(200), env.counted(499))


async def test_a_request_that_is_cut_after_its_head_gets_no_second_answer() -> None:
    reached = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        reached.set()
        await asyncio.Event().wait()

    env, wire = Env(app), Asgi()
    task = asyncio.create_task(env.middleware(env.scope, wire.receive, wire.send))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert 1 == len(wire.sent)


async def test_what_is_no_request_goes_on_as_it_is() -> None:
    """The lifespan has no headers, no principal and no count."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    env, wire = Env(app), Asgi()
    await env.middleware({"type": "lifespan"}, wire.receive, wire.send)

    assert [{"type": "lifespan"}] == seen


async def test_the_time_of_an_answer_is_counted_under_its_route() -> None:
    env, wire = Env(), Asgi()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert "anybody" == scope["state"]["principal"].name
        await env.clock.advance(1.5)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})
        await send({"type": "http.response.body", "body": b""})

    env.middleware._app = app
    await env.middleware(env.scope, wire.receive, wire.send)

    assert (1, 1.5) == (env.counted(200), env.seconds())
    assert (b"x-own", b"1") in wire.sent[0]["headers"]
    assert (b"connection", b"close") not in wire.sent[0]["headers"]


@pytest.mark.parametrize("path", ["asgi", "direct", "prompt"])
@pytest.mark.parametrize("limit", ["requests_per_s", "bytes_per_s", "records_per_s", "uploads_max"])
async def test_a_keys_limits_hold_on_every_path_of_a_request(path: str, limit: str) -> None:
    """What one request used up refuses the next, whichever way both come; later, or when the first ended, it passes."""
    go = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await answered()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def answered() -> None:
        count_records(100)
        if limit == "uploads_max":
            await go.wait()

    async def handler(call: DirectRequest) -> DirectResponse:
        await answered()
        return DirectResponse(b"{}")

    def prompt(call: DirectRequest, body: Any, respond: Any) -> None:
        async def later() -> None:
            await answered()
            respond(lambda: DirectResponse(b"{}"))

        waiting.append(asyncio.ensure_future(later()))

    env = Env(app, keys=True, limits={limit: 1.0})
    env.headers += [(b"x-api-key", SECRET.encode()), (b"content-length", b"100")]
    waiting: list[asyncio.Future[None]] = []

    async def received() -> Any:
        return {"type": "http.request", "body": b"x" * 100, "more_body": False}

    async def sent(message: Any) -> None:
        if message["type"] == "http.response.start":
            env.write(message["status"], message["headers"], b"")

    async def send() -> None:
        if path == "asgi":
            await env.middleware(env.scope, received, sent)
        elif path == "direct":
            await env.middleware.direct(env.route(handler), env.scope, b"x" * 100, env.write)
        else:
            env.middleware.promptly(env.route(prompt=prompt), env.scope, b"x" * 100, env.write)

    requests = []
    for _ in range(3):  # a burst of two seconds is allowed
        requests.append(asyncio.ensure_future(send()))
        await settle()
    refused = [status for status, _, _ in env.written].count(429)
    go.set()
    await asyncio.gather(*requests, *waiting)
    await env.clock.advance(1000.0)
    env.written.clear()
    await send()
    await asyncio.gather(*waiting)

    assert (1 if limit == "requests_per_s" else 2) == refused == env.metrics.value("lakebed_http_throttled_total")
    assert [200] == [status for status, _, _ in env.written]
