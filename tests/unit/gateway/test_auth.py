"""Keys: who is let in, by which header, and that secrets stay secret."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lakebed.core.errors import Invalid
from lakebed.core.http import own_keys
from lakebed.gateway.app import Gateway
from lakebed.gateway.auth import KEYS_MAX, Keyring, read_keys
from lakebed.gateway.settings import GatewaySettings
from support.gateway_fixtures import Sample

Make = Callable[..., Gateway]
Ask = Callable[..., Any]

SECRET = "0123456789abcdef-writer"
READER = "0123456789abcdef-reader"
KEYS = [
    {"name": "writer", "secret": SECRET, "rights": ["sample:*", "console:*", "gateway:*"]},
    {"name": "reader", "secret": READER, "rights": ["sample:read"]},
]


def basic(secret: str) -> str:
    return "Basic " + base64.b64encode(f"me:{secret}".encode()).decode()


async def test_without_keys_everybody_is_anybody(make: Make, ask: Ask) -> None:
    """On loopback with no key configured, no header is needed."""
    assert (await ask(make(), "GET", "/sample")).text.startswith("anybody")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {SECRET}"},
        {"authorization": f"bearer  {SECRET} "},
        {"x-api-key": SECRET},
        {"authorization": basic(SECRET)},
    ],
)
async def test_a_known_key_names_its_principal(make: Make, ask: Ask, headers: dict[str, str]) -> None:
    """Bearer, X-Api-Key and, to read, Basic are one and the same key."""
    answer = await ask(make(keys=KEYS), "GET", "/sample", headers=headers)

    assert (answer.status_code, answer.text.split()[0]) == (200, "writer")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": f"Bearer {SECRET}x"},
        {"authorization": f"Bearer {SECRET[:-1]}"},
        {"authorization": SECRET},
        {"authorization": f"Digest {SECRET}"},
        {"authorization": "Basic !!!"},
        {"authorization": "Bearer " + "x" * 5000},
        {"authorization": b"Bearer \xff\xfe"},
        {"x-api-key": "x"},
        {"x-api-key": ""},
    ],
)
async def test_anything_else_is_nobody(make: Make, ask: Ask, headers: dict[str, Any]) -> None:
    """401 with a challenge, and nothing of what was sent comes back."""
    answer = await ask(make(keys=KEYS), "GET", "/sample", headers=headers)

    assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert SECRET[:8] not in answer.text


async def test_a_browser_may_read_but_not_write_with_basic(make: Make, ask: Ask) -> None:
    """A browser sends Basic by itself, for any site's form: it opens pages and changes nothing."""
    app = make(keys=KEYS)

    assert (await ask(app, "GET", "/sample", headers={"authorization": basic(SECRET)})).status_code == 200
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert (await ask(app, method, "/sample", headers={"authorization": basic(SECRET)})).status_code == 401


async def test_a_key_without_the_right_is_denied_and_told_which(make: Make, ask: Ask) -> None:
    """403 names the right that is missing."""
    answer = await ask(make(keys=KEYS), "POST", "/sample", content=b"x", headers={"x-api-key": READER})

    assert (answer.status_code, answer.json()["right"]) == (403, "sample:write")


@pytest.mark.parametrize("path", ["/healthz", "/health"])
async def test_health_needs_no_key(make: Make, ask: Ask, path: str) -> None:
    """Anyone who balances the load queries without a key, even with a wrong one."""
    app = make(keys=KEYS)

    assert (await ask(app, "GET", path)).status_code in (200, 503)
    assert (await ask(app, "GET", path, headers={"x-api-key": "wrong"})).status_code in (200, 503)


@pytest.mark.parametrize("path", ["/metrics", "/metrics/prometheus", "/docs", "/openapi.json", "/nope"])
async def test_everything_else_needs_one(make: Make, ask: Ask, path: str) -> None:
    """A stranger does not even learn which paths exist."""
    assert (await ask(make(keys=KEYS), "GET", path)).status_code == 401


@pytest.mark.parametrize("host", ["127.0.0.1:80", "localhost", "[::1]:8080", "a.localhost:1"])
async def test_without_keys_names_of_this_machine_are_answered(make: Make, ask: Ask, host: str) -> None:
    """Addresses and localhost cannot be owned by another site."""
    assert (await ask(make(), "GET", "/sample", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:8080"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "127.0.0.1", "origin": "https://evil.example"},
        {"host": "127.0.0.1", "origin": "null"},
        {"host": "intranet"},
        {"host": "[::1].evil.example"},
        {"host": "127.0.0.1", "sec-fetch-site": "cross-site"},
        {"host": "127.0.0.1", "sec-fetch-site": "same-site"},
    ],
)
async def test_without_keys_another_site_is_refused(make: Make, ask: Ask, headers: dict[str, str]) -> None:
    """A web page cannot use the browser to reach a gateway on the same machine."""
    answer = await ask(make(), "POST", "/sample", content=b"x", headers=headers)

    assert (answer.status_code, answer.json()["code"]) == (403, "denied")


