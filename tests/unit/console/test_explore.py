"""What can be asked and done on the pages of the log, the queue and the audit, and what it costs."""

from __future__ import annotations

import asyncio
import re
import threading
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from lakebed.console.rendering import Assets, environment
from lakebed.console.samples import DataSample
from lakebed.core import runs
from lakebed.core.auth import ANYBODY
from lakebed.core.clock import SystemClock
from lakebed.core.errors import Unavailable
from lakebed.core.runs import ActiveRun
from lakebed.delta.log import Commit
from lakebed.delta.model import TableSpec
from lakebed.delta.plain import PlainTable, schema_json
from lakebed.log import view
from lakebed.log.broker import Broker
from lakebed.log.codec import Records, columns
from lakebed.log.lines import records_of
from lakebed.log.model import TopicPartition
from lakebed.log.page import LogPage, opened_first
from lakebed.log.producers import RecordChunk
from lakebed.log.view import TopicRow
from lakebed.log.writer import PartitionAppend
from lakebed.pipeline.audit import page as audit_page
from lakebed.queue.model import KeyValueEntry, QueueStatus
from lakebed.queue.page import filtered
from lakebed.queue.page import opened_first as queue_opened_first
from lakebed.queue.roles import Queue
from lakebed.queue.view import WaitingRow
from lakebed.store.memory import MemoryStore
from lakebed.ticks.page import STEP_X, STEP_Y, TicksPage, lineage
from lakebed.ticks.view import ProjectStatus, TickStatus, TickView
from support.console_site import KEYS, OPERATOR, Site, site

TP = TopicPartition("orders", 0)


def log_page(here: Site) -> LogPage:
    page = here.console.data.pages[LogPage]
    assert isinstance(page, LogPage)
    return page


async def append(here: Site, *values: bytes, records: Records | None = None) -> None:
    broker = Broker(here.context, log_page(here).log.meta)
    chunk = RecordChunk(columns(values) if records is None else records)
    await broker.writer.append_shared([PartitionAppend(TP, (chunk,))])
    await broker.writer.drain()


async def do(here: Site, action: str, **form: str) -> str:
    await here.browser.open("/queue")
    return (await here.browser.post(f"/console/do/{action}", form)).text


async def twin(here: Site, path: str) -> Any:
    return (await here.browser.client.get(path)).json()


async def test_records_are_found_by_their_text_from_an_offset_on() -> None:
    """Whatever the case; what was searched is named, so that a further search begins behind it."""
    async with site() as here:
        await append(
            here, *(b'{"order": %d, "City": "%s"}' % (n, b"BASEL" if n % 10 == 3 else b"Bern") for n in range(40))
        )
        found = await twin(here, "/log.json?topic=orders&search=basel")
        later = await twin(here, "/log.json?topic=orders&search=basel&offset=20")
        none = await twin(here, "/log.json?topic=orders&search=nowhere")

    assert [4, 14, 24, 34] == [row["offset"] for row in found["records"]["records"]]
    assert [24, 34] == [row["offset"] for row in later["records"]["records"]]
    assert ([], 41) == (none["records"]["records"], none["records"]["next_offset"])


async def test_records_show_their_key_headers_and_time_and_are_found_by_key() -> None:
    """As a Kafka client sees them; a record without a key has none; a typed record may have one."""
    async with site() as here:
        await append(here, b"plain")
        made = records_of([b"total 5", b"total 7"], "customer-Basel", ["trace=abc"], 1_760_000_000_000)
        await append(here, records=made)
        await do(here, "log.produce", topic="orders", partition="0", key="typed-key", value="by hand")
        shown = await twin(here, "/log.json?topic=orders")
        found = await twin(here, "/log.json?topic=orders&search=BASEL")
        page = await here.browser.open("/log?topic=orders")
        asked = (await here.browser.open("/console/ask/log.produce?topic=orders&partition=0")).text

    plain, first, _, typed = shown["records"]["records"]
    assert (None, []) == (plain["key"], plain["headers"]) and plain["at_ms"]
    assert ("customer-Basel", 1_760_000_000_000) == (first["key"]["text"], first["at_ms"])
    assert [{"name": "trace", "value": "abc"}] == first["headers"]
    assert ("typed-key", "by hand") == (typed["key"]["text"], typed["payload"]["text"])
    assert [2, 3] == [row["offset"] for row in found["records"]["records"]]
    assert re.search(r'name="value"[^>]* required', asked) and not re.search(r'name="key"[^>]* required', asked)
    assert "trace: abc" in page.text and "2025-10-09 08:53:20" in page.text


