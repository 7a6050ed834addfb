"""What a browser makes of an answer: it runs nothing of one that is no page, and guesses no type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lakebed.gateway import sessions
from lakebed.gateway.app import Gateway
from lakebed.gateway.auth import RequestHead, same_origin
from lakebed.gateway.openapi import POLICY as DOCS_POLICY
from support.gateway_fixtures import Sample

Make = Callable[..., Gateway]
Ask = Callable[..., Any]
SECRET = "0123456789abcdef-very-secret"
KEYS = [{"name": "reader", "secret": SECRET, "rights": ["*"]}]
SCRIPT = b'<x:script xmlns:x="http://www.w3.org/1999/xhtml">alert(1)</x:script>'


async def _stored(request: Request) -> Response:
    """Somebody's bytes, under a type that a browser would run."""
    return Response(SCRIPT, media_type=request.query_params["type"])


STORED = Route("/stored", _stored)


@pytest.mark.parametrize("path", ["/healthz", "/metrics", "/openapi.json", "/sample", "/nowhere", "/raise"])
async def test_an_answer_that_is_no_page_runs_nothing(make: Make, ask: Ask, path: str) -> None:
    """Answers and refusals of every kind report that their type is meant, and that nothing may be loaded or run."""
    answer = await ask(make(), "GET", path)

    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")


@pytest.mark.parametrize(
    "kind", ["application/xml", "image/svg+xml", "text/html", "text/plain", "application/xhtml+xml"]
)
async def test_stored_bytes_run_nothing_whatever_their_type(make: Make, ask: Ask, kind: str) -> None:
    """A route that forgets its own policy gets the strictest."""
    answer = await ask(make([Sample(more=[STORED])]), "GET", f"/stored?type={kind}")

    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_a_page_keeps_its_own_policy(make: Make, ask: Ask) -> None:
    """Two policies would both be in force: a page has one."""
    answer = await ask(make(), "GET", "/docs")

    assert answer.headers.get_list("content-security-policy") == [DOCS_POLICY]
    assert answer.headers.get_list("x-content-type-options") == ["nosniff"]


@pytest.mark.parametrize(
    "cookie",
    [
        "v1.cmVhZGVy.².n.s",
        "v1.cmVhZGVy.99999999999.n.\xe9\xff",
        "v2.abc",
        "v3.\xe9\xff",
        "v3.",
        "v3.².n." + "0" * 32,
        "v3.99999999999.n." + "\xe9" * 32,
        "v3.99999999999.n." + "0" * 32,
        "v1....",
        "....",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_strangers_cookie_is_no_session(make: Make, ask: Ask, cookie: str, method: str) -> None:
    """Whatever bytes a cookie has, it is known or it is not: 401, and no error of ours."""
    app = make(keys=KEYS)
    sent = [f"{sessions.COOKIE}={cookie}".encode("latin-1"), f'{sessions.COOKIE}="{cookie}"'.encode("latin-1")]

    answers = [await ask(app, method, "/sample", headers=[(b"cookie", raw)]) for raw in sent]

    assert [answer.status_code for answer in answers] == [401, 401]


@pytest.mark.parametrize(
    ("origin", "same"),
    [
        ("http://lake.example", True),
        ("https://lake.example", True),
        ("http://lake.example.evil.example", False),
        ("http://lake.example:9000", False),
        ("http://evil.example/lake.example", False),
        ("http://sub.lake.example", False),
        ("http://lake.exampl", False),
        ("http://", False),
        ("null", False),
        ("", False),
    ],
)
def test_an_origin_is_ours_only_as_a_whole(origin: str, same: bool) -> None:
    """A name that begins or ends as ours does is another site's."""
    requested = RequestHead([(b"host", b"lake.example"), (b"origin", origin.encode())])

    assert same == same_origin(requested)


def test_a_session_longer_than_a_cookie_may_be_is_none() -> None:
    form = "v3.1.{}." + "0" * sessions.SEAL_CHARS
    assert sessions.is_ours(form.format("n" * sessions.NONCE_CHARS_MAX))
    assert not sessions.is_ours(form.format("n" * (sessions.NONCE_CHARS_MAX + 1)))
