"""What a part declares about its HTTP routes without importing the gateway: decoding, size limits, description.

The marks are attributes of the endpoint function; the gateway reads them when it registers the route.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import wraps
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lakebed.core.auth import Principal
from lakebed.core.errors import Invalid, TooLarge

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Buffer = bytes | memoryview

JSON = "application/json"
VERSION = "/v1"
# Decoding holds the interpreter's lock, also in a thread, so the size limits how long all other requests pause: 16 MiB
# decode in at most 60 ms (5.6 million empty records), 200,000 records take 30 ms more.
JSON_BYTES_MAX = 16 * 1024 * 1024
JSON_ITEMS_MAX = 200_000
BODY_MARK = "__lakebed_body_bytes_max__"
HELD_MARK = "__lakebed_held_bytes_max__"
OPERATION_MARK = "__lakebed_operation__"
OWN_KEYS_MARK = "__lakebed_own_keys__"
STATE = "gateway"  # the attribute of `app.state` that holds the ServerState
DIRECT_MARK = "__lakebed_direct__"
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
ENCODER = msgspec.json.Encoder(enc_hook=str)


class ServerState(msgspec.Struct, frozen=True, eq=False):
    """What every server gives its routes, as `app.state.gateway`. `stopping` is set when the drain begins."""

    stopping: asyncio.Event


class Operation(msgspec.Struct, frozen=True):
    """How a plain Starlette route appears in /openapi.json. Types are msgspec ones."""

    summary: str = ""
    body: Any = None
    answer: Any = None
    media_type: str = JSON
    right: str = ""


class AliasRoute(Route):
    """The same endpoint at another path. `of` is the path to prefer."""

    def __init__(self, path: str, route: Route) -> None:
        super().__init__(path, route.endpoint, methods=sorted(route.methods or ()))
        self.of = route.path


def with_aliases(routes: Sequence[Route]) -> list[Route]:
    """These routes, and each of them without `/v1` in its path."""
    return [*routes, *(AliasRoute(route.path.removeprefix(VERSION), route) for route in routes)]


async def whole_body(request: Request) -> Buffer:
    """The whole body as one buffer. A large body is already in one buffer and is not copied."""
    parts: list[Any] = [part async for part in request.stream() if part]
    if len(parts) == 1:
        return cast(Buffer, parts[0])
    if parts and all(isinstance(part, memoryview) and part.obj is parts[0].obj for part in parts):
        whole = memoryview(parts[0].obj).toreadonly()
        if sum(map(len, parts)) == len(whole):
            return whole
    return b"".join(parts)


class DirectRequest:
    """The request of a direct handler: its principal, its headers, and a body that may still be arriving."""

    __slots__ = ("_body", "_headers", "principal")

    def __init__(
        self,
        principal: Principal,
        headers: Iterable[tuple[bytes, bytes]],
        body: Buffer | Callable[[], Awaitable[Buffer]],
    ) -> None:
        self.principal, self._headers, self._body = principal, headers, body

    def header(self, name: bytes, otherwise: str = "") -> str:
        """The first header of this name; `name` is lower case."""
        for found, value in self._headers:
            if found == name:
                return value.decode("latin-1")
        return otherwise

    async def body(self) -> Buffer:
        """The whole body as one buffer. Call it once."""
        return await self._body() if callable(self._body) else self._body


class DirectResponse(NamedTuple):
    """The response of a direct handler."""

    body: bytes
    status: int = 200
    media_type: str = JSON
    more: Mapping[str, str] = MappingProxyType({})  # further headers, names in lower case

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        further = [(name.encode(), value.encode()) for name, value in self.more.items()]
        return [(b"content-type", self.media_type.encode()), (b"content-length", b"%d" % len(self.body)), *further]


DirectHandler = Callable[[DirectRequest], Awaitable[DirectResponse]]
Respond = Callable[[Callable[[], DirectResponse]], None]  # call it once, with a function that returns or raises
PromptHandler = Callable[[DirectRequest, Buffer, Respond], None]


class DirectHandlers(NamedTuple):
    handler: DirectHandler
    prompt: PromptHandler | None


def direct(handler: DirectHandler, prompt: PromptHandler | None = None) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of a handler that small requests reach on the fast path (`gateway/fast/direct.py`).

    All other requests call it as an ASGI endpoint; both use the same handler. `prompt` does the same without a task: it
    raises, or calls `respond` when the response is known.
    """

    @wraps(handler)
    async def endpoint(request: Request) -> Response:
        call = DirectRequest(request.state.principal, request.scope["headers"], lambda: whole_body(request))
        response = await handler(call)
        return Response(response.body, response.status, response.more, media_type=response.media_type)

    return _mark(endpoint, DIRECT_MARK, DirectHandlers(handler, prompt))


