"""Rolls up what the agents of the demo sent and compares the totals."""

from __future__ import annotations

from collections import Counter

from lakebed.batches.matchers import Selector
from lakebed.batches.paths import ACCEPTED, identity_of
from lakebed.batches.sources import SampleSources
from lakebed.batches.window_query import RollupQuerier
from lakebed.core.context import Context
from lakebed.core.errors import Unavailable
from lakebed.demo.scenario import ScenarioContext
from lakebed.rollups import paths
from lakebed.rollups.codec.chunk import decode_rollup
from lakebed.rollups.model import RollupJob
from lakebed.rollups.roller import RollupReport
from lakebed.rollups.settings import RollupSettings
from lakebed.rollups.workers import roller
from lakebed.store.lease import HeldByAnother

METRIC = "demo_count"  # what the agents of the demo count
WINDOW_S = 60
LOOK_BACK_S = 3600  # longer than a demo takes
HELD_TRIES, HELD_EVERY_S = 60, 0.5  # the stack's own roller may be at it


async def prove_rollups(stage: ScenarioContext, context: Context, job: RollupJob) -> None:
    """Rolls up every accepted batch, twice; adds up the chunks of each window by agent, and asks as a query does."""
    sent: Counter[str] = Counter()
    async for info in context.store.list(ACCEPTED):
        identity = identity_of(info.key)
        sent[identity.agent_id] += identity.samples
    if not sent:
        return
    report, again = await _roll(context, job), await _roll(context, job)
    stage.report(f"{report.samples} samples of {report.batches} batches became {report.chunks} rollup chunks")
    windows_s = context.settings.of(RollupSettings).windows_s
    counted: dict[str, Counter[str]] = {f"window={window_s}s": Counter() for window_s in windows_s}
    async for info in context.store.list(paths.ROLLUP):
        window = counted[info.key.split("/")[2]]
        table = decode_rollup((await context.store.get(info.key)).data)
        for row in table.group_by("agent_id").aggregate([("count", "sum")]).to_pylist():
            window[row["agent_id"]] += row["count_sum"]
    differ = [window for window, agents in counted.items() if agents != sent]
    held = not differ and not again.samples and not report.unreadable
    seen = f"{sum(sent.values())} samples of {len(sent)} agents in {len(counted)} windows, {len(differ)} differ"
    stage.check("rollups have every sample that each agent sent, once", held, seen)
    await _query(stage, context)


async def _roll(context: Context, job: RollupJob) -> RollupReport:
    """Rolls up what is accepted, as the stack's own roller does, once that one is not at it."""
    for _ in range(HELD_TRIES):
        try:
            return await roller(context, job).run(cold=True)
        except HeldByAnother:
            await context.clock.sleep(HELD_EVERY_S)
    raise Unavailable(f"another roller has held the lease for {HELD_TRIES * HELD_EVERY_S:g} s")


async def _query(stage: ScenarioContext, context: Context) -> None:
    """A query over windows counts what the agents counted, and reads it from rollups."""
    sources = SampleSources.of_bucket(context, batches_max=10_000)
    now_ns = context.clock.now_ns()
    querier = RollupQuerier(context, sources)
    answer = await querier.range(
        Selector(METRIC, []), WINDOW_S, now_ns - LOOK_BACK_S * 10**9, now_ns + WINDOW_S * 10**9
    )
    counted = sum(bucket.count for series in answer.series for bucket in series.buckets)
    rolled = answer.sources.get("rollup", 0)
    if counted:
        stage.counted("counted samples", "in rollups", counted)
    stage.check(
        "a query over rollups finds what was accepted",
        rolled > 0 and answer.resolution_s == WINDOW_S and not answer.sources.get("raw"),
        f"{counted} samples in windows of {answer.resolution_s} s, from {rolled} chunks",
    )
