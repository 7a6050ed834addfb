"""What the console makes of an address, a form and a cookie: bounded, checked, and only for our own pages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import QueryParams

from lakebed.console import pages as pages_module
from lakebed.console import routes as routes_module
from lakebed.console.data import PageData
from lakebed.console.live import VIEWERS_MAX
from lakebed.console.page import (
    DAYS_AHEAD_MAX,
    FAST_S,
    FIELD_CHARS_MAX,
    POLICY_CHARS_MAX,
    SCAN_S,
    SLOW_S,
    TEXT_CHARS_MAX,
    Action,
    DataSource,
    PageQuery,
)
from lakebed.console.pages import ACTIONS, DOCTOR_EVERY_S, DoctorRunner, StatusPage
from lakebed.console.rendering import CSS, FILES, JAVASCRIPT, SVG
from lakebed.console.requests import demand_origin, form_of, inside, is_secure
from lakebed.console.routes import REASON_CHARS_MAX
from lakebed.console.samples import PATIENCE_S, TIMEOUT_S
from lakebed.core.auth import ANYBODY
from lakebed.core.context import Diagnosis
from lakebed.core.errors import Denied, Invalid, Unavailable
from lakebed.core.http import ServerState
from lakebed.core.settings import load
from lakebed.gateway import sessions
from lakebed.lifecycle.page import PREVIEW_S
from lakebed.log.page import REPORT_S
from lakebed.wiring.parts import sections
from support.console_site import KEYS, OPERATOR, WATCHER, site
from support.tick_fixtures import context_of


def query(**params: str) -> PageQuery:
    return PageQuery(QueryParams(params))


@pytest.mark.parametrize(
    ("given", "expected"),
    [("", None), ("  ", None), ("0", 0), (" 17 ", 17), ("9" * 18, 10**18 - 1)],
)
def test_an_offset_is_a_whole_number_or_none(given: str, expected: int | None) -> None:
    assert expected == query(offset=given).whole("offset")
    assert query().whole("offset") is None


@pytest.mark.parametrize("given", ["-1", "1.5", "x", "9" * 19, "1e3", "²"])
def test_what_is_no_offset_is_invalid_by_its_name(given: str) -> None:
    with pytest.raises(Invalid, match="offset="):
        query(offset=given).whole("offset")


def test_text_of_an_address_is_cut_and_a_policy_is_not() -> None:
    """Half a policy would be another one: it is refused."""
    assert "x" * TEXT_CHARS_MAX == query(topic="x" * (TEXT_CHARS_MAX + 1)).text("topic")
    assert "" == query().text("topic")
    assert "p" * POLICY_CHARS_MAX == query(policy=f" {'p' * POLICY_CHARS_MAX}\n").policy("policy")
    with pytest.raises(Invalid, match="longer than 8000"):
        query(policy="p" * (POLICY_CHARS_MAX + 1)).policy("policy")


@pytest.mark.parametrize(("given", "expected"), [("", 0.0), ("0", 0.0), ("1.5", 1.5), ("3650", DAYS_AHEAD_MAX)])
def test_days_ahead_are_a_number_within_ten_years(given: str, expected: float) -> None:
    assert expected == query(days=given).days("days")


@pytest.mark.parametrize("given", ["-0.1", "3650.1", "x", "nan", "inf"])
def test_other_days_ahead_are_invalid(given: str) -> None:
    with pytest.raises(Invalid, match="days"):
        query(days=given).days("days")


@pytest.mark.parametrize(
    ("where", "goes"),
    [
        ("/queue?queue=a", "/queue?queue=a"),
        ("/", "/"),
        ("", "/"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("http://evil.example/", "/"),
        ("queue", "/"),
        ("/a\nb", "/"),
        ("/a\tb", "/"),
    ],
)
def test_after_signing_in_only_places_of_ours_are_gone_to(where: str, goes: str) -> None:
    assert goes == inside(where)


def requested(scheme: str = "http", **headers: str) -> Any:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return SimpleNamespace(url=SimpleNamespace(scheme=scheme), headers=given)


def test_a_cookie_is_for_https_alone_where_that_was_used() -> None:
    """By us, or by the proxy in front of us."""
    assert is_secure(requested("https"))
    assert is_secure(requested("http", x_forwarded_proto="https"))
    assert not is_secure(requested("http", x_forwarded_proto="http"))
    assert not is_secure(requested("http"))


@pytest.mark.parametrize(
    ("origin", "host", "ours"),
    [
        ("http://lake:80", "lake:80", True),
        ("https://lake:80", "lake:80", True),
        ("http://lake", "lake:80", False),
        ("http://evil", "lake", False),
        ("", "lake", False),
        ("null", "lake", False),
        ("http://", "", False),
    ],
)
def test_a_form_comes_from_our_own_origin(origin: str, host: str, ours: bool) -> None:
    if ours:
        demand_origin(requested(origin=origin, host=host))
        return
    with pytest.raises(Denied):
        demand_origin(requested(origin=origin, host=host))


async def test_a_form_has_few_fields_and_the_last_of_a_name_counts() -> None:
    def request(body: bytes) -> Any:
        async def read() -> bytes:
            return body

        return SimpleNamespace(body=read)

    assert {"a": "2", "b": ""} == await form_of(request(b"a=1&a=2&b="))
    for wrong in (b"\xff=1", b"&".join(b"f%d=1" % number for number in range(33))):
        with pytest.raises(Invalid):
            await form_of(request(wrong))


async def test_cookies_are_out_of_reach_of_scripts_and_last_as_long_as_the_session() -> None:
    async with site(keys=KEYS) as here:
        plain = (await here.browser.sign_in(OPERATOR)).headers["set-cookie"]
        secure = await here.browser.post("/login", {"key": OPERATOR}, **{"x-forwarded-proto": "https"})
        out = (await here.browser.post("/logout")).headers["set-cookie"]
        elsewhere = await here.browser.post("/login", {"key": OPERATOR}, origin="http://evil.example")
        away = await here.browser.post("/logout", origin="http://evil.example")

    assert f"Max-Age={sessions.SESSION_S}" in plain and "Secure" not in plain
    assert "Secure" in secure.headers["set-cookie"]
    assert out.startswith(f'{sessions.COOKIE}="";')
    assert (403, 403) == (elsewhere.status_code, away.status_code)


async def test_where_nobody_signs_in_a_page_has_a_cookie_of_its_own_once() -> None:
    """Its token belongs to it: another browser's is another."""
    async with site() as here:
        first = await here.browser.open("/queue")
        token = here.browser.token
        second = await here.browser.open("/queue")
        again = here.browser.token
        here.browser.client.cookies.clear()
        await here.browser.open("/queue")
        login = await here.browser.open("/login?next=/log")

    cookie = first.headers["set-cookie"]
    assert cookie.startswith("lakebed_page=") and "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
    assert "set-cookie" not in second.headers
    assert (token, True) == (again, here.browser.token != token)
    assert (303, "/log") == (login.status_code, login.headers["location"])


