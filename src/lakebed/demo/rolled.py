"""What the agents sent, counted again as windows: accepted batches are rolled up, and a query finds every sample."""

from __future__ import annotations

from lakebed.batches.coverage import Coverage
from lakebed.batches.live import Live
from lakebed.batches.matchers import Selector
from lakebed.batches.raw import RawBatches
from lakebed.batches.roller import RollupReport
from lakebed.batches.rolling import LocalJob
from lakebed.batches.rollups import Rollups
from lakebed.batches.sources import Sources
from lakebed.context import Context
from lakebed.demo.stage import Stage
from lakebed.errors import Unavailable
from lakebed.frame.work import Job
from lakebed.gateway.rollups import roller
from lakebed.store.lease import HeldByAnother

WINDOW_S = 60
HELD_TRIES, HELD_EVERY_S = 60, 0.5  # the stack's own roller may be at it


async def roll(context: Context, job: Job, *, cold: bool = False) -> RollupReport:
    """Rolls up what is accepted, as the stack's own roller does, once that one is not at it."""
    for _ in range(HELD_TRIES):
        try:
            return await roller(context, job).run(cold=cold)
        except HeldByAnother:
            await context.clock.sleep(HELD_EVERY_S)
    raise Unavailable(f"another roller has been at it for {HELD_TRIES * HELD_EVERY_S:g} s")


async def prove_rollups(stage: Stage, context: Context, metric: str, since_ns: int) -> int:
    """Rolls up what is accepted; gives how many samples of the metric the rollups count since then."""
    await roll(context, LocalJob(context.store), cold=True)
    raw = RawBatches(context.store)
    sources = Sources(
        Live(bytes_max=0, window_s=0.0, clock=context.clock, metrics=context.metrics),
        raw,
        Coverage(context.store, raw),
        follower=None,
        spool=None,
        batches_max=10_000,
        clock=context.clock,
    )
    window_ns = WINDOW_S * 1_000_000_000
    first_ns = since_ns // window_ns * window_ns
    asked = Rollups(context.store, sources, context.clock)
    answer = await asked.range(Selector(metric, []), WINDOW_S, first_ns, context.clock.now_ns() + window_ns)
    counted = sum(bucket.count for series in answer.series for bucket in series.buckets)
    rolled = answer.sources.get("rollup", 0)
    stage.check(
        "a query over rollups finds what was accepted",
        rolled > 0,
        f"{counted} samples in windows of {WINDOW_S} s, from {rolled} chunks",
    )
    return counted
