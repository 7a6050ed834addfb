"""Small requests to hot routes, from the socket to their handler without ASGI in between.

For a request of some kilobytes the layers between a socket and its handler cost more than the handler. Where a route
is marked (`core.http.direct`), a plain request with a small body waits in the protocol until it is complete, goes
through the middleware to the handler, and gets its response in one write. All other requests (chunked, HTTP/1.0,
`Expect`, a query, a body that is large or late, a gateway that traces or is full) go through ASGI to the same handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from starlette.routing import BaseRoute, Route
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from lakebed.core import traces
from lakebed.core.http import DIRECT_MARK
from lakebed.gateway.auth import CERTIFICATE
from lakebed.gateway.body_limits import BodyBudget, BodyLimits
from lakebed.gateway.middleware import DirectRoute, Middleware
from lakebed.gateway.protocol import GatewayProtocol

DIRECT_BYTES_MAX = 256 * 1024  # the most that a connection holds before its request starts
REST_S = 5.0  # what a body of 256 KiB needs at 50 KB/s; a slower one leaves the fast path
UNUSUAL = frozenset(
    {b"transfer-encoding", b"expect", b"upgrade", b"cookie"}
)  # a request with one of these goes through ASGI


class DirectRoutes:
    """The marked routes of one gateway, by method and path of the request line."""

    def __init__(self, routes: Iterable[BaseRoute], middleware: Middleware, limits: BodyLimits) -> None:
        self.middleware, self._budget = middleware, limits.budget
        self._rest_s = min(REST_S, limits.settings.body_timeout_s)
        self._known: dict[tuple[bytes, bytes], DirectRoute] = {}
        for route in routes:
            direct = getattr(getattr(route, "endpoint", None), DIRECT_MARK, None)
            if direct is not None and isinstance(route, Route):
                found = DirectRoute(
                    route, direct.handler, direct.prompt, min(DIRECT_BYTES_MAX, limits.of(route.endpoint))
                )
                for method in route.methods or ():
                    self._known[method.encode(), route.path.encode()] = found

    def cycle(self, http: GatewayProtocol, done: Callable[[], None]) -> DirectCycle | None:
        """For the request whose head was just read, when the fast path applies. Calls `done` after the response."""
        found = self._known.get((http.parser.get_method(), http.url))
        if found is None or traces.installed() or http.parser.get_http_version() != "1.1":
            return None
        declared = b""
        for name, value in http.headers:
            if name == b"content-length":
                declared = value
            elif name in UNUSUAL or (name == b"connection" and value.lower() != b"keep-alive"):
                return None
        if http.full or not declared.isdigit() or len(declared) > 9:
            return None
        size = int(declared)
        if size > found.bytes_max or not self._budget.take(size):
            return None  # ASGI responds with the reason
        return DirectCycle(http, found, self.middleware, self._rest_s, done, BudgetShare(self._budget, size))


class BudgetShare:
    """The bytes that one request has taken from the budget for bodies; given back once."""

    __slots__ = ("_budget", "_size")

    def __init__(self, budget: BodyBudget, size: int) -> None:
        self._budget, self._size = budget, size

    def give_back(self) -> None:
        size, self._size = self._size, 0
        self._budget.give(size)


class _NoEvent:
    """The server sets a cycle's event when the client disconnects; here nothing waits for it."""

    def set(self) -> None:
        return None


def _nothing() -> None:
    return None


class DirectCycle:
    """One direct request and its response. To the server it is a cycle like any other."""

    message_event = _NoEvent()

    def __init__(
        self,
        http: GatewayProtocol,
        found: DirectRoute,
        middleware: Middleware,
        rest_s: float,
        done: Callable[[], None],
        share: BudgetShare,
    ) -> None:
        self.share = share
        self._http, self._found, self._middleware, self._rest_s, self._done = http, found, middleware, rest_s, done
        self._method, self._headers = http.parser.get_method(), http.headers
        self.before: RequestResponseCycle | None = http.cycle  # dropped with the response: it would keep all before it
        self.parts: list[bytes] = []
        self.late: asyncio.TimerHandle | None = None
        self.keep_alive = True
        self._cut_short = _nothing
        self.disconnected = self.response_complete = False

    def expect_rest(self, give_up: Callable[[], None]) -> None:
        """The body is incomplete: when it takes too long, `give_up` sends the request through ASGI."""
        if self.late is None:
            self.late = self._http.loop.call_later(self._rest_s, give_up)

    def arrived(self) -> None:
        if self.late is not None:
            self.late.cancel()

    @property
    def waits(self) -> bool:
        """Whether its handler needs a task."""
        return self._found.prompt is None

    async def run_asgi(self, _: Any) -> None:
        """As the server's own cycle, but without the app."""
        try:
            await self._middleware.direct(self._found, self._scope(), self._body(), self._write)
        finally:
            self._finish()

    def run_promptly(self) -> None:
        """The same without a task: the response is written when the handler has it."""
        cut_short = self._middleware.promptly(self._found, self._scope(), self._body(), self._write_and_finish)
        if not self.response_complete:
            self._cut_short = cut_short

    def stop_within(self, seconds: float) -> None:
        """The server stops: a request still waiting after this time gets OutcomeUnknown."""
        if not self.waits:  # a task is ended by the server itself
            self._http.loop.call_later(seconds, lambda: self._cut_short())

    def _scope(self) -> Scope:
        return {
            "type": "http",
            "method": self._method.decode(),
            "path": self._found.route.path,
            "headers": self._headers,
            "client": self._http.client,
            CERTIFICATE: getattr(self._http, "certificate", ()),
        }

    def _body(self) -> bytes:
        body = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        self.parts.clear()
        return body

    def _finish(self) -> None:
        """Nothing of an answered request refers back to it: it is freed at once, not by the garbage collector."""
        self.response_complete = True
        self.before, self._cut_short = None, _nothing
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
