"""Signing in, tokens and origins: what a browser may do, and what another site may make it do."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from lakebed.core.clock import ManualClock
from lakebed.gateway import sessions
from lakebed.gateway.auth import Keyring, RequestHead, configured_keys
from lakebed.gateway.settings import GatewaySettings
from support.console_site import ADDRESS, KEYS, OPERATOR, WATCHER, site

DO = "/console/do/lifecycle.walk"
NUMBERS = {"partition", "offset", "partitions", "retention_s", "retention_bytes", "batch"}
FORM = {"bucket": "landing"}


async def test_a_key_becomes_a_session_and_is_not_kept() -> None:
    """The cookie is HttpOnly and SameSite, holds no key, and opens the pages; signing out ends it."""
    async with site(keys=KEYS) as here:
        answer = await here.browser.sign_in(OPERATOR, next="/queue?queue=a")
        page = await here.browser.open("/queue")
        out = await here.browser.post("/logout")
        after = await here.browser.open("/queue")

    cookie = answer.headers["set-cookie"]
    assert (answer.status_code, answer.headers["location"]) == (303, "/queue?queue=a")
    assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower() and OPERATOR not in cookie
    assert page.status_code == 200 and "operator" in page.text
    assert (out.status_code, after.status_code) == (303, 303)


async def test_a_wrong_key_is_refused_and_an_outside_place_is_not_gone_to() -> None:
    """The form reports it and shows nothing of the key; `next` leads nowhere but here."""
    async with site(keys=KEYS) as here:
        wrong = await here.browser.sign_in("0123456789abcdef-nobody")
        away = await here.browser.sign_in(OPERATOR, next="//evil.example/")

    assert wrong.status_code == 401
    assert "the key is unknown" in wrong.text and "0123456789abcdef-nobody" not in wrong.text
    assert away.headers["location"] == "/"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"x-csrf-token": ""}, 401),
        ({"x-csrf-token": "0" * 64}, 401),
        ({"origin": "http://evil.example"}, 401),
        ({"origin": "null"}, 401),
    ],
)
async def test_a_signed_in_browser_acts_only_from_its_own_page(headers: dict[str, str], status: int) -> None:
    """Without the page's token, or from another origin, a cookie is nobody's and nothing is done."""
    async with site(keys=KEYS) as here:
        await here.browser.sign_in(OPERATOR)
        await here.browser.open("/lifecycle")

        answer = await here.browser.post(DO, FORM, **headers)
        actions = await here.console.data.trail.latest()

    assert answer.status_code == status
    assert len(actions) == (1 if status == 200 else 0)


@pytest.mark.parametrize(
    "headers", [{"x-csrf-token": ""}, {"x-csrf-token": "0" * 64}, {"origin": "http://127.0.0.1:1"}, {"origin": ""}]
)
async def test_where_nobody_signs_in_a_page_still_needs_its_token(headers: dict[str, str]) -> None:
    """On loopback without keys, another page on this machine cannot act either."""
    async with site() as here:
        await here.browser.open("/lifecycle")

        answer = await here.browser.post(DO, FORM, **headers)

        assert answer.status_code == 403
        assert [] == await here.console.data.trail.latest()


async def test_where_nobody_signs_in_a_request_that_never_saw_a_page_does_nothing() -> None:
    """Without a cookie there is no page whose token it could be, whatever is sent as one."""
    async with site() as here:
        for token in ("", "0" * 64, sessions.token_of("")):
            answer = await here.browser.client.post(DO, data=FORM, headers={"origin": ADDRESS, "x-csrf-token": token})
            assert answer.status_code == 403
            here.browser.client.cookies.clear()

        assert [] == await here.console.data.trail.latest()


async def test_a_cookie_alone_writes_nowhere_else_either() -> None:
    """The session reads every route; to write to any of them it needs the token too."""
    async with site(keys=KEYS) as here:
        await here.browser.sign_in(OPERATOR)
        read = await here.browser.client.get("/metrics")
        written = await here.browser.client.post(DO, data=FORM)

    assert read.status_code == 200
    assert written.status_code == 401


async def test_an_action_needs_its_right() -> None:
    """A watcher sees the dialog report which right is missing, and cannot act by hand either."""
    async with site(keys=KEYS) as here:
        await here.browser.sign_in(WATCHER)
        await here.browser.open("/queue")
        dialog = await here.browser.client.get("/console/ask/queue.discard?queue=jobs&letter=a")
        done = await here.browser.post("/console/do/queue.discard", {"queue": "jobs", "letter": "a", "reason": "x"})

    assert "watcher may not queue:admin:jobs" in dialog.text
    assert "<textarea" not in dialog.text
    assert done.status_code == 403


async def test_a_refused_sign_in_and_a_refused_action_are_logged() -> None:
    """With the address and, once it is known, the key's name; the secret that was tried is not in the log."""
    async with site(keys=KEYS) as here:
        with capture_logs() as lines:
            await here.browser.sign_in("a wrong secret of somebody")
            await here.browser.sign_in(WATCHER)
            await here.browser.open("/queue")
            await here.browser.post("/console/do/queue.discard", {"queue": "jobs", "letter": "a", "reason": "x"})

    refused = [line for line in lines if line["event"] == "request refused"]
    assert [("nobody", "/login", 401), ("watcher", "/console/do/queue.discard", 403)] == [
        (line["principal"], line["path"], line["status"]) for line in refused
    ]
    assert {"127.0.0.1"} == {line["address"] for line in refused}
    assert "a wrong secret" not in repr(lines)


