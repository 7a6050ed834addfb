"""The demo's look at rollups counts every accepted sample, once."""

from __future__ import annotations

from pathlib import Path

from batches_frames import START_NS
from lakebed.batches import paths
from lakebed.batches.rolling import LocalJob
from lakebed.clock import ManualClock
from lakebed.context import Context
from lakebed.demo.numbers import Observer
from lakebed.demo.rollups import prove_rollups
from lakebed.demo.stage import Stage
from lakebed.frame.model import Sample
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.parts import sections
from lakebed.settings import load
from lakebed.store.memory import MemoryStore
from rollup_kit import accept, frame


async def test_a_query_over_rollups_finds_every_sample() -> None:
    """Two agents' batches are rolled up, once, and windows and chunks count as many samples as were accepted."""
    clock = ManualClock(START_NS + 10_000_000_000)
    context = Context("n", load(sections()), MemoryStore(clock=clock), clock, Ids.seeded(1), Metrics())
    stage = Stage(
        folder=Path("nowhere"),
        settings=context.settings,
        environment={},
        gateway_url="",
        scale=1.0,
        seed=1,
        tell=lambda _: None,
        observer=Observer(clock),
    )
    for agent in ("a", "b"):
        for start in (0, 30):
            samples = [Sample("demo_count", START_NS + n * 1_000_000, float(n)) for n in range(start, start + 30)]
            await accept(context.store, frame(agent, start, samples), START_NS + 1_000_000_000)

    await prove_rollups(stage, context, LocalJob(context.store))

    assert [("counted samples", 120)] == [(each.thing, each.count) for each in stage.record.counted]
    assert [True, True] == [each.held for each in stage.record.proven]
    chunk = min([info.key async for info in context.store.list(f"{paths.ROLLUP}window=60s/")])
    await context.store.delete(chunk)

    await prove_rollups(stage, context, LocalJob(context.store))

    assert [False, False] == [each.held for each in stage.record.proven][2:]
