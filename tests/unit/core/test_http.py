"""What parts report about their routes, and what a principal may do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from starlette.requests import Request

from lakebed.core import http as wire
from lakebed.core.auth import ANYBODY, Principal
from lakebed.core.errors import Denied, Invalid, TooLarge
from lakebed.core.http import (
    DirectRequest,
    DirectResponse,
    check_items,
    decode_json,
    direct_response,
    json_response,
    stopping,
    whole_body,
)


@pytest.mark.parametrize(
    ("rights", "right", "may"),
    [
        (("queue:*",), "queue:write:orders", True),
        (("queue:*",), "queues:write", False),
        (("queue:read",), "queue:read:orders", False),
        (("batches:write:agent-7*",), "batches:write:agent-70", True),
        (("batches:write:agent-7*",), "batches:write:agent-8", False),
        (("log:read", "log:admin:t"), "log:admin:t", True),
        (("Log:read",), "log:read", False),
        ((), "log:read", False),
    ],
)
def test_a_right_is_matched_as_a_pattern_and_by_case(rights: tuple[str, ...], right: str, may: bool) -> None:
    """Any one of the patterns is enough; a star spans several words; nothing is granted by default."""
    assert may is Principal("p", rights).may(right)


def test_a_missing_right_is_named_in_the_refusal() -> None:
    """With the principal, so that an operator knows which key to extend."""
    with pytest.raises(Denied) as refused:
        Principal("reader", ("log:read",)).demand("log:write")
    Principal("reader", ("log:read",)).demand("log:read")
    ANYBODY.demand("anything:at:all")

    assert "reader may not log:write" == refused.value.message
    assert ("log:write", True) == (refused.value.detail["right"], "'log:write'" in refused.value.hint)


class Streamed:
    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    async def stream(self) -> AsyncIterator[Any]:
        for part in self._parts:
            yield part


async def test_a_body_in_pieces_is_joined_and_one_piece_is_not_copied() -> None:
    """Pieces of one buffer that are all of it are given as that buffer; a part of it is joined like any other."""
    whole = bytearray(b"abcdef")
    view = memoryview(whole)

    async def read(*parts: Any) -> Any:
        return await whole_body(cast(Request, Streamed(*parts)))

    one = b"abc"
    assert one is await read(one, b"")
    assert b"abcd" == await read(b"ab", b"", b"cd")
    assert b"" == await read()
    together = await read(view[:2], view[2:])
    assert together.obj is whole and together.readonly and b"abcdef" == together
    assert b"abde" == await read(view[:2], view[3:5])
    assert b"abXY" == await read(view[:2], memoryview(b"XY"))
    assert b"abcXYZ" == await read(view[:3], memoryview(b"XYZ"))  # as long as the first buffer


async def test_a_call_gives_the_first_field_of_a_name_and_its_body() -> None:
    """A missing field is what the caller reports; a body may be there or on its way."""

    async def later() -> bytes:
        return b"later"

    fields = [(b"accept", b"a"), (b"accept", b"b"), (b"x", b"\xe9")]
    call = DirectRequest(ANYBODY, fields, later)

    assert ("a", "é", "", "none") == (
        call.header(b"accept"),
        call.header(b"x"),
        call.header(b"y"),
        call.header(b"y", "none"),
    )
    assert (b"later", b"now") == (await call.body(), await DirectRequest(ANYBODY, [], b"now").body())


def test_an_answer_says_its_kind_its_length_and_more() -> None:
    """In the order a head is written; values that JSON does not know are text."""
    made = direct_response({"a": SimpleNamespace}, 503, {"retry-after": "2"})

    assert 503 == made.status and b"SimpleNamespace" in made.body
    assert [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(made.body)).encode()),
        (b"retry-after", b"2"),
    ] == made.headers
    assert (200, [(b"content-type", b"text/plain"), (b"content-length", b"2")]) == (
        DirectResponse(b"ok", media_type="text/plain").status,
        DirectResponse(b"ok", media_type="text/plain").headers,
    )
    plain = json_response([1], 201, {"x-a": "b"})
    assert (201, b"[1]", "application/json", "b") == (
        plain.status_code,
        plain.body,
        plain.headers["content-type"],
        plain.headers["x-a"],
    )


class Thing(msgspec.Struct):
    size: int


def test_json_that_does_not_fit_is_invalid_and_too_much_of_it_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of the wrong field is named; exactly the limit is taken; the binary form is named where there is one."""
    assert Thing(3) == decode_json(b'{"size":3}', Thing)
    with pytest.raises(Invalid, match=r"\$\.size"):
        decode_json(b'{"size":"x"}', Thing)
    for body in (b"{", b'"\xff"', b"[" * 100_000):
        with pytest.raises(Invalid, match="not JSON"):
            decode_json(body, list[Any] if body[:1] == b"[" else Any)  # type: ignore[arg-type]
    monkeypatch.setattr(wire, "JSON_BYTES_MAX", 10)
    assert Thing(3) == decode_json(b'{"size":3}', Thing)
    with pytest.raises(TooLarge, match="a JSON body of 11 bytes") as large:
        decode_json(b'{"size":31}', Thing, binary="application/x-frame")
    assert "send less at once, or as application/x-frame" == large.value.hint
    monkeypatch.setattr(wire, "JSON_ITEMS_MAX", 2)
    check_items(2)
    with pytest.raises(TooLarge, match="3 records") as many:
        check_items(3)
    assert "send less at once" == many.value.hint


def test_marks_are_what_the_gateway_reads() -> None:
    """Each mark is on the endpoint it decorates, with its value."""

    def endpoint() -> None: ...

    wire.body_limit(5)(endpoint)
    wire.streamed(7)(endpoint)
    assert endpoint is wire.own_keys(endpoint)
    wire.operation("Do it", body=Thing, answer=int)(endpoint)

    assert (5, 7, True) == (
        getattr(endpoint, wire.BODY_MARK),
        getattr(endpoint, wire.HELD_MARK),
        getattr(endpoint, wire.OWN_KEYS_MARK),
    )
    assert wire.Operation("Do it", Thing, int, "application/json") == getattr(endpoint, wire.OPERATION_MARK)
    wire.operation(media_type="text/csv")(endpoint)
    assert "text/csv" == getattr(endpoint, wire.OPERATION_MARK).media_type


def test_the_event_that_the_server_stops_is_the_servers_own() -> None:
    """An application without one gets an event that is never set."""
    event = asyncio.Event()

    def request(**state: Any) -> Request:
        return cast(Request, SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(**state))))

    assert event is stopping(request(**{wire.STATE: wire.ServerState(stopping=event)}))
    assert not stopping(request()).is_set() and not stopping(request(**{wire.STATE: True})).is_set()