async def test_keys_of_a_file_are_added_to_those_of_the_settings(make: Make, ask: Ask, tmp_path: Path) -> None:
    """Settings and file together are the keyring."""
    file = tmp_path / "keys.toml"
    file.write_text('[[keys]]\nname = "agent"\nsecret = "agent-secret-0123456789"\nrights = ["sample:*"]\n')
    file.chmod(0o600)
    app = make(keys=KEYS, keys_file=str(file))

    assert (await ask(app, "GET", "/sample", headers={"x-api-key": "agent-secret-0123456789"})).text[:5] == "agent"
    assert (await ask(app, "GET", "/sample", headers={"x-api-key": SECRET})).text[:6] == "writer"


@pytest.mark.parametrize(
    "text",
    [
        f'keys = "{SECRET}"',
        f'[[keys]]\nname = "a"\nsecret = "{SECRET}',
        f'[[keys]]\nsecret = "{SECRET}"',
        f'[[keys]]\nname = "a"\nsecret = "{SECRET}"\nrihgts = ["*"]',
        f'[[keys]]\nname = "a"\nsecret = ["{SECRET}"]',
        f'[[keys]]\nname = "a"\nsecret = "{SECRET}"\nsecret = "{SECRET}"',
        "",
    ],
)
def test_a_bad_keys_file_is_refused_at_start_without_showing_a_secret(tmp_path: Path, text: str) -> None:
    """What is wrong and where, never what it reports there."""
    file = tmp_path / "keys.toml"
    file.write_text(text)

    with pytest.raises(Invalid) as caught:
        read_keys(file)

    assert str(file) in caught.value.message
    assert SECRET not in repr(caught.value) + caught.value.hint
    assert caught.value.__suppress_context__


def test_a_missing_or_binary_keys_file_is_refused(tmp_path: Path) -> None:
    """A file that cannot be read is no empty keyring."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")

    for name in ("absent", "binary"):
        with pytest.raises(Invalid, match="keys_file"):
            read_keys(tmp_path / name)


@pytest.mark.parametrize(
    "keys",
    [
        [{"name": "a", "secret": "short"}],
        [{"name": "a", "secret": ""}],
        [{"name": "a", "secret": SECRET}, {"name": "a", "secret": READER}],
        [{"name": "a", "secret": SECRET}, {"name": "b", "secret": SECRET}],
        [{"name": f"k{n}", "secret": f"{n:020d}"} for n in range(KEYS_MAX + 1)],
    ],
)
def test_weak_double_or_too_many_keys_are_refused(keys: list[dict[str, str]]) -> None:
    """A keyring that could mistake one for another is not made."""
    with pytest.raises(Invalid):
        Keyring.of(GatewaySettings.of({"keys": keys}))


def test_settings_never_show_a_secret() -> None:
    """Not in their text form, not in the listing."""
    assert SECRET not in repr(GatewaySettings.of({"keys": KEYS}))


async def test_a_route_with_keys_of_its_own_is_reached_without_the_gateways(ask: Ask, make: Make) -> None:
    """The mark opens that route alone: its neighbours still demand a key."""

    @own_keys
    async def mine(request: Request) -> Response:
        return Response(request.state.principal.name)

    part = Sample(more=[Route("/mine/{thing}", mine)])

    opened = await ask(make([part], keys=KEYS), "GET", "/mine/1", headers={"x-api-key": "an-org"})
    closed = await ask(make([part], keys=KEYS), "GET", "/sample", headers={"x-api-key": "an-org"})
    other_method = await ask(make([part], keys=KEYS), "POST", "/mine/1", headers={"x-api-key": "an-org"})

    assert ((200, "nobody"), 401, 401) == (
        (opened.status_code, opened.text),
        closed.status_code,
        other_method.status_code,
    )


@pytest.mark.parametrize("path", ["/healthz/sample", "/health-sample", "/healthzz", "/health/", "/HEALTHZ"])
async def test_a_path_that_only_begins_as_a_public_one_needs_a_key(make: Make, ask: Ask, path: str) -> None:
    """Health is public, by its two names and no others."""
    assert (await ask(make(keys=KEYS), "GET", path)).status_code == 401
    assert (await ask(make(keys=KEYS), "GET", "/healthz")).status_code in (200, 503)
