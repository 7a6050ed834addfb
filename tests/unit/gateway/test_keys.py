"""Keys in the bucket: hashed, shared by all gateways within seconds, with an end; and sessions that end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from lakebed.core.clock import ManualClock, now_ms, settle
from lakebed.core.context import Context
from lakebed.core.errors import AlreadyExists, Invalid, Unavailable
from lakebed.core.retry import RETRY_BASE_S, RETRY_CAP_S
from lakebed.core.settings import Contradiction, load
from lakebed.gateway import sessions
from lakebed.gateway.app import Gateway, build
from lakebed.gateway.auth import read_keys
from lakebed.gateway.key_watch import AGAIN_S, EVERY_S, USED_EVERY_S
from lakebed.gateway.keys import (
    LIST_KEY,
    SESSIONS_KEY,
    SESSIONS_MAX,
    KeyList,
    KeyRecord,
    SessionList,
    SignedIn,
    added,
    at_ms,
    digest,
    kept,
    key_list,
    rotated,
    session_list,
    without,
)
from lakebed.gateway.state import state_of
from lakebed.gateway.tls import PLAIN, checks
from lakebed.wiring.parts import sections
from support.certificates import Authority
from support.counting_store import count_requests
from support.gateway_fixtures import Sample, client_of, context_with

SECRET = "0123456789abcdef-ann"
OTHER = "0123456789abcdef-ann-2"
ANN = KeyRecord("ann", digest(SECRET.encode()).hex(), ("*",))


@asynccontextmanager
async def running(context: Context) -> AsyncIterator[Gateway]:
    """A gateway whose lifespan runs: its keys are watched."""
    app = build(context, [Sample()])
    async with app.router.lifespan_context(app):
        yield app


def beside(context: Context) -> Context:
    """Another gateway on the same bucket."""
    return msgspec.structs.replace(context, node="node-2")


async def status(app: Gateway, secret: str = SECRET, path: str = "/sample") -> int:
    async with client_of(app) as client:
        return (await client.get(path, headers={"x-api-key": secret})).status_code


async def change(context: Context, decide: Callable[[Any], Any]) -> None:
    await key_list(context).change(lambda known: (decide(known), None))


async def test_a_key_of_the_bucket_works_and_is_revoked_on_every_gateway_within_seconds() -> None:
    """No gateway restarts; a gateway that had keys is not open when the last one is revoked."""
    clock = ManualClock()
    context = context_with(clock)
    await change(context, lambda known: added(known, ANN))

    async with running(context) as one, running(beside(context)) as two:
        before = [await status(one), await status(two)]
        await change(context, lambda known: rotated(known, "ann", digest(OTHER.encode()).hex()))
        await clock.advance(EVERY_S + 0.1)
        turned = [await status(one), await status(two), await status(one, OTHER)]
        await change(context, lambda known: without(known, "ann"))
        await clock.advance(EVERY_S + 0.1)
        after = [await status(one, OTHER), await status(two, OTHER)]

    assert [200, 200] == before
    assert [401, 401, 200] == turned
    assert [401, 401] == after


async def test_a_gateway_that_starts_after_the_last_key_was_revoked_is_closed() -> None:
    """The bucket has a list of keys, an empty one: nobody is let in, on loopback either. The answer says how to add a
    key; the next gateway without a list is open."""
    clock = ManualClock()
    context = context_with(clock)
    await change(context, lambda known: added(known, ANN))
    await change(context, lambda known: without(known, "ann"))

    async with running(beside(context)) as late:
        async with client_of(late) as client:
            answers = [await client.get("/sample"), await client.get("/sample", headers={"x-api-key": SECRET})]
        await change(context, lambda known: added(known, ANN))
        await clock.advance(EVERY_S + 0.1)
        recovered = await status(late)
        await context.store.delete(LIST_KEY)
        await clock.advance(EVERY_S + 0.1)
        closed = await status(late, "none")
    async with running(beside(context)) as reopened:
        opened = await status(reopened, "none")

    assert [401, 401] == [each.status_code for each in answers]
    assert all("lakebed keys add" in each.json()["hint"] for each in answers)
    assert (200, 401, 200) == (recovered, closed, opened)


async def test_a_key_that_is_added_closes_an_open_gateway() -> None:
    """On loopback without keys everybody is let in, until the bucket has a list of keys."""
    clock = ManualClock()
    context = context_with(clock)

    async with running(context) as app:
        before = await status(app, "none")
        await change(context, lambda known: added(known, ANN))
        await clock.advance(EVERY_S + 0.1)
        after = [await status(app, "none"), await status(app)]

    assert (200, [401, 200]) == (before, after)


async def test_neither_secret_nor_cookie_is_in_the_bucket_and_what_is_there_lets_nobody_in() -> None:
    """Whoever reads the bucket finds hashes, and a hash is neither a key nor a session."""
    context = context_with(ManualClock())
    await change(context, lambda known: added(known, ANN))

    async with running(context) as app:
        state = state_of(app)
        cookie = state.keyring.sign_in(SECRET, "a" * 40)
        await state.key_watch.opened(cookie)
        stored = b"".join([bytes((await context.store.get(key)).data) for key in (LIST_KEY, SESSIONS_KEY)])
        hashed = (await session_list(context).read()).value.sessions
        async with client_of(app) as client:
            seal = (await session_list(context).read()).value.seal
            forged = [
                f"{sessions.COOKIE}=v3.99999999999.{value}.{seal[:32]}"
                for value in (*hashed, ANN.sha256, ANN.fingerprint)
            ]
            answers = [(await client.get("/sample", headers={"cookie": each})).status_code for each in forged]

    assert SECRET.encode() not in stored and cookie.encode() not in stored
    assert 1 == len(hashed)
    assert {401} == {*answers, await status(app, ANN.sha256)}


async def test_a_session_is_known_to_all_gateways_and_ends_with_its_logout() -> None:
    """A browser moves between gateways; after it signed out, its cookie is worth nothing on any of them."""
    clock = ManualClock()
    context = context_with(clock)
    await change(context, lambda known: added(known, ANN))

    async with (
        running(context) as one,
        running(beside(context)) as two,
        client_of(one) as here,
        client_of(two) as there,
    ):
        await clock.advance(2)
        cookie = state_of(one).keyring.sign_in(SECRET, "a" * 40)
        await state_of(one).key_watch.opened(cookie)
        sent = {"cookie": f"{sessions.COOKIE}={cookie}"}
        before = [(await client.get("/sample", headers=sent)).status_code for client in (here, there)]
        await state_of(two).key_watch.ended(cookie)
        at_once = (await there.get("/sample", headers=sent)).status_code
        await clock.advance(EVERY_S + 0.1)
        after = [(await client.get("/sample", headers=sent)).status_code for client in (here, there)]

    assert [200, 200] == before
    assert (401, [401, 401]) == (at_once, after)


async def test_a_strangers_cookie_costs_no_read_and_one_that_ended_costs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cookie proves that a gateway made it; who signed out and still sends it causes one read a gateway."""
    clock = ManualClock()
    context = context_with(clock)
    await change(context, lambda known: added(known, ANN))

    async with running(context) as one, running(beside(context)) as two, client_of(two) as client:
        cookie = state_of(one).keyring.sign_in(SECRET, "a" * 40)
        await state_of(one).key_watch.opened(cookie)
        asked = count_requests(monkeypatch, context.store)

        async def sent(value: str) -> tuple[int, list[str]]:
            asked.clear()
            answer = await client.get("/sample", headers={"cookie": f"{sessions.COOKIE}={value}"})
            return answer.status_code, list(asked)

        forged = [await sent(cookie[:-32] + f"{number:032x}") for number in range(20)]
        opened = await sent(cookie)
        await state_of(one).key_watch.ended(cookie)
        await clock.advance(EVERY_S + 0.1)
        ended = [await sent(cookie) for _ in range(3)]

    assert [(401, [])] * 20 == forged
    assert (200, ["get"]) == opened
    assert [(401, ["get"]), (401, []), (401, [])] == ended


