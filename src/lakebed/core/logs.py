"""Structured logs on stderr: readable lines on a terminal, one JSON object a line otherwise.

Values under names that hold secrets are masked here, for every logger.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import structlog

from lakebed.core.errors import shown_text

REQUEST: ContextVar[bytes] = ContextVar("request", default=b"")  # the id of the request being answered
CAPTURED: ContextVar[tuple[deque[str], ...]] = ContextVar("captured", default=())
CAPTURED_LINES = 100  # kept of one job: the last ones
CAPTURED_CHARS = 400  # of one line
SECRET_NAMES = ("secret", "token", "password", "authorization", "api_key", "access_key")


def configure(level: str = "info", *, as_json: bool | None = None) -> None:
    """Sets up logging for this process. JSON unless stderr is a terminal, or as given."""
    if as_json is None:
        as_json = not sys.stderr.isatty()
    last = [structlog.processors.JSONRenderer()] if as_json else [show_text, structlog.dev.ConsoleRenderer()]
    structlog.configure(
        processors=[
            name_request,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            mask_secrets,
            structlog.processors.format_exc_info,
            keep_line,
            *last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=_Stderr,
        cache_logger_on_first_use=True,
    )


def configure_library() -> None:
    """Warnings only, for a program that uses Lakebed as a library; a configuration of the program's own stays."""
    if structlog.get_config()["logger_factory"] is _Stderr:
        configure("warning")


class _Stderr:
    """Writes to whatever stderr is now. A closed stderr never breaks the work that is logged."""

    def __init__(self, *_: Any) -> None:
        return None

    def msg(self, message: str) -> None:
        with suppress(OSError, ValueError):
            print(message, file=sys.stderr, flush=True)

    debug = info = warning = error = critical = exception = msg


# Until `configure` is called, logs go to stderr too: stdout is for data.
structlog.configure(logger_factory=_Stderr)


def logger(name: str) -> Any:
    return structlog.get_logger(part=name)


def name_request(_: Any, __: str, event: Any) -> Any:
    """Adds the request id to everything that is logged while a request is handled."""
    request_id = REQUEST.get()
    if request_id:
        event.setdefault("request_id", request_id.decode())
    return event


@contextmanager
def captured() -> Iterator[deque[str]]:
    """The last lines that are logged inside, by this task and by threads that it starts with `asyncio.to_thread`.

    A job inside a job: its lines are those of both.
    """
    lines: deque[str] = deque(maxlen=CAPTURED_LINES)
    token = CAPTURED.set((*CAPTURED.get(), lines))
    try:
        yield lines
    finally:
        with suppress(ValueError):  # a task that is dropped is closed in another context
            CAPTURED.reset(token)


def keep_line(_: Any, level: str, event: Any) -> Any:
    """Adds the line, as text, to those that are captured."""
    if jobs := CAPTURED.get():
        shown = {name: value for name, value in event.items() if name not in ("event", "level", "timestamp", "part")}
        more = "".join(f" {name}={value}" for name, value in shown.items())
        line = f"{event.get('timestamp', '')} {level} {event.get('event', '')}{more}"[:CAPTURED_CHARS]
        for lines in jobs:
            lines.append(line)
    return event


def show_text(_: Any, __: str, event: Any) -> Any:
    """For a terminal: what came over the network, a path, a name, an error, cannot drive it."""
    return {shown_text(name): shown_text(value) if isinstance(value, str) else value for name, value in event.items()}


def mask_secrets(_: Any, __: str, event: Any) -> Any:
    for key in event:
        if any(word in key.lower() for word in SECRET_NAMES):
            event[key] = "***"
    return event
