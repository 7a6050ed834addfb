"""Small requests to hot routes, from the socket to their handler without ASGI in between.

For a request of some kilobytes the layers between a socket and its handler cost more than the handler. Where a route
is marked (`wire.direct`), a plain request whose body is small waits in the protocol until all of it is there, goes
through the door to the handler, and is answered in one write. Whatever is not plain (chunked, HTTP/1.0, `Expect`, a
query, a body that is large or late, a gateway that traces or is full) takes the usual way to the same handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from starlette.routing import BaseRoute, Route
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from lakebed import traces
from lakebed.gateway.door import Door
from lakebed.gateway.limits import Budget, Limits
from lakebed.wire import DIRECT_MARK, Direct

DIRECT_BYTES_MAX = 256 * 1024  # what a connection holds, at most, before its request is judged
REST_S = 5.0  # what a body of 256 KiB needs at 50 KB/s; a slower one is no case for a short way
UNUSUAL = frozenset({b"transfer-encoding", b"expect", b"upgrade"})  # a head with one of these goes the usual way


class DirectRoute(NamedTuple):
    route: Route
    direct: Direct
    bytes_max: int


class DirectRoutes:
    """The marked routes of one gateway, by method and path as they stand in a request line."""

    def __init__(self, routes: Iterable[BaseRoute], door: Door, limits: Limits) -> None:
        self.door, self._budget = door, limits.budget
        self._rest_s = min(REST_S, limits.settings.body_timeout_s)
        self._known: dict[tuple[bytes, bytes], DirectRoute] = {}
        for route in routes:
            direct = getattr(getattr(route, "endpoint", None), DIRECT_MARK, None)
            if direct is not None and isinstance(route, Route):
                found = DirectRoute(route, direct, min(DIRECT_BYTES_MAX, limits.of(route.endpoint)))
                for method in route.methods or ():
                    self._known[method.encode(), route.path.encode()] = found

    def cycle(self, http: HttpToolsProtocol, done: Callable[[], None]) -> DirectCycle | None:
        """For the request whose head has just been read, when it may go this way. Calls `done` when it is answered."""
        found = self._known.get((http.parser.get_method(), http.url))
        if found is None or traces.installed() or http.parser.get_http_version() != "1.1":
            return None
        declared = b""
        for name, value in http.headers:
            if name == b"content-length":
                declared = value
            elif name in UNUSUAL or (name == b"connection" and value.lower() != b"keep-alive"):
                return None
        under_way = max(len(http.tasks), len(http.connections))  # a connection has one request under way, at most
        full = http.limit_concurrency is not None and under_way >= http.limit_concurrency
        if full or not declared.isdigit() or len(declared) > 9:
            return None
        size = int(declared)
        if size > found.bytes_max or not self._budget.take(size):
            return None  # the usual way knows what to say
        return DirectCycle(http, found, self.door, self._rest_s, done, Share(self._budget, size))


class Share:
    """What one request has taken from the budget for bodies, given back once."""

    __slots__ = ("_budget", "_size")

    def __init__(self, budget: Budget, size: int) -> None:
        self._budget, self._size = budget, size

    def give_back(self) -> None:
        size, self._size = self._size, 0
        self._budget.give(size)


class _Unheard:
    """The server sets a cycle's event when the client is gone; here nobody waits for it."""

    def set(self) -> None:
        return None


class DirectCycle:
    """One such request and its answer. To the server it is a cycle like any other."""

    message_event = _Unheard()

    def __init__(
        self,
        http: HttpToolsProtocol,
        found: DirectRoute,
        door: Door,
        rest_s: float,
        done: Callable[[], None],
        share: Share,
    ) -> None:
        self.share = share
        self._http, self._found, self._door, self._rest_s, self._done = http, found, door, rest_s, done
        self._method, self._headers = http.parser.get_method(), http.headers
        self.before: RequestResponseCycle | None = http.cycle
        self.parts: list[bytes] = []
        self.late: asyncio.TimerHandle | None = None
        self.keep_alive = True
        self._cut_short: Callable[[], None] = lambda: None
        self.disconnected = self.response_complete = False

    def expect_rest(self, give_up: Callable[[], None]) -> None:
        """The body is not here yet: a client that lets it wait for long goes the usual way, which knows what to say."""
        if self.late is None:
            self.late = self._http.loop.call_later(self._rest_s, give_up)

    def arrived(self) -> None:
        if self.late is not None:
            self.late.cancel()

    @property
    def waits(self) -> bool:
        """Whether its handler needs a task."""
        return self._found.direct.prompt is None

    async def run_asgi(self, _: Any) -> None:
        """As the server's own cycle, but for the app, which is not asked."""
        try:
            await self._door.direct(self._found.direct.handler, self._scope(), self._body(), self._write)
        finally:
            self._finish()

    def run_promptly(self) -> None:
        """The same without a task: the answer is written when the handler tells it."""
        prompt = self._found.direct.prompt
        assert prompt is not None
        self._cut_short = self._door.promptly(prompt, self._scope(), self._body(), self._write_and_finish)

    def stop_within(self, seconds: float) -> None:
        """The server stops: whoever still waits when the time is over is told that the outcome is unknown."""
        if not self.waits:  # a task is ended by the server itself
            self._http.loop.call_later(seconds, lambda: self._cut_short())

    def _scope(self) -> Scope:
        return {
            "type": "http",
            "method": self._method.decode(),
            "path": self._found.route.path,
            "headers": self._headers,
            "route": self._found.route,
        }

    def _body(self) -> bytes:
        body = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.parts.clear()
        return body

    def _finish(self) -> None:
        self.response_complete = True
        self.share.give_back()
        if not self.keep_alive:
            self._http.transport.close()
        self._done()

    def _write_and_finish(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self._write(status, headers, body)
        self._finish()

    def _write(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        if self.disconnected:
            return
        packet = [STATUS_LINE[status]]
        for name, value in (*self._http.server_state.default_headers, *headers):
            packet += (name, b": ", value, b"\r\n")
        packet.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        packet.append(body)
        self._http.transport.write_whole(b"".join(packet))  # type: ignore[attr-defined]
