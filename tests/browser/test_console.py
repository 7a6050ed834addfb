"""The console as people use it: in a browser, with a mouse, a keyboard or a thumb, on a lake that moves and fails."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from lakebed.console.pages import PAGES
from lakebed.embedded.endpoints import BucketEndpoints
from lakebed.lifecycle.model import Rule
from lakebed.lifecycle.policy import render_xml
from lakebed.store import admin
from support.browser_tab import DEADLINE_MS, Tab
from support.console_stack import HOSTILE, HOSTILE_KEY, RETIRED, Yard, yard_on

AXE = Path(__file__).parents[1] / "support/vendor/axe-core/axe.min.js"
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pytest.fixture(autouse=True)
def patient() -> None:
    expect.set_options(timeout=DEADLINE_MS)


@EVERY_PAGE
def test_a_page_loads_from_this_gateway_alone(tab: Tab, page: Any) -> None:
    """It opens, shows its title and data, comes alive, queries no other host and complains about nothing."""
    shown = tab.go(page.path)

    expect(shown.locator("h1")).to_have_text(page.title)
    if page.in_menu:
        expect(shown.locator(f'nav a[href="{page.path}"]')).to_have_attribute("aria-current", "page")
    expect(shown.locator("#page .alert")).to_have_count(0)
    assert (tab.elsewhere, tab.complaints) == ([], [])
    assert len(tab.asked) >= 9


@pytest.mark.full
def test_live_numbers_move(tab: Tab, yard: Yard) -> None:
    """What comes into the lake, by any process, is counted on the open page, without reloading it, and drawn."""
    page = tab.go("/")
    counted = page.locator('.flow.wide [data-live="lake.log_in"]')

    yard.send(9_001)

    expect(counted).to_have_text(re.compile(r"[1-9]"))
    expect(page.locator(".chart canvas").first).to_be_visible()
    expect(page.locator('.flow.wide [data-live="level.queue_dead"]')).not_to_have_text("–")
    assert sum("/live" in url for url in tab.asked) == 1


@pytest.mark.full
def test_on_a_phone_every_decision_is_within_reach(yard: Yard, browser: Browser) -> None:
    """The buttons of a row lie inside the screen: nobody has to find out that a table scrolls."""
    context = browser.new_context(viewport={"width": 390, "height": 844})
    page = context.new_page()
    page.set_default_timeout(DEADLINE_MS)
    outside: dict[str, list[str]] = {}
    for path in ("/batches", "/queue?queue=orders", "/lifecycle"):
        page.goto(f"{yard.url}{path}")
        page.wait_for_selector("td.acts button")
        for button in page.query_selector_all("td.acts button"):
            box = button.bounding_box()
            if box is None or box["x"] < 0 or box["x"] + box["width"] > 390:
                outside.setdefault(path, []).append(button.inner_text())
    context.close()

    assert {} == outside


@pytest.mark.full
def test_a_legend_tells_the_newest_values(yard: Yard, browser: Browser) -> None:
    """Without a pointer on the chart, which a phone never has, it shows numbers and not dashes."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(DEADLINE_MS)
    page.goto(f"{yard.url}/")
    values = page.locator(".chart .u-value")

    expect(values.nth(3)).to_be_visible()
    expect(values.filter(has_not_text=re.compile(r"\d"))).to_have_count(0)
    context.close()


@pytest.mark.full
def test_a_page_reloads_its_inside_and_nothing_is_lost(tab: Tab, yard: Yard) -> None:
    """New data appears by itself; where the keyboard is, and what is folded open, stays."""
    page = tab.go("/log?topic=orders")
    page.locator('nav a[href="/queue"]').focus()

    yard.send(9_002)

    expect(page.locator("#page")).to_contain_text(str(9_002 * 5 + 4))
    assert page.evaluate("() => document.activeElement.getAttribute('href')") == "/queue"


@pytest.mark.full
def test_what_is_typed_while_a_reload_is_under_way_stays(tab: Tab) -> None:
    """The answer to a reload that began before somebody began to type is too late: it does not take the words back."""
    page = tab.go("/lifecycle")
    held: list[Any] = []
    page.route("**/lifecycle", lambda route: held.append(route))
    while not held:
        page.wait_for_timeout(50)
    field = page.locator("section", has=page.get_by_role("heading", name="Edit rules")).get_by_label("Bucket")
    field.fill("landing")

    with page.expect_response("**/lifecycle"):
        held[0].continue_()
    page.wait_for_timeout(500)  # for the swap, if there were one

    expect(field).to_have_value("landing")
    page.unroute("**/lifecycle")