async def test_a_search_reads_a_bounded_number_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "SEARCHED_MAX", 10)
    monkeypatch.setattr(view, "READ_BYTES_MAX", 10)
    async with site() as here:
        for number in range(30):
            await append(here, b"record %d" % number)
        found = await twin(here, "/log.json?topic=orders&search=nowhere")

    assert 11 <= found["records"]["next_offset"] <= 14


async def test_a_partition_is_read_from_a_time_on() -> None:
    async with site() as here:
        await append(here, b"early")
        await asyncio.sleep(0.01)
        await append(here, b"late")
        at = log_page(here).log
        spans = (await at.segments("orders", 0)).segments
        moment = spans[-1].created_at_ms / 1000
        text = datetime.fromtimestamp(moment, UTC).isoformat().replace("+00:00", "")
        found = await twin(here, f"/log.json?topic=orders&time={text}")
        odd = await here.browser.open("/log?topic=orders&time=noon")

    assert ["late"] == [row["payload"]["text"] for row in found["records"]["records"]]
    assert 400 == odd.status_code and "is not a time" in odd.text


async def test_a_record_is_appended_from_the_page() -> None:
    """Into a partition that exists; the trail has it; a topic that does not exist is not created by a slip."""
    async with site() as here:
        await append(here, b"first")
        done = await do(here, "log.produce", topic="orders", partition="0", value='{"typed": "<b>"}')
        slip = await do(here, "log.produce", topic="odrers", partition="0", value="x")
        found = await twin(here, "/log.json?topic=orders")
        (failed, made) = await here.context.trail.latest()

    assert "one record appended" in done and "odrers does not exist" in slip
    assert "typed" in found["records"]["records"][-1]["payload"]["text"]
    assert (("log.produce", "done"), ("log.produce", "invalid")) == (
        (made.what, made.outcome), (failed.what, failed.outcome),
    )  # fmt: skip


async def test_a_value_that_is_too_long_is_refused_and_not_cut() -> None:
    async with site() as here:
        await append(here, b"first")
        refused = await do(here, "log.produce", topic="orders", partition="0", value="x" * 16_001)
        found = await twin(here, "/log.json?topic=orders")

    assert "value is longer than 16000 characters" in refused
    assert 1 == len(found["records"]["records"])


async def test_a_group_is_moved_and_its_lag_follows() -> None:
    async with site() as here:
        await append(here, *(b"%d" % n for n in range(10)))
        log = log_page(here).log
        await log.groups.commit("billing", TP, 9)
        done = await do(here, "log.seek", topic="orders", group="billing", partition="0", offset="2", reason="again")
        far = await do(here, "log.seek", topic="orders", group="billing", partition="0", offset="99", reason="again")
        (row,) = await log.groups.progress("orders")

    assert "continues at offset 2" in done
    assert "a group cannot commit 99" in far
    assert (2, 9) == (row.offset, row.lag)


