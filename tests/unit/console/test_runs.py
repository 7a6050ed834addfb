"""What ran: one page over what every part records, with state, reason of a failure and a way to run it again."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
import pytest

from lakebed.batches.plot import SPOOLED, MetricPlots, drawn
from lakebed.batches.view import RecentBatches
from lakebed.batches.window_query import RollupSeries, WindowValues
from lakebed.console.pages import ACTIONS
from lakebed.console.rendering import Assets, environment
from lakebed.console.runs import PART_RUNS_MAX, JobRunner, RunRecord, RunsPage, RunsReader, merged
from lakebed.core.auth import ANYBODY
from lakebed.core.clock import ManualClock, SystemClock
from lakebed.core.context import Context
from lakebed.core.errors import Conflict, Invalid, Unavailable
from lakebed.core.logs import CAPTURED
from lakebed.core.runs import ActiveRun, RecordedRun, RunReader
from lakebed.core.settings import load
from lakebed.pipeline.tables.maintenance import TableMaintenance
from lakebed.pipeline.tables.runs import TablesRuns
from lakebed.store.memory import MemoryStore
from lakebed.ticks import runs as ticks_runs
from lakebed.ticks.audit import AuditRow
from lakebed.ticks.runs import silver
from lakebed.ticks.view import ProjectStatus, TickStatus
from lakebed.wiring.parts import PARTS, resolve, sections
from support.batch_frames import frame_of
from support.batches_gateway import collector
from support.console_site import KEYS, site
from support.tick_fixtures import context_of

READERS = [part for part in PARTS if part.runs]


@pytest.mark.parametrize("part", READERS, ids=lambda part: part.name)
async def test_each_reader_has_a_right_and_an_empty_lake_has_no_runs(part: Any) -> None:
    reader: RunsReader = resolve(part.runs)(context_of())

    assert ":" in reader.right
    assert [] == await reader.latest(PART_RUNS_MAX)
    await reader.close()


def test_those_that_run_now_come_first_and_then_the_newest() -> None:
    runs = [
        RunRecord("a", "old", "done", 10),
        RunRecord("b", "now", "running", 0, 5),
        RunRecord("c", "new", "failed", 20),
    ]

    assert ["now", "new", "old"] == [run.subject for run in merged(runs)]


async def test_a_run_is_shown_with_its_duration_rows_and_log() -> None:
    """And leads to what it ran on; kinds filter; the twin has the same."""
    store = MemoryStore(clock=SystemClock())
    async with site(store) as here:
        await ran(here.context, "log", "log compaction", "clicks/3 and 2 more")
        await ran(here.context, "tables", "bronze load", "bronze/topics/clicks")
        page = await here.browser.open("/runs")
        chosen = await here.browser.open("/runs?kind=bronze+load")
        twin = (await here.browser.client.get("/runs.json")).json()
        (log_href,) = re.findall(r'href="(/runs\?run=log[^"]+)"', page.text)
        opened = await here.browser.open(log_href.replace("&amp;", "&"))
        one = (await here.browser.client.get(log_href.partition("#")[0].replace("/runs?", "/runs.json?"))).json()
        none = await here.browser.open("/runs?run=log/2026-11-18T01/000001760000000-0000-abc")
        odd = await here.browser.client.get("/runs?run=nothing/x")

    assert 'href="/log?topic=clicks&amp;partition=3"' in page.text
    assert 'href="/tables?table=bronze%2Ftopics%2Fclicks"' in page.text
    assert 'data-label="Kind">bronze load</td>' in chosen.text
    assert 'data-label="Kind">log compaction</td>' not in chosen.text
    assert [("log compaction", 9, 7)] == [(run["kind"], run["rows_in"], run["rows_out"]) for run in twin["log"]]
    assert "compacted &lt;b&gt;" in opened.text and "compacted <b>" not in opened.text
    assert any("compacted" in line for line in one["run"]["log"])
    assert 1 == none.text.count("no run log/2026-11-18T01/000001760000000-0000-abc")
    assert 404 == odd.status_code and "no run nothing/x" in odd.text


async def ran(context: Context, part: str, kind: str, subject: str, fields: dict[str, str] | None = None) -> str:
    """Records a run; gives its name."""
    async with context.run_log(part).record(kind, subject, fields) as run:
        CAPTURED.get()[-1].append("info compacted <b>")
        run.rows_in, run.rows_out = 9, 7
    return run.name


@pytest.mark.parametrize(
    ("part", "kind", "subject"),
    [
        ("batches", "reconciler scan", "batches"),
        ("batches", "reconciler audit", "batches"),
        ("rollups", "rollups", "batches"),
        ("log", "log compaction", "clicks/0"),
    ],
)
async def test_a_run_is_run_again_and_is_on_record(part: str, kind: str, subject: str) -> None:
    """By the job itself, in this gateway; on an empty lake it finds nothing to do and ends well."""
    async with site(MemoryStore(clock=SystemClock())) as here:
        name = await ran(here.context, part, kind, subject)
        page = await here.browser.open("/runs")
        done = await here.browser.post("/console/do/runs.again", {"run": name})
        reader = RunReader(here.context, part)
        async with asyncio.timeout(30):
            states: list[str] = []
            while states != ["done", "done"]:
                found = await reader.latest(9)
                states = [run.state for run in found]
                assert "failed" not in states, found
                await asyncio.sleep(0.01)

    assert f"/console/ask/runs.again?run={name.replace('/', '%2F')}".encode() in page.content.replace(b"&amp;", b"&")
    assert f"{kind} {subject} runs" in done.text


async def test_a_job_runs_once_at_a_time_in_the_lake_and_again_when_it_has_ended() -> None:
    """Whichever gateway is asked, and however it ended; another subject is another job."""
    store, clock = MemoryStore(clock=SystemClock()), SystemClock()
    one, other = (JobRunner(context_of(store, clock=clock, seed=seed), "log") for seed in (1, 2))
    going, ends = asyncio.Event(), list[str]()

    async def work(run: ActiveRun) -> None:
        await going.wait()
        ends.append(run.subject)
        if len(ends) == 1:
            raise Unavailable("it failed")

    async def ended(runner: JobRunner) -> None:
        going.set()
        async with asyncio.timeout(60):
            while runner._tasks:
                await asyncio.sleep(0)
        going.clear()

    await one.begin("compaction", "clicks", work)
    for runner in (one, other):
        with pytest.raises(Conflict, match="compaction clicks is running already"):
            await runner.begin("compaction", "clicks", work)
    await other.begin("compaction", "orders", work)
    await ended(one)
    await ended(other)
    for runner in (one, other, one):
        await runner.begin("compaction", "clicks", work)
        await ended(runner)

    assert ["clicks", "orders", "clicks", "clicks", "clicks"] == ends
    found = await RunReader(context_of(store, clock=clock), "log").latest(10)
    assert ["done"] * 4 + ["failed"] == sorted(run.state for run in found)
    await one.stop()
    await other.stop()


async def test_a_job_that_is_asked_for_twice_at_the_same_time_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both look at what runs before either begins: the second is told that it runs already."""
    runner, going, begun = JobRunner(context_of(), "log"), asyncio.Event(), list[str]()
    latest, looked = runner._reader.latest, asyncio.Barrier(2)

    async def together(limit: int) -> Any:
        found = await latest(limit)
        await looked.wait()
        return found

    async def work(run: ActiveRun) -> None:
        begun.append(run.subject)
        await going.wait()

    monkeypatch.setattr(runner._reader, "latest", together)
    both = [runner.begin("compaction", "clicks", work) for _ in range(2)]
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*both, return_exceptions=True)
    await runner.stop()

    assert ["clicks"] == begun
    assert [type(None), Conflict] == sorted(map(type, answers), key=lambda kind: kind is Conflict)


