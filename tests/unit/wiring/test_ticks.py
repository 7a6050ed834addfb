"""When a process of a stack starts Spark by itself."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.errors import Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.spark import session
from lakebed.store.memory import MemoryStore
from lakebed.ticks.dispatcher import Dispatcher
from lakebed.ticks.model import BronzeResult, BronzeTick, SilverTick
from lakebed.ticks.routes import TicksRoutes
from lakebed.wiring import ticks as wiring
from lakebed.wiring.parts import sections
from lakebed.wiring.ticks import SparkBronze, SparkFlow, SparkSilver, WarmTicks, component, silver_workers, workers
from support.tick_fixtures import context_of as ticks_context


def context_of(contracts: str) -> Context:
    clock = SystemClock()
    settings = load(sections(), flags={"pipeline.contracts": contracts})
    return Context(
        node="node-1", settings=settings, store=MemoryStore(clock=clock), clock=clock, ids=Ids(), metrics=Metrics()
    )


@pytest.mark.parametrize(("contracts", "times"), [("", 0), ("examples", 1)])
async def test_workers_start_spark_only_where_silver_has_contracts(
    contracts: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without contracts nothing of theirs needs it: a stack has one Spark, the gateway's."""
    warmed: list[int] = []

    async def warm(self: SparkFlow) -> None:
        warmed.append(1)

    async def dispatch(self: Dispatcher) -> None:
        raise Unavailable(f"warmed {len(warmed)} times")

    monkeypatch.setattr(SparkFlow, "warm", warm)
    monkeypatch.setattr(Dispatcher, "run", dispatch)
    (worker,) = silver_workers(context_of(contracts))

    with pytest.raises(Unavailable, match=f"warmed {times} times"):
        await worker.run()


