"""Spans around work. Off until a process installs a tracer at its start; then each ended span goes to the sink.

While off, `span` gives one shared object and `traced` one comparison: no clock is read, nothing is made.
Neither ever raises on its own account nor waits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar, Token
from functools import wraps
from types import TracebackType
from typing import Any, TypeVar

from lakebed.clock import Clock
from lakebed.ids import Ids
from lakebed.traces.model import HEADER, Kind, Place, Span, Value, parse, render

F = TypeVar("F", bound=Callable[..., Any])

_here: ContextVar[Place | None] = ContextVar("lakebed_trace", default=None)
_tracer: Tracer | None = None


class Tracer:
    """Makes spans. `ratio` of the traces that begin here are recorded; those that come in decided already."""

    def __init__(self, sink: Callable[[Span], None], *, clock: Clock, ids: Ids, ratio: float = 1.0) -> None:
        self._sink, self._clock, self._ids, self._ratio = sink, clock, ids, ratio

    def begin(self, name: str, kind: Kind, parent: Place | None) -> Span:
        span_id = self._ids.token()
        if parent is None:
            place = Place(self._ids.token() + self._ids.token(), span_id, self._ids.uniform(0.0, 1.0) < self._ratio)
        else:
            place = Place(parent.trace_id, span_id, parent.sampled)
        return Span(place, name, self._clock.now_ns(), parent.span_id if parent else "", kind, attributes={})

    def end(self, span: Span) -> None:
        if span.place.sampled:
            span.end_ns = self._clock.now_ns()
            self._sink(span)


class _Nothing:
    """Tracing is off."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, at: object) -> None:
        return None


class _Around:
    __slots__ = ("_span", "_token", "_tracer")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer, self._span = tracer, span
        self._token: Token[Place | None] | None = None

    def __enter__(self) -> Span:
        self._token = _here.set(self._span.place)
        return self._span

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._token is not None:
            _here.reset(self._token)
        if error is not None:
            self._span.error = getattr(error, "code", "") or type(error).__name__
        self._tracer.end(self._span)


_NOTHING = _Nothing()


def install(tracer: Tracer | None) -> None:
    """For the whole process; None turns it off."""
    global _tracer
    _tracer = tracer


def installed() -> bool:
    return _tracer is not None


def span(name: str, kind: Kind = "internal", *, parent: str = "", **attributes: Value) -> _Around | _Nothing:
    """Work with a name, inside whatever span is open here; `parent` is a caller's traceparent header instead."""
    if _tracer is None:
        return _NOTHING
    made = _tracer.begin(name, kind, (parse(parent) if parent else None) or _here.get())
    made.set(**attributes)
    return _Around(_tracer, made)


def traced(name: str) -> Callable[[F], F]:
    """The same around every call of a function, async or not."""

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
    """The header that a request to another process carries; none outside a span."""
    place = _here.get() if _tracer is not None else None
    return {HEADER: render(place)} if place is not None else {}
