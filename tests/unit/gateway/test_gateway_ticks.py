"""When a process of a stack starts Spark by itself."""

from __future__ import annotations

import pytest

from lakebed.clock import SystemClock
from lakebed.context import Context, Worker
from lakebed.gateway.ticks import SparkFlow, SparkSilver
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.parts import sections
from lakebed.pipeline import session
from lakebed.settings import load
from lakebed.store.memory import MemoryStore
from lakebed.ticks.model import SilverTick


def context_of(contracts: str) -> Context:
    clock = SystemClock()
    settings = load(sections(), flags={"pipeline.contracts": contracts})
    return Context("node-1", settings, MemoryStore(clock=clock), clock, Ids(), Metrics())


class Watched(SparkFlow):
    warmed = 0

    async def warm(self) -> None:
        self.warmed += 1


@pytest.mark.parametrize(("contracts", "times"), [("", 0), ("examples", 1)])
async def test_workers_start_spark_only_where_silver_has_contracts(contracts: str, times: int) -> None:
    """Without contracts nothing of theirs needs it: a stack has one Spark, the gateway's."""
    ran = []
    flow = Watched(context_of(contracts))

    async def dispatch() -> None:
        ran.append(flow.warmed)

    await flow.warming(Worker("ticks-dispatcher", dispatch)).run()

    assert [times] == ran


async def test_a_tick_without_a_contract_is_done_without_spark() -> None:
    """Its tables stay in bronze and are named, and no Java is started to say so."""
    job = SparkSilver(SparkFlow(context_of("")))

    done = await job.run("acme", "shop", [SilverTick("t-1", "20261115", "delta", {"orders": 3, "customers": 1})])

    assert (["t-1"], ["customers", "orders"]) == (list(done.detail["ticks"]), list(done.detail["without_contract"]))
    assert "off" == session.state()