async def test_the_page_shows_so_many_runs_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakebed.console.runs.RUNS_MAX", 3)
    store, clock = MemoryStore(clock=SystemClock()), SystemClock()
    log = context_of(store, clock=clock).run_log("log")
    for number in range(5):
        async with log.record("log compaction", f"topic-{number}"):
            pass
    async with site(store) as here:
        page = await here.browser.open("/runs")

    shown = [number for number in range(5) if f"topic-{number}" in page.text]
    assert 3 == len(shown)


async def test_models_and_loads_are_run_again_with_what_they_ran_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of the jobs; one that nobody can repeat is refused."""
    repeated: list[tuple[str, str, dict[str, str]]] = []
    monkeypatch.setattr(
        TablesRuns, "repeat", lambda self, run: repeated.append((run.kind, run.subject, run.fields)), raising=True
    )
    async with site(MemoryStore(clock=SystemClock())) as here:
        models = {"org": "acme", "project": "shop", "models": "daily"}
        names = [
            await ran(here.context, "tables", "models", "acme/shop", models),
            await ran(here.context, "tables", "bronze load", "bronze/topics/clicks", {"word": "topic.clicks"}),
        ]
        retention = await ran(here.context, "tables", "table retention", "bronze/topics/clicks")
        await here.browser.open("/runs")
        for name in names:
            done = await here.browser.post("/console/do/runs.again", {"run": name})
            assert 200 == done.status_code, done.text
        refused = await here.browser.post("/console/do/runs.again", {"run": retention})
        async with asyncio.timeout(30):
            while len(repeated) < 2:
                await asyncio.sleep(0.01)

    assert [("models", "acme/shop", models), ("bronze load", "bronze/topics/clicks", {"word": "topic.clicks"})] == (
        repeated
    )
    assert 404 == refused.status_code and "not run from here" in refused.text


def test_the_right_to_run_again_is_that_of_the_part() -> None:
    right = ACTIONS["runs.again"].right

    assert ["batches:admin", "batches:admin", "log:admin:*", "pipeline:run", "console:run"] == [
        right({"run": f"{part}/2026-11-18T01/x"}) for part in ("batches", "rollups", "log", "tables", "nothing")
    ]


async def test_runs_of_a_part_that_may_not_be_read_are_left_out_with_the_reason() -> None:
    async with site(keys=KEYS) as here:
        await here.browser.sign_in("0123456789abcdef-watcher")
        page = await here.browser.open("/runs")

    assert "ticks: watcher may not ticks:read" in page.text


def test_a_job_that_failed_says_why_and_can_run_again() -> None:
    tick = TickStatus("20261116T120000__1", "committed", 1, 10, 1000)
    row = AuditRow("acme", "shop", tick.tick_id, "failed", "a", 4000, 0, {"detail": "contract: total is missing"})

    found = silver(row, tick)

    assert ("failed", "contract: total is missing", 3.0) == (found.state, found.reason, found.took_s)
    assert set(found.fields) == set(ACTIONS[found.action].fields)


def test_a_run_leads_to_its_log_and_to_sparks_page() -> None:
    """Where the job recorded them."""
    tick = TickStatus("t1", "committed", 1, 10, 1000)
    detail = '{"silver": [], "spark": {"application": "local-1", "address": "http://127.0.0.1:4040"}}'
    found = silver(AuditRow("acme", "shop", "t1", "done", "a", 4000, 0, {"detail": detail, "log": "started"}), tick)
    chosen = {"runs": [found], "kinds": [], "kind": "", "state": "", "run": ""}
    html = environment(Assets()).get_template("runs.html").render(
        page=RunsPage, data={}, chosen=chosen, read_only=True,
        principal=ANYBODY, signed_in=False, may=ANYBODY.may, token="", now_ms=0, now_ns=0,
    )  # fmt: skip

    assert '<a href="http://127.0.0.1:4040" rel="noreferrer">Spark</a>' in html
    assert (
        '<a href="/ticks?org=acme&amp;project=shop&amp;tick=t1" aria-label="Log of silver and gold acme/shop/t1">'
        in html
    )


def test_a_job_that_ended_well_has_its_rows() -> None:
    tick = TickStatus("20261116T120000__1", "committed", 1, 10, 1000)
    detail = '{"silver": [{"table": "orders", "rows_in": 10, "good": 8}, {"table": "users", "rows_in": 1, "good": 1}]}'
    found = silver(AuditRow("acme", "shop", tick.tick_id, "done", "a", 4000, 0, {"detail": detail}), tick)

    assert ("done", 11, 9, "") == (found.state, found.rows_in, found.rows_out, found.reason)


@pytest.mark.parametrize(("changed_ms", "began_ms"), [(1000, 1000), (4000, 4000), (4001, 0), (9000, 0), (0, 0)])
def test_a_job_began_when_its_tick_was_committed_where_that_was_before(changed_ms: int, began_ms: int) -> None:
    """A tick that changed after its job, or whose time is not known, says nothing of the job's begin: no duration is
    better than one below zero."""
    row = AuditRow("acme", "shop", "t1", "done", "a", 4000, 0)

    found = silver(row, TickStatus("t1", "committed", 1, 10, changed_ms))

    assert (began_ms, 4000) == (found.started_at_ms, found.ended_at_ms)


@pytest.mark.parametrize(
    ("state", "inserted", "replaced", "shown", "rows"),
    [
        ("committed", 5, 2, "done", 7),
        ("committed", 5, None, "done", 5),
        ("committed", 0, 3, "done", 3),
        ("failed", None, None, "failed", None),
        ("uploading", None, None, "waiting", None),
        ("finalizing", None, None, "running", None),
    ],
)
def test_a_tick_is_a_run_with_the_rows_that_it_changed(
    state: str, inserted: int | None, replaced: int | None, shown: str, rows: int | None
) -> None:
    """Inserted and replaced together; unknown before they are known."""
    tick = TickStatus("t1", state, 2, 10, 4000, inserted, replaced, created_at_ms=1000, rows_sent=9)

    found = ticks_runs._tick(ProjectStatus("acme", "shop", "", {}, (tick,)), tick)

    assert (shown, 9, rows, 1000, "2 parts") == (
        found.state,
        found.rows_in,
        found.rows_out,
        found.started_at_ms,
        found.reason,
    )


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("table compaction", {}, ("compact", "bronze/o/p/t")),
        ("table vacuum", {}, ("vacuum", "bronze/o/p/t")),
        ("bronze load", {"word": "topic.clicks"}, ("load", ["topic.clicks"])),
        ("silver", {"org": "o", "project": "p"}, ("rebuild", "o", "p")),
        ("models", {"org": "o", "project": "p", "models": "a b"}, ("models", "o", "p", ["a", "b"], "command")),
        ("models", {"org": "o", "project": "p", "models": ""}, ("models", "o", "p", None, "command")),
    ],
)
def test_a_run_of_a_table_is_repeated_by_its_own_job(
    monkeypatch: pytest.MonkeyPatch, kind: str, fields: dict[str, str], expected: tuple[Any, ...]
) -> None:
    """On the same table, source or project, and only there."""
    asked: list[tuple[Any, ...]] = []
    maintenance, load, runner = TableMaintenance, "lakebed.pipeline.bronze.ingestion.Ingestion", Repeated(asked)
    monkeypatch.setattr(maintenance, "compact", lambda self, only: asked.append(("compact", only)))
    monkeypatch.setattr(maintenance, "vacuum", lambda self, only: asked.append(("vacuum", only)))
    monkeypatch.setattr(load, lambda context: runner)
    monkeypatch.setattr("lakebed.pipeline.runner.PipelineRunner", lambda context: runner)
    run = RecordedRun("r", "tables", kind, "bronze/o/p/t", "done", 1, 2, fields=fields)

    TablesRuns(context_of(clock=ManualClock())).repeat(run)

    assert kind in TablesRuns.repeats
    assert [expected] == asked


class Repeated:
    """The jobs of the pipeline, which note what they are asked for."""

    def __init__(self, asked: list[tuple[Any, ...]]) -> None:
        self.asked = asked

    def run(self, *, only: list[str]) -> None:
        self.asked.append(("load", only))

    def rebuild(self, org: str, project: str) -> None:
        self.asked.append(("rebuild", org, project))

    def run_models(self, org: str, project: str, names: list[str] | None, *, trigger: str) -> None:
        self.asked.append(("models", org, project, names, trigger))


async def test_each_action_that_runs_something_again_exists() -> None:
    page = RunsPage(context_of())
    await page.stop()

    assert {"ticks.replay", "audit.run", "lifecycle.walk", "runs.again"} <= set(ACTIONS)


async def test_a_metric_of_a_batch_is_offered_and_plotted_with_quantiles() -> None:
    """From the bucket alone; labels narrow it; what is no matcher is refused."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    async with collector(store, clock=clock) as (client, part):
        frame = frame_of(0, 9, agent="web-1", at_ns=clock.now_ns() - 60 * 10**9)
        assert (await client.post("/v1/batches", content=frame)).status_code == 200
        await part.derived_writes.stop()
    context = context_of(store=store, clock=clock)
    plots = MetricPlots(context, RecentBatches(context))

    names = await plots.names()
    found = await plots.plot(names[0].metric, (), "1h")
    narrow = await plots.plot(names[0].metric, ("host=h1",), "1h")
    other = await plots.plot(names[0].metric, ("host=elsewhere",), "1h")
    none = await plots.plot("nothing", (), "6h")
    with pytest.raises(Invalid):
        await plots.plot(names[0].metric, ("host",), "1h")

    assert [("cpu", ("host",))] == [(one.metric, one.labels) for one in names]
    assert [value for value in found.lines["p50"] if value is not None]
    assert (["h0", "h1"], 60) == (sorted(one.labels["host"] for one in found.series), found.window_s)
    assert (["h1"], []) == ([one.labels["host"] for one in narrow.series], other.series)
    assert (False, []) == (found.partial, found.why)  # every accepted batch is in the bucket and in its index
    assert clock.now_ns() - 5 * 10**9 == found.accepted_through_ns
    assert ([], {}) == (none.series, none.lines)


