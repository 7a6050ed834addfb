"""Rollups inside `lakebed bench pipeline`: accepted batches to chunks, beside Spark's own read-aggregate-write.

The roller pays for finding the batches, fetching and verifying them, three windows, exact sums, sketches, an index, and
storing chunks in the bucket; Spark's own reads Parquet from local disk, makes one window, and writes to local disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from lakebed.batches import paths
from lakebed.batches.roller import Roller
from lakebed.batches.settings import RollupSettings
from lakebed.bench.harness import Check, Stand, at_least, at_most, rounds_of, told
from lakebed.clock import ManualClock
from lakebed.context import Context
from lakebed.errors import Corrupt
from lakebed.gateway.rollups import spark_job
from lakebed.pipeline.settings import SparkSettings

NATIVE_BAR = 0.5  # the roller ÷ Spark's own, samples a second
LINEAR_BAR = 2.6  # time for twice the samples ÷ time for the samples: twice, and what noise adds
MADE = (paths.ROLLUP, paths.INDEX, paths.MANIFESTS, paths.ROLLER)


class Fleet(Protocol):
    """Accepted batches in the bucket."""

    @property
    def samples(self) -> int: ...

    async def grow(self, samples: int) -> None: ...


async def rollups(stand: Stand, context: Context, fleet: Fleet, folder: Path, now_ns: int) -> list[Check]:
    """`folder/rows` is Parquet of the fleet's first samples, which Spark's own run reads. It is `now_ns`."""
    count = 400_000 if stand.quick else 2_000_000
    await fleet.grow(count)
    rounds = 3 if stand.quick else 5
    stand.tell(f"{fleet.samples} samples to rollups and Spark's own read-aggregate-write of {count}, in turn")

    async def ours() -> float:
        return await _roll(context, fleet.samples, now_ns)

    async def native() -> float:
        began = context.clock.monotonic_s()
        await asyncio.to_thread(aggregate, _session(context), folder / "rows", folder / "rolled")
        return count / (context.clock.monotonic_s() - began)

    await _warm(ours, native)
    seen = await rounds_of(rounds, {"rollup": ours, "native": native})
    first = fleet.samples
    stand.tell("twice as many samples")
    await fleet.grow(2 * first)
    doubled = [await ours() for _ in range(rounds)]
    return [
        told(f"{first} accepted samples to rollups", seen["rollup"], "samples/s"),
        told("Spark's own read-aggregate-write", seen["native"], "samples/s"),
        at_least("rollup ÷ Spark's own", seen["rollup"], seen["native"], NATIVE_BAR),
        at_most(
            "rollup: time for twice the samples ÷ for the samples",
            [2 * first / rate for rate in doubled],
            [first / rate for rate in seen["rollup"]],
            LINEAR_BAR,
        ),
    ]


async def _warm(*contenders: Callable[[], Awaitable[float]]) -> None:
    for contender in contenders:
        await contender()


async def _roll(context: Context, samples: int, now_ns: int) -> float:
    """Everything there is, from nothing. Raises Corrupt unless every sample is in."""
    for prefix in MADE:
        async for info in context.store.list(prefix):
            await context.store.delete(info.key)
    settings = context.settings.of(RollupSettings)
    roller = Roller(
        context.store,
        spark_job(context),
        windows_s=settings.windows_s,
        overlap_s=settings.overlap_s,
        batches_max=settings.batches_max,
        lease_s=settings.lease_s,
        owner=context.node,
        clock=ManualClock(now_ns),
        ids=context.ids,
        metrics=context.metrics,
    )
    began = context.clock.monotonic_s()
    report = await roller.run()
    seconds = context.clock.monotonic_s() - began
    if report.samples != samples or report.unreadable:
        raise Corrupt(f"{samples} samples were accepted, but rollups say {report}")
    return samples / seconds


def aggregate(spark: Any, rows: Path, to: Path) -> None:
    """Spark's own: one window of 60 s, with the five plain numbers of a row."""
    spark.read.parquet(str(rows)).createOrReplaceTempView("samples")
    made = spark.sql(
        """SELECT agent_id, metric, labels, time_ns - time_ns % 60000000000 AS start_ns, count(*) AS count,
                  sum(value) AS sum, min(value) AS min, max(value) AS max, max(time_ns) AS last_ns,
                  max_by(value, time_ns) AS last
           FROM samples GROUP BY ALL"""
    )
    made.write.mode("overwrite").parquet(str(to))


def _session(context: Context) -> Any:
    from lakebed.pipeline.session import open_session

    return open_session(context.settings.of(SparkSettings))