async def test_a_topic_is_created_once_and_configured() -> None:
    async with site() as here:
        made = await do(here, "log.create", topic="clicks", partitions="3")
        again = await do(here, "log.create", topic="clicks", partitions="3")
        many = await do(here, "log.create", topic="other", partitions="100000")
        await do(here, "log.configure", topic="clicks", retention_s="3600", retention_bytes="0", reason="cost")
        found = await twin(here, "/log.json?topic=clicks")

    assert "has 3 partitions" in made and "exists" in again and "from 1 to 1000" in many
    assert [0, 1, 2] == [row["partition"] for row in found["partitions"]]
    assert 3600.0 == found["config"]["retention_s"]


@pytest.mark.parametrize(
    ("path", "missing"),
    [
        ("/log?topic=nothing", "topic nothing does not exist"),
        ("/log?topic=nothing&partition=3&offset=5", "topic nothing does not exist"),
        ("/tables?table=gold/nothing", "gold/nothing"),
        ("/queue?queue=nothing&batch=3", "queue nothing has no batch"),
        ("/ticks?org=a&project=b&tick=t1", "no tick a/b/t1"),
        ("/batches?agent=x&batch=boot%2F0-9", "no batch boot/0-9 of x"),
        ("/lifecycle?bucket=nothing&key=a", "no filer is configured"),
    ],
)
async def test_one_missing_thing_is_said_once(path: str, missing: str) -> None:
    """However many parts of the page need it."""
    store = MemoryStore(clock=SystemClock())
    async with site(store) as here:
        spec = TableSpec("gold/shop/orders", schema_json((("id", "long"),)))
        table = PlainTable(here.context, spec)
        file = await table.write(pa.table({"id": [1, 2]}))
        await table.commit(lambda _: Commit("WRITE", (file,), rows_inserted=2))
        page = await here.browser.open(path)

    alerts = re.findall(r'class="alert" role="alert"><strong>(.*?)</strong>', page.text)
    assert 1 == len(alerts) and missing in alerts[0], alerts


async def test_who_may_only_look_can_do_none_of_it() -> None:
    """The dialog names the right that is missing, and the act is refused."""
    async with site(keys=KEYS) as here:
        await here.browser.sign_in("0123456789abcdef-watcher")
        await here.browser.open("/queue")
        for action, form in (
            ("log.produce", {"topic": "orders", "partition": "0", "value": "x"}),
            ("log.seek", {"topic": "orders", "group": "g", "partition": "0", "offset": "1", "reason": "r"}),
            ("log.create", {"topic": "orders", "partitions": "1"}),
            ("queue.replay-all", {"queue": "jobs", "reason": "r"}),
            ("lifecycle.put", {"bucket": "b", "policy": "{}", "reason": "r"}),
            ("audit.run", {"depth": "quick"}),
        ):
            refused = await here.browser.post(f"/console/do/{action}", form)
            assert 403 == refused.status_code and "watcher may not" in refused.text, action
        assert [] == await here.context.trail.latest()


async def test_all_dead_letters_are_replayed_at_once() -> None:
    store = MemoryStore(clock=SystemClock())
    async with site(store) as here:
        queue = Queue.of(here.context, "jobs")
        for number in range(3):
            await (await queue.ingestor().ingest([KeyValueEntry(b"k", b"%d" % number)])).await_durable()
        collector = queue.collector("one")
        for _ in range(3):
            batch = await collector.next_batch()
            assert batch is not None
            trouble = await queue.consumer.reject(batch.claimed, "no schema", last=True)
            await queue.dead_letters.bury(batch.claimed, trouble)
        await collector.close()
        before = await queue.status()
        done = await do(here, "queue.replay-all", queue="jobs", reason="the schema is there")
        after = await queue.status()

    assert "3 dead letters enqueued again" in done
    assert ((3, 0), (0, 3)) == ((before.dead, before.pending), (after.dead, after.pending))


