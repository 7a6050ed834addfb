"""The gateway's one middleware: a pure ASGI layer around the routes, and the entry of the fast path.

It gives the request its id, authenticates the caller, keeps the body inside its limits, turns exceptions into problem
documents, and counts and times the response under its route's path template. Starlette's own error middleware is left
out, so an error is caught once, here.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lakebed.core import traces
from lakebed.core.auth import NOBODY, Principal
from lakebed.core.clock import Clock
from lakebed.core.errors import OutcomeUnknown, Overloaded, Throttled, Unavailable
from lakebed.core.http import Buffer, DirectHandler, DirectRequest, DirectResponse, PromptHandler
from lakebed.core.logs import REQUEST, logger
from lakebed.core.quotas import USAGE, KeyQuotas, KeyUsage
from lakebed.core.runtime import Runtime
from lakebed.core.trail import CALLER, Caller
from lakebed.gateway.auth import Keyring, RequestHead
from lakebed.gateway.body_limits import BodyLimits, RequestBody, declared_length
from lakebed.gateway.problems import Problem, problem

REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
NO_ROUTE = "(none)"
SERIES_MAX = 10_000  # routes × methods × statuses are few; this only bounds a mistake
REFUSED = (401, 403)
STATUS_GONE = 499  # counted, never sent: the client disconnected before the response
POLICY = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")
NO_SNIFF = (b"x-content-type-options", b"nosniff")
CLOSE = (b"connection", b"close")
FULL = "lakebed.full"  # in a scope whose connection is one too many
REFUSALS_MAX, REFUSALS_S = 10, 10.0  # log lines about refused requests in this time; more would be a way to fill a disk

Write = Callable[[int, list[tuple[bytes, bytes]], bytes], None]  # status, headers, body: a whole response

log = logger("gateway")


class DirectRoute(NamedTuple):
    """A route of the fast path. `prompt` runs without a task; None where the handler needs one."""

    route: Route
    handler: DirectHandler
    prompt: PromptHandler | None
    bytes_max: int


class Middleware:
    def __init__(
        self,
        app: ASGIApp,
        *,
        keyring: Keyring,
        find_session: Callable[[str], Awaitable[None]],
        limits: BodyLimits,
        runtime: Runtime,
        verbose: bool,
    ) -> None:
        self._app, self._keyring, self._limits = app, keyring, limits
        self._find_session = find_session
        self.refusals = RefusalLog(runtime.clock)
        self.quotas = KeyQuotas(runtime.clock)
        self.throttled = runtime.metrics.counter("lakebed_http_throttled_total")
        self._clock, self._verbose = runtime.clock, verbose
        self._prefix, self._drawn = runtime.ids.token()[:8].encode(), 0
        self._counts = runtime.metrics.counter("lakebed_http_requests_total")
        self._times = runtime.metrics.histogram("lakebed_http_seconds")
        self._in_flight = 0  # ended by `_count`
        runtime.metrics.gauge("lakebed_http_in_flight").set_function(lambda: self._in_flight)
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
                span.update_name(f"{scope['method']} {route}")
                span.set_attribute("http.request.method", scope["method"])
                span.set_attribute("http.route", route)
                span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    traces.fail(span, "server error")
        return None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Serves one request; returns the status of its response."""
        started_s = self._clock.monotonic_s()
        self._in_flight += 1
        head = RequestHead(scope["headers"])
        request_id = self._named(head)
        named = request_id.decode()
        body = RequestBody(self._limits, scope, receive, None)
        answer = _Sender(request_id, body, send)
        usage: KeyUsage | None = None
        uploads = False
        try:
            if FULL in scope:
                raise Overloaded(
                    "the gateway has gateway.connections_max connections", hint="retry later, or use another gateway"
                )
            if head.length is not None:
                body.declared = declared_length(head.length)
                body.ended = body.declared == 0
                self._limits.check(body.declared)
            elif not head.chunked:
                body.ended = True
            if head.cookie is not None and (cookie := self._keyring.unknown_session(head)):
                await self._find_session(cookie)
            uploads = not body.ended
            usage = self._begin(self._admit(scope, head), upload=uploads)
            await self._app(scope, body, answer)
        except ClientDisconnect:
            answer.status = answer.status or STATUS_GONE
        except asyncio.CancelledError:
            # The time of the drain is over, or the server stops.
            if not answer.status:
                await self._refuse(_cut_short(), named, scope, answer)
            raise
        except Exception as error:
            if answer.status:
                raise  # too late for a response: the server closes the connection and logs the cause
            await self._refuse(error, named, scope, answer)
        finally:
            if usage is not None:
                usage.end(upload=uploads, size=body.seen)
            body.release()
            self._count(scope, answer.status, self._clock.monotonic_s() - started_s)
        return answer.status

    async def direct(self, found: DirectRoute, scope: Scope, body: Buffer, write: Write) -> None:
        """One whole request straight to its handler. `scope` has its method, path and headers."""
        started_s = self._clock.monotonic_s()
        self._in_flight += 1
        head = RequestHead(scope["headers"])
        request_id = self._named(head)
        answer: Problem | DirectResponse | None = None
        usage: KeyUsage | None = None
        try:
            principal = self._admit(scope, head)
            scope["route"] = found.route  # an unknown caller is counted without a route, as through ASGI
            usage = self._begin(principal, upload=True)
            answer = await found.handler(DirectRequest(principal, scope["headers"], body))
        except asyncio.CancelledError:
            answer = self._problem(_cut_short(), request_id.decode(), scope)
            raise
        except Exception as error:
            answer = self._problem(error, request_id.decode(), scope)
        finally:
            if usage is not None:
                usage.end(upload=True, size=len(body))
            if answer is not None:
                write(answer.status, [*answer.headers, (b"x-request-id", request_id), NO_SNIFF, POLICY], answer.body)
                self._count(scope, answer.status, self._clock.monotonic_s() - started_s)

    def promptly(self, found: DirectRoute, scope: Scope, body: Buffer, write: Write) -> Callable[[], None]:
        """As `direct`, for a prompt handler. Returns a function that ends the request when the drain is over."""
        started_s = self._clock.monotonic_s()
        self._in_flight += 1
        head = RequestHead(scope["headers"])
        request_id = self._named(head)
        done, size = False, len(body)  # not the body: what outlives the response would keep it
        usage: KeyUsage | None = None

        def finish(answer: Problem | DirectResponse) -> None:
            nonlocal done
            if done:
                return  # cut short before
            done = True
            if usage is not None:
                usage.end(upload=True, size=size)
            write(answer.status, [*answer.headers, (b"x-request-id", request_id), NO_SNIFF, POLICY], answer.body)
            self._count(scope, answer.status, self._clock.monotonic_s() - started_s)

        def refuse(error: Exception) -> None:
            # Handled here and never raised again: an error in the locals of a frame of its own traceback is a cycle,
            # and would keep the body until the garbage collector runs.
            finish(self._problem(error, request_id.decode(), scope))

        def respond(made: Callable[[], DirectResponse]) -> None:
            try:
                answer = made()
            except Exception as error:
                refuse(error)
            else:
                finish(answer)

        try:
            principal = self._admit(scope, head)
            scope["route"] = found.route
            usage = self._begin(principal, upload=True)
            assert found.prompt is not None
            found.prompt(DirectRequest(principal, scope["headers"], body), body, respond)
        except Exception as error:
            refuse(error)
        return lambda: refuse(_cut_short())

    def _admit(self, scope: Scope, head: RequestHead) -> Principal:
        principal = self._keyring.principal(scope, head)
        scope.setdefault("state", {})["principal"] = principal
        CALLER.set(Caller(address_of(scope), principal.tenant))
        return principal

    def _begin(self, principal: Principal, *, upload: bool) -> KeyUsage | None:
        """Counts the request against its key; None for a key without limits. Raises Throttled."""
        usage = self.quotas.of(principal)
        USAGE.set(usage)
        if usage is not None:
            try:
                usage.begin(upload=upload)
            except Throttled:
                self.throttled.inc()
                raise
        return usage

    def unread(self, error: Exception) -> Problem:
        """The response to a request whose head was refused before it was complete, counted like any other."""
        answer = problem(error, self._named(RequestHead(())).decode())
        self._in_flight += 1
        self._count({"method": "", "path": ""}, answer.status, 0.0)
        return answer

    def _named(self, head: RequestHead) -> bytes:
        """The id of the request: the client's where it is valid. All further log lines contain it."""
        request_id = head.request_id
        if request_id is None or REQUEST_ID.fullmatch(request_id) is None:
            self._drawn += 1
            request_id = b"%s%08x" % (self._prefix, self._drawn)
        REQUEST.set(request_id)
        return request_id

    def _problem(self, error: Exception, request_id: str, scope: Scope) -> Problem:
        answer = problem(error, request_id, scope)
        if answer.status >= 500 and not _expected(error):
            where, kind = {"method": scope["method"], "path": _shown(scope)}, type(error).__name__
            log.error("request failed", **where, code=answer.code, error=kind, exc_info=error)
        return answer

    async def _refuse(self, error: Exception, request_id: str, scope: Scope, sender: _Sender) -> None:
        answer = self._problem(error, request_id, scope)
        await sender({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
        await sender({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else answer.body})

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        self._in_flight -= 1
        route = scope.get("route")
        key = (getattr(route, "path", NO_ROUTE), scope["method"], status)
        series = self._series.get(key)
        if series is None:
            label, method, _ = key
            if label == NO_ROUTE:
                method = "any"  # unknown callers may send any method
            series = (
                self._counts.labels(route=label, method=method, status=str(status)),
                self._times.labels(route=label),
            )
            if len(self._series) < SERIES_MAX:
                self._series[key] = series
        series[0].inc()
        series[1].observe(seconds)
        if status in REFUSED:
            self._refused(scope, status)
        if self._verbose:
            log.debug("answered", method=scope["method"], path=_shown(scope), status=status, ms=round(seconds * 1e3, 3))

    def _refused(self, scope: Scope, status: int) -> None:
        """Whichever part refused it: the middleware, a route, or a page that shows the refusal itself."""
        principal = scope.get("state", {}).get("principal")
        who = principal.name if principal is not None else NOBODY.name
        self.refusals.note(who, address_of(scope), status=status, method=scope["method"], path=_shown(scope))


class RefusalLog:
    """Logs refused requests with who and from where: a few of each REFUSALS_S, and how many were left out."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s, self._logged, self._left_out = 0.0, 0, 0

    def note(self, principal: str, address: str, **more: str | int) -> None:
        now_s = self._clock.monotonic_s()
        if now_s >= self._until_s:
            self._until_s, self._logged = now_s + REFUSALS_S, 0
        if self._logged >= REFUSALS_MAX:
            self._left_out += 1
            return
        self._logged += 1
        log.info("request refused", principal=principal, address=address, **more, left_out=self._left_out)
        self._left_out = 0


class _Sender:
    """`send` for one request: adds the request id and the security headers, closes the connection when a body was not
    read to its end, and remembers the status.
    """

    __slots__ = ("_body", "_request_id", "_send", "status")

    def __init__(self, request_id: bytes, body: RequestBody, send: Send) -> None:
        self._request_id, self._body, self._send = request_id, body, send
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self._request_id)]
            names = {name.lower() for name, _ in headers}
            headers += [field for field in (NO_SNIFF, POLICY) if field[0] not in names]  # a page sets its own policy
            if not self._body.ended:
                headers.append(CLOSE)  # the rest of the body would have to be read first, or the connection is over
            message["headers"] = headers
        await self._send(message)


def address_of(scope: Scope) -> str:
    """The address that the request came from; empty when the server does not know it."""
    client = scope.get("client")
    return str(client[0]) if client else ""


def _cut_short() -> OutcomeUnknown:
    return OutcomeUnknown("the gateway stopped before it responded", hint="read, then retry")


def _parent(scope: Scope) -> str:
    """The caller's traceparent, as it came."""
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent"), "")


def _shown(scope: Scope) -> str:
    """The path as it was sent, without its query, which may contain a key, and without control characters."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.partition(b"?")[0].decode("ascii", "backslashreplace")


def _expected(error: Exception) -> bool:
    """Overloaded and Unavailable are counted, but not logged one by one."""
    return isinstance(error, (Overloaded, Unavailable))
