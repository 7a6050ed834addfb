"""`lakebed bench gateway`: what the middleware costs a small write, beside the bare route and a plain Starlette app.

Measured in process, in CPU time of this thread, without the server, which costs both sides the same.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakebed.bench.harness import BenchEnvironment, Check, at_most, measured, rounds_of
from lakebed.core.context import Context, StatelessComponent
from lakebed.core.settings import load
from lakebed.gateway.app import build
from lakebed.wiring.parts import sections

ADDED_US_BAR = 40.0  # request id, authentication, limits, problems, metrics and routing together
STARLETTE_BAR = 1.0  # and no more than the routing of a plain app, which does none of that
OTHER_ROUTES = 40  # what a gateway with all its parts has
KEYS = 10
BODY = b"x" * 1024

App = Callable[[Any, Any, Any], Awaitable[None]]


async def bench(environment: BenchEnvironment) -> Sequence[Check]:
    count = 2_000 if environment.quick else 10_000
    environment.report(f"POST of 1 KiB to one of {OTHER_ROUTES + 2} routes, {count} a round, {KEYS} keys")
    part = _Part()
    apps: dict[str, App] = {
        "bare": part.hot.app,
        "starlette": Starlette(routes=[*part.reads, *part.writes]),
        "open": build(_with_keys(environment.context(), 0), [part]),
        "keys": build(_with_keys(environment.context(), KEYS), [part]),
    }
    seen = await rounds_of(environment.rounds, {name: _contender(app, count) for name, app in apps.items()})
    rounds = [ours - bare for ours, bare in zip(seen["keys"], seen["bare"], strict=True)]
    added = min(seen["keys"]) - min(seen["bare"])  # of the fastest rounds: other load only adds
    return [
        measured("bare route", seen["bare"], "µs"),
        measured("plain Starlette app", seen["starlette"], "µs"),
        measured("gateway, no keys", seen["open"], "µs"),
        measured(f"gateway, {KEYS} keys", seen["keys"], "µs"),
        Check(
            "added to the bare route",
            round(added, 1),
            "µs",
            ADDED_US_BAR,
            added <= ADDED_US_BAR,
            round(max(rounds) - min(rounds), 1),
        ),
        at_most("gateway relative to plain Starlette", seen["keys"], seen["starlette"], STARLETTE_BAR),
    ]


class _Part(StatelessComponent):
    """One hot route behind many others."""

    name = "bench"

    def __init__(self) -> None:
        others = [Route(f"/other-{n}/{{thing}}", _hot) for n in range(OTHER_ROUTES // 2)]
        self.hot = Route("/hot", _hot, methods=["POST"])
        self.reads: Sequence[BaseRoute] = [*others, *(Route(f"/other-{n}", _hot) for n in range(OTHER_ROUTES // 2))]
        self.writes: Sequence[BaseRoute] = [self.hot]


async def _hot(request: Request) -> Response:
    await request.body()
    return Response(b"ok")


def _with_keys(context: Context, count: int) -> Context:
    keys = [{"name": f"key-{n}", "secret": f"{n:020d}", "rights": ["*"]} for n in range(count)]
    return msgspec.structs.replace(context, settings=load(sections(), flags={"gateway.keys": keys}))


def _contender(app: App, count: int) -> Callable[[], Awaitable[float]]:
    async def receive() -> Any:
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def send(message: Any) -> None:
        return None

    async def measured() -> float:
        for _ in range(100):
            await app(_scope(), receive, send)
        began = time.thread_time()
        for _ in range(count):
            await app(_scope(), receive, send)
        return (time.thread_time() - began) / count * 1e6

    return measured


def _scope() -> dict[str, Any]:
    return {
        "type": "http",
        "method": "POST",
        "path": "/hot",
        "root_path": "",
        "query_string": b"",
        "state": {},
        "headers": [
            (b"host", b"127.0.0.1:8080"),
            (b"user-agent", b"bench"),
            (b"accept", b"*/*"),
            (b"content-length", b"1024"),
            (b"content-type", b"application/json"),
            (b"x-api-key", b"00000000000000000003"),
        ],
    }
