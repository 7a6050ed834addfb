"""What the agents sent, counted again in windows: accepted batches are rolled up, and the totals must agree."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from lakebed.batches import paths
from lakebed.context import Context
from lakebed.demo.rolled import roll
from lakebed.demo.stage import Stage
from lakebed.frame.rollup import decode_rollup
from lakebed.gateway.rollups import spark_job


def prove_rollups(stage: Stage, context: Context, spark: Any) -> None:
    """Rolls up every accepted batch, twice, and adds up the chunks of each window by agent."""
    asyncio.run(_prove(stage, context, spark))


async def _prove(stage: Stage, context: Context, spark: Any) -> None:
    sent: Counter[str] = Counter()
    async for info in context.store.list(paths.ACCEPTED):
        identity = paths.identity_of(info.key)
        sent[identity.agent_id] += identity.samples
    report = await roll(context, spark_job(context, spark))
    again = await roll(context, spark_job(context, spark))
    stage.tell(f"{report.samples} samples of {report.batches} batches became {report.chunks} rollup chunks")
    counted: dict[str, Counter[str]] = {}
    async for info in context.store.list(paths.ROLLUP):
        window = counted.setdefault(info.key.split("/")[2], Counter())
        table = decode_rollup((await context.store.get(info.key)).data)
        for row in table.group_by("agent_id").aggregate([("count", "sum")]).to_pylist():
            window[row["agent_id"]] += row["count_sum"]
    differ = [window for window, agents in counted.items() if agents != sent]
    held = bool(sent) and not differ and not again.samples and not report.unreadable
    seen = f"{sum(sent.values())} samples of {len(sent)} agents in {len(counted)} windows, {len(differ)} differ"
    stage.check("rollups have every sample that each agent sent, once", held, seen)