def test_what_has_something_in_it_is_opened_first() -> None:
    def status(name: str, pending: int = 0, dead: int = 0) -> QueueStatus:
        return QueueStatus(name, pending, 0, 0, 0, dead, None, None, None, 0, 1, 0, [])

    assert "work" == queue_opened_first([status("default"), status("work", 30)])
    assert "dead" == queue_opened_first([status("default", 5), status("dead", dead=1)])
    assert ("", "default") == (queue_opened_first([]), queue_opened_first([status("default")]))
    assert "b" == opened_first([TopicRow("a", 1, 0, 0), TopicRow("b", 1, 3, 0)])
    assert "a" == opened_first([TopicRow("a", 1, 0, 0)])


def test_waiting_batches_are_filtered_by_state_and_owner() -> None:
    def row(sequence: int, held_by: str = "", rejections: int = 0) -> WaitingRow:
        return WaitingRow(sequence, "", 1, 1, 0.0, held_by, 1.0 if held_by else None, rejections, "")

    rows = [row(1, "collector-a"), row(2, "collector-b", 2), row(3), row(4, "", 1)]

    def found(state: str = "", owner: str = "") -> list[int]:
        return [each.sequence for each in filtered(rows, state, owner)]

    assert ([1, 2, 3, 4], [1, 2], [3, 4], [2, 4]) == (found(), found("claimed"), found("free"), found("failed"))
    assert [2] == found("", "-b")


class QuietAudit:
    """Waits instead of running Spark."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.go, self.error = threading.Event(), error
        monkeypatch.setattr(audit_page, "audit", self.audit)
        monkeypatch.setattr(runs, "BEAT_S", 0.05)

    def audit(self, context: Any, quick: bool, run: ActiveRun) -> None:
        run.progress("running tasks", 8, 3)
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error
        run.rows_in = 12


async def until(here: Any, path: str, words: str) -> str:
    """The page, once it has these words."""
    async with asyncio.timeout(30):
        while words not in (page := await here.browser.open(path)).text:
            here.console.data.samples.forget()
            await asyncio.sleep(0.02)
    return str(page.text)


async def test_an_audit_is_started_from_the_page_and_every_gateway_shows_its_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One at a time in the lake; its run stays on record."""
    store, quiet = MemoryStore(clock=SystemClock()), QuietAudit(monkeypatch)
    async with site(store, keys=KEYS) as here, site(store, keys=KEYS) as other:
        for each in (here, other):
            await each.browser.sign_in(OPERATOR)
            await each.browser.open("/audit")
        done = await do(here, "audit.run", depth="quick")
        shown = await until(other, "/audit", "3 of 8 tasks known")
        again = await do(other, "audit.run", depth="quick")
        row = await until(other, "/runs", "running tasks, 3 of 8 tasks")
        quiet.go.set()
        ended = await until(other, "/audit", "Completed in")
        listed = await until(other, "/runs?kind=audit&state=done", 'data-label="Kind">audit</td>')

    assert "the audit runs" in done and "is running already" in again
    assert '<progress max="8" value="3"' in shown and 'hx-get="/console/ask/audit.run' not in shown
    assert 'data-label="Kind">audit</td>' in row
    assert 'hx-get="/console/ask/audit.run' in ended and 'data-label="Rows in">12</td>' in listed


async def test_an_audit_that_was_not_completed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = QuietAudit(monkeypatch, Unavailable("the store does not answer"))
    quiet.go.set()
    async with site(keys=KEYS) as here:
        await here.browser.sign_in(OPERATOR)
        await here.browser.open("/audit")
        await do(here, "audit.run", depth="full")
        await until(here, "/audit", "the store does not answer")
        await until(here, "/runs?state=failed", "the store does not answer")


