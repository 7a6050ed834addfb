"""Ways around the console: the search field, the documentation, a page for what does not exist, the API by part."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.datastructures import QueryParams

from lakebed.batches.view import AgentRow
from lakebed.console import manual
from lakebed.console.page import DataSource, PageQuery, PageRequest, PageSamples
from lakebed.console.pages import PAGES
from lakebed.console.samples import DataSample
from lakebed.console.search import SearchHit, SearchPage, matching
from lakebed.core.clock import SystemClock
from lakebed.core.errors import NotFound
from lakebed.gateway.openapi import part_of
from lakebed.log.routes import component as log_component
from lakebed.log.view import TopicRow
from lakebed.pipeline.tables.view import TableRow
from lakebed.queue.model import KeyValueEntry, QueueStatus
from lakebed.queue.roles import Queue
from lakebed.store.memory import MemoryStore
from support.console_site import KEYS, WATCHER, site

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def test_names_with_every_word_are_found_and_those_that_begin_so_come_first() -> None:
    links = [("old-Orders", "/1"), ("orders-eu", "/2"), ("clicks", "/3")]

    assert [SearchHit("topic", "orders-eu", "/2"), SearchHit("topic", "old-Orders", "/1")] == matching(
        "topic", links, "orders"
    )
    assert ["orders-eu"] == [hit.name for hit in matching("topic", links, "eu orders")]


def test_of_many_names_the_first_in_order_are_shown() -> None:
    """A name that begins with the text is not cut off behind others that merely hold it."""
    links = [(f"a-{n:02d}-log", f"/{n}") for n in range(30)] + [("log", "/log")]

    found = matching("topic", links, "log")

    assert (20, "log", "a-18-log") == (len(found), found[0].name, found[-1].name)


async def test_topics_tables_queues_agents_and_buckets_are_found_and_lead_to_their_pages() -> None:
    """Each from what its own page lists; the address chooses it there, and a name is found once."""
    rows = {
        "topic": [TopicRow("orders-topic", 1, 2, 3)],
        "table": [TableRow("gold/orders-table", "gold", 1, 2, 3, 4)],
        "queue": [QueueStatus("orders-queue", 0, 0, 0, 0, 0, None, None, None, 0, 0, 0, [])],
        "agent": [AgentRow("orders-agent")],
        "bucket": [{"bucket": "orders-bucket"}, {"bucket": "orders-bucket"}],
    }
    async with site() as here:
        search = here.console.data.pages[SearchPage]

        async def read(sources: dict[str, DataSource]) -> PageSamples:
            return {kind: DataSample(rows[kind]) for kind in sources}

        query = PageQuery(QueryParams("q=orders"))
        _, chosen = await search.load(PageRequest(query, None, read, lambda right: None))  # type: ignore[arg-type]

    assert [
        SearchHit("agent", "orders-agent", "/batches?agent=orders-agent"),
        SearchHit("bucket", "orders-bucket", "/lifecycle?bucket=orders-bucket"),
        SearchHit("queue", "orders-queue", "/queue?queue=orders-queue"),
        SearchHit("table", "gold/orders-table", "/tables?table=gold%2Forders-table"),
        SearchHit("topic", "orders-topic", "/log?topic=orders-topic"),
    ] == sorted(chosen["hits"], key=lambda hit: hit.kind)


async def test_a_queue_is_found_by_a_part_of_its_name() -> None:
    """By who may read it; markup in the query is text."""
    store = MemoryStore(clock=SystemClock())
    async with site(store, keys=KEYS) as here:
        entry = KeyValueEntry(b"k", b"v")
        await (await Queue.of(here.context, "work-orders").ingestor().ingest([entry])).await_durable()
        await here.browser.sign_in(WATCHER)
        found = await here.browser.open("/search?q=ORDERS")
        none = await here.browser.open("/search?q=%3Cb%3Enothing")

    assert 'href="/queue?queue=work-orders"' in found.text
    assert "topic: watcher may not log:read" in found.text
    assert "0 found for “&lt;b&gt;nothing”" in none.text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
async def test_each_page_links_to_its_documentation_which_exists(page: type) -> None:
    async with site() as here:
        shown = await here.browser.open(page.path)  # type: ignore[attr-defined]
        read = await here.browser.open(f"/manual/{page.manual}")  # type: ignore[attr-defined]

    assert f'href="/manual/{page.manual}"' in shown.text  # type: ignore[attr-defined]
    assert 200 == read.status_code and "<h1>" in read.text.split('class="manual"')[1]


@pytest.mark.parametrize(
    "name", ["../pyproject.md", "parts/../../x.md", "parts/nothing.md", "/etc/hostname", "a/b/c.md", ""]
)
def test_the_manual_reads_its_own_pages_alone(name: str) -> None:
    with pytest.raises(NotFound):
        manual.found(name)


def test_html_in_a_page_of_the_manual_is_text(tmp_path: Path) -> None:
    file = tmp_path / "x.md"
    file.write_text("<script>alert(1)</script>\n\n[x](javascript:alert(1))\n")

    html = manual.rendered(file)

    assert "<script" not in html and 'href="javascript' not in html


def test_an_installation_without_documentation_says_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as missing:
        manual.found("parts/log.md", tmp_path / "docs")

    assert "source tree" in missing.value.hint


async def test_a_browser_gets_a_page_for_what_does_not_exist_and_a_client_json() -> None:
    async with site() as here:
        page = await here.browser.client.get("/no/<b>such", headers=HTML)
        client = await here.browser.client.get("/no/such")
        posted = await here.browser.client.post("/no/such", headers=HTML)

    assert (404, "text/html; charset=utf-8") == (page.status_code, page.headers["content-type"])
    assert "Page not found" in page.text and 'href="/"' in page.text and "<b>" not in page.text
    for answer in (client, posted):
        assert (404, "no_such_route") == (answer.status_code, answer.json()["code"])


async def test_the_api_is_listed_by_part() -> None:
    async with site() as here:
        page = (await here.browser.client.get("/docs")).text
        tree = (await here.browser.client.get("/openapi.json")).json()

    assert '<section id="part-console">' in page and 'href="#part-console"' in page
    assert all(item["tags"][0] for path in tree["paths"].values() for item in path.values())
    assert "log" == part_of(log_component)
