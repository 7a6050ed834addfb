"""Pages: what they show, to whom, and their JSON twins."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from starlette.datastructures import QueryParams

from lakebed.console.data import PageData
from lakebed.console.page import PageQuery
from lakebed.console.pages import PAGES, OverviewPage
from lakebed.console.rendering import FILES
from lakebed.console.samples import PATIENCE_S, DataSample
from lakebed.core.clock import SystemClock
from lakebed.core.context import Health
from lakebed.core.errors import Invalid, Unavailable
from lakebed.core.ids import Ids
from lakebed.delta.log import Commit
from lakebed.delta.model import TableSpec
from lakebed.delta.plain import PlainTable, schema_json
from lakebed.lifecycle.page import LifecyclePage
from lakebed.log.broker import Broker
from lakebed.log.codec import columns
from lakebed.log.model import TopicPartition
from lakebed.log.page import LogPage
from lakebed.log.producers import RecordChunk
from lakebed.log.writer import PartitionAppend
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.roles import Queue
from lakebed.store.memory import MemoryStore
from support import tick_fixtures as ticks_kit
from support.console_site import KEYS, OPERATOR, WATCHER, site
from support.runtimes import runtime_on

SCHEMA = schema_json((("id", "long"),))
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


class Hostile:
    name = "<script>alert(1)</script>"
    reads = writes = ()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def health(self) -> Health:
        return Health("degraded", '"><img src=x onerror=alert(1)>')


class FailingStore(MemoryStore):
    """A store that stops answering on request."""

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
        shown, twin = await here.browser.open(page.path), await here.browser.client.get(page.twin())

    assert (shown.status_code, twin.status_code) == (200, 200), (shown.text[:500], twin.text[:500])
    assert f"<h1>{page.title}</h1>" in shown.text
    assert f'href="{page.twin()}"' in shown.text
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
    vendored = [file for file, _ in FILES.values() if file.parent.name in ("htmx", "idiomorph", "uplot")]
    assert 4 == len(vendored)
    assert all(file.exists() and (file.parent / "LICENSE").exists() for file in vendored)


async def test_hostile_text_is_inert() -> None:
    """What a component reports of itself never becomes markup."""
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
        here.console.data.samples.forget()
        during = (await here.browser.open("/queue")).text
        store.failing = False
        here.console.data.samples.forget()
        after = (await here.browser.open("/queue")).text

    assert "jobs" in before and "does not answer" not in before
    assert "jobs" in during and "the store does not answer" in during
    assert "jobs" in after and "does not answer" not in after


async def test_an_address_that_makes_no_sense_is_an_answer_not_a_failure() -> None:
    """Wrong numbers and names that are none are reported in the page."""
    async with site() as here:
        offset = await here.browser.open("/log?topic=a&offset=minus")
        topic = await here.browser.open("/log?topic=../../etc")
        table = (await here.browser.client.get("/tables.json?table=../secrets")).json()

    assert offset.status_code == 400
    assert "is not an offset" in offset.text
    assert topic.status_code == 200 and "is not a valid topic name" in topic.text
    assert "is no table" in table["troubles"]["table"]["message"]


async def test_a_stranger_is_shown_the_door() -> None:
    """Pages lead to the sign-in, twins and live numbers are refused; nothing of the lake is reported."""
    async with site(keys=KEYS) as here:
        pages = [await here.browser.open(page.path) for page in PAGES]
        twins = [await here.browser.client.get(page.twin()) for page in PAGES]
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
    """Every number of the first page comes from the metrics registry or the bucket, and its twin reports the same."""
    async with site() as here:
        here.context.metrics.counter("lakebed_queue_entries_total").inc(41)
        here.context.metrics.counter("lakebed_log_records_total").labels(direction="in").inc(7)
        page, twin = await here.browser.open("/"), (await here.browser.client.get("/overview.json")).json()

    assert (twin["totals"]["queue_entries"], twin["totals"]["log_in"]) == (41, 7)
    assert twin["health"]["status"] == "ok"
    assert twin["levels"]["queue_waiting"] == 0
    assert {"batches_samples": None, "log_in": None, "queue_in": None, "ticks_rows": None} == twin["last_hour"]
    assert page.status_code == 200


async def test_a_page_shows_what_was_chosen_or_else_the_first() -> None:
    """Without a name in the address the first queue and the first table are shown."""
    store = MemoryStore(clock=SystemClock())
    async with site(store) as here:
        for name, word in (("a", b"first"), ("b", b"second")):
            queue = Queue.of(here.context, name)
            await (await queue.ingestor().ingest([KeyValueEntry(b"k", word)])).await_durable()
        for name in ("gold/x", "quarantine/orders", "silver/orders", "silver/plain"):
            table = PlainTable(runtime_on(store, here.context.clock, Ids.seeded(1)), TableSpec(name, SCHEMA))
            file = await table.write(pa.table({"id": [len(name)]}))
            await table.commit(lambda _, file=file: Commit("WRITE", (file,), rows_inserted=1))

        async def twin(path: str) -> Any:
            return (await here.browser.client.get(path)).json()

        first, chosen = await twin("/queue.json"), await twin("/queue.json?queue=b")
        opened = await twin(f"/queue.json?queue=b&batch={chosen['waiting'][0]['location']}")
        tables = await twin("/tables.json")
        silver, plain = await twin("/tables.json?table=silver/orders"), await twin("/tables.json?table=silver/plain")

    assert first["waiting"][0]["location"] != chosen["waiting"][0]["location"]
    assert ("batch" in chosen, "second") == (False, opened["batch"]["shown"][0]["value"]["text"])
    assert ("gold/x", [["6"]]) == (tables["table"]["name"], tables["rows"]["rows"])
    assert ("quarantine/orders", [["17"]]) == (silver["quarantine"]["name"], silver["quarantined"]["rows"])
    assert "quarantine" not in plain


async def test_the_newest_tick_of_all_projects_is_shown_unless_one_is_chosen() -> None:
    context = ticks_kit.context_of()
    async with ticks_kit.serving(context) as service, site(context.store) as here:
        await service.issue(project="p-2")
        await service.upload("20261115T110000__older", project="p-2")
        await service.upload("20261115T130000__old")
        await service.upload("20261115T120000__new", project="p-2")
        newest = (await here.browser.client.get("/ticks.json")).json()
        requested = "/ticks.json?org=acme&project=p-1&tick=20261115T130000__old"
        chosen = (await here.browser.client.get(requested)).json()

    assert ("p-2", "20261115T120000__new") == (newest["tick"]["project_id"], newest["tick"]["tick_id"])
    assert ("p-1", "20261115T130000__old") == (chosen["tick"]["project_id"], chosen["tick"]["tick_id"])
    assert 2 == len(newest["projects"])


async def test_the_log_page_shows_the_partition_and_the_offset_that_were_chosen() -> None:
    """Without them the first topic, its first partition and the last records."""
    async with site() as here:
        window = here.console.data.pages[LogPage].log
        broker = Broker(here.context, window.meta)
        for partition, word in ((0, b"zero"), (1, b"one")):
            chunk = RecordChunk(columns((word, word + b"+")))
            await broker.writer.append_shared([PartitionAppend(TopicPartition("orders", partition), (chunk,))])
        await broker.writer.drain()

        async def twin(path: str) -> Any:
            return (await here.browser.client.get(path)).json()

        first, chosen = await twin("/log.json"), await twin("/log.json?topic=orders&partition=1&offset=2")
        none = await twin("/log.json?topic=clicks")

    assert ["zero", "zero+"] == [row["payload"]["text"] for row in first["records"]["records"]]
    assert ([2], ["one+"]) == (
        [row["offset"] for row in chosen["records"]["records"]],
        [row["payload"]["text"] for row in chosen["records"]["records"]],
    )
    assert (0, 1) == (first["segments"]["partition"], chosen["segments"]["partition"])
    assert ([0, 1], []) == ([one["partition"] for one in first["partitions"]], first["groups"])
    assert "topic clicks does not exist" == none["troubles"]["partitions"]["message"]


async def test_the_overview_waits_shortly_and_its_twin_for_as_long_as_it_takes() -> None:
    seen: list[dict[str, float]] = []

    class Visited:
        def __init__(self, patient: bool) -> None:
            self.patient = patient

        async def load(self, **sources: Any) -> Any:
            seen.append({name: source.patience_s for name, source in sources.items()})
            return {}

    page = PageData(ticks_kit.context_of()).pages[OverviewPage]
    for patient in (False, True):
        await page.load(Visited(patient))  # type: ignore[arg-type]

    hasty, patient_ = seen
    assert ({0.3}, {PATIENCE_S}) == (set(hasty.values()), set(patient_.values()))
    assert {"health", "conflicts", "topics", "queues", "silver", "tables", "blockers", "streams"} | {
        "reconciler",
        "heard",
    } == set(hasty)


async def test_the_ledger_is_of_the_bucket_and_key_and_a_preview_of_the_text() -> None:
    """Without a key the whole bucket's; a preview takes the ledger's place."""
    requested: list[Any] = []

    class Noted(LifecyclePage):
        """Notes what would be shown, in the place of reading it."""

        def __getattribute__(self, name: str) -> Any:
            if name in ("statuses", "rules", "streams", "blockers", "policy", "ledger", "preview"):
                return lambda *given: requested.append((name, *given))
            return super().__getattribute__(name)

    page = Noted(ticks_kit.context_of())

    async def lifecycle(**params: str) -> Any:
        requested.clear()
        request = SimpleNamespace(query=PageQuery(QueryParams(params)), load=see)
        return (await page.load(request))[1]  # type: ignore[arg-type]

    async def see(**asks: Any) -> Any:
        return {"policy": DataSample("<old>\n</old>\n")}

    assert {"bucket": "", "key": "", "days": 0.0, "policy": "", "preview": ""} == await lifecycle()
    assert 4 == len(requested)
    await lifecycle(bucket="b", key="k", days="5")
    assert ("ledger", "b", "k") == requested[-1]
    chosen = await lifecycle(bucket="b", days="5", policy="<x/>", preview="1")
    assert ("preview", "b", 5.0, "<x/>") == requested[-1]
    assert (5.0, "<x/>", "1") == (chosen["days"], chosen["policy"], chosen["preview"])
    await lifecycle(bucket="b", policy="<old>\r\n</old>", preview="1")
    assert ("preview", "b", 0.0, "") == requested[-1]  # the rules in force, as the editor shows them
    with pytest.raises(Invalid):
        await lifecycle(bucket="b", days="-1", preview="1")


async def test_the_end_of_the_page_data_stops_what_runs_for_it() -> None:
    data = PageData(ticks_kit.context_of())
    closed: list[str] = []

    class Window:
        async def close(self) -> None:
            closed.append("log")

    data.pages[LogPage]._log = Window()  # type: ignore[attr-defined]
    data._refreshing = asyncio.create_task(asyncio.Event().wait())
    data.live._task = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type, assignment]
    data.status.doctor_runner._task = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type, assignment]
    tasks = [data._refreshing, data.live._task, data.status.doctor_runner._task]

    await data.stop()
    await asyncio.sleep(0)

    assert ["log"] == closed
    assert all(task is not None and task.done() for task in tasks)