def ticks_html(tick: TickView, projects: list[ProjectStatus], state: str = "") -> str:
    shown = {
        "tick": DataSample(tick),
        "projects": DataSample(projects),
        "letters": DataSample([]),
        "silver": DataSample(),
    }
    return str(
        environment(Assets()).get_template("ticks.html").render(
            page=TicksPage, data=shown, chosen={"org": "acme", "project": "shop", "tick": "t1", "state": state},
            read_only=True, principal=ANYBODY, signed_in=False, may=ANYBODY.may, token="", now_ms=0, now_ns=0,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("state", "listed"), [("", ["t1", "t2"]), ("failed", ["t2"]), ("uploading", [])])
def test_ticks_are_filtered_by_state_and_one_leads_to_its_log_and_to_spark(state: str, listed: list[str]) -> None:
    ticks = (TickStatus("t1", "committed", 1, 10, 1000), TickStatus("t2", "failed", 1, 10, 1000))
    tick = TickView("acme", "shop", "t1", "committed", 1, 10, [], log="<b>merged", spark_page="http://127.0.0.1:4040")

    html = ticks_html(tick, [ProjectStatus("acme", "shop", "", {"committed": 1, "failed": 1}, ticks)], state)

    assert listed == re.findall(r'<td class="key"><a href="/ticks\?[^"]+">(t\d)</a>', html)
    assert '<pre class="payload" tabindex="0">&lt;b&gt;merged</pre>' in html
    assert '<a href="http://127.0.0.1:4040" rel="noreferrer">' in html


def test_a_tick_shows_its_lineage_and_what_changed_in_a_schema() -> None:
    """From its parts to the tables that were made of it, each linked; columns outside the contract are named."""
    report = {
        "silver": [{"table": "orders", "good": 1, "quarantined": 0, "added": ["tax"], "discarded": ["debug"]}],
        "gold": [{"table": "by_city"}],
    }
    tick = TickView("acme", "shop", "t1", "committed", 3, 10, [], {"orders": 4}, report)
    html = ticks_html(tick, [])

    assert 'href="/tables?table=silver%2Facme%2Fshop%2Forders"' in html
    assert 'href="/tables?table=gold%2Facme%2Fshop%2Fby_city"' in html
    assert "columns added: tax" in html and "columns not in the contract: debug" in html


def test_lineage_is_drawn_by_what_each_table_was_made_of() -> None:
    """A gold table stands behind its sources; a source that the tick did not touch has no line."""
    gold = [
        {"table": "by_country", "rows": 4, "sources": {"gold.by_customer": 1}},
        {"table": "by_customer", "rows": 40, "sources": {"silver.orders": 3, "silver.users": 9}},
    ]
    report = {"silver": [{"table": "orders", "good": 5940, "quarantined": 60}], "gold": gold}
    found = lineage(TickView("acme", "shop", "t1", "committed", 5, 10, [], {"orders": 4, "raw": 0}, report))
    at = {box.name: (box.x // STEP_X, box.y // STEP_Y) for box in found.boxes}

    assert {
        "parts": (0, 0), "bronze.orders": (1, 0), "bronze.raw": (1, 1), "silver.orders": (2, 0),
        "gold.by_customer": (3, 0), "gold.by_country": (4, 0),
    } == at  # fmt: skip
    assert 5 == len(found.edges)  # to both bronze tables, to silver, to each gold table
    assert "5,940 rows, 60 quarantined" in {box.note for box in found.boxes}
    assert "/tables?table=bronze%2Fticks%2Facme%2Fshop%2Forders" == found.boxes[1].href
    assert "" == found.boxes[0].href and all(box.href.startswith("/tables?") for box in found.boxes[1:])
    assert all(0 <= box.x < found.width and 0 <= box.y < found.height for box in found.boxes)


def test_gold_tables_that_name_each_other_are_drawn_too() -> None:
    """No report keeps the page from being shown."""
    gold = [{"table": "a", "sources": {"gold.b": 1}}, {"table": "b", "sources": {"gold.a": 1}}, {"no": "table"}]
    found = lineage(TickView("o", "p", "t", "committed", 1, 1, [], {"x": 0}, {"gold": gold, "silver": ["odd"]}))

    assert ["parts", "bronze.x", "gold.a", "gold.b"] == [box.name for box in found.boxes]
