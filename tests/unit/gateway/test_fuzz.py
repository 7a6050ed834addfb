"""Whatever a body holds, the answer is the value or a problem; never a crash, never a trace."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lakebed.core.errors import Invalid
from lakebed.core.http import decode_json, json_response
from lakebed.gateway.app import build
from support.gateway_fixtures import Sample, client_of, context_with

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


class Thing(msgspec.Struct):
    size: int
    name: str = ""
    inner: dict[str, list[int]] = {}


async def keep(request: Request) -> Response:
    return json_response(decode_json(await request.body(), Thing))


KEYS = [{"name": "a", "secret": "0123456789abcdef", "rights": ["*"]}]
OPEN = build(context_with(), [Sample(more=[Route("/things", keep, methods=["POST"])])])
LOCKED = build(context_with(keys=KEYS), [Sample()])


@given(st.binary() | JSON.map(lambda value: msgspec.json.encode(value, enc_hook=str)))
def test_decoding_gives_the_value_or_invalid(body: bytes) -> None:
    """No other exception ever leaves the decoder."""
    try:
        assert isinstance(decode_json(body, Thing), Thing)
    except Invalid as error:
        assert error.message


def test_a_deep_body_is_invalid() -> None:
    """Nesting without end does not break the process."""
    with pytest.raises(Invalid):
        decode_json(b"[" * 200_000, list)


@settings(max_examples=60, deadline=None)
@given(body=st.binary(max_size=200) | JSON.map(lambda value: msgspec.json.encode(value, enc_hook=str)))
async def test_a_route_answers_the_value_or_a_problem(body: bytes) -> None:
    """200 with JSON, or 400 with a whole problem."""
    async with client_of(OPEN) as client:
        answer = await client.post("/things", content=body)

    reported: dict[str, Any] = answer.json()
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        assert {"type", "title", "status", "code", "message", "hint", "request_id"} <= set(reported)


@settings(max_examples=80, deadline=None)
@given(
    path=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="?#"), max_size=30),
    headers=st.lists(
        st.tuples(
            st.sampled_from([b"x-request-id", b"authorization", b"x-api-key", b"content-length", b"host", b"accept"]),
            st.binary(max_size=40),
        ),
        max_size=6,
    ),
    method=st.sampled_from(["GET", "POST", "HEAD", "DELETE", "BREW"]),
)
async def test_any_head_is_answered(path: str, headers: list[tuple[bytes, bytes]], method: str) -> None:
    """Odd paths, methods and headers are refused with a client's error, never with ours."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": "/" + path,
        "headers": headers,
        "query_string": b"",
        "root_path": "",
    }
    await LOCKED(scope, receive, send)

    assert 200 <= sent[0]["status"] < 500