async def test_requests_that_bring_one_ended_cookie_together_cost_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page asks for many things at once. A session that was opened since is found by the same read."""
    clock = ManualClock()
    context = context_with(clock)
    await change(context, lambda known: added(known, ANN))
    go, reads, get = asyncio.Event(), list[str](), context.store.get

    async def slow(key: str) -> Any:
        reads.append(key)
        await go.wait()
        return await get(key)

    async with running(context) as one, running(beside(context)) as two, client_of(two) as client:
        ended, live = (state_of(one).keyring.sign_in(SECRET, nonce * 40) for nonce in "ab")
        await state_of(one).key_watch.opened(live)

        async def sent(value: str) -> int:
            return (await client.get("/sample", headers={"cookie": f"{sessions.COOKIE}={value}"})).status_code

        monkeypatch.setattr(context.store, "get", slow)
        waiting = [asyncio.create_task(sent(value)) for value in (ended, ended, ended, live, live, ended)]
        await settle()
        go.set()
        answers = await asyncio.gather(*waiting)
        monkeypatch.undo()

    assert [401, 401, 401, 200, 200, 401] == answers
    assert [SESSIONS_KEY] == reads


async def test_a_read_that_ends_behind_a_later_one_brings_no_ended_session_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The regular read is slow and began before the sign-out; one for another cookie began after it, and ended."""
    clock = ManualClock()
    context = context_with(clock)
    await change(context, lambda known: added(known, ANN))
    go, get = asyncio.Event(), context.store.get
    waiting = list[str]()

    async def slow(key: str) -> Any:
        found = await get(key)
        if key == SESSIONS_KEY and not waiting:
            waiting.append(key)
            await go.wait()
        return found

    async with running(context) as app, running(beside(context)) as other, client_of(app) as client:
        cookie = state_of(app).keyring.sign_in(SECRET, "a" * 40)
        await state_of(app).key_watch.opened(cookie)
        sent = {"cookie": f"{sessions.COOKIE}={cookie}"}
        monkeypatch.setattr(context.store, "get", slow)
        await clock.advance(EVERY_S)
        assert [SESSIONS_KEY] == waiting
        await state_of(app).key_watch.ended(cookie)
        await state_of(app).key_watch.find_session(state_of(other).keyring.sign_in(SECRET, "b" * 40))
        go.set()
        await settle()
        after = (await client.get("/sample", headers=sent)).status_code
        monkeypatch.undo()

    assert 401 == after


