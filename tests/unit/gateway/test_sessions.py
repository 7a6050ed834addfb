"""Sessions: what a cookie claims, how long it lasts, and which writes it allows."""

from __future__ import annotations

import base64
from hashlib import sha256

import pytest

from lakebed.core.clock import ManualClock, now_ms
from lakebed.core.errors import Unauthenticated
from lakebed.gateway import sessions
from lakebed.gateway.auth import LOCAL_NAMES_MAX, PRESENTED_BYTES_MAX, Keyring, RequestHead, _is_local
from lakebed.gateway.settings import GatewaySettings

SECRET = "0123456789abcdef-ann"
KEYS = [
    {"name": "ann", "secret": SECRET, "rights": ["*"]},
    {"name": "bob", "secret": "0123456789abcdef-bob", "rights": ["queue:*"]},
]
ORIGIN = {"origin": "http://lake.example"}


def ring(clock: ManualClock) -> Keyring:
    return Keyring.of(GatewaySettings.of({"keys": KEYS}), clock)


def asked(cookie: str = "", **headers: str) -> RequestHead:
    given = {"host": "lake.example", **{name.replace("_", "-"): value for name, value in headers.items()}}
    if cookie:
        given["cookie"] = f"{sessions.COOKIE}={cookie}"
    return RequestHead([(name.encode(), value.encode()) for name, value in given.items()])


def scope(method: str = "GET") -> dict[str, str]:
    return {"method": method, "path": "/metrics"}


