"""`lakebed bench pipeline`: accepted batches to bronze and to rollups, beside Spark's own run over the same rows; and
the audit of a million manifests.

Spark's own reads the rows from Parquet on local disk, aggregates them into windows of a minute, and writes Parquet to
local disk. Bronze and rollups pay for what it does not: finding the batches, fetching them from the bucket, verifying
their hashes, writing to the bucket and committing; rollups make three windows with exact sums, sketches and an index.
What it costs when the data doubles is measured in the same rounds, on a second fleet of twice the samples.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from lakebed.bench.audit import audit
from lakebed.bench.fleet import Fleet, fleet
from lakebed.bench.harness import Check, Contender, Stand, at_least, at_most, rounds_of, told
from lakebed.bench.rollups import roll
from lakebed.errors import Corrupt
from lakebed.feed import Limit
from lakebed.pipeline.settings import SparkSettings

SAMPLES, SAMPLES_QUICK = 2_000_000, 600_000
ROUNDS, ROUNDS_QUICK = 5, 3
NATIVE_BAR = 0.5  # bronze or rollups ÷ Spark's own, samples a second
LINEAR_BAR = 2.6  # time for twice the samples ÷ time for the samples: twice, and what noise adds
OURS = {"bronze": "bronze", "rollup": "rollups"}


async def bench(stand: Stand) -> Sequence[Check]:
    folder = Path(tempfile.mkdtemp(prefix="lakebed-bench-"))
    try:
        return [*await _samples(stand, folder), *await audit(stand, folder)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _samples(stand: Stand, folder: Path) -> list[Check]:
    from lakebed.pipeline.session import warm

    count = SAMPLES_QUICK if stand.quick else SAMPLES
    warm(stand.settings.of(SparkSettings))
    stand.tell(f"{count} samples are accepted, and twice as many beside them")
    once, twice = await fleet(stand, count), await fleet(stand, 2 * count)
    stand.tell("Spark starts, and warms up")
    await asyncio.to_thread(_rows, once, folder / "rows")
    contenders: dict[str, Contender] = {
        "bronze": lambda: asyncio.to_thread(ingest, once),
        "rollup": lambda: roll(once),
        "aggregate": lambda: _native(once, folder),
        "bronze twice": lambda: asyncio.to_thread(ingest, twice),
        "rollup twice": lambda: roll(twice),
    }
    for name in ("rollup", "aggregate"):  # bronze has run by now
        await contenders[name]()
    stand.tell(f"{count} samples to bronze, to rollups, and through Spark's own, in turn; and twice as many")
    seen = await rounds_of(ROUNDS_QUICK if stand.quick else ROUNDS, contenders)
    return [
        *(told(f"{count} accepted samples to {OURS[name]}", seen[name], "samples/s") for name in OURS),
        told("Spark's own read-aggregate-write of them", seen["aggregate"], "samples/s"),
        *(
            at_least(f"{OURS[n]} ÷ Spark's own read-aggregate-write", seen[n], seen["aggregate"], NATIVE_BAR)
            for n in OURS
        ),
        *(
            at_most(
                f"{OURS[name]}: time for twice the samples ÷ for the samples",
                [2 * count / rate for rate in seen[f"{name} twice"]],
                [count / rate for rate in seen[name]],
                LINEAR_BAR,
            )
            for name in OURS
        ),
    ]


def _session(given: Fleet) -> Any:
    from lakebed.pipeline.session import open_session

    return open_session(given.context.settings.of(SparkSettings))


def _samples_of(spark: Any, given: Fleet) -> Any:
    from lakebed.pipeline.samples import Samples

    return Samples(spark, given.context, name=f"bench/{given.context.ids.token()}")


def _rows(given: Fleet, to: Path) -> None:
    """The fleet's rows as Parquet on local disk, for Spark's own runs: taken from bronze itself."""
    samples = _samples_of(_session(given), given)
    samples.step(Limit())
    samples.table.read().repartition(4).write.parquet(str(to))


def ingest(given: Fleet) -> float:
    """Everything into a fresh table, in samples a second. Raises Corrupt unless every sample is there."""
    samples, clock = _samples_of(_session(given), given), given.context.clock
    began = clock.monotonic_s()
    report = samples.step(Limit())
    seconds = clock.monotonic_s() - began
    if report is None or report.good != given.samples or samples.table.snapshot().rows != given.samples:
        raise Corrupt(f"{given.samples} samples were accepted, but bronze says {msgspec.to_builtins(report)}")
    return given.samples / seconds


async def _native(given: Fleet, folder: Path) -> float:
    spark, clock = _session(given), given.context.clock
    began = clock.monotonic_s()
    await asyncio.to_thread(aggregate, spark, folder / "rows", folder / "written")
    return given.samples / (clock.monotonic_s() - began)


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