async def test_pages_are_not_kept_and_cannot_be_framed() -> None:
    async with site(keys=KEYS) as here:
        login = await here.browser.open("/login")
        away = await here.browser.open("/queue?queue=a b")

    for answer in (login, away):
        assert "no-store" == answer.headers["cache-control"]
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert "form-action 'self'" in answer.headers["content-security-policy"]
        assert ("same-origin", "same-origin") == (
            answer.headers["referrer-policy"],
            answer.headers["cross-origin-opener-policy"],
        )
    assert away.headers["location"].startswith("/login?next=%2Fqueue%3Fqueue%3Da")


async def test_a_twin_is_an_error_only_when_nothing_could_be_read() -> None:
    """One trouble beside a good answer is reported in the body. A denial is 403: a retry does not change it."""
    async with site(keys=KEYS) as here:
        await here.browser.sign_in(WATCHER)
        some = await here.browser.client.get("/status.json")
        none = await here.browser.client.get("/tables.json")
        queue = await here.browser.client.get("/queue.json")
        mixed = await here.browser.client.get("/overview.json")

    assert (200, 403, 200) == (some.status_code, none.status_code, queue.status_code)
    assert (200, "denied") == (mixed.status_code, mixed.json()["troubles"]["tables"]["code"])
    assert [] == mixed.json()["queues"]
    assert "denied" == none.json()["troubles"]["tables"]["code"]
    assert "no-store" == none.headers["cache-control"]
    assert "troubles" not in queue.json()


def add_action(patch: pytest.MonkeyPatch, action: Action) -> None:
    """An action `test.it` of the health page."""
    patch.setitem(ACTIONS, "test.it", action)
    patch.setitem(StatusPage.actions, "test.it", action)


async def test_a_reason_has_a_limit_and_a_field_is_cut() -> None:
    done: list[Any] = []

    async def do(look: Any, fields: Any, who: str, reason: str) -> str:
        done.append((fields, who, reason))
        return "well"

    action = Action("T", "B", ("a",), lambda f: "console:read", lambda f: "", do)
    async with site() as here:
        await here.browser.open("/queue")
        with pytest.MonkeyPatch.context() as patch:
            add_action(patch, action)
            fits = await here.browser.post(
                "/console/do/test.it", {"a": "x" * 2000, "b": "other", "reason": f"  {'r' * REASON_CHARS_MAX} "}
            )
            longer = await here.browser.post("/console/do/test.it", {"a": "", "reason": "r" * (REASON_CHARS_MAX + 1)})
        recorded_actions = await here.context.trail.latest()

    assert (200, 400) == (fits.status_code, longer.status_code)
    assert [({"a": "x" * FIELD_CHARS_MAX}, "anybody", "r" * REASON_CHARS_MAX)] == done
    assert [("well", "done")] == [
        (recorded_action.detail, recorded_action.outcome) for recorded_action in recorded_actions
    ]
    assert "lakebed-changed" == fits.headers["hx-trigger"]
    assert "hx-trigger" not in longer.headers


