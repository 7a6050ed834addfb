"""What a part says about its HTTP routes without knowing the gateway: how to decode, how large, how described.

The marks are attributes on the endpoint function; the gateway reads them when it registers the route.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lakebed.auth import Principal
from lakebed.errors import Invalid, TooLarge

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Buffer = bytes | memoryview

JSON = "application/json"
# Decoding holds the interpreter's lock, in a thread as well as outside of one, so what bounds the pause of all other
# requests is the size: 16 MiB decode in 60 ms at worst (5.6 million empty records), 200,000 records take 30 ms more.
JSON_BYTES_MAX = 16 * 1024 * 1024
JSON_ITEMS_MAX = 200_000
BODY_MARK = "__lakebed_body_bytes_max__"
HELD_MARK = "__lakebed_held_bytes_max__"
OPERATION_MARK = "__lakebed_operation__"
OWN_KEYS_MARK = "__lakebed_own_keys__"
DIRECT_MARK = "__lakebed_direct__"
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
ENCODER = msgspec.json.Encoder(enc_hook=str)


class Operation(msgspec.Struct, frozen=True):
    """How a plain Starlette route appears in /openapi.json. Types are msgspec ones."""

    summary: str = ""
    body: Any = None
    answer: Any = None
    media_type: str = JSON


async def whole_body(request: Request) -> Buffer:
    """The body, in one piece. A large one already lies in one, and is not copied."""
    parts: list[Any] = [part async for part in request.stream() if part]
    if len(parts) == 1:
        return cast(Buffer, parts[0])
    if parts and all(isinstance(part, memoryview) and part.obj is parts[0].obj for part in parts):
        whole = memoryview(parts[0].obj).toreadonly()
        if sum(map(len, parts)) == len(whole):
            return whole
    return b"".join(parts)


class Call:
    """A request as a direct handler sees it: who asks, the head's fields, and a body that may still be on its way."""

    __slots__ = ("_body", "_headers", "principal")

    def __init__(
        self,
        principal: Principal,
        headers: Iterable[tuple[bytes, bytes]],
        body: Buffer | Callable[[], Awaitable[Buffer]],
    ) -> None:
        self.principal, self._headers, self._body = principal, headers, body

    def header(self, name: bytes, otherwise: str = "") -> str:
        """The first field of this name, which is given in lower case."""
        for found, value in self._headers:
            if found == name:
                return value.decode("latin-1")
        return otherwise

    async def body(self) -> Buffer:
        """All of it, in one piece. Once."""
        return await self._body() if callable(self._body) else self._body


class Answered(NamedTuple):
    """A direct handler's answer."""

    body: bytes
    status: int = 200
    media_type: str = JSON
    more: Mapping[str, str] = MappingProxyType({})  # further headers, names in lower case

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        further = [(name.encode(), value.encode()) for name, value in self.more.items()]
        return [(b"content-type", self.media_type.encode()), (b"content-length", b"%d" % len(self.body)), *further]


Handler = Callable[[Call], Awaitable[Answered]]
Tell = Callable[[Callable[[], Answered]], None]  # given what makes the answer, or raises what is wrong; once
Prompt = Callable[[Call, Buffer, Tell], None]


class Direct(NamedTuple):
    handler: Handler
    prompt: Prompt | None


def direct(handler: Handler, prompt: Prompt | None = None) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint of a handler that small requests reach straight from the socket (`gateway/direct.py`).

    Every other request comes through it as through any endpoint: both ways lead to the one handler. `prompt` does the
    same without waiting: it raises, or sees to it that the answer is told when it is known.
    """

    @wraps(handler)
    async def endpoint(request: Request) -> Response:
        call = Call(request.state.principal, request.scope["headers"], lambda: whole_body(request))
        answered = await handler(call)
        return Response(answered.body, answered.status, answered.more, media_type=answered.media_type)

    return _mark(endpoint, DIRECT_MARK, Direct(handler, prompt))


def answered(value: Any, status: int = 200, more: Mapping[str, str] = MappingProxyType({})) -> Answered:
    """A direct handler's answer of msgspec's JSON, with further headers."""
    return Answered(ENCODER.encode(value), status, more=more)


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """A type's decoder, made once: to make one takes longer than to decode a small body. Types are few."""
    made = _decoders.get(kind)
    if made is None:
        made = _decoders[kind] = msgspec.json.Decoder(kind)
    return made


def decode_json(body: Buffer, kind: type[T], *, binary: str = "") -> T:
    """The JSON value as a `kind`. Raises Invalid naming the path of the field that is wrong, TooLarge for more than
    JSON_BYTES_MAX. `binary` is the content type that takes more.
    """
    if len(body) > JSON_BYTES_MAX:
        raise _too_much_json(f"a JSON body of {len(body)} bytes is over the limit of {JSON_BYTES_MAX}", binary)
    try:
        return decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise Invalid(f"the JSON body does not fit: {error}", hint="mend the field at the path named above") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"the body is not JSON: {error}", hint="send one JSON value, encoded as UTF-8") from error


def check_items(count: int, *, binary: str = "") -> None:
    """Raises TooLarge for more records, entries, … in one JSON body than are taken over in one go."""
    if count > JSON_ITEMS_MAX:
        raise _too_much_json(f"{count} records in one JSON body are over the limit of {JSON_ITEMS_MAX}", binary)


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response of msgspec's JSON; unknown objects are shown as text."""
    return Response(ENCODER.encode(value), status, headers, media_type=JSON)


def stopping(request: Request) -> asyncio.Event:
    """Set when the server begins to drain: what only waits (a long poll) answers then and does not hold it up."""
    event = getattr(request.app.state, "stopping", None)
    return event if isinstance(event, asyncio.Event) else asyncio.Event()


def body_limit(bytes_max: int) -> Callable[[F], F]:
    """Marks a route whose body may be larger (a stream) or must be smaller than `gateway.body_bytes_max`."""
    return lambda endpoint: _mark(endpoint, BODY_MARK, bytes_max)


def streamed(held_bytes_max: int) -> Callable[[F], F]:
    """Marks a route that passes its body on as it comes: so much of it, at most, is in memory at once."""
    return lambda endpoint: _mark(endpoint, HELD_MARK, held_bytes_max)


def own_keys(endpoint: F) -> F:
    """Marks a route that knows its callers by keys of its own: the gateway lets anybody through to it."""
    return _mark(endpoint, OWN_KEYS_MARK, True)


def operation(summary: str = "", *, body: Any = None, answer: Any = None, media_type: str = "") -> Callable[[F], F]:
    """Describes a plain route for /openapi.json; without it only its path, methods and docstring are listed."""
    said = Operation(summary, body, answer, media_type or JSON)
    return lambda endpoint: _mark(endpoint, OPERATION_MARK, said)


def _too_much_json(message: str, binary: str) -> TooLarge:
    return TooLarge(message, hint=f"send less at once, or as {binary}" if binary else "send less at once")


def _mark(endpoint: F, name: str, value: Any) -> F:
    setattr(endpoint, name, value)
    return endpoint
