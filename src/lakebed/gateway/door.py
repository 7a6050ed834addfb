"""The door every request comes through: one pure ASGI layer around the routes.

It gives the request its id, says who is asking, keeps the body inside its limits, turns what is raised into a problem,
and counts and times the answer under its route's path template. It stands where FastAPI would put its own error
middleware, so an error is caught once, here.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lakebed import traces
from lakebed.clock import Clock
from lakebed.errors import OutcomeUnknown, Overloaded, Unavailable
from lakebed.gateway.asked import Asked
from lakebed.gateway.auth import Keyring
from lakebed.gateway.limits import Body, Limits, declared_length
from lakebed.gateway.problems import Problem, problem
from lakebed.ids import Ids
from lakebed.logs import REQUEST, logger
from lakebed.metrics import Metrics
from lakebed.wire import Answered, Buffer, Call, Handler, Prompt

REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
NO_ROUTE = "(none)"
SERIES_MAX = 10_000  # routes × methods × statuses are few; this only bounds a mistake
STATUS_GONE = 499  # counted, never sent: the client left before it was answered
POLICY = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")
NO_SNIFF = (b"x-content-type-options", b"nosniff")
CLOSE = (b"connection", b"close")

Write = Callable[[int, list[tuple[bytes, bytes]], bytes], None]  # status, headers, body: a whole answer

log = logger("gateway")


class Door:
    def __init__(
        self, app: ASGIApp, *, keyring: Keyring, limits: Limits, metrics: Metrics, clock: Clock, ids: Ids, verbose: bool
    ) -> None:
        self._app, self._keyring, self._limits = app, keyring, limits
        self._clock, self._verbose = clock, verbose
        self._prefix, self._asked = ids.token()[:8].encode(), 0
        self._counts = metrics.counter("lakebed_http_requests_total")
        self._times = metrics.histogram("lakebed_http_seconds")
        self._series: dict[tuple[str, str, int], tuple[Any, Any]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)  # lifespan; a websocket finds no route and is closed
        if not traces.installed():
            await self._answer(scope, receive, send)
            return None
        with traces.span(scope["method"], "server", parent=_parent(scope)) as span:
            status = await self._answer(scope, receive, send)
            if span is not None:
                route = getattr(scope.get("route"), "path", NO_ROUTE)
                span.name = f"{scope['method']} {route}"
                span.set(http__request__method=scope["method"], http__route=route, http__response__status_code=status)
                span.error = "server error" if status >= 500 else ""
        return None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """One request; gives the status it was answered with."""
        started_s = self._clock.monotonic_s()
        asked = Asked(scope["headers"])
        request_id = self._named(asked)
        named = request_id.decode()
        body = Body(self._limits, scope, receive, None)
        answer = _Answer(request_id, body, send)
        try:
            if asked.length is not None:
                body.declared = declared_length(asked.length)
                body.ended = body.declared == 0
                self._limits.check(body.declared)
            elif not asked.chunked:
                body.ended = True
            scope.setdefault("state", {})["principal"] = self._keyring.principal(scope, asked)
            await self._app(scope, body, answer)
        except ClientDisconnect:
            answer.status = answer.status or STATUS_GONE
        except asyncio.CancelledError:
            # The drain's time is over, or the server is being torn down.
            if not answer.status:
                await self._refuse(_cut_short(), named, scope, answer)
            raise
        except Exception as error:
            if answer.status:
                raise  # too late to say it: the server cuts the connection and logs the cause
            await self._refuse(error, named, scope, answer)
        finally:
            body.release()
            self._count(scope, answer.status, self._clock.monotonic_s() - started_s)
        return answer.status

    async def direct(self, handler: Handler, scope: Scope, body: Buffer, write: Write) -> None:
        """One whole request straight to its handler. `scope` has its method, path, headers and route."""
        started_s = self._clock.monotonic_s()
        asked = Asked(scope["headers"])
        request_id = self._named(asked)
        told: Problem | Answered | None = None
        try:
            principal = self._keyring.principal(scope, asked)
            told = await handler(Call(principal, scope["headers"], body))
        except asyncio.CancelledError:
            told = self._problem(_cut_short(), request_id.decode(), scope)
            raise
        except Exception as error:
            told = self._problem(error, request_id.decode(), scope)
        finally:
            if told is not None:
                write(told.status, [*told.headers, (b"x-request-id", request_id), NO_SNIFF, POLICY], told.body)
                self._count(scope, told.status, self._clock.monotonic_s() - started_s)

    def promptly(self, handler: Prompt, scope: Scope, body: Buffer, write: Write) -> Callable[[], None]:
        """As `direct`, for a handler that does not wait. Gives what ends it, when there is no time left to wait."""
        started_s = self._clock.monotonic_s()
        asked = Asked(scope["headers"])
        request_id = self._named(asked)
        done = False

        def finish(told: Problem | Answered) -> None:
            nonlocal done
            if done:
                return  # cut short before
            done = True
            write(told.status, [*told.headers, (b"x-request-id", request_id), NO_SNIFF, POLICY], told.body)
            self._count(scope, told.status, self._clock.monotonic_s() - started_s)

        def refuse(error: Exception) -> None:
            # Answered here and never raised again: an error in the locals of a frame of its own traceback is a cycle,
            # and would keep the body until the garbage collector comes by.
            finish(self._problem(error, request_id.decode(), scope))

        def tell(answer: Callable[[], Answered]) -> None:
            try:
                told = answer()
            except Exception as error:
                refuse(error)
            else:
                finish(told)

        try:
            handler(Call(self._keyring.principal(scope, asked), scope["headers"], body), body, tell)
        except Exception as error:
            refuse(error)
        return lambda: refuse(_cut_short())

    def unread(self, error: Exception) -> Problem:
        """The answer to a request that was given up before its head was whole, counted like any other answer."""
        told = problem(error, self._named(Asked(())).decode())
        self._count({"method": "", "path": ""}, told.status, 0.0)
        return told

    def _named(self, asked: Asked) -> bytes:
        """The request's id: the client's own where it is one. Whatever is logged from now on carries it."""
        request_id = asked.request_id
        if request_id is None or REQUEST_ID.fullmatch(request_id) is None:
            self._asked += 1
            request_id = b"%s%08x" % (self._prefix, self._asked)
        REQUEST.set(request_id)
        return request_id

    def _problem(self, error: Exception, request_id: str, scope: Scope) -> Problem:
        told = problem(error, request_id, scope)
        if told.status >= 500 and not _expected(error):
            log.error("request failed", method=scope["method"], path=_shown(scope), code=told.code, exc_info=error)
        return told

    async def _refuse(self, error: Exception, request_id: str, scope: Scope, answer: _Answer) -> None:
        told = self._problem(error, request_id, scope)
        await answer({"type": "http.response.start", "status": told.status, "headers": told.headers})
        await answer({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else told.body})

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope.get("route")
        key = (getattr(route, "path", NO_ROUTE), scope["method"], status)
        series = self._series.get(key)
        if series is None:
            label, method, _ = key
            if label == NO_ROUTE:
                method = "any"  # a stranger may invent methods
            series = (
                self._counts.labels(route=label, method=method, status=str(status)),
                self._times.labels(route=label),
            )
            if len(self._series) < SERIES_MAX:
                self._series[key] = series
        series[0].inc()
        series[1].observe(seconds)
        if self._verbose:
            log.debug("answered", method=scope["method"], path=_shown(scope), status=status, ms=round(seconds * 1e3, 3))


class _Answer:
    """`send` for one request: adds the request id, and what keeps a browser from running an answer that is no page;
    closes the connection when a body was left unread; remembers the status.
    """

    __slots__ = ("_body", "_request_id", "_send", "status")

    def __init__(self, request_id: bytes, body: Body, send: Send) -> None:
        self._request_id, self._body, self._send = request_id, body, send
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self._request_id)]
            names = {name.lower() for name, _ in headers}
            headers += [field for field in (NO_SNIFF, POLICY) if field[0] not in names]  # a page says its own policy
            if not self._body.ended:
                headers.append(CLOSE)  # the rest of the body would have to be read first
            message["headers"] = headers
        await self._send(message)


def _cut_short() -> OutcomeUnknown:
    return OutcomeUnknown("the gateway stopped before this was answered", hint="read, then retry")


def _parent(scope: Scope) -> str:
    """The caller's traceparent, as it came."""
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent"), "")


def _shown(scope: Scope) -> str:
    """The path as it was sent, without its query: no terminal is steered by it, and no key in a query is logged."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.partition(b"?")[0].decode("ascii", "backslashreplace")


def _expected(error: Exception) -> bool:
    """Not now, or too much: counted, but no line in the log for each."""
    return isinstance(error, (Overloaded, Unavailable))