async def test_while_the_store_is_away_unknown_cookies_cost_a_read_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not one for each request: a store that is overloaded would get more of them the longer it is."""
    clock = ManualClock()
    context = context_with(clock)
    await change(context, lambda known: added(known, ANN))
    reads = list[str]()

    async def away(key: str) -> Any:
        reads.append(key)
        raise Unavailable("the store is away")

    async with running(context) as one, running(beside(context)) as two, client_of(two) as client:
        cookies = [state_of(one).keyring.sign_in(SECRET, nonce * 40) for nonce in "abc"]
        for cookie in cookies:
            await state_of(one).key_watch.opened(cookie)

        async def sent(value: str) -> int:
            return (await client.get("/sample", headers={"cookie": f"{sessions.COOKIE}={value}"})).status_code

        with monkeypatch.context() as patched:
            patched.setattr(context.store, "get", away)
            during = [*await asyncio.gather(*(sent(value) for value in cookies * 2)), await sent(cookies[0])]
            at_first = len(reads)
            await clock.advance(AGAIN_S)
            during += [await sent(value) for value in cookies]
        await clock.advance(AGAIN_S)
        after = [await sent(value) for value in cookies]

    assert {401} == set(during)
    assert (1, 2) == (at_first, len(reads))
    assert [200, 200, 200] == after


@pytest.mark.parametrize(
    "value",
    [
        "v1.x.\u00b2.n.s".encode("latin-1"),
        b"v3.1.a." + b"\xe9" * 32,
        b"v3.99999999999." + b"a" * 40 + b"." + b"\xff" * 32,
        b"v3....",
        b"\x80",
        b"",
        b"a" * 5000,
    ],
)
async def test_a_cookie_that_is_garbage_is_401(value: bytes) -> None:
    """Other digits, other characters, no form at all: nobody, and no error of ours; to change something neither."""
    context = context_with(ManualClock())
    await change(context, lambda known: added(known, ANN))
    headers = [(b"cookie", sessions.COOKIE.encode() + b"=" + value), (b"x-csrf-token", value)]

    async with running(context) as app, client_of(app) as client:
        answers = [await client.request(method, "/sample", headers=headers) for method in ("GET", "POST")]

    assert [401, 401] == [answer.status_code for answer in answers]


async def test_gateways_agree_on_one_seal_and_a_read_only_one_makes_none() -> None:
    """Whoever starts first makes it, once in the life of the lake; it stays when keys are used and sessions end."""
    context = context_with(ManualClock())
    await change(context, lambda known: added(known, ANN))
    read_only = context_with(context.clock, read_only=True)
    read_only = msgspec.structs.replace(read_only, store=context.store)

    async with running(read_only) as app:
        assert b"" == state_of(app).keyring.sessions.seal
        await status(app)
    assert SessionList() == (await session_list(context).read()).value  # nor does it note who used a key
    async with running(context) as one, running(beside(context)) as two:
        seals = {state_of(app).keyring.sessions.seal for app in (one, two)}
        await status(one)
    stored = (await session_list(context).read()).value

    assert {stored.seal.encode()} == seals and 40 == len(stored.seal)
    assert ["ann"] == list(stored.used)


async def test_a_session_ends_with_the_secret_it_was_opened_with() -> None:
    """Rotating a key ends its sessions: whoever stole one is out too."""
    clock = ManualClock()
    context = context_with(clock)
    await change(context, lambda known: added(known, ANN))

    async with running(context) as app, client_of(app) as client:
        cookie = state_of(app).keyring.sign_in(SECRET, "a" * 40)
        await state_of(app).key_watch.opened(cookie)
        sent = {"cookie": f"{sessions.COOKIE}={cookie}"}
        before = (await client.get("/sample", headers=sent)).status_code
        await change(context, lambda known: rotated(known, "ann", digest(OTHER.encode()).hex()))
        await clock.advance(EVERY_S + 0.1)
        after = (await client.get("/sample", headers=sent)).status_code

    assert (200, 401) == (before, after)


async def test_a_key_ends_with_its_expiry() -> None:
    """To the millisecond, without a change of the list."""
    clock = ManualClock()
    context = context_with(clock)
    ending = msgspec.structs.replace(ANN, expires_ms=now_ms(clock) + 1000)
    await change(context, lambda known: added(known, ending))

    async with running(context) as app:
        before = await status(app)
        await clock.advance(1.0)
        after = await status(app)

    assert (200, 401) == (before, after)


async def test_the_last_use_of_a_key_is_stored() -> None:
    """Within a minute, so that an operator sees which keys can go."""
    clock = ManualClock()
    context = context_with(clock)
    await change(context, lambda known: added(known, ANN))

    async with running(context) as app:
        await clock.advance(EVERY_S + 0.1)
        await status(app)
        await clock.advance(USED_EVERY_S + EVERY_S)
        await asyncio.sleep(0)
        used = (await session_list(context).read()).value.used

    assert ["ann"] == list(used)
    assert now_ms(clock) - used["ann"] <= (USED_EVERY_S + EVERY_S) * 1000


async def test_the_use_of_a_key_is_stored_once_the_store_takes_writes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that was used once, while the store refused, is not shown as one that nobody uses."""
    clock = ManualClock()
    context = context_with(clock)
    await change(context, lambda known: added(known, ANN))

    async with running(context) as app:
        await clock.advance(EVERY_S + 0.1)
        await status(app)

        async def refused(key: str, *_: Any) -> Any:
            raise Unavailable("this path refuses writes")

        with monkeypatch.context() as patched:
            patched.setattr(context.store, "replace", refused)
            await clock.advance(USED_EVERY_S + EVERY_S)
        during = (await session_list(context).read()).value.used
        await clock.advance(USED_EVERY_S + EVERY_S)
        after = (await session_list(context).read()).value.used

    assert ([], ["ann"]) == (list(during), list(after))


