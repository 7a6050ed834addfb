"""The worker that runs models when they are due: nothing waits for what is slow. No Spark."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Collection
from itertools import pairwise
from typing import Any

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Corrupt, Unavailable
from lakebed.pipeline.models.folder import sql_model
from lakebed.pipeline.models.graph import graph_of
from lakebed.pipeline.models.pages import graph_page
from lakebed.pipeline.models.plan import ModelStep
from lakebed.pipeline.models.runs import ModelReport, PipelineRun, decode_run, expire_runs, run_key, runs, write_run
from lakebed.pipeline.models.worker import PARALLEL, PAUSE_MAX_MS, ModelWorker
from lakebed.store.memory import MemoryStore
from support.runtimes import runtime_of

DEADLINE_S = 20.0


class Service:
    """Four models of one project: a slow one and a quick one that follow their source, one by interval, one by hand."""

    def __init__(self, **more: str) -> None:
        headers = {"slow": "", "quick": "", "hourly": "-- every: 1h\n", "byhand": "-- on: manual\n"} | more
        self.waiting: dict[str, int] = {}
        reads = "select * from silver.orders"
        self.graph = graph_of([sql_model(name, header + reads) for name, header in headers.items()], {"orders"})
        self.moved, self.made, self.error = {"slow", "quick"}, [], None  # type: ignore[var-annotated]
        self.late: set[tuple[str, str, str]] = set()
        self.go_on = threading.Event()

    error: Exception | None
    made: list[tuple[str, str]]

    def projects(self) -> list[tuple[str, str]]:
        return [("acme", "shop")]

    def lags(self, words: Collection[str]) -> dict[str, int]:
        return {word: self.waiting.get(word, 0) for word in words}

    def load(self, words: Collection[str]) -> None:
        self.made += [(word, "load") for word in words]
        self.waiting.clear()

    def plan_models(self, org_id: str, project_id: str, names: list[str]) -> dict[str, ModelStep]:
        return {name: ModelStep("refresh" if name in self.moved else "unchanged", "") for name in names}

    def run_models(self, org_id: str, project_id: str, names: list[str], *, trigger: str) -> list[ModelReport]:
        (name,) = names
        if name == "slow":
            assert self.go_on.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        self.made.append((name, trigger))
        return [ModelReport(name, "made")]


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    made = Service()
    yield made
    made.go_on.set()


async def ended(worker: ModelWorker, *left: str) -> None:
    """Waits until only these models run."""
    async with asyncio.timeout(DEADLINE_S):
        while {name for _, _, name in worker._running} - set(left):
            await asyncio.sleep(0.001)


async def test_a_round_waits_for_no_model_and_a_slow_one_stops_no_other(service: Service) -> None:
    """The quick model is made twice while the slow one runs, which is not started again meanwhile."""
    clock = ManualClock()
    worker = ModelWorker(service, runtime_of(clock))

    first = await worker.round()
    await ended(worker, "slow")
    second = await worker.round()
    await ended(worker, "slow")
    service.go_on.set()
    await ended(worker)

    assert (["slow", "quick", "hourly"], ["quick"]) == (first, second)
    assert [("hourly", "schedule"), ("quick", "change"), ("quick", "change"), ("slow", "change")] == sorted(
        service.made
    )


async def test_the_worker_looks_at_its_interval_also_after_a_round_that_failed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing that fails costs one round; what runs at the end is let go."""
    clock, looked = ManualClock(), list[float]()
    worker = ModelWorker(service, runtime_of(clock))
    began_s = clock.monotonic_s()

    def projects() -> list[tuple[str, str]]:
        looked.append(clock.monotonic_s() - began_s)
        if len(looked) == 2:
            raise Unavailable("the bucket is away")
        return [("acme", "shop")]

    monkeypatch.setattr(service, "projects", projects)
    running = asyncio.create_task(worker.run(10.0))
    async with asyncio.timeout(DEADLINE_S):
        while len(looked) < 4:
            await clock.advance(0.5)
            await asyncio.sleep(0.001)
    slow = worker._running["acme", "shop", "slow"]
    running.cancel()
    await asyncio.gather(running, slow, return_exceptions=True)

    assert all(later - earlier >= 10 for earlier, later in pairwise(looked))
    assert slow.cancelled()