def test_an_action_asks_acts_and_is_recorded(tab: Tab) -> None:
    """A dead letter is replayed: the dialog queries why, the letter goes, the trail reports who, what and why."""
    page = tab.go("/queue?queue=orders")
    page.get_by_role("button", name="Replay", exact=True).first.click()
    dialog = page.locator("dialog#ask")
    expect(dialog).to_be_visible()
    dialog.get_by_role("button", name="Replay").click()
    expect(dialog.locator("textarea:invalid")).to_be_visible()  # it does not go without a reason

    dialog.locator("textarea").fill("the schema is registered now")
    dialog.get_by_role("button", name="Replay").click()
    expect(dialog).to_contain_text("enqueued again as sequence")
    dialog.get_by_role("button", name="Close").click()

    expect(page.get_by_role("button", name="Replay")).to_have_count(0)
    tab.go("/audit")
    row = page.get_by_role("row", name="queue.replay")
    expect(row).to_contain_text("the schema is registered now")
    expect(row).to_contain_text("anybody")
    assert tab.complaints == []


@pytest.mark.full
def test_a_conflict_is_resolved_by_keyboard_alone(tab: Tab) -> None:
    """Tab reaches the skip link, the pages and every button; Enter opens, Escape closes, the dialog holds the focus."""
    page = tab.go("/batches")
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    reached = _tab_to(page, "Keep accepted batch")
    page.keyboard.press("Enter")
    dialog = page.locator("dialog#ask")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).not_to_be_visible()
    assert page.evaluate("() => document.activeElement.textContent.trim()") == reached

    page.keyboard.press("Enter")
    expect(dialog.locator("textarea")).to_be_focused()
    page.keyboard.type("the first one is the truth")
    _tab_to(page, "Keep")
    page.keyboard.press("Enter")

    expect(dialog).to_contain_text("resolved as accept_existing")
    expect(dialog.get_by_role("button", name="Close")).to_be_focused()
    page.keyboard.press("Enter")
    expect(dialog).not_to_be_visible()
    expect(page.locator("#page")).to_contain_text("the first one is the truth")


def _tab_to(page: Any, text: str, most: int = 60) -> str:
    for _ in range(most):
        page.keyboard.press("Tab")
        at: str = page.evaluate("() => document.activeElement.textContent.trim()")
        if at == text:
            return at
    raise AssertionError(f"{most} tabs do not lead to {text!r}")


@pytest.mark.full
@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/log?topic=clicks", HOSTILE),
        ("/lifecycle?bucket=landing", HOSTILE_KEY),
        ("/tables?table=silver/acme/shop/orders", HOSTILE),
        ("/batches", HOSTILE[:40]),
        ("/audit", "Operator actions"),
    ],
)
def test_hostile_keys_and_payloads_are_text(tab: Tab, path: str, text: str) -> None:
    """Markup in keys, payloads, rows and names is shown as it is, and nothing of it runs, also after a reload."""
    page = tab.go(path)

    expect(page.locator("#page")).to_contain_text(text)
    page.wait_for_timeout(5_000)  # at least one reload of the page's inside
    assert page.evaluate("() => window.__hacked") is None
    assert page.locator("#page script, #page img, #page svg[onload], #page [onerror]").count() == 0
    assert (tab.elsewhere, tab.complaints) == ([], [])


@pytest.mark.full
def test_a_hostile_key_is_text_in_a_dialog_too(tab: Tab, yard: Yard) -> None:
    """It comes back from the server inside the dialog, and its batch is opened and shown entry by entry."""
    page = tab.go("/lifecycle")
    row = page.get_by_role("row").filter(has_text="inbox/").first
    row.get_by_role("button", name="Quarantine").click()
    expect(page.locator("dialog#ask")).to_contain_text(HOSTILE_KEY)
    page.keyboard.press("Escape")
    page.goto(f"{yard.url}/console/ask/queue.discard?queue={HOSTILE_KEY.replace('#', '')}&letter=x")
    assert page.evaluate("() => window.__hacked") is None
    page = tab.go("/queue?queue=orders")
    page.get_by_role("region", name="Waiting").get_by_role("link", name="5", exact=True).click()
    expect(page.get_by_role("heading", name="Batch", exact=True)).to_be_visible()
    expect(page.locator("#page")).to_contain_text(HOSTILE)

    assert page.evaluate("() => window.__hacked") is None