async def test_a_file_that_changes_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    """Keys in a file are reloaded too; a mistake in it is logged and locks nobody out."""
    clock = ManualClock()
    file = tmp_path / "keys.toml"
    write_keys(file, SECRET)

    async with running(context_with(clock, keys_file=str(file))) as app:
        before = [await status(app), await status(app, OTHER)]
        write_keys(file, OTHER)
        await clock.advance(EVERY_S + 0.1)
        after = [await status(app), await status(app, OTHER)]
        file.write_text("keys = 1")
        with capture_logs() as lines:
            await clock.advance(EVERY_S + 0.1)
            broken = await status(app, OTHER)

    assert ([200, 401], [401, 200], 200) == (before, after, broken)
    assert ["keys were not refreshed"] == [line["event"] for line in lines if line["log_level"] == "warning"]


async def test_a_file_of_keys_whose_mode_was_put_right_is_read_again(tmp_path: Path) -> None:
    """It was refused because others could read it: `chmod` changes neither its time nor its size, and is enough."""
    clock = ManualClock()
    file = tmp_path / "keys.toml"
    write_keys(file, SECRET)

    async with running(context_with(clock, keys_file=str(file))) as app:
        write_keys(file, OTHER, 0o644)
        await clock.advance(EVERY_S + 0.1)
        refused = [await status(app), await status(app, OTHER)]
        file.chmod(0o600)
        await clock.advance(EVERY_S + 0.1)
        after = [await status(app), await status(app, OTHER)]

    assert ([200, 401], [401, 200]) == (refused, after)


