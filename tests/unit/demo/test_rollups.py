"""The demo's look at rollups counts every accepted sample, once."""

from __future__ import annotations

from pathlib import Path

from lakebed.batches.model import Sample
from lakebed.core.clock import ManualClock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.demo.metrics import Observer
from lakebed.demo.scenario import ScenarioContext
from lakebed.rollups import paths
from lakebed.rollups.demo import prove_rollups
from lakebed.rollups.local_job import LocalJob
from lakebed.store.memory import MemoryStore
from lakebed.wiring.parts import sections
from support.batch_frames import START_NS
from support.rollup_fixtures import accept, frame


async def test_a_query_over_rollups_finds_every_sample() -> None:
    """Two agents' batches are rolled up, once, and windows and chunks count as many samples as were accepted."""
    clock = ManualClock(START_NS + 10_000_000_000)
    context = Context(
        node="n",
        settings=load(sections()),
        store=MemoryStore(clock=clock),
        clock=clock,
        ids=Ids.seeded(1),
        metrics=Metrics(),
    )
    stage = ScenarioContext(
        folder=Path("nowhere"),
        settings=context.settings,
        environment={},
        gateway_url="",
        scale=1.0,
        seed=1,
        report=lambda _: None,
        observer=Observer(clock),
    )
    for agent in ("a", "b"):
        for start in (0, 30):
            samples = [Sample("demo_count", START_NS + n * 1_000_000, float(n)) for n in range(start, start + 30)]
            await accept(context.store, frame(agent, start, samples), START_NS + 1_000_000_000)

    await prove_rollups(stage, context, LocalJob(context.store))

    assert [("counted samples", 120)] == [(each.thing, each.count) for each in stage.log.counted]
    assert [True, True] == [each.held for each in stage.log.proven]
    chunk = min([info.key async for info in context.store.list(f"{paths.ROLLUP}window=60s/")])
    await context.store.delete(chunk)

    await prove_rollups(stage, context, LocalJob(context.store))

    assert [False, False] == [each.held for each in stage.log.proven][2:]