@pytest.mark.full
def test_a_failing_backend_is_said_and_recovers(tab: Tab, yard: Yard) -> None:
    """When the store goes away the page says so and keeps what it knew; when it is back the trouble goes by itself."""
    page = tab.go("/queue?queue=orders")
    known = page.get_by_role("region", name="Queues")
    expect(known).to_contain_text("orders")

    yard.wire.cut()
    try:
        expect(page.locator("#page .alert").first).to_be_visible()
        expect(known).to_contain_text("orders")
    finally:
        yard.wire.mend()

    expect(page.locator("#page .alert")).to_have_count(0)
    expect(known).to_contain_text("orders")


def test_when_the_gateway_is_dead_no_state_is_green(
    weed: BucketEndpoints, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The page notices by itself: every state turns grey and says that it is the last known, and a banner says why."""
    with yard_on(weed, tmp_path_factory.mktemp("dead")) as alone:
        context = browser.new_context()
        tab = Tab(context.new_page(), alone.url)
        page = tab.go("/")
        dot = page.locator(".flow.wide .dot.ok").first
        green = dot.evaluate("(dot) => getComputedStyle(dot).fill")
        alone.stop()

        expect(page.locator("html")).to_have_attribute("data-contact", "lost")
        expect(page.locator("#banner")).to_contain_text("has not responded since")
        assert green != dot.evaluate("(dot) => getComputedStyle(dot).fill")
        assert "last known" in page.locator(".pill").first.evaluate(
            "(pill) => getComputedStyle(pill, '::after').content"
        )
        context.close()


@pytest.mark.full
def test_a_time_range_is_chosen_and_kept(tab: Tab) -> None:
    """Every chart of the page is redrawn for it, and the next page has it too."""
    page = tab.go("/")
    with page.expect_response(re.compile(r"/history\.json\?range=6h")):
        page.get_by_text("6 h", exact=True).click()
    expect(page.locator("[data-range-shown]").first).to_have_text("6 h")

    page = tab.go("/queue")

    expect(page.locator("[data-range-shown]").first).to_have_text("6 h")
    assert tab.complaints == []


def test_a_question_is_asked_in_sql(tab: Tab) -> None:
    """Over real Delta tables: the answer is on the page and in the file; a file of the machine is out of reach."""
    page = tab.go("/tables?table=silver/acme/shop/orders")
    page.get_by_label("Query").fill("select city, count(*) as n from silver.shop.orders group by city order by city")
    page.get_by_role("button", name="Run").click()
    answer = page.get_by_role("region", name="Result")
    expect(answer.get_by_role("row", name="Basel")).to_contain_text("20")
    with page.expect_download() as saved:
        page.locator("#sql").get_by_role("link", name="CSV").click()
    assert '"Basel",20' in saved.value.path().read_text()

    page.get_by_label("Query").fill("select * from read_text('/etc/hostname')")
    page.get_by_role("button", name="Run").click()

    expect(page.locator("#sql .alert")).to_contain_text("read_text(…) is not allowed")
    assert tab.complaints == []


@pytest.mark.full
def test_rows_of_a_table_are_filtered_sorted_and_paged(tab: Tab) -> None:
    page = tab.go("/tables?table=silver/acme/shop/orders")
    rows = page.locator("#rows")
    rows.get_by_label("Sort by").select_option("order_id")
    rows.locator("select[name=desc]").select_option("descending")
    rows.get_by_role("button", name="Show rows").click()
    expect(page.get_by_role("region", name="Rows").locator("tbody tr").first).to_contain_text("39")
    page.get_by_role("link", name="Next").click()
    expect(page.get_by_role("region", name="Rows").locator("tbody tr").first).to_contain_text("14")
    page.get_by_role("link", name="Profile all columns").click()
    expect(page.get_by_role("region", name="Profile")).to_contain_text("city")


@pytest.mark.full
def test_a_record_is_appended_and_found(tab: Tab) -> None:
    """From the dialog to the partition, and by its text."""
    page = tab.go("/log?topic=clicks")
    page.get_by_role("button", name="Append a record").click()
    dialog = page.locator("dialog#ask")
    dialog.get_by_label("Value").fill('{"typed": "in the console"}')
    dialog.get_by_role("button", name="Append", exact=True).click()
    expect(dialog).to_contain_text("one record appended")
    dialog.get_by_role("button", name="Close").click()
    page.get_by_label("Value contains").fill("IN THE CONSOLE")
    page.get_by_role("button", name="Go").click()

    expect(page.get_by_role("region", name="Records").locator("tbody tr")).to_have_count(1)
    expect(page.get_by_role("region", name="Records")).to_contain_text("in the console")


@pytest.mark.full
def test_the_search_field_leads_to_what_it_finds(tab: Tab) -> None:
    page = tab.go("/")
    page.get_by_role("searchbox", name=re.compile("Search topics")).fill("orders")
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="Found")).to_contain_text("topic")
    page.get_by_role("link", name="gold/acme/shop/by_city").or_(
        page.get_by_role("link", name="silver/acme/shop/orders")
    ).first.click()

    expect(page.locator("h1")).to_have_text("Tables")


@pytest.mark.full
def test_what_ran_is_on_one_page(tab: Tab) -> None:
    page = tab.go("/runs")

    runs = page.get_by_role("region", name="Runs")
    for kind in ("tick", "models", "audit", "lifecycle scan"):
        expect(runs.get_by_role("cell", name=kind, exact=True).first).to_be_visible()
    expect(runs.get_by_role("row", name="models")).to_contain_text("daily: the column total is missing")
    runs.get_by_role("row", name="audit full").get_by_role("link", name="Log").click()
    expect(page.locator("#run h2")).to_have_text("audit full")
    expect(page.locator("#run pre")).to_contain_text(f"info finding {HOSTILE}")
    assert page.evaluate("() => window.__hacked") is None
    runs.get_by_role("row", name="models").get_by_role("button", name="Run again").click()
    expect(page.get_by_role("dialog")).to_contain_text("Runs the same job again")


# What a row of a page opens.
OPENED = {
    "/runs": "a[href*='run=']",
    "/ticks": "a[href*='tick=']",
    "/batches": "a[href*='batch=']",
    "/log": "a[href*='partition=']",
}
LOOKS = pytest.mark.parametrize("look", ["light", "dark"])


@LOOKS
@EVERY_PAGE
@pytest.mark.full
def test_nothing_serious_is_in_the_way_of_a_screen_reader(yard: Yard, browser: Browser, page: Any, look: Any) -> None:
    """The rules of axe-core find nothing serious or critical."""
    assert [] == _found_by_axe(yard, browser, page.path, look)


@LOOKS
@pytest.mark.full
@pytest.mark.parametrize("path", ["/nowhere", "/manual/parts/console.md", "/docs", *OPENED])
def test_nothing_serious_is_in_the_way_where_links_lead(yard: Yard, browser: Browser, path: str, look: Any) -> None:
    """A missing page, the documentation, the API, and what a row opens: a run, a tick, a batch, a partition."""
    assert [] == _found_by_axe(yard, browser, path, look, OPENED.get(path, ""))


def test_nothing_serious_is_in_the_way_on_the_busiest_page(yard: Yard, browser: Browser) -> None:
    assert [] == _found_by_axe(yard, browser, "/tables", "light")


def _found_by_axe(yard: Yard, browser: Browser, path: str, look: Any, opens: str = "") -> list[str]:
    """Of the page, or of the page behind the first link that `opens` selects on it."""
    context = browser.new_context(bypass_csp=True, color_scheme=look)
    page = context.new_page()
    page.goto(yard.url + path)
    if opens:
        page.goto(yard.url + str(page.locator(opens).first.get_attribute("href")))
    if page.locator("#page").count():  # a page of the console
        page.wait_for_selector("html[data-live]", state="attached")
    page.add_script_tag(content=AXE.read_text(encoding="utf-8"))
    found = page.evaluate("async () => (await axe.run()).violations")
    context.close()
    return [
        f"{one['id']}: {node['html'][:160]}"
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


@EVERY_PAGE
@pytest.mark.full
def test_a_wide_table_does_not_widen_the_page(tab: Tab, page: Any) -> None:
    """Not on a desktop either: it scrolls inside itself, with its headers for screen readers."""
    shown = tab.go(page.path)

    shown.set_viewport_size({"width": 900, "height": 800})
    shown.wait_for_timeout(300)
    assert shown.evaluate("() => document.documentElement.scrollWidth") <= 900


@EVERY_PAGE
@pytest.mark.full
def test_a_phone_needs_no_sideways_scrolling(phone: Tab, page: Any) -> None:
    """At 390 pixels every page fits; wide tables scroll inside themselves."""
    shown = phone.go(page.path)

    shown.wait_for_timeout(300)
    width = shown.evaluate("() => document.documentElement.scrollWidth")
    assert width <= 390, f"{width} pixels"


@pytest.mark.full
def test_the_theme_follows_the_system_and_the_button(tab: Tab) -> None:
    """Dark where the system is dark; the button turns it, and the choice is kept on the next page."""
    ground = "() => getComputedStyle(document.body).backgroundColor"
    tab.page.emulate_media(color_scheme="dark")
    page = tab.go("/")
    dark = page.evaluate(ground)
    tab.page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    assert dark != light

    page.get_by_role("button", name="Light / dark").click()
    assert page.evaluate(ground) == dark
    page = tab.go("/queue")
    assert page.evaluate(ground) == dark


@pytest.mark.full
def test_the_offset_browser_walks_a_partition(tab: Tab) -> None:
    """From the end to the beginning and on, by links that can be shared."""
    page = tab.go("/log?topic=orders&partition=1")
    page.get_by_label("From offset").fill("1")
    page.get_by_role("button", name="Go").click()
    expect(page.locator("#record-1")).to_contain_text('"order"')
    page.get_by_role("link", name="Later").click()
    expect(page.locator("#record-51")).to_be_visible()
    page.get_by_role("link", name="Earlier").click()
    expect(page.locator("#record-1")).to_be_visible()
    expect(page.locator(".segments rect").first).to_be_attached()


def test_a_dry_run_shows_how_many_how_much_and_a_sample(tab: Tab) -> None:
    """Of the rules in force, and of a document that nobody has put yet; the live filer is walked, nothing goes."""
    page = tab.go("/lifecycle")
    page.locator("section", has=page.get_by_role("heading", name="Dry run")).get_by_role("link", name="landing").click()
    form = page.locator("#editor")
    expect(form.get_by_label("Rules")).to_have_value(re.compile("old-tmp"))  # those in force
    form.get_by_label("Days ahead").fill("9")
    form.get_by_role("button", name="Dry run").click()
    reported = page.locator("section", has=page.get_by_role("heading", name="Dry run of landing, 9 days ahead"))
    expect(reported.locator("dl.figures div", has_text="would be deleted")).to_contain_text("3")
    expect(reported.locator("dl.figures div", has_text="bytes")).to_contain_text("3.6 KiB")
    expect(reported.get_by_role("row", name="tmp/b.csv old-tmp")).to_contain_text("2.0 KiB")
    expect(reported).not_to_contain_text("kept/c.csv")

    rules = render_xml((Rule("all-kept", prefix="kept/", expiration_days=1),)).decode()
    form.get_by_label("Rules").fill(rules)
    form.get_by_role("button", name="Dry run").click()

    reported = page.locator("section", has=page.get_by_role("heading", name="by the edited rules"))
    expect(reported.locator("dl.figures div", has_text="would be deleted")).to_contain_text("1")
    expect(reported.locator("dl.figures div", has_text="bytes")).to_contain_text("3.9 KiB")
    expect(reported.get_by_role("row", name="kept/c.csv all-kept")).to_have_count(1)
    expect(page.get_by_role("region", name="Rules")).not_to_contain_text("all-kept")  # it is not in force
    reported.get_by_role("button", name="Put these rules").click()
    expect(page.locator("dialog").get_by_label("Rules, as AWS writes them")).to_have_value(re.compile("all-kept"))
    page.keyboard.press("Escape")
    assert tab.complaints == []


@pytest.mark.full
def test_a_blocker_is_retried_against_the_live_filer(tab: Tab, yard: Yard) -> None:
    """What stood still is deleted now, by the rule in force; the blocker goes, the verdict and the deed are told."""
    s3 = admin.client(yard.stored.store_settings())
    assert 1 == s3.list_objects_v2(Bucket="landing", Prefix=RETIRED)["KeyCount"]
    page = tab.go("/lifecycle")
    page.get_by_role("row").filter(has_text=RETIRED).get_by_role("button", name="Retry").click()
    dialog = page.locator("dialog#ask")
    dialog.get_by_role("button", name="Retry").click()
    expect(dialog).to_contain_text("DONE")
    dialog.get_by_role("button", name="Close").click()

    expect(page.get_by_role("region", name="Blockers").get_by_role("row").filter(has_text=RETIRED)).to_have_count(0)
    assert 0 == s3.list_objects_v2(Bucket="landing", Prefix=RETIRED)["KeyCount"]
    tab.go(f"/lifecycle?bucket=landing&key={RETIRED}")
    expect(page.get_by_role("region", name="Decisions")).to_contain_text("deleted")
    tab.go("/audit")
    expect(page.get_by_role("row", name="lifecycle.retry")).to_contain_text(RETIRED)


def test_an_audit_shows_what_was_conserved_and_names_what_was_not(tab: Tab) -> None:
    """Samples at each stage from agent to gold; the hour that lost some with its number, the sound ones counted."""
    page = tab.go("/audit")

    stages = page.get_by_role("region", name="Row counts")
    for words in ("sent by agents 7,200 ", "accepted 7,200 0", "bronze 7,183 17 ", "rollups 7,183 of 7,183 due 0"):
        expect(stages.get_by_role("row", name=words)).to_have_count(1)
    wrong = page.get_by_role("region", name="Differences").get_by_role("row")
    expect(wrong).to_have_count(2)  # its head, and the one hour
    expect(wrong.nth(1)).to_contain_text("db-1")
    expect(wrong.nth(1)).to_contain_text("17 lost before bronze")
    expect(page.locator("#page")).to_contain_text("2 of 3 hours have equal counts at every stage")
    expect(page.locator("#page")).to_contain_text("problems")
    page.get_by_text("Details").click()
    expect(page.get_by_role("region", name="Findings")).to_contain_text(HOSTILE_KEY)
    assert page.evaluate("() => window.__hacked") is None


@pytest.mark.full
def test_signing_in_with_a_key(browser: Browser, yard: Yard) -> None:
    """Where keys are configured, a key opens the console for its rights, and signing out closes it."""
    keys = [
        {"name": "ann", "secret": "0123456789abcdef-ann", "rights": ["*"]},
        {"name": "bob", "secret": "0123456789abcdef-bob", "rights": ["console:read", "queue:read*"]},
    ]
    guarded = Yard(yard.stored, yard.folder, keys=keys, prefix=yard.prefix)
    guarded.start()
    context = browser.new_context()
    tab = Tab(context.new_page(), guarded.url)
    try:
        tab.page.goto(f"{guarded.url}/queue?queue=orders")
        tab.page.get_by_label("Key").fill("0123456789abcdef-wrong")
        tab.page.get_by_role("button", name="Sign in").click()
        expect(tab.page.get_by_role("alert")).to_contain_text("the key is unknown")
        tab.page.get_by_label("Key").fill("0123456789abcdef-bob")
        tab.page.get_by_role("button", name="Sign in").click()

        expect(tab.page.locator("h1")).to_have_text("Queue")
        page = tab.go("/lifecycle")
        expect(page.locator("#page .alert").first).to_contain_text("bob may not lifecycle:read")
        assert "0123456789abcdef" not in page.evaluate("() => document.cookie")
        page.get_by_role("button", name="Sign out").click()
        page.wait_for_url("**/login")
    finally:
        context.close()
        guarded.close()


HOSTILE_POLICY = """<LifecycleConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Rule><ID>old</ID>
<Status>Enabled</Status><Filter><Prefix>old/</Prefix></Filter><Expiration><Days>30</Days></Expiration></Rule>
<x:script xmlns:x="http://www.w3.org/1999/xhtml">document.documentElement.setAttribute("hacked", "yes")</x:script>
</LifecycleConfiguration>"""


@pytest.mark.parametrize("shown", [False, True], ids=["as it is", "shown in spite of it"])
def test_a_hostile_lifecycle_policy_runs_nothing(tab: Tab, yard: Yard, shown: bool) -> None:
    """Opened by itself on the console's origin it is saved and not shown; a browser that shows it runs no script."""
    address = f"{yard.url}/api/s3/buckets/landing/lifecycle"

    def answer(route: Any) -> None:
        got = route.fetch()
        headers = {
            name: value for name, value in got.headers.items() if shown is False or name != "content-disposition"
        }
        assert got.status == 200
        route.fulfill(status=200, headers=headers, body=HOSTILE_POLICY)

    tab.page.route(address, answer)
    tab.page.goto(f"{yard.url}/lifecycle")
    if shown:
        tab.page.goto(address)
        tab.page.wait_for_timeout(1_000)
        assert tab.page.evaluate("() => document.documentElement.getAttribute('hacked')") is None
    else:
        with tab.page.expect_download() as saved:
            tab.page.evaluate("(address) => { window.location = address }", address)
        assert saved.value.suggested_filename == "lifecycle.xml"
        assert tab.page.url == f"{yard.url}/lifecycle"
