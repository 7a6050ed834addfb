"""Which requests take the fast path, the limits of a head, and the answers of a process that waits for its store."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.routing import Route
from uvicorn.server import ServerState

from lakebed.core import retry
from lakebed.core.clock import ManualClock
from lakebed.core.errors import Unavailable
from lakebed.core.http import direct
from lakebed.core.retry import until_available
from lakebed.gateway.app import build
from lakebed.gateway.body_limits import BodyBudget, BodyLimits
from lakebed.gateway.fast.direct import DIRECT_BYTES_MAX, BudgetShare, DirectRoutes
from lakebed.gateway.fast.large_body import LARGE_BYTES, LARGE_BYTES_MAX, large_body
from lakebed.gateway.listen import server_config
from lakebed.gateway.protocol import HEAD_BYTES_MAX, HEAD_LINES_MAX
from lakebed.gateway.settings import GatewaySettings
from lakebed.wiring.boot import WaitingApp
from lakebed.wiring.parts import components
from support.gateway_fixtures import context_with
from support.runtimes import runtime_of


async def _handler(*_: Any) -> Any:
    raise AssertionError("nobody calls it")


def http(*headers: tuple[bytes, bytes], method: bytes = b"POST", url: bytes = b"/hot", version: str = "1.1") -> Any:
    parser = SimpleNamespace(get_method=lambda: method, get_http_version=lambda: version)
    return SimpleNamespace(
        parser=parser,
        url=url,
        headers=list(headers),
        tasks=set(),
        connections=set(),
        full=False,
        cycle=SimpleNamespace(receive=None, on_response=None, response_complete=False),
        flow=None,
    )


def length(size: int) -> tuple[bytes, bytes]:
    return b"content-length", b"%d" % size


def routes(body_bytes_max: int = 2 * DIRECT_BYTES_MAX, bodies_bytes_max: int = 4 * DIRECT_BYTES_MAX) -> Any:
    settings = GatewaySettings(body_bytes_max=body_bytes_max, bodies_bytes_max=bodies_bytes_max)
    limits = BodyLimits(settings, runtime_of(ManualClock()))
    marked = Route("/hot", direct(_handler), methods=["POST"])
    return DirectRoutes([marked, Route("/cold", _handler, methods=["POST"])], None, limits), limits  # type: ignore[arg-type]


def taken(made: Any, requested: Any) -> bool:
    return made.cycle(requested, lambda: None) is not None


def test_a_plain_small_request_to_a_marked_route_takes_the_fast_path_and_its_share() -> None:
    made, limits = routes()

    cycle = made.cycle(http(length(700), (b"connection", b"Keep-Alive")), lambda: None)

    assert limits.budget.held == 700
    cycle.share.give_back()
    assert limits.budget.held == 0


@pytest.mark.parametrize("url", [b"/v1/produce", b"/produce", b"/v1/batches"])
def test_the_hot_routes_of_every_part_and_their_aliases_take_the_fast_path(url: bytes) -> None:
    context = context_with()
    app = build(context, components(context))

    made = DirectRoutes(app.routes, None, BodyLimits(GatewaySettings(), runtime_of(ManualClock())))  # type: ignore[arg-type]

    assert taken(made, http(length(7), url=url))


@pytest.mark.parametrize(
    "requested",
    [
        http(length(7), url=b"/cold"),
        http(length(7), url=b"/hot?a=1"),
        http(length(7), method=b"PUT"),
        http(length(7), version="1.0"),
        http(length(7), (b"expect", b"100-continue")),
        http(length(7), (b"transfer-encoding", b"chunked")),
        http(length(7), (b"upgrade", b"h2c")),
        http(length(7), (b"connection", b"close")),
        http(),
        http((b"content-length", b"-1")),
        http((b"content-length", b"0000000007")),
    ],
)
def test_what_is_not_plain_goes_through_asgi_and_takes_nothing(requested: Any) -> None:
    made, limits = routes()

    assert not taken(made, requested)
    assert limits.budget.held == 0


def test_the_limit_of_the_fast_path_is_the_smaller_of_its_own_and_the_routes() -> None:
    wide, _ = routes()
    assert taken(wide, http(length(DIRECT_BYTES_MAX)))
    assert not taken(wide, http(length(DIRECT_BYTES_MAX + 1)))
    narrow, limits = routes(body_bytes_max=100)
    assert not taken(narrow, http(length(101)))
    assert limits.budget.held == 0
    assert taken(narrow, http(length(100)))


def test_a_full_gateway_and_a_full_budget_send_a_request_through_asgi() -> None:
    made, limits = routes()
    requested = http(length(7))
    requested.full = True
    assert not taken(made, requested)
    limits.budget.held = limits.budget.bytes_max - 6
    assert not taken(made, http(length(7)))
    assert taken(made, http(length(6)))


def test_a_share_of_the_budget_is_given_back_once() -> None:
    """A request that is answered and whose connection is lost gives back what it took, and nothing of another."""
    budget = BodyBudget(100)
    assert budget.take(60) and budget.take(40)
    share = BudgetShare(budget, 60)

    share.give_back()
    share.give_back()

    assert 40 == budget.held


@pytest.mark.parametrize(
    ("size", "large"),
    [(LARGE_BYTES - 1, False), (LARGE_BYTES, True), (LARGE_BYTES_MAX, True), (LARGE_BYTES_MAX + 1, False)],
)
def test_a_body_is_read_into_one_buffer_between_two_sizes(size: int, large: bool) -> None:
    class Cycle:
        pass

    requested = http(length(size))
    requested.cycle = Cycle()

    assert (large_body(requested) is not None) is large


@pytest.mark.parametrize("name", [b"transfer-encoding", b"upgrade"])
def test_a_body_without_one_certain_length_is_a_stream(name: bytes) -> None:
    assert large_body(http(length(LARGE_BYTES), (name, b"chunked"))) is None


@pytest.mark.parametrize(
    ("path", "method", "kind"),
    [
        ("/healthz", "GET", b"application/json"),
        ("/health", "HEAD", b"application/json"),
        ("/topics", "POST", b"application/problem+json"),
    ],
)
async def test_a_process_that_waits_for_its_store_is_down_and_says_when_to_come_back(
    path: str, method: str, kind: bytes
) -> None:
    waiting = WaitingApp(context_with(ManualClock()))
    waiting.reason = "connection refused"
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await waiting({"type": "http", "path": path, "method": method, "headers": []}, asyncio.Event().wait, send)  # type: ignore[arg-type]

    headers = dict(sent[0]["headers"])
    assert (sent[0]["status"], headers[b"content-type"], headers[b"connection"]) == (503, kind, b"close")
    assert headers[b"x-content-type-options"] == b"nosniff"
    assert headers[b"content-security-policy"].startswith(b"default-src 'none'")
    if method == "HEAD":
        assert sent[1]["body"] == b"" and int(headers[b"content-length"]) > 0
        return
    assert int(headers[b"content-length"]) == len(sent[1]["body"])
    reported = msgspec.json.decode(sent[1]["body"])
    if path == "/healthz":
        assert reported["status"] == "down" and "connection refused" in reported["components"]["store"]["detail"]
    else:
        assert headers[b"retry-after"] == b"5" and "connection refused" in reported["message"]


async def test_a_waiting_process_logs_at_once_and_then_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not each try: a store that is away for an hour does not fill the log."""
    clock = ManualClock()
    context = context_with(clock)
    logged: list[float] = []
    tries: list[float] = []

    async def boot() -> Any:
        tries.append(clock.monotonic_s())
        if len(tries) > 40:
            return "the authority"
        raise Unavailable("refused")

    async def sleep(seconds: float) -> None:
        await ManualClock.advance(clock, 1.0)

    monkeypatch.setattr(clock, "sleep", sleep)
    monkeypatch.setattr(retry.log, "warning", lambda *_, waited_s, **__: logged.append(waited_s))

    assert await until_available(context, boot) == "the authority"

    assert logged == [0.0, 10.0, 20.0, 30.0]