async def test_an_action_that_hangs_has_an_unknown_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: Any) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(routes_module, "ACT_S", 0.02)
    add_action(monkeypatch, Action("T", "B", (), lambda f: "console:read", lambda f: "", hang))
    async with site() as here:
        await here.browser.open("/queue")
        answer = await here.browser.post("/console/do/test.it", {"reason": "x"})

    assert 503 == answer.status_code
    assert "no answer within 0.02 s" in answer.text


async def test_after_an_action_everything_is_asked_for_again() -> None:
    async with site() as here:
        await here.browser.open("/lifecycle")
        entries = here.console.data.samples._entries
        fresh = [entry.until_s for entry in entries.values()]
        await here.browser.post("/console/do/lifecycle.walk", {"bucket": "landing"})

        assert any(fresh)
        assert {0.0} == {entry.until_s for entry in entries.values()}


async def test_assets_have_their_types_and_only_the_current_ones_are_kept() -> None:
    async with site() as here:
        for name, (file, kind) in FILES.items():
            url = here.console._assets.url(name)
            current = await here.browser.client.get(url)
            old = await here.browser.client.get(f"/console/assets/000000000000/{name}")
            assert (file.read_bytes(), kind) == (current.content, current.headers["content-type"])
            assert "immutable" in current.headers["cache-control"]
            assert ("no-cache", current.content) == (old.headers["cache-control"], old.content)
    kinds = {".css": CSS, ".js": JAVASCRIPT, ".svg": SVG}
    assert all(kind == kinds[file.suffix] for file, kind in FILES.values())


def pages() -> dict[str, Any]:
    """Each page by its name."""
    return {page.name: page for page in PageData(context_of()).pages.values()}


RIGHTS = {
    "status.health": ("console:read", 1.0), "status.doctor": ("console:read", 0.3),
    "batches.agents": ("batches:read", SLOW_S), "batches.recent": ("batches:read", SLOW_S),
    "batches.conflicts": ("batches:admin", FAST_S), "log.topics": ("log:read", FAST_S),
    "log.report": ("log:read", SCAN_S), "queue.queues": ("queue:read", FAST_S),
    "ticks.projects": ("ticks:read", SLOW_S), "ticks.silver": ("ticks:read", SLOW_S),
    "ticks.letters": ("ticks:read", SLOW_S), "tables.all_tables": ("tables:read", SLOW_S),
    "lifecycle.statuses": ("lifecycle:read:*", FAST_S), "lifecycle.rules": ("lifecycle:read:*", SLOW_S),
    "lifecycle.streams": ("lifecycle:read:*", FAST_S), "lifecycle.blockers": ("lifecycle:read:*", FAST_S),
    "audit.audit": ("audit:read", SLOW_S),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHTS)
def test_each_thing_needs_the_right_of_its_part_and_stays_fresh_as_long_as_agreed(name: str) -> None:
    page, _, method = name.partition(".")
    source: DataSource = getattr(pages()[page], method)()

    assert RIGHTS[name] == (source.right, source.ttl_s)


def test_operator_actions_are_for_those_who_may_read_the_trail() -> None:
    source = PageData(context_of()).operator_actions()

    assert ("trail:read", FAST_S) == (source.right, source.ttl_s)


def test_each_named_thing_needs_the_right_to_it() -> None:
    by_name = pages()
    log, queue, ticks = by_name["log"], by_name["queue"], by_name["ticks"]
    tables, lifecycle = by_name["tables"], by_name["lifecycle"]

    assert [
        "log:read:t", "log:read:t", "log:read:t", "log:consume:t", "queue:read:q", "queue:read:q", "queue:read:q",
        "ticks:read:o/p", "tables:read:x/y", "tables:read:x/y", "tables:read:x/y", "lifecycle:read:b",
        "lifecycle:read:b",
    ] == [
        source.right
        for source in (
            log.partitions("t"), log.groups("t"), log.segments("t", 0), log.records("t", 0, None),
            queue.waiting("q"), queue.letters("q"), queue.batch("q", "l"), ticks.tick("o", "p", "t"),
            tables.table("x/y"), tables.rows("x/y"), tables.snippets("x/y"),
            lifecycle.ledger("b", ""), lifecycle.preview("b", 0.0, ""),
        )
    ]  # fmt: skip


