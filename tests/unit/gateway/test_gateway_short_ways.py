"""Which requests take a short way from the socket, and what a process says that waits for its store."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from conftest_gateway import context_with
from starlette.routing import Route

from lakebed import wire
from lakebed.clock import ManualClock
from lakebed.gateway.direct import DIRECT_BYTES_MAX, DirectRoutes
from lakebed.gateway.large_body import LARGE_BYTES, LARGE_BYTES_MAX, large_body
from lakebed.gateway.limits import Limits
from lakebed.gateway.settings import GatewaySettings
from lakebed.gateway.waiting import Waiting


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
        limit_concurrency=3,
        cycle=SimpleNamespace(receive=None, on_response=None, response_complete=False),
        flow=None,
    )


def length(size: int) -> tuple[bytes, bytes]:
    return b"content-length", b"%d" % size


def routes(body_bytes_max: int = 2 * DIRECT_BYTES_MAX, bodies_bytes_max: int = 4 * DIRECT_BYTES_MAX) -> Any:
    settings = GatewaySettings(body_bytes_max=body_bytes_max, bodies_bytes_max=bodies_bytes_max)
    limits = Limits(settings, ManualClock())
    marked = Route("/hot", wire.direct(_handler), methods=["POST"])
    return DirectRoutes([marked, Route("/cold", _handler, methods=["POST"])], None, limits), limits  # type: ignore[arg-type]


def taken(made: Any, asked: Any) -> bool:
    return made.cycle(asked, lambda: None) is not None


def test_a_plain_small_request_to_a_marked_route_takes_the_short_way_and_its_share() -> None:
    made, limits = routes()

    cycle = made.cycle(http(length(700), (b"connection", b"Keep-Alive")), lambda: None)

    assert limits.budget.held == 700
    cycle.share.give_back()
    assert limits.budget.held == 0


@pytest.mark.parametrize(
    "asked",
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
def test_what_is_not_plain_goes_the_usual_way_and_takes_nothing(asked: Any) -> None:
    made, limits = routes()

    assert not taken(made, asked)
    assert limits.budget.held == 0


def test_the_limit_of_the_short_way_is_the_smaller_of_its_own_and_the_routes() -> None:
    wide, _ = routes()
    assert taken(wide, http(length(DIRECT_BYTES_MAX)))
    assert not taken(wide, http(length(DIRECT_BYTES_MAX + 1)))
    narrow, limits = routes(body_bytes_max=100)
    assert not taken(narrow, http(length(101)))
    assert limits.budget.held == 0
    assert taken(narrow, http(length(100)))


def test_a_full_gateway_and_a_full_budget_send_a_request_the_usual_way() -> None:
    made, limits = routes()
    for name in ("tasks", "connections"):
        asked = http(length(7))
        setattr(asked, name, {1, 2})
        assert taken(made, asked)
        setattr(asked, name, {1, 2, 3})
        assert not taken(made, asked)
    limits.budget.held = limits.budget.bytes_max - 6
    assert not taken(made, http(length(7)))
    assert taken(made, http(length(6)))


@pytest.mark.parametrize(
    ("size", "large"),
    [(LARGE_BYTES - 1, False), (LARGE_BYTES, True), (LARGE_BYTES_MAX, True), (LARGE_BYTES_MAX + 1, False)],
)
def test_a_body_is_read_into_one_buffer_between_two_sizes(size: int, large: bool) -> None:
    class Cycle:
        pass

    asked = http(length(size))
    asked.cycle = Cycle()

    assert (large_body(asked) is not None) is large


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
    waiting = Waiting(context_with(ManualClock()))
    waiting.reason = "connection refused"
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await waiting({"type": "http", "path": path, "method": method, "headers": []}, asyncio.Event().wait, send)  # type: ignore[arg-type]

    headers = dict(sent[0]["headers"])
    assert (sent[0]["status"], headers[b"content-type"], headers[b"connection"]) == (503, kind, b"close")
    if method == "HEAD":
        assert sent[1]["body"] == b"" and int(headers[b"content-length"]) > 0
        return
    assert int(headers[b"content-length"]) == len(sent[1]["body"])
    told = msgspec.json.decode(sent[1]["body"])
    if path == "/healthz":
        assert told["status"] == "down" and "connection refused" in told["components"]["store"]["detail"]
    else:
        assert headers[b"retry-after"] == b"5" and "connection refused" in told["message"]
