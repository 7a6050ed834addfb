"""What the agents sent, counted again as rows: accepted batches become a table, and the totals must agree."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from lakebed.batches import paths
from lakebed.context import Context
from lakebed.demo.stage import Stage
from lakebed.feed import Limit

STEPS_MAX = 1_000


def prove_bronze(stage: Stage, context: Context, spark: Any) -> None:
    """Brings every accepted batch into bronze; checks it against the manifests and against the agents' own disks."""
    from lakebed.pipeline.samples import Samples

    sent = asyncio.run(_sent(context))
    if not sent:
        return
    samples = Samples(spark, context)
    reports = []
    for _ in range(STEPS_MAX):
        report = samples.step(Limit(objects=500))
        if report is None:
            break
        reports.append(report)
    good, rows_in = sum(report.good for report in reports), sum(report.rows_in for report in reports)
    stage.tell(f"{rows_in} samples of {sum(report.objects for report in reports)} accepted batches went into bronze")
    rows = samples.table.read(columns=["agent_id", "boot_id", "seq", "metric", "value"]).cache()
    found = rows.groupBy("agent_id", "boot_id").agg({"seq": "count"}).collect()
    counted = {(row["agent_id"], row["boot_id"]): row["count(seq)"] for row in found}
    distinct = rows.select("agent_id", "boot_id", "seq").distinct().count()
    differ = sum(counted.get(boot) != count for boot, count in sent.items())
    stage.counted("accepted samples", "rows in bronze", good)
    stage.check(
        "bronze has every sample that each boot of each agent numbered, once",
        differ == 0 and len(counted) == len(sent) and good == distinct == sum(sent.values()),
        f"{good} rows of {sum(sent.values())} numbers in {len(sent)} boots",
    )
    made = _made(stage)
    if made:
        kept = rows.filter("metric = 'demo_count'").select("agent_id", "value").distinct()
        values = {row["agent_id"]: row["count"] for row in kept.groupBy("agent_id").count().collect()}
        short = sum(values.get(agent, 0) != count for agent, count in made.items())
        stage.check("bronze agrees with the agents' own disks", short == 0, f"{len(made)} agents, {short} differ")


async def _sent(context: Context) -> Counter[tuple[str, str]]:
    """How many numbers each boot has used, by the identities that were accepted."""
    sent: Counter[tuple[str, str]] = Counter()
    async for info in context.store.list(paths.ACCEPTED):
        identity = paths.identity_of(info.key)
        sent[identity.agent_id, identity.boot_id] += identity.samples
    return sent


def _made(stage: Stage) -> dict[str, int]:
    """How many values each agent of the fleets notes on its disk that it has made."""
    notes = (stage.folder / "demo").glob("fleet-*/*/progress")
    return {note.parent.name: int(note.read_text() or 0) for note in notes}
