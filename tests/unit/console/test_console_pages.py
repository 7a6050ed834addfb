"""Pages: what they show, to whom, and their JSON twins."""

from __future__ import annotations

import re
from typing import Any

import pytest
from console_kit import KEYS, OPERATOR, WATCHER, site

from lakebed.clock import SystemClock
from lakebed.console.assets import FILES
from lakebed.console.pages import PAGES
from lakebed.context import Health
from lakebed.errors import Unavailable
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.queue import Queue
from lakebed.store.memory import MemoryStore

EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


class Hostile:
    name = "<script>alert(1)</script>"
    reads = writes = ()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def health(self) -> Health:
        return Health("degraded", '"><img src=x onerror=alert(1)>')


class FailingStore(MemoryStore):
    """A store that stops answering when told to."""

    failing = False

    async def get(self, key: str) -> Any:
        if self.failing:
            raise Unavailable("the store does not answer")
        return await super().get(key)

    async def children(self, prefix: str) -> Any:
        if self.failing:
            raise Unavailable("the store does not answer")
        return await super().children(prefix)


@EVERY_PAGE
async def test_an_empty_lake_has_every_page_and_says_what_to_type(page: Any) -> None:
    """Nothing is there yet, nothing is wrong, and every page can be opened and read by a program."""
    async with site() as here:
        shown, twin = await here.browser.open(page.path), await here.browser.client.get(page.twin)

    assert (shown.status_code, twin.status_code) == (200, 200), (shown.text[:500], twin.text[:500])
    assert f"<h1>{page.title}</h1>" in shown.text
    assert f'href="{page.twin}"' in shown.text
    if page.name not in ("overview", "status", "lifecycle"):
        assert "troubles" not in twin.json()
    if page.name in ("batches", "log", "queue", "ticks", "tables", "lifecycle", "audit", "status", "overview"):
        assert "lakebed " in re.sub("<[^>]+>", " ", shown.text.split("<main", 1)[1])


@EVERY_PAGE
async def test_pages_hold_no_script_style_or_address_of_their_own(page: Any) -> None:
    """The policy can be strict because pages are: no inline script, no inline style, no handler, no other host."""
    async with site() as here:
        answer = await here.browser.open(page.path)

    assert answer.headers["content-security-policy"].startswith("default-src 'self'")
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|<style", answer.text)
    assert [] == [
        link for link in re.findall(r'(?:href|src|action)="([^"]*)"', answer.text) if not link.startswith(("/", "#"))
    ]


async def test_assets_are_served_from_here_and_kept() -> None:
    """Each file a page names is there for anybody, with an address that changes with its content."""
    async with site(keys=KEYS) as here:
        page = (await here.browser.open("/login")).text
        named = set(re.findall(r'"(/console/assets/[^"]+)"', page))
        answers = [await here.browser.client.get(path) for path in named]
        missing = await here.browser.client.get("/console/assets/x/secret.txt")

    assert named
    assert all(answer.status_code == 200 and "immutable" in answer.headers["cache-control"] for answer in answers)
    assert missing.status_code == 404
    assert all(
        file.exists() and (file.parent / "LICENSE").exists() for file, _ in FILES.values() if "vendor" in str(file)
    )


async def test_hostile_text_is_inert() -> None:
    """What a component says of itself never becomes markup."""
    async with site(components=[Hostile()]) as here:
        pages = [(await here.browser.open(path)).text for path in ("/", "/status")]

    assert "onerror=alert(1)&gt;" in pages[1]
    assert all("<script>" not in page and "<img src=x" not in page for page in pages)


async def test_a_part_shows_only_to_those_who_may_read_it() -> None:
    """A key that may read queues sees queues; elsewhere it is told which right is missing, and nothing is asked for."""
    async with site(keys=KEYS) as here:
        await here.browser.sign_in(WATCHER)
        queue, log = await here.browser.open("/queue"), await here.browser.open("/log")
        twin = (await here.browser.client.get("/log.json")).json()

    assert "may not" not in queue.text
    assert "watcher may not log:read" in log.text
    assert twin["troubles"]["topics"]["code"] == "denied"
    assert twin["topics"] is None


async def test_a_failing_store_is_said_in_the_page_and_taken_back() -> None:
    """The last good answer stays, with the trouble beside it; when the store is back the trouble goes."""
    store = FailingStore(clock=SystemClock())
    async with site(store) as here:
        queue = Queue.of(here.context, "jobs")
        await (await queue.ingestor().ingest([KeyValueEntry(b"k", b"v")])).await_durable()
        before = (await here.browser.open("/queue")).text

        store.failing = True
        here.console.look.samples.forget()
        during = (await here.browser.open("/queue")).text
        store.failing = False
        here.console.look.samples.forget()
        after = (await here.browser.open("/queue")).text

    assert "jobs" in before and "does not answer" not in before
    assert "jobs" in during and "the store does not answer" in during
    assert "jobs" in after and "does not answer" not in after


async def test_an_address_that_makes_no_sense_is_an_answer_not_a_failure() -> None:
    """Wrong numbers and names that are none are told in the page."""
    async with site() as here:
        offset = await here.browser.open("/log?topic=a&offset=minus")
        topic = await here.browser.open("/log?topic=../../etc")
        table = (await here.browser.client.get("/tables.json?table=../secrets")).json()

    assert offset.status_code == 400
    assert "is no offset" in offset.text
    assert topic.status_code == 200 and "is not a topic name" in topic.text
    assert "is no table" in table["troubles"]["table"]["message"]


async def test_a_stranger_is_shown_the_door() -> None:
    """Pages lead to the sign-in, twins and live numbers are refused; nothing of the lake is told."""
    async with site(keys=KEYS) as here:
        pages = [await here.browser.open(page.path) for page in PAGES]
        twins = [await here.browser.client.get(page.twin) for page in PAGES]
        live = await here.browser.client.get("/live")

    assert {page.status_code for page in pages} == {303}
    assert all(page.headers["location"].startswith("/login?next=") for page in pages)
    assert {twin.status_code for twin in (*twins, live)} == {401}


async def test_a_key_without_the_consoles_right_is_told_so() -> None:
    async with site(keys=[{"name": "agent", "secret": OPERATOR, "rights": ["batches:write:*"]}]) as here:
        await here.browser.sign_in(OPERATOR)
        page = await here.browser.open("/queue")

    assert page.status_code == 403
    assert "agent may not console:read" in page.text


async def test_the_overview_tells_what_the_registry_counted() -> None:
    """Every number of the first page comes from the metrics registry or the bucket, and its twin says the same."""
    async with site() as here:
        here.context.metrics.counter("lakebed_queue_entries_total").inc(41)
        here.context.metrics.counter("lakebed_log_records_total").labels(direction="in").inc(7)
        page, twin = await here.browser.open("/"), (await here.browser.client.get("/overview.json")).json()

    assert (twin["totals"]["queue_entries"], twin["totals"]["log_in"]) == (41, 7)
    assert twin["health"]["status"] == "ok"
    assert twin["levels"]["queue_waiting"] == 0
    assert re.search(r'data-live="total.queue_entries">41<', page.text)