def direct_response(value: Any, status: int = 200, more: Mapping[str, str] = MappingProxyType({})) -> DirectResponse:
    """A JSON response of a direct handler, encoded by msgspec, with further headers."""
    return DirectResponse(ENCODER.encode(value), status, more=more)


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """The decoder of a type, cached: creating one takes longer than decoding a small body."""
    made = _decoders.get(kind)
    if made is None:
        made = _decoders[kind] = msgspec.json.Decoder(kind)
    return made


def decode_json(body: Buffer, kind: type[T], *, binary: str = "") -> T:
    """The JSON value as a `kind`. Raises Invalid with the path of the wrong field, TooLarge over JSON_BYTES_MAX.

    `binary` is the content type that allows larger bodies.
    """
    if len(body) > JSON_BYTES_MAX:
        raise _too_much_json(f"a JSON body of {len(body)} bytes is over the limit of {JSON_BYTES_MAX}", binary)
    try:
        return decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise Invalid(f"the JSON body is not valid: {error}", hint="correct the field at this path") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"the body is not JSON: {error}", hint="send one JSON value, encoded as UTF-8") from error


def check_items(count: int, *, binary: str = "") -> None:
    """Raises TooLarge when one JSON body has more records or entries than JSON_ITEMS_MAX."""
    if count > JSON_ITEMS_MAX:
        raise _too_much_json(f"{count} records in one JSON body are over the limit of {JSON_ITEMS_MAX}", binary)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response encoded by msgspec; unknown objects are encoded as text."""
    return Response(ENCODER.encode(value), status, headers, media_type=JSON)


def stopping(request: Request) -> asyncio.Event:
    """Set when the server begins to drain: a request that only waits (a long poll) then responds at once."""
    state = getattr(request.app.state, STATE, None)
    return state.stopping if isinstance(state, ServerState) else asyncio.Event()


def body_limit(bytes_max: int) -> Callable[[F], F]:
    """Marks a route with its own limit instead of `gateway.body_bytes_max`."""
    return lambda endpoint: _mark(endpoint, BODY_MARK, bytes_max)


def streamed(held_bytes_max: int) -> Callable[[F], F]:
    """Marks a route that streams its body: at most this many bytes of it are in memory at once."""
    return lambda endpoint: _mark(endpoint, HELD_MARK, held_bytes_max)


def own_keys(endpoint: F) -> F:
    """Marks a route that authenticates its callers itself: the gateway requires no key for it."""
    return _mark(endpoint, OWN_KEYS_MARK, True)


def operation(
    summary: str = "", *, body: Any = None, answer: Any = None, media_type: str = "", right: str = ""
) -> Callable[[F], F]:
    """Describes a route for /openapi.json; without it only its path, methods and docstring are listed.

    `right` is the right that the endpoint requires, with names of the request in braces: `log:read:{topic}`.
    """
    described = Operation(summary, body, answer, media_type or JSON, right)
    return lambda endpoint: _mark(endpoint, OPERATION_MARK, described)


def _too_much_json(message: str, binary: str) -> TooLarge:
    return TooLarge(message, hint=f"send less at once, or as {binary}" if binary else "send less at once")


def _mark(endpoint: F, name: str, value: Any) -> F:
    setattr(endpoint, name, value)
    return endpoint