async def test_a_start_waits_for_keys_that_cannot_be_read_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process does not end, and nobody gets in with keys that are not known."""
    clock = ManualClock()
    context = context_with(clock)
    await change(context, lambda known: added(known, ANN))
    read, refusals = context.store.get, 2

    async def away(key: str) -> Any:
        nonlocal refusals
        if key == LIST_KEY and refusals:
            refusals -= 1
            raise Unavailable("the store is away")
        return await read(key)

    monkeypatch.setattr(context.store, "get", away)

    async def started() -> list[int]:
        async with running(context) as app:
            return [await status(app), await status(app, OTHER)]

    starting = asyncio.create_task(started())
    for _ in range(2):
        await clock.advance(RETRY_BASE_S + RETRY_CAP_S)

    assert ([200, 401], 0) == (await starting, refusals)


async def test_a_store_that_is_away_locks_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys that are known stay until the list can be read again."""
    clock = ManualClock()
    context = context_with(clock)
    await change(context, lambda known: added(known, ANN))

    async with running(context) as app:

        async def away(key: str) -> Any:
            raise Unavailable("the store is away")

        monkeypatch.setattr(context.store, "get", away)
        await clock.advance(EVERY_S + 0.1)

        assert 200 == await status(app)
        monkeypatch.undo()