class Wire:
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        self.sent = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.closed = True

    def write_eof(self) -> None:
        return None

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        return None

    def resume_reading(self) -> None:
        return None


def connected(fast_path: bool) -> tuple[Any, Wire, list[Any]]:
    """One connection of a gateway whose app only records its requests."""
    requested: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        requested.append(scope)

    config = server_config(app, GatewaySettings(fast_path=fast_path))  # type: ignore[arg-type]
    config.load()
    made = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})  # type: ignore[call-arg]
    wire_ = Wire()
    made.connection_made(wire_)  # type: ignore[arg-type]
    return made, wire_, requested


def head(lines: int, more: bytes = b"") -> bytes:
    return b"GET / HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % number for number in range(lines)) + more + b"\r\n"


@pytest.mark.parametrize("fast_path", [True, False])
async def test_a_head_has_so_many_lines_and_no_more(fast_path: bool) -> None:
    made, wire_, requested = connected(fast_path)
    made.data_received(head(HEAD_LINES_MAX))
    await asyncio.sleep(0)
    assert (len(requested), b" 431 " in wire_.sent) == (1, False)

    made, wire_, requested = connected(fast_path)
    made.data_received(head(HEAD_LINES_MAX + 1))
    await asyncio.sleep(0)
    assert (len(requested), wire_.sent.startswith(b"HTTP/1.1 431 ")) == (0, True)
    made.data_received(head(1))  # what still comes is dropped
    await asyncio.sleep(0)
    assert requested == []


@pytest.mark.parametrize("fast_path", [True, False])
async def test_a_head_has_so_many_bytes_whole_or_in_parts(fast_path: bool) -> None:
    made, wire_, requested = connected(fast_path)
    made.data_received(head(1, b"big: " + b"z" * (HEAD_BYTES_MAX - 200) + b"\r\n"))
    await asyncio.sleep(0)
    assert (len(requested), b" 431 " in wire_.sent) == (1, False)

    for parts in (1, 40):
        made, wire_, requested = connected(fast_path)
        whole = head(1, b"big: " + b"z" * (HEAD_BYTES_MAX + 200) + b"\r\n")
        size = len(whole) // parts + 1
        for start in range(0, len(whole), size):
            made.data_received(whole[start : start + size])
        await asyncio.sleep(0)
        assert (len(requested), wire_.sent.startswith(b"HTTP/1.1 431 ")) == (0, True)


async def test_pipelined_requests_whose_client_leaves_give_back_what_they_took() -> None:
    """One that waits for its turn at once, the one under way with its answer: the budget is whole again."""
    made, wire_, _ = connected(fast_path=True)
    known, limits = routes()
    let_go, begun = asyncio.Event(), list[bytes]()

    async def answered(found: Any, scope: Any, body: bytes, write: Any) -> None:
        begun.append(body)
        await let_go.wait()

    known.middleware = SimpleNamespace(direct=answered)
    made.direct = known
    posted = b"POST /hot HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s"
    made.data_received(posted % (5, b"first") + posted % (6, b"second") + posted % (5, b"third"))
    made.data_received(posted % (7, b"unfin"))
    await asyncio.sleep(0)
    whole = limits.budget.held
    wire_.close()
    made.connection_lost(None)
    left = limits.budget.held
    let_go.set()
    await asyncio.gather(*made.tasks)

    assert (5 + 6 + 5 + 7, 5, 0) == (whole, left, limits.budget.held)
    assert [b"first"] == begun