def test_a_dry_run_may_take_longer_than_a_read() -> None:
    by_name = pages()
    preview, report, queues = (
        by_name["lifecycle"].preview("b", 0.0, ""),
        by_name["log"].report(),
        by_name["queue"].queues(),
    )

    assert (PREVIEW_S, PREVIEW_S) == (preview.timeout_s, preview.patience_s)
    assert SCAN_S == preview.ttl_s == by_name["tables"].snippets("b").ttl_s
    assert (REPORT_S, 1.0) == (report.timeout_s, report.patience_s)
    assert (30.0, 30.0) == (PREVIEW_S, REPORT_S)
    assert (TIMEOUT_S, PATIENCE_S) == (queues.timeout_s, queues.patience_s)


# The doctor on a page.


async def ended(runner: DoctorRunner) -> None:
    async with asyncio.timeout(60):
        while runner.report.running:
            await asyncio.sleep(0.01)


async def test_the_doctor_runs_once_at_a_time_and_not_again_at_once(
    monkeypatch: pytest.MonkeyPatch, manual_clock: Any
) -> None:
    runs = 0

    async def examine(settings: Any, folder: Any, report_: Any) -> None:
        nonlocal runs
        runs += 1
        report_(Diagnosis("a", "pass", ""))
        report_(Diagnosis("b", "warn", ""))

    monkeypatch.setattr(pages_module, "_examine", examine)
    runner = DoctorRunner(load(sections()), manual_clock)
    began = runner.begin()
    assert runner.begin() is began and began.running
    await ended(runner)
    found = await runner.latest()
    await manual_clock.advance(DOCTOR_EVERY_S - 0.1)
    assert runner.begin() is found
    await manual_clock.advance(0.1)
    assert runner.begin().running
    await ended(runner)

    assert 2 == runs
    assert ["a", "b"] == [one.name for one in found.diagnoses]
    assert found.started_at_ms == found.ended_at_ms > 0


@pytest.mark.parametrize(
    ("error", "seen", "fix"),
    [
        (Unavailable("no store", hint="start it"), "no store", "start it"),
        (ValueError("secret"), "failed: ValueError", "run: lakebed doctor"),
    ],
)
async def test_a_doctor_that_fails_says_so(
    monkeypatch: pytest.MonkeyPatch, manual_clock: Any, error: Exception, seen: str, fix: str
) -> None:
    async def examine(*_: Any) -> None:
        raise error

    monkeypatch.setattr(pages_module, "_examine", examine)
    runner = DoctorRunner(load(sections()), manual_clock)
    runner.begin()
    await ended(runner)

    assert (Diagnosis("doctor", "fail", seen, fix),) == runner.report.diagnoses


async def test_the_doctor_looks_at_the_disk_of_the_stack(
    monkeypatch: pytest.MonkeyPatch, manual_clock: Any, tmp_path: Path
) -> None:
    """In the folder of the stack where one is named, else in the current one."""
    folders: list[Path] = []

    async def examine(settings: Any, folder: Path, report_: Any) -> None:
        folders.append(folder)

    monkeypatch.setattr(pages_module, "_examine", examine)
    monkeypatch.setenv("LAKEBED_DIR", str(tmp_path))
    for _ in range(2):
        runner = DoctorRunner(load(sections()), manual_clock)
        runner.begin()
        await ended(runner)
        monkeypatch.delenv("LAKEBED_DIR", raising=False)

    assert [tmp_path, Path()] == folders


async def test_live_numbers_end_when_the_gateway_stops() -> None:
    """First the last sample, then each new one; a stop ends the stream and its viewer."""
    async with site() as here, asyncio.timeout(30):
        stop = asyncio.Event()
        state = SimpleNamespace(principal=ANYBODY)
        app = SimpleNamespace(state=SimpleNamespace(gateway=ServerState(stop)))
        answer = await here.console._live(SimpleNamespace(state=state, app=app))  # type: ignore[arg-type]
        stream = answer.body_iterator  # type: ignore[attr-defined]
        first = await anext(stream)
        live = here.console.data.live
        next(iter(live._viewers)).put_nowait(live.now())
        second = await anext(stream)
        viewers = here.console.data.live.viewers
        stop.set()
        rest = [chunk async for chunk in stream]

        assert (b"event: sample\ndata: {", b"event: sample\ndata: {") == (first[:21], second[:21])
        assert (1, 0) == (viewers, here.console.data.live.viewers)
        assert len(rest) <= 1
        assert ("text/event-stream", "no-store") == (answer.media_type, answer.headers["cache-control"])


async def test_no_more_viewers_than_the_limit_get_a_stream() -> None:
    async with site() as here:
        here.console.data.live._viewers = {asyncio.Queue() for _ in range(VIEWERS_MAX)}
        answer = await here.browser.client.get("/live")
        here.console.data.live._viewers = set()

    assert (503, "overloaded", "10") == (answer.status_code, answer.json()["code"], answer.headers["retry-after"])