async def test_without_the_bucket_a_gateway_starts_with_its_configured_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others are refused until the bucket can be read: nobody gets in with an unknown key."""
    clock, file = ManualClock(), tmp_path / "keys.toml"
    write_keys(file, SECRET)
    context = context_with(clock, keys_file=str(file))

    async def away(key: str) -> Any:
        raise Unavailable("the store is away")

    monkeypatch.setattr(context.store, "get", away)
    async with running(context) as app:
        assert [200, 401] == [await status(app), await status(app, OTHER)]
        monkeypatch.undo()


def write_keys(file: Path, secret: str, mode: int = 0o600) -> None:
    file.write_text(f'[[keys]]\nname = "ann"\nsecret = "{secret}"\nrights = ["*"]\n')
    file.chmod(mode)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_plain_text_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    """The error says how to fix it and shows no secret."""
    file = tmp_path / "keys.toml"
    write_keys(file, SECRET, mode)

    with pytest.raises(Invalid, match="plain text") as caught:
        read_keys(file)

    assert "chmod 600" in caught.value.hint and SECRET not in repr(caught.value)
    file.write_text(f'[[keys]]\nname = "ann"\nsha256 = "{ANN.sha256}"\nrights = ["*"]\n')
    assert ("ann",) == tuple(key.name for key in read_keys(file))


async def test_a_settings_file_with_plain_text_keys_that_others_may_read_stops_the_start(tmp_path: Path) -> None:
    file = tmp_path / "lakebed.toml"
    file.write_text(f'[gateway]\nkeys = [{{name = "ann", secret = "{SECRET}", rights = ["*"]}}]\n')
    context = msgspec.structs.replace(context_with(ManualClock()), settings=load(sections(), file=file))

    file.chmod(0o644)
    with pytest.raises(Invalid, match="plain text"):
        async with running(context):
            pass
    file.chmod(0o600)
    async with running(context) as app:
        assert 200 == await status(app)


async def test_a_gateway_for_others_does_not_start_without_a_key() -> None:
    """A key in the bucket is enough."""
    context = context_with(ManualClock(), host="0.0.0.0")

    with pytest.raises(Contradiction, match="needs at least one key"):
        async with running(context):
            pass
    await change(context, lambda known: added(known, ANN))
    async with running(context) as app:
        assert 401 == await status(app, "none")


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (KeyRecord("", ANN.sha256), "name"),
        (KeyRecord("a\nb", ANN.sha256), "name"),
        (KeyRecord("a", "xyz"), "hex"),
        (KeyRecord("a"), "neither"),
        (KeyRecord("a", ANN.sha256, tenant="a.b"), "tenant"),
        (KeyRecord("a", ANN.sha256, tenant="A"), "tenant"),
    ],
)
async def test_a_key_that_could_be_mistaken_for_another_is_not_added(key: KeyRecord, why: str) -> None:
    context = context_with(ManualClock())

    with pytest.raises(Invalid, match=why):
        await change(context, lambda known: added(known, key))


async def test_refusals_are_logged_with_who_and_from_where_and_sampled() -> None:
    """Ten in ten seconds, and how many were left out: a stranger cannot fill the disk."""
    clock = ManualClock()
    keys = [{"name": "ann", "secret": SECRET, "rights": ["other:*"]}]
    app = build(context_with(clock, keys=keys), [Sample()])

    async with client_of(app) as client:
        with capture_logs() as lines:
            await client.post("/sample", headers={"x-api-key": SECRET}, content=b"x")
            for _ in range(30):
                await client.get("/sample", headers={"x-api-key": "wrong"})
            await clock.advance(11)
            await client.get("/sample")
        refused = [line for line in lines if line["event"] == "request refused"]

    assert ("ann", "127.0.0.1", 403) == tuple(refused[0][name] for name in ("principal", "address", "status"))
    assert ("nobody", 401) == tuple(refused[1][name] for name in ("principal", "status"))
    assert [10, 21] == [len(refused) - 1, refused[-1]["left_out"]]
    assert {"info"} == {line["log_level"] for line in refused}
    assert SECRET not in repr(lines) and "wrong" not in repr(lines)


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "tls_elsewhere": True}, False),
        ({"host": "127.0.0.1"}, False),
    ],
)
async def test_keys_in_plain_text_are_warned_of_in_log_health_and_doctor(settings: dict[str, Any], warns: bool) -> None:
    """A gateway that others reach without TLS. Strangers see that it is degraded, and not why."""
    keys = [{"name": "ann", "secret": SECRET, "rights": ["*"]}]
    context = context_with(ManualClock(), keys=keys, **settings)

    with capture_logs() as lines:
        async with running(context) as app, client_of(app) as client:
            known = (await client.get("/healthz", headers={"x-api-key": SECRET})).json()
            stranger = (await client.get("/healthz")).json()
    (diagnosis,) = await checks(context)

    found = [line for line in lines if line["log_level"] == "warning" and PLAIN in line["event"]]
    assert warns == bool(found) and (not warns or "gateway.tls_cert" in found[0]["fix"])
    assert ("degraded" if warns else "ok") == known["components"]["gateway"]["status"]
    assert warns == (PLAIN in known["components"]["gateway"]["detail"])
    assert {"status": known["status"]} == stranger
    assert ("warn" if warns else "pass") == diagnosis.verdict
    assert warns == (PLAIN in diagnosis.seen and "gateway.tls_cert" in diagnosis.fix)


async def test_a_gateway_with_a_certificate_warns_of_nothing(tmp_path: Path) -> None:
    cert, key = Authority(tmp_path).sign("gateway")
    keys = [{"name": "ann", "secret": SECRET, "rights": ["*"]}]
    context = context_with(ManualClock(), keys=keys, host="0.0.0.0", tls_cert=str(cert), tls_key=str(key))

    with capture_logs() as lines:
        async with running(context):
            pass

    assert [] == [line for line in lines if line["log_level"] == "warning"]
    assert ["pass"] == [diagnosis.verdict for diagnosis in await checks(context)]


async def test_with_too_many_sessions_the_oldest_end() -> None:
    """Who signs in now is let in, whoever forgot to sign out; sessions that are over do not count."""
    context = context_with()
    now_s = now_ms(context.clock) // 1000
    opened = {f"h{number}": SignedIn("ann", "f", now_s + 1 + number) for number in range(SESSIONS_MAX + 2)}
    over = {"over": SignedIn("ann", "f", now_s)}

    left = kept(SessionList(over | opened, {"ann": 5}), context)

    assert (SESSIONS_MAX, {"ann": 5}) == (len(left.sessions), left.used)
    assert {"h0", "h1", "over"} == (over | opened).keys() - left.sessions.keys()


@pytest.mark.parametrize(
    ("text", "hours"), [("1970-01-02", 48), ("1970-01-02T12:00:00Z", 36), ("1970-01-02T12:00:00+02:00", 34)]
)
def test_a_day_ends_at_its_end(text: str, hours: int) -> None:
    """A key that expires on a day works on that day, in UTC."""
    assert 0 <= hours * 3_600_000 - at_ms(text) <= 1000


def test_a_certificate_has_one_key() -> None:
    """Whose rights a client certificate has must not depend on the order of a list."""
    known = added(KeyList(), KeyRecord("a", rights=("*",), certificate="agent-7"))

    with pytest.raises(AlreadyExists, match="'a' has this certificate"):
        added(known, KeyRecord("b", rights=("queue:*",), certificate="agent-7"))
    assert 3 == len(added(added(known, ANN), KeyRecord("c", digest(b"c").hex(), ("*",))).keys)


async def test_a_session_of_another_gateway_is_not_locked_out_by_a_store_that_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its cookie is looked for again: only a bucket that was read and does not have it makes it a missing one."""
    clock = ManualClock()
    context = context_with(clock)
    await change(context, lambda known: added(known, ANN))

    async with running(context) as one, running(beside(context)) as two, client_of(two) as client:
        cookie = state_of(one).keyring.sign_in(SECRET, "a" * 40)
        await state_of(one).key_watch.opened(cookie)
        sent = {"cookie": f"{sessions.COOKIE}={cookie}"}

        async def away(key: str) -> Any:
            raise Unavailable("the store is away")

        with monkeypatch.context() as patched:
            patched.setattr(context.store, "get", away)
            during = (await client.get("/sample", headers=sent)).status_code
        await clock.advance(AGAIN_S)
        after = (await client.get("/sample", headers=sent)).status_code

    assert (401, 200) == (during, after)


async def test_a_session_that_the_store_refuses_is_known_where_it_was_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the next reads of the list too, until it is signed out; a store that refuses writes is when it is needed."""
    clock = ManualClock()
    context = context_with(clock)
    await change(context, lambda known: added(known, ANN))

    async with running(context) as app, client_of(app) as client:

        async def refused(key: str, *_: Any) -> Any:
            raise Unavailable("this path refuses writes")

        monkeypatch.setattr(context.store, "replace", refused)
        cookie = state_of(app).keyring.sign_in(SECRET, "a" * 40)
        await state_of(app).key_watch.opened(cookie)
        sent = {"cookie": f"{sessions.COOKIE}={cookie}"}
        await clock.advance(EVERY_S + 0.1)
        later = (await client.get("/sample", headers=sent)).status_code
        await state_of(app).key_watch.ended(cookie)
        await clock.advance(EVERY_S + 0.1)
        after = (await client.get("/sample", headers=sent)).status_code
        monkeypatch.undo()

    assert (200, 401) == (later, after)