async def test_a_table_that_cannot_be_read_holds_up_only_the_models_that_read_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other models of its project, and the projects behind it, are planned and made all the same."""
    plainly, planned = service.plan_models, list[tuple[str, tuple[str, ...]]]()

    def plan_models(org_id: str, project_id: str, names: list[str]) -> dict[str, ModelStep]:
        planned.append((project_id, tuple(names)))
        if project_id == "broken" and "hourly" in names:
            raise Corrupt("tables/gold/acme/broken/hourly has a gap")
        return plainly(org_id, project_id, names)

    monkeypatch.setattr(service, "projects", lambda: [("acme", "broken"), ("acme", "shop")])
    monkeypatch.setattr(service, "plan_models", plan_models)
    service.moved = {"quick"}
    worker = ModelWorker(service, runtime_of(ManualClock()))

    started = await worker.round()
    await ended(worker)

    assert ["quick", "quick", "hourly"] == started
    assert ("shop", ("slow", "quick", "hourly")) == planned[-1]  # at once, where nothing is wrong


async def test_a_topic_whose_lag_is_not_known_holds_up_only_the_models_that_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its table cannot be read: models of other topics, and those that follow tables, run."""
    service = Service(bad="-- lag: topic.bad | 1\n", good="-- lag: topic.good | 1\n")
    service.moved, service.waiting = {"quick"}, {"topic.good": 1}
    plainly = service.lags

    def lags(words: Collection[str]) -> dict[str, int]:
        if "topic.bad" in words:
            raise Corrupt("tables/bronze/topics/lake/bad has a gap")
        return plainly(words)

    monkeypatch.setattr(service, "lags", lags)
    worker = ModelWorker(service, runtime_of(ManualClock()))

    started = await worker.round()
    await ended(worker)

    assert {"quick", "hourly", "good"} == set(started)


async def test_so_many_models_run_at_once_and_the_others_wait() -> None:
    """Each holds a part of Spark: a hundred at once would be none."""
    service = Service(**{f"m{n}": "" for n in range(PARALLEL + 2)})
    service.moved = {f"m{n}" for n in range(PARALLEL + 2)}
    worker, at_once, most = ModelWorker(service, runtime_of(ManualClock())), set[str](), list[int]()
    plainly = service.run_models

    def run_models(org_id: str, project_id: str, names: list[str], *, trigger: str) -> list[ModelReport]:
        at_once.add(names[0])
        most.append(len(at_once))
        threading.Event().wait(0.02)
        at_once.discard(names[0])
        return plainly(org_id, project_id, names, trigger=trigger)

    service.run_models = run_models  # type: ignore[method-assign]

    started = await worker.round()
    await ended(worker)

    assert (PARALLEL + 3, PARALLEL + 3) == (len(started), len(service.made))  # the hourly one too
    assert max(most) <= PARALLEL


async def test_an_interval_counts_from_the_last_run_whatever_moved(service: Service) -> None:
    """Also of a run that found nothing to do."""
    clock, service.moved = ManualClock(), set()
    worker = ModelWorker(service, runtime_of(clock))

    started = []
    for advance_s in (0, 3599, 1, 0):
        await clock.advance(advance_s)
        started.append(await worker.round())
        await ended(worker)

    assert [["hourly"], [], ["hourly"], []] == started


async def test_a_model_runs_when_a_topic_has_so_many_records_that_wait() -> None:
    """They are loaded first; before that, and when its source moves, it does not run. The project of the topics has no
    table yet.
    """
    clock, service = ManualClock(), Service(lagged="-- lag: topic.orders | 10\n")
    service.moved = {"lagged"}
    worker = ModelWorker(service, runtime_of(clock))
    await worker.round()
    await ended(worker)  # the hourly one
    service.made.clear()

    started = []
    for waiting in (0, 9, 10, 0):
        service.waiting["topic.orders"] = waiting
        started.append(await worker.round())
        await ended(worker)

    assert [[], [], ["lagged"], []] == started
    assert [("topic.orders", "load"), ("lagged", "lag")] == service.made


async def test_a_model_that_fails_is_tried_again_after_a_growing_pause(service: Service) -> None:
    """Not in every round, and its failure stops no round."""
    clock, service.moved, service.error = ManualClock(), {"quick"}, Unavailable("not now")
    worker = ModelWorker(service, runtime_of(clock))

    started = []
    for advance_s in (0, 15, 15, 30, 30):
        await clock.advance(advance_s)
        started.append("quick" in await worker.round())
        await ended(worker)
    service.error = None
    await clock.advance(600)
    await worker.round()
    await ended(worker)

    assert [True, False, True, False, True] == started
    assert ("quick", "change") in service.made


async def test_a_model_that_was_made_again_is_not_held_up_by_earlier_failures(service: Service) -> None:
    """The pause grows with failures that follow each other."""
    clock, service.moved, service.error = ManualClock(), {"quick"}, Unavailable("not now")
    worker = ModelWorker(service, runtime_of(clock))
    for failing in (True, True, True, False, True):
        service.error = Unavailable("not now") if failing else None
        await worker.round()
        await ended(worker)
        await clock.advance(3600)
    await worker.round()
    await ended(worker)
    service.error = None
    service.made.clear()

    await clock.advance(600)
    await worker.round()
    await ended(worker)
    service.error = Unavailable("not now")
    await worker.round()
    await ended(worker)
    await clock.advance(30)

    assert "quick" in await worker.round()
    await ended(worker)