async def test_a_queue_that_is_away_cuts_no_load_and_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher fails and is tried again beside them: they are started once."""
    started: list[str] = []
    tried_again = asyncio.Event()

    async def dispatch(self: Dispatcher) -> None:
        started.append("dispatch")
        if len(started) > 2:
            tried_again.set()
        raise Unavailable("the queue is away")

    async def load() -> None:
        started.append("load")
        await asyncio.Event().wait()

    monkeypatch.setattr(Dispatcher, "run", dispatch)
    monkeypatch.setattr(wiring, "pipeline_loops", lambda context, opened: [load])
    (worker,) = silver_workers(context_of(""))
    running = asyncio.ensure_future(worker.run())
    async with asyncio.timeout(60):
        await asyncio.wait([running, asyncio.ensure_future(tried_again.wait())], return_when=asyncio.FIRST_COMPLETED)
    alive = not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert (True, 1) == (alive, started.count("load"))


async def test_a_tick_without_a_contract_is_done_without_spark() -> None:
    """Its tables stay in bronze and are named, and no Java is started to report it."""
    job = SparkSilver(SparkFlow(context_of("")))

    done = await job.run("acme", "shop", [SilverTick("t-1", "20261115", "delta", {"orders": 3, "customers": 1})])

    assert (["t-1"], ["customers", "orders"]) == (list(done.detail["ticks"]), list(done.detail["without_contract"]))
    assert "off" == session.state()


class StandIn:
    """A pipeline that notes what it is requested."""

    def __init__(self, *tables: Any) -> None:
        self.tables, self.asked = tables, []  # type: ignore[var-annotated]

    def commit(self, tick: Any) -> Any:
        self.asked.append((tick.org_id, tick.project_id, tick.tick_id))
        return self.tables

    def run_silver(self, *args: Any, anew: set[str], raises: bool) -> Any:
        self.asked.append((*args, anew, raises))
        return {"ticks": args[2]}


def flow_over(pipeline: StandIn) -> SparkFlow:
    flow = SparkFlow(context_of(""))
    flow._opened = pipeline
    return flow


async def test_a_commit_adds_up_its_tables_and_names_their_versions() -> None:
    one = SimpleNamespace(name="orders", rows_inserted=5, rows_replaced=1, version=3)
    other = SimpleNamespace(name="lines", rows_inserted=7, rows_replaced=2, version=9)
    pipeline = StandIn(one, other)

    found = await SparkBronze(flow_over(pipeline)).commit(BronzeTick("acme", "shop", "t-1", "delta", (), ()))

    assert BronzeResult(12, 3, {"orders": 3, "lines": 9}) == found
    assert [("acme", "shop", "t-1")] == pipeline.asked


async def test_a_job_reads_each_table_at_the_latest_version_of_its_ticks() -> None:
    """Whatever the order of the ticks; tables of a replay are made anew, others are not."""
    pipeline = StandIn()
    ticks = [
        SilverTick("t-2", "d", "delta", {"orders": 4, "lines": 0}),
        SilverTick("t-1", "d", "delta", {"orders": 3}, replay=True),
    ]

    found = await SparkSilver(flow_over(pipeline)).run("acme", "shop", ticks)

    assert [("acme", "shop", ["t-2", "t-1"], {"orders": 4, "lines": 0}, {"orders"}, False)] == pipeline.asked
    assert {"ticks": ["t-2", "t-1"]} == found.detail


async def test_a_pipeline_is_made_once_for_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = SparkFlow(context_of(""))
    made: list[int] = []
    monkeypatch.setattr(flow, "_make", lambda: made.append(1) or StandIn())

    first, second = await asyncio.gather(flow.open(), flow.open())

    assert first is second
    assert [1] == made


@pytest.mark.parametrize(
    ("flags", "warmed"),
    [
        ({"store.url": "s3://lake", "pipeline.warm": True}, 1),
        ({"store.url": "s3://lake", "pipeline.warm": False}, 0),
        ({"store.url": "memory:", "pipeline.warm": True}, 0),
    ],
)
async def test_spark_is_started_early_where_the_settings_and_the_store_allow(flags: Any, warmed: int) -> None:
    """An error is left to the first job, which raises it again."""
    times: list[int] = []

    def warm() -> None:
        times.append(1)
        raise Unavailable("no Java")

    clock = SystemClock()
    context = Context(
        node="n",
        settings=load(sections(), flags=flags),
        store=MemoryStore(clock=clock),
        clock=clock,
        ids=Ids(),
        metrics=Metrics(),
    )
    flow = SparkFlow(context)
    flow._opened = SimpleNamespace(warm=warm)

    await flow.warm()

    assert warmed == len(times)


@pytest.mark.parametrize(("pipeline", "kind"), [("twin", TicksRoutes), ("spark", WarmTicks)])
async def test_the_setting_chooses_who_writes_bronze(pipeline: str, kind: type) -> None:
    context = ticks_context(pipeline=pipeline)
    made = component(context)

    assert kind is type(made)
    health = await made.health()
    assert (pipeline == "spark") == health.detail.endswith("; Spark: off")
    assert ["ticks-sweeper", "ticks-auditor", "pipeline"] == [worker.name for worker in workers(context)]
    assert ["pipeline"] == [worker.name for worker in silver_workers(context)]


async def test_commits_of_many_orgs_run_at_once_whatever_the_default_threads_are() -> None:
    """Forty commits wait for each other: they are all inside Spark's writer at the same time."""
    together = threading.Barrier(40, timeout=20)

    class Runner:
        def commit(self, tick: BronzeTick) -> list[Any]:
            together.wait()
            return []

    flow = SparkFlow(context_of(""))
    flow._opened = Runner()
    bronze = SparkBronze(flow)
    ticks = [BronzeTick(f"org-{number}", "p", "t", "20261115", (), {}) for number in range(40)]

    done = await asyncio.gather(*map(bronze.commit, ticks))

    assert [BronzeResult(0, 0, {})] * 40 == list(done)