# Of all tenants together: a conflict, a blocker, the walk of every bucket, the audit, what silver failed on.
OF_ALL = {"audit.run", "ticks.redrive"}


async def test_another_tenants_session_changes_nothing_from_any_page() -> None:
    """Every action there is, on things of acme: 403 for a rival with all rights, and the trail has no entry of it."""
    secrets = {tenant: f"0123456789abcdef-{tenant}" for tenant in ("acme", "rival")}
    keys = [{"name": name, "secret": secrets[name], "rights": ["*"], "tenant": name} for name in secrets]
    async with site(keys=keys) as here:
        actions = {name: action for page in here.console.data.pages.values() for name, action in page.actions.items()}
        seen: dict[str, dict[str, int]] = {}
        for who, secret in secrets.items():
            await here.browser.sign_in(secret)
            await here.browser.open("/queue")
            seen[who] = {}
            for name, action in actions.items():
                form = {field: "1" if field in NUMBERS else "acme-x" for field in action.fields}
                answer = await here.browser.post(f"/console/do/{name}", {**form, "reason": "why"})
                seen[who][name] = answer.status_code
        entries = await here.context.trail.latest()

    assert len(actions) >= 17
    assert {403} == set(seen["rival"].values())
    assert set() == {entry.who for entry in entries} & {"rival"}
    assert not {401, 500} & set(seen["acme"].values())
    closed = {name for name, status in seen["acme"].items() if status == 403}
    assert OF_ALL <= closed and not closed & {"log.seek", "log.produce", "queue.discard", "ticks.replay"}


async def test_moving_a_group_needs_the_right_of_the_group() -> None:
    """Who may consume a topic does not thereby skip the records of another program."""
    rights = ["console:read", "log:*:orders", "log:group:mine"]
    async with site(keys=[{"name": "operator", "secret": OPERATOR, "rights": rights}]) as here:
        await here.browser.sign_in(OPERATOR)
        await here.browser.open("/log")
        form = {"topic": "orders", "partition": "0", "offset": "1", "reason": "why"}
        theirs = await here.browser.post("/console/do/log.seek", {**form, "group": "theirs"})
        mine = await here.browser.post("/console/do/log.seek", {**form, "group": "mine"})
        dialog = await here.browser.client.get("/console/ask/log.seek?topic=orders&group=theirs&partition=0&offset=1")

    assert (403, True) == (theirs.status_code, "log:group:theirs" in theirs.text)
    assert 403 != mine.status_code
    assert "operator may not log:group:theirs" in dialog.text


def keys_of(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "secret": f"0123456789abcdef-{name}", "rights": ["*"]} for name in names]


def keyring(clock: ManualClock, *names: str) -> Keyring:
    return Keyring.of(GatewaySettings.of({"keys": keys_of(*names)}), clock)


def requested(cookie: str, **headers: str) -> RequestHead:
    given = {"cookie": f"a=b; {sessions.COOKIE}={cookie}", "host": "127.0.0.1", **headers}
    return RequestHead([(name.encode(), value.encode()) for name, value in given.items()])


async def test_a_session_ends_with_its_time_and_with_its_key() -> None:
    """A session lasts as long as its key, and not longer than its time."""
    clock = ManualClock()
    ring = keyring(clock, "ann", "bob")
    session = ring.sign_in("0123456789abcdef-ann", "nonce")
    scope = {"method": "GET", "path": "/metrics"}

    assert ring.principal(scope, requested(session)).name == "ann"
    ring.set_keys(configured_keys(GatewaySettings.of({"keys": keys_of("bob")})))
    with pytest.raises(Exception, match="no key"):
        ring.principal(scope, requested(session))
    ring.set_keys(configured_keys(GatewaySettings.of({"keys": keys_of("ann")})))
    assert ring.principal(scope, requested(session)).name == "ann"
    await clock.advance(sessions.SESSION_S + 1)
    with pytest.raises(Exception, match="no key"):
        ring.principal(scope, requested(session))


async def test_signing_out_ends_the_session_and_not_only_the_cookie() -> None:
    """Whoever copied the cookie is signed out too."""
    async with site(keys=KEYS) as here:
        await here.browser.sign_in(OPERATOR)
        copied = here.browser.client.cookies[sessions.COOKIE]
        sent = {"cookie": f"{sessions.COOKIE}={copied}", "accept": "text/html"}
        before = await here.browser.client.get("/status.json", headers=sent)
        await here.browser.post("/logout")
        here.browser.client.cookies.clear()
        after = await here.browser.client.get("/status.json", headers=sent)

    assert (200, 401) == (before.status_code, after.status_code)


def test_a_write_by_session_names_its_origin_and_token() -> None:
    clock = ManualClock()
    ring = keyring(clock, "ann")
    session = ring.sign_in("0123456789abcdef-ann", "nonce")
    scope, token = {"method": "POST", "path": "/v1/produce"}, sessions.token_of(session)

    assert ring.principal(scope, requested(session, **{"x-csrf-token": token, "origin": ADDRESS})).name == "ann"
    for wrong in ({}, {"x-csrf-token": "f" * 64}, {"x-csrf-token": token, "origin": "http://evil.example"}):
        with pytest.raises(Exception, match="no key"):
            ring.principal(scope, requested(session, **wrong))