async def test_a_model_that_failed_with_its_tick_is_made_between_ticks() -> None:
    """Until a tick has made it, it follows its sources; before and after that, only ticks run it."""
    service = Service(ticked="-- on: tick\n", other="-- on: tick\n")
    service.moved = {"ticked", "other"}
    worker = ModelWorker(service, runtime_of(ManualClock()))
    at = ("acme", "shop", "ticked")

    started = []
    for late, moved in ((set(), True), ({at}, True), ({at}, False), (set(), True)):
        service.late, service.moved = late, {"ticked", "other"} if moved else set()
        started.append([name for name in await worker.round() if name != "hourly"])
        await ended(worker)

    assert [[], ["ticked"], [], []] == started
    assert ("ticked", "change") in service.made


async def test_the_pause_after_many_failures_has_a_limit(service: Service) -> None:
    """A model that failed all night is tried again within the longest pause after its cause is gone."""
    clock, service.moved, service.error = ManualClock(), {"quick"}, Unavailable("not now")
    worker = ModelWorker(service, runtime_of(clock))
    for _ in range(20):
        await worker.round()
        await ended(worker)
        await clock.advance(PAUSE_MAX_MS / 1000)

    assert "quick" in await worker.round()
    await ended(worker)


def record(run_id: str, began_ms: int, *reports: ModelReport, **changed: Any) -> PipelineRun:
    known: dict[str, Any] = {"org_id": "acme", "project_id": "shop", "trigger": "tick", "seconds": 1.5, "state": "done"}
    return PipelineRun(run_id, began_ms=began_ms, models=reports, **{**known, **changed})


async def test_runs_are_read_newest_first_by_project_and_model_and_kept_for_a_while() -> None:
    """A run that found nothing leaves no record; days that are past go as a whole."""
    store, day_ms = MemoryStore(clock=ManualClock()), 86_400_000
    made, still = ModelReport("spent", "made", rows=3), ModelReport("other", "unchanged")
    for each in (
        record("a", 10 * day_ms, made),
        record("b", 11 * day_ms, made, still, org_id="other"),
        record("c", 11 * day_ms + 1, still),
        record("d", 12 * day_ms, ModelReport("bad", "failed", error="why"), state="failed"),
    ):
        await write_run(store, each)

    everything = await runs(store)
    assert ["d", "b", "a"] == [each.run_id for each in everything]
    assert (["b"], ["b", "a"], ["d"]) == (
        [each.run_id for each in await runs(store, org_id="other")],
        [each.run_id for each in await runs(store, model="spent")],
        [each.run_id for each in await runs(store, limit=1)],
    )
    assert 1 == await expire_runs(store, 101 * day_ms * 1_000_000)
    assert ["d", "b"] == [each.run_id for each in await runs(store)]
    assert "pipeline/runs/v1/1970-01-13/d.json" == run_key(everything[0])


def test_a_record_is_read_for_ever() -> None:
    """Format 1, as it was first written."""
    data = b"""{"run_id":"000001760000000-0000-ab","org_id":"acme","project_id":"shop","trigger":"tick",
        "began_ms":1760000000000,"seconds":2.5,"state":"done","models":[{"table":"spent","state":"made",
        "mode":"increment","reason":"silver.orders 1 to 2","version":4,"rows":7,"rows_in":8,"quarantined":1,
        "sources":{"silver.orders":2},"after":{"silver.orders":1},"columns":{"total":["silver.orders.total"]},
        "expectations":[{"condition":"total >= 0","action":"quarantine","failed":1}],"seconds":2.1}]}"""

    found = decode_run(data, "key")

    (made,) = found.models
    assert ("spent", "made", 7, 1, {"silver.orders": 2}) == (
        made.table,
        made.state,
        made.rows,
        made.quarantined,
        made.sources,
    )
    assert 1 == made.expectations[0].failed


def test_the_page_draws_the_graph_and_describes_each_model() -> None:
    """Arrows say what is read, and how; the same graph gives the same page."""
    one = "-- incremental: merge\n-- keys: id\n-- expect: total >= 0 | fail\nselect * from {{ changes('orders') }}"
    graph = graph_of([sql_model("spent", one), sql_model("top", "-- every: 1h\nselect * from gold.spent")], {"orders"})

    page = graph_page(graph)

    for line in (
        "  silver_orders[(silver.orders)]",
        "  silver_orders -- changes --> gold_spent",
        "  gold_spent --> gold_top",
        "| reads | `silver.orders` (changes) |",
        "| runs | every 1h |",
        "| `total >= 0` | fail |",
    ):
        assert line in page.splitlines(), line
    assert page == graph_page(graph)
