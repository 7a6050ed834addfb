"""Errors as HTTP responses: `application/problem+json`, with the error's facts at top level.

| kind | status | the client's next step |
|---|---|---|
| Invalid | 400 | correct the request |
| TooLarge, UnsupportedEncoding, Unprocessable | 413, 415, 422 | correct what the status names |
| SlowBody | 408 | send faster, on a new connection |
| HeadTooLarge | 431 | send fewer and shorter headers, on a new connection |
| Unauthenticated, Denied | 401, 403 | send a key, another key |
| NotFound | 404 | – |
| Conflict, AlreadyExists, Stale, Fenced | 409 | read the current state, then decide |
| Throttled | 429 | the key is over a limit of its own: wait Retry-After, then retry |
| Overloaded, Unavailable, OutcomeUnknown | 503 | wait Retry-After, then retry (OutcomeUnknown: read first) |
| TooEarly | 425 | another request does the same: wait Retry-After, then retry |
| Corrupt, anything else | 500 | report it, with the request id |

A subclass that is not in the table gets the status of its nearest parent. Other exceptions get the code `internal` and
no text, because their text may contain anything.
"""

from __future__ import annotations

import math
from html import escape
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import Scope

from lakebed.core import errors
from lakebed.core.http import decode_json
from lakebed.gateway.body_limits import HeadTooLarge, SlowBody

__all__ = ["STATUSES", "Problem", "decode_json", "problem", "status_of"]

STATUSES: dict[type[errors.LakebedError], int] = {
    errors.LakebedError: 500,
    errors.Invalid: 400,
    errors.TooLarge: 413,
    errors.UnsupportedEncoding: 415,
    errors.Unprocessable: 422,
    SlowBody: 408,
    HeadTooLarge: 431,
    errors.NotFound: 404,
    errors.Denied: 403,
    errors.Unauthenticated: 401,
    errors.Conflict: 409,
    errors.AlreadyExists: 409,
    errors.Stale: 409,
    errors.Fenced: 409,
    errors.Overloaded: 503,
    errors.Throttled: 429,
    errors.Unavailable: 503,
    errors.TooEarly: 425,
    errors.OutcomeUnknown: 503,
    errors.Corrupt: 500,
}
RETRY_AFTER_S_MAX = 3600
RESERVED = frozenset({"type", "title", "status", "code", "message", "hint", "request_id"})


class Problem(msgspec.Struct, frozen=True):
    """An error response, ready to be sent."""

    status: int
    code: str
    headers: list[tuple[bytes, bytes]]
    body: bytes


def problem(error: Exception, request_id: str, scope: Scope | None = None) -> Problem:
    """The response for any exception. Never raises, never shows the text of an exception that is not a LakebedError."""
    known, status, extra = _known(error, scope)
    fields: dict[str, Any] = {
        "type": f"urn:lakebed:problem:{known.code}",
        "title": _title(status),
        "status": status,
        "code": known.code,
        "message": known.message,
        "hint": known.hint,
        "request_id": request_id,
    }
    fields |= {name: value for name, value in known.detail.items() if name not in RESERVED}
    body, media_type = _encode(fields), b"application/problem+json"
    if isinstance(known, _Unrouted) and _is_browser(scope):
        body, media_type = _page(known, request_id), b"text/html; charset=utf-8"
    headers = [(b"content-type", media_type), (b"content-length", b"%d" % len(body)), *extra]
    if isinstance(known, (errors.Overloaded, errors.Unavailable)):
        headers.append((b"retry-after", b"%d" % _whole_seconds(known.retry_after_s)))
    if status == 401:
        headers.append((b"www-authenticate", _challenge(scope)))
    return Problem(status, known.code, headers, body)


def _is_browser(scope: Scope | None) -> bool:
    """Whether somebody opened an address by hand: a browser asks for HTML first, clients and scripts do not."""
    if scope is None or scope["method"] != "GET":
        return False
    accepted = next((value for name, value in scope["headers"] if name == b"accept"), b"")
    return bool(accepted.split(b",", 1)[0].strip() == b"text/html")


def _page(known: errors.LakebedError, request_id: str) -> bytes:
    """A page without style and script: the gateway's policy for errors allows neither."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Not found · Lakebed</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light"></head><body><main>'
        f"<h1>Page not found</h1><p>{escape(known.message)}.</p>"
        '<p><a href="/">Console</a> · <a href="/docs">All routes</a></p>'
        f"<p><small>Request {escape(request_id)}</small></p></main></body></html>"
    ).encode()


def status_of(kind: type[errors.LakebedError]) -> int:
    return next(STATUSES[base] for base in kind.__mro__ if base in STATUSES)


class _Internal(errors.LakebedError):
    code = "internal"


class _Unrouted(errors.NotFound):
    code = "no_such_route"


class _MethodNotAllowed(errors.Invalid):
    code = "method_not_allowed"


class _Refused(errors.Invalid):
    code = "refused"


Known = tuple[errors.LakebedError, int, list[tuple[bytes, bytes]]]


def _known(error: Exception, scope: Scope | None) -> Known:
    if isinstance(error, errors.LakebedError):
        return error, status_of(type(error)), []
    if isinstance(error, HTTPException):
        return _from_http(error, scope)
    internal = _Internal(
        "internal error of the gateway",
        hint="give the request_id to the operator; the log has the cause",
    )
    return internal, 500, []


def _from_http(error: HTTPException, scope: Scope | None) -> Known:
    requested = f"{scope['method']} {scope['path']}" if scope else "the request"
    extra = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
    known: errors.LakebedError
    if error.status_code == 404:
        known = _Unrouted(f"no route for {requested}", hint="/docs lists all routes")
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        known = _MethodNotAllowed(f"no route for {requested}", hint=f"this path allows {allowed}", allowed=allowed)
    elif error.status_code < 500:
        known = _Refused(str(error.detail))
    else:
        known = _Internal(_title(error.status_code), hint="give the request_id to the operator; the log has the cause")
    return known, error.status_code, extra


def _challenge(scope: Scope | None) -> bytes:
    """Basic for browsers, which ask their user for a key only then; Bearer for programs."""
    pages = any(name == b"accept" and b"text/html" in value for name, value in (scope or {"headers": ()})["headers"])
    return b'Basic realm="lakebed", charset="UTF-8"' if pages else b'Bearer realm="lakebed"'


def _encode(fields: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(fields, enc_hook=str)
    except Exception:  # a detail that cannot be encoded must not hide the error
        return msgspec.json.encode({name: str(value) for name, value in fields.items()})


def _whole_seconds(seconds: float) -> int:
    return min(RETRY_AFTER_S_MAX, max(1, math.ceil(seconds)))


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"
