"""Spans around work, by OpenTelemetry's API. Off until a process installs a tracer at its start.

with span("store get", key=key): …          # a shared, empty context manager while tracing is off
@traced("lifecycle tick")                   # the same around a function, async or not

While off, `span` returns one shared object and `traced` makes one comparison. Neither waits, on or off.
OpenTelemetry takes times, ids and threads from the system, not from the clock and the ids that are passed in elsewhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import Token
from functools import wraps
from types import TracebackType
from typing import Any, Literal, TypeVar

from opentelemetry.context import Context, attach, detach, get_current
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

F = TypeVar("F", bound=Callable[..., Any])
Kind = Literal["internal", "server", "client"]

_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_W3C = TraceContextTextMapPropagator()
_tracer: Tracer | None = None


class _Nothing:
    """Tracing is off."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, at: object) -> None:
        return None


class _Around:
    """The span is current inside, and ends with it. Of an error it carries the code: no text, no traceback."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: Span) -> None:
        self._span = span
        self._token: Token[Context] | None = None

    def __enter__(self) -> Span:
        self._token = attach(set_span_in_context(self._span))
        return self._span

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._token is not None:
            detach(self._token)
        if error is not None:
            fail(self._span, getattr(error, "code", "") or type(error).__name__)
        self._span.end()


_NOTHING = _Nothing()


def install(tracer: Tracer | None) -> None:
    """For the whole process; None turns tracing off."""
    global _tracer
    _tracer = tracer


def installed() -> bool:
    return _tracer is not None


def span(
    name: str, kind: Kind = "internal", *, parent: str = "", **attributes: str | int | float | bool
) -> _Around | _Nothing:
    """Work with a name, inside the span that is current; `parent` is a caller's traceparent header instead."""
    if _tracer is None:
        return _NOTHING
    inside = _W3C.extract({"traceparent": parent}, get_current()) if parent else None
    return _Around(_tracer.start_span(name, inside, _KINDS[kind], attributes))


def fail(span: Span, why: str) -> None:
    span.set_status(Status(StatusCode.ERROR, why))


def traced(name: str) -> Callable[[F], F]:
    """A span around every call of a function, async or not."""

    def around(function: F) -> F:
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def asynchronous(*args: Any, **kwargs: Any) -> Any:
                if _tracer is None:
                    return await function(*args, **kwargs)
                with span(name):
                    return await function(*args, **kwargs)

            return asynchronous  # type: ignore[return-value]

        @wraps(function)
        def synchronous(*args: Any, **kwargs: Any) -> Any:
            if _tracer is None:
                return function(*args, **kwargs)
            with span(name):
                return function(*args, **kwargs)

        return synchronous  # type: ignore[return-value]

    return around


def outgoing() -> dict[str, str]:
    """The headers that a request to another process carries; none outside a span."""
    headers: dict[str, str] = {}
    if _tracer is not None:
        _W3C.inject(headers)
    return headers