async def test_a_plot_says_what_it_lacks() -> None:
    """Batches in a spool are not in the bucket yet, and more batches than one plot reads are not all in it."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    async with collector(store, clock=clock) as (client, part):
        for number in range(3):
            frame = frame_of(number * 10, number * 10 + 9, at_ns=clock.now_ns() - 60 * 10**9)
            assert (await client.post("/v1/batches", content=frame)).status_code == 200
        await part.derived_writes.stop()
    context = context_of(store=store, clock=clock)
    flags = {"store.url": "memory:", "batches.acceptance": "local_spool", "batches.spool_dir": "spool"}
    spooled = msgspec.structs.replace(context, settings=load(sections(), flags=flags))
    few = MetricPlots(context, RecentBatches(context), batches_max=2)

    assert [SPOOLED] == (await MetricPlots(spooled, RecentBatches(spooled)).plot("cpu", (), "15m")).why
    assert ["more than 2 raw batches are in the range"] == (await few.plot("cpu", (), "15m")).why


async def test_a_batch_is_opened_from_its_row_and_leads_back_to_its_plots() -> None:
    """Its manifest, its blob and its series; what was never accepted, a name that is none and a lost blob are told."""
    clock = SystemClock()
    store = MemoryStore(clock=clock)
    async with collector(store, clock=clock) as (client, part):
        frame = frame_of(0, 9, agent="web-1", at_ns=clock.now_ns())
        assert (await client.post("/v1/batches", content=frame)).status_code == 200
        await part.derived_writes.stop()
    async with site(store) as here:
        page = await here.browser.open("/batches")
        opened = await here.browser.open("/batches?agent=web-1&batch=boot-1%2F0-9")
        twin = (await here.browser.client.get("/batches.json?agent=web-1&batch=boot-1/0-9")).json()
        other = await here.browser.open("/batches?agent=web-1&batch=boot-1%2F5-9")
        odd = await here.browser.open("/batches?agent=web-1&batch=nothing")
        await store.delete(twin["batch"][0]["manifest"]["raw_blob_key"])
        here.console.data.samples.forget()
        lost = await here.browser.open("/batches?agent=web-1&batch=boot-1%2F0-9")

    assert "/batches?agent=web-1&amp;batch=boot-1%2F0-9#batch" in page.text
    (batch,) = twin["batch"]
    assert [("cpu", "agent_id=web-1,host=h0", 5), ("cpu", "agent_id=web-1,host=h1", 5)] == [
        (row["metric"], row["match"], row["samples"]) for row in batch["series"]
    ]
    assert batch["manifest"]["raw_blob_key"] in opened.text
    assert "/batches?metric=cpu&amp;match=agent_id%3Dweb-1%2Chost%3Dh0#plot" in opened.text
    assert "no batch boot-1/5-9 of web-1 is accepted" in other.text and "names no batch" in odd.text
    assert "Series of the batch" in opened.text and "Series of the batch" not in lost.text


def test_a_window_without_samples_is_a_gap_in_the_plot() -> None:
    def window(at_s: int) -> WindowValues:
        return WindowValues(at_s * 10**9, 1, 1.0, 1.0, 3.0, 0, 2.0, 0, [1.0, 2.0, 2.5])

    at_s, lines = drawn(RollupSeries({}, [window(0), window(60), window(300)]), 60)

    assert [0.0, 60.0, 180.0, 300.0] == at_s
    assert [2.5, 2.5, None, 2.5] == lines["p99"]
    assert {"largest", "p50", "p90", "p99", "smallest"} == set(lines)