async def test_a_session_lasts_twelve_hours_to_the_second() -> None:
    clock = ManualClock()
    value = ring(clock).sign_in(SECRET, "nonce")
    claimed = sessions.read(value)

    assert claimed is not None
    assert ("ann", now_ms(clock) // 1000 + 12 * 3600) == (claimed.name, claimed.expires_s)
    await clock.advance(claimed.expires_s - now_ms(clock) / 1000 - 0.5)
    assert "ann" == ring(clock).principal(scope(), asked(value)).name
    await clock.advance(0.5)
    with pytest.raises(Unauthenticated):
        ring(clock).principal(scope(), asked(value))


async def test_another_keys_name_under_a_seal_is_nobody() -> None:
    """The seal is of the key that is named: a session cannot be turned into another's."""
    clock = ManualClock()
    value = ring(clock).sign_in("0123456789abcdef-bob", "nonce")
    name = base64.urlsafe_b64encode(b"ann").decode().rstrip("=")
    fields = value.split(".")
    forged = ".".join([fields[0], name, *fields[2:]])
    longer = ".".join([*fields[:2], str(int(fields[2]) + 1), *fields[3:]])

    assert "bob" == ring(clock).principal(scope(), asked(value)).name
    sealed = sessions.issue("ann", sha256(b"0123456789abcdef-bob").digest(), now_s=now_ms(clock) // 1000, nonce="n")

    for wrong in (forged, longer, sealed):
        with pytest.raises(Unauthenticated):
            ring(clock).principal(scope(), asked(wrong))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_every_method_but_get_and_head_needs_the_pages_token(method: str) -> None:
    clock = ManualClock()
    value = ring(clock).sign_in(SECRET, "nonce")
    token = {"x_csrf_token": sessions.token_of(value)}

    for safe in ("GET", "HEAD"):
        assert "ann" == ring(clock).principal(scope(safe), asked(value)).name
    assert "ann" == ring(clock).principal(scope(method), asked(value, **token, **ORIGIN)).name
    for wrong in ({}, ORIGIN, {"x_csrf_token": "0" * 64, **ORIGIN}, {**token, "origin": "http://evil.example"}):
        with pytest.raises(Unauthenticated):
            ring(clock).principal(scope(method), asked(value, **wrong))


async def test_a_wrong_key_beside_a_good_session_is_a_wrong_key() -> None:
    """A key that is presented decides alone."""
    clock = ManualClock()
    value = ring(clock).sign_in(SECRET, "nonce")

    with pytest.raises(Unauthenticated, match="unknown"):
        ring(clock).principal(scope(), asked(value, x_api_key="wrong"))
    with pytest.raises(Unauthenticated, match="no key was sent"):
        ring(clock).principal(scope(), asked())


def test_a_key_that_is_too_long_is_not_signed_in() -> None:
    for secret in ("", "x" * (PRESENTED_BYTES_MAX + 1), SECRET[:-1]):
        with pytest.raises(Unauthenticated):
            ring(ManualClock()).sign_in(secret, "nonce")


def test_tokens_and_sessions_differ_by_their_nonce() -> None:
    keys = ring(ManualClock())
    one, two = keys.sign_in(SECRET, "n1"), keys.sign_in(SECRET, "n2")

    assert one != two
    assert sessions.token_of(one) != sessions.token_of(two)
    assert 64 == len(sessions.token_of(one))


@pytest.mark.parametrize(
    "value",
    ["v2.YQ.9.n.s", "v1.YQ.9.n", "v1.YQ.9.n.m.s", "v1.YQ.-9.n.s", "v1.YQ..n.s", "v1.A.9.n.s", "v1._w.9.n.s", ""],
)
def test_what_is_no_session_of_ours_is_none(value: str) -> None:
    """Another version, more or fewer fields, an end that is no number, a name that does not decode."""
    assert sessions.read("v1.YQ.9.n.s") is not None
    assert sessions.read(value) is None


@pytest.mark.parametrize("name", ["a", "ab", "abc", "abcd", "größe", "a.b c"])
def test_every_name_comes_back_from_its_cookie(name: str) -> None:
    claimed = sessions.read(sessions.issue(name, b"digest", now_s=1000, nonce="n"))

    assert claimed is not None
    assert (name, 1000 + sessions.SESSION_S) == (claimed.name, claimed.expires_s)
    assert claimed.is_sealed_by(b"digest") and not claimed.is_sealed_by(b"other")


@pytest.mark.parametrize(
    ("header", "value"),
    [
        (None, ""),
        (b"", ""),
        (b"a=b", ""),
        (b"a=b; lakebed_session=x.y; c=d", "x.y"),
        (b"other_lakebed_session=x", ""),
        (b"lakebed_session=x; " + b"a" * sessions.COOKIE_BYTES_MAX, ""),
    ],
)
def test_a_cookie_is_found_by_its_whole_name(header: bytes | None, value: str) -> None:
    assert value == sessions.cookie_in(header)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        (b"127.0.0.1", True),
        (b"10.1.2.3:9000", True),
        (b"[::1]", True),
        (b"[::1]:80", True),
        (b"LOCALHOST:80", True),
        (b"a.LOCALHOST", True),
        (b"gateway:80", True),
        (b"evil.example", False),
        (b"localhost.evil.example:80", False),
        (b"evillocalhost.example", False),
        (b"1.2.3.4.5", False),
    ],
)
def test_only_names_that_no_other_site_can_own_are_local(host: bytes, local: bool) -> None:
    assert local == _is_local(host)


def test_each_header_is_read_into_its_own_field() -> None:
    names = [
        ("host", "host"), ("content-length", "length"), ("authorization", "authorization"), ("cookie", "cookie"),
        ("x-request-id", "request_id"), ("x-api-key", "api_key"), ("origin", "origin"), ("x-csrf-token", "token"),
    ]  # fmt: skip
    full = RequestHead([(name.encode(), name.upper().encode()) for name, _ in names])
    empty = RequestHead([(b"accept", b"x")])

    assert [name.upper().encode() for name, _ in names] == [getattr(full, field) for _, field in names]
    assert [None] * len(names) == [getattr(empty, field) for _, field in names]
    assert (False, True) == (full.chunked, RequestHead([(b"transfer-encoding", b"chunked")]).chunked)


def test_names_that_were_found_to_be_local_are_remembered_up_to_a_limit() -> None:
    """A stranger may send any number of names; those beyond the limit are judged each time."""
    keys = Keyring(())
    for number in range(LOCAL_NAMES_MAX * 2):
        assert "anybody" == keys.principal(scope(), RequestHead([(b"host", b"h%d" % number)])).name

    assert LOCAL_NAMES_MAX == len(keys._local)
