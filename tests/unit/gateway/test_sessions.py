"""Sessions: what a cookie claims, how long it lasts, and which writes it allows."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from lakebed.core.clock import ManualClock, now_ms
from lakebed.core.errors import Unauthenticated
from lakebed.core.local import is_local
from lakebed.gateway import sessions
from lakebed.gateway.auth import CERTIFICATE, LOCAL_NAMES_MAX, PRESENTED_BYTES_MAX, Keyring, RequestHead
from lakebed.gateway.keys import KeyRecord, SignedIn
from lakebed.gateway.settings import GatewaySettings

SECRET = "0123456789abcdef-ann"
KEYS = [
    {"name": "ann", "secret": SECRET, "rights": ["*"]},
    {"name": "bob", "secret": "0123456789abcdef-bob", "rights": ["queue:*"]},
]
ORIGIN = {"origin": "http://lake.example"}


def ring(clock: ManualClock) -> Keyring:
    return Keyring.of(GatewaySettings.of({"keys": KEYS}), clock)


def requested(cookie: str = "", **headers: str) -> RequestHead:
    given = {"host": "lake.example", **{name.replace("_", "-"): value for name, value in headers.items()}}
    if cookie:
        given["cookie"] = f"{sessions.COOKIE}={cookie}"
    return RequestHead([(name.encode(), value.encode()) for name, value in given.items()])


def scope(method: str = "GET") -> dict[str, str]:
    return {"method": method, "path": "/metrics"}


async def test_a_session_lasts_twelve_hours_to_the_second() -> None:
    clock = ManualClock()
    keys = ring(clock)
    value = keys.sign_in(SECRET, "nonce")
    expires_s = now_ms(clock) // 1000 + 12 * 3600

    await clock.advance(expires_s - now_ms(clock) / 1000 - 0.5)
    assert "ann" == keys.principal(scope(), requested(value)).name
    await clock.advance(0.5)
    with pytest.raises(Unauthenticated):
        keys.principal(scope(), requested(value))


async def test_a_cookie_that_nobody_was_given_is_nobody() -> None:
    """A session is what was opened here or in the bucket: nothing about it can be changed in the cookie."""
    keys = ring(ManualClock())
    value = keys.sign_in("0123456789abcdef-bob", "nonce")

    assert "bob" == keys.principal(scope(), requested(value)).name
    for wrong in (value + "0", value[:-1], value.replace("v3", "v1"), sessions.hashed(value), "v3.ann"):
        with pytest.raises(Unauthenticated):
            keys.principal(scope(), requested(wrong))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_every_method_but_get_and_head_needs_the_pages_token(method: str) -> None:
    keys = ring(ManualClock())
    value = keys.sign_in(SECRET, "nonce")
    token = {"x_csrf_token": sessions.token_of(value)}

    for safe in ("GET", "HEAD"):
        assert "ann" == keys.principal(scope(safe), requested(value)).name
    assert "ann" == keys.principal(scope(method), requested(value, **token, **ORIGIN)).name
    for wrong in ({}, ORIGIN, {"x_csrf_token": "0" * 64, **ORIGIN}, {**token, "origin": "http://evil.example"}):
        with pytest.raises(Unauthenticated):
            keys.principal(scope(method), requested(value, **wrong))


async def test_a_wrong_key_beside_a_good_session_is_a_wrong_key() -> None:
    """A key that is presented decides alone."""
    keys = ring(ManualClock())
    value = keys.sign_in(SECRET, "nonce")

    with pytest.raises(Unauthenticated, match="unknown"):
        keys.principal(scope(), requested(value, x_api_key="wrong"))
    with pytest.raises(Unauthenticated, match="no key was sent"):
        keys.principal(scope(), requested())


def test_a_key_that_is_too_long_is_not_signed_in() -> None:
    """Neither as any key nor as one that has a certificate and no secret."""
    certified = Keyring((KeyRecord("agent", rights=("*",), certificate="agent-7"),), ManualClock())
    for secret in ("", "x" * (PRESENTED_BYTES_MAX + 1), SECRET[:-1]):
        for keys in (ring(ManualClock()), certified):
            with pytest.raises(Unauthenticated):
                keys.sign_in(secret, "nonce")
            assert keys.key_with(secret.encode()) is None


def test_tokens_and_sessions_differ_by_their_nonce() -> None:
    keys = ring(ManualClock())
    one, two = keys.sign_in(SECRET, "n1"), keys.sign_in(SECRET, "n2")

    assert one != two
    assert sessions.token_of(one) != sessions.token_of(two)
    assert 64 == len(sessions.token_of(one))


@pytest.mark.parametrize(
    "value",
    ["v3.1.abc.{}x", "v2.1.abc.{}", "v3.1.abc", "v3.1..{}", "v3..abc.{}", "v3.1.a.b.{}", "v3.1.é.{}", "v3.1.a b.{}",
     "v3.-1.abc.{}", "v3.².abc.{}", "v3.1234567890123.abc.{}", "", ".", "v3.1." + "a" * 200 + ".{}"],
)  # fmt: skip
def test_what_has_not_the_form_of_a_session_is_none(value: str) -> None:
    """Another version, no nonce or end, other characters, too long."""
    assert sessions.is_ours("v3.1.abc." + "0" * 32)
    assert not sessions.is_ours(value.format("0" * 32))


def test_only_a_cookie_that_a_gateway_made_may_be_of_a_session_elsewhere() -> None:
    """Its MAC is right, its time is not over, and the bucket was not read for it in vain before."""
    here, there = sessions.SessionTable(), sessions.SessionTable()
    unsealed = here.open(SignedIn("ann", "f", 100), "n0")
    assert not here.may_be_open(unsealed, 1), "without a seal every cookie could be forged"
    here.seal = there.seal = b"a seal of these gateways"
    value = here.open(SignedIn("ann", "f", 100), "n1")
    forged = (
        unsealed,
        value[:-1] + "x",
        value.replace("100", "999"),
        value.replace("n1", "n2"),
        "v3.100.n1." + "0" * 32,
    )

    assert there.may_be_open(value, 99)
    assert not there.may_be_open(value, 100)
    assert not any(there.may_be_open(each, 1) for each in forged)
    there.note_missing(value)
    assert not there.may_be_open(value, 1)


async def test_what_ended_here_stays_ended_while_the_bucket_still_has_it() -> None:
    table = sessions.SessionTable()
    value = table.open(SignedIn("ann", "f", 100), "n1")
    stored = {sessions.hashed(value): SignedIn("ann", "f", 100)}

    table.end(value)
    table.load(stored, 1)
    assert table.find(value) is None
    table.load({}, 1)
    table.load(stored, 1)
    assert table.find(value) is not None


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
        (b"gateway:80", False),
        (b"localhost", True),
        (b"[::1].evil.example", False),
        (b"[::1]x", False),
        (b"127.0.0.1:x", False),
        (b"", False),
        (b"evil.example", False),
        (b"localhost.evil.example:80", False),
        (b"evillocalhost.example", False),
        (b"1.2.3.4.5", False),
    ],
)
def test_only_names_that_no_other_site_can_own_are_local(host: bytes, local: bool) -> None:
    assert local == is_local(host)


def test_each_header_is_read_into_its_own_field() -> None:
    names = [
        ("host", "host"), ("content-length", "length"), ("authorization", "authorization"), ("cookie", "cookie"),
        ("x-request-id", "request_id"), ("x-api-key", "api_key"), ("origin", "origin"), ("x-csrf-token", "token"),
        ("sec-fetch-site", "site"),
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
        assert "anybody" == keys.principal(scope(), RequestHead([(b"host", b"h%d.localhost" % number)])).name

    assert LOCAL_NAMES_MAX == len(keys._local)


async def test_a_session_and_a_certificate_end_with_their_key() -> None:
    """A key with an expiry lets nobody in after it: neither its secret, nor a session, nor its certificate."""
    clock = ManualClock()
    until = datetime.fromtimestamp(now_ms(clock) / 1000 + 3600, UTC).isoformat()
    own = {"name": "ann", "secret": SECRET, "rights": ["*"], "certificate": "agent-7", "expires": until}
    keys = Keyring.of(GatewaySettings.of({"keys": [own]}), clock)
    value = keys.sign_in(SECRET, "nonce")
    certified = {**scope(), CERTIFICATE: ("other", "agent-7")}

    await clock.advance(3599.0)
    found = [keys.principal(scope(), requested(value)).name, keys.principal(certified, requested()).name]
    await clock.advance(1.0)

    assert ["ann", "ann"] == found
    for where, head in ((scope(), requested(value)), (certified, requested()), (scope(), requested(x_api_key=SECRET))):
        with pytest.raises(Unauthenticated):
            keys.principal(where, head)
    with pytest.raises(Unauthenticated):
        keys.sign_in(SECRET, "another")


def test_of_two_keys_with_one_certificate_the_first_has_it() -> None:
    """Keys of the settings come first: a key in the bucket cannot take their certificate."""
    ours, theirs = KeyRecord("a", rights=("x",), certificate="c"), KeyRecord("b", rights=("*",), certificate="c")

    found = Keyring((ours, theirs)).principal({**scope(), CERTIFICATE: ("c",)}, requested())

    assert "a" == found.name


def test_a_session_that_the_bucket_had_ends_with_what_the_bucket_has() -> None:
    """One that was opened here ends when another gateway ended it, whether or not its sharing was confirmed."""
    table = sessions.SessionTable()
    session = SignedIn("ann", "f", expires_s=100)
    confirmed, seen, alone = (table.open(session, nonce * 40) for nonce in "abc")
    table.shared(confirmed)

    table.load({sessions.hashed(seen): session}, now_s=1)
    first = [table.find(value) is not None for value in (confirmed, seen, alone)]
    table.load({}, now_s=2)
    second = [table.find(value) is not None for value in (confirmed, seen, alone)]
    table.load({}, now_s=100)

    assert ([False, True, True], [False, False, True]) == (first, second)
    assert table.find(alone) is None
