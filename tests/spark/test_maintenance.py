"""Compaction, retention and vacuum of bronze on the real bucket: rows stay, and so do readers at a pinned version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession

from lakebed.core.clock import ManualClock, SystemClock
from lakebed.core.context import Context
from lakebed.core.errors import Invalid
from lakebed.core.feed import Limit
from lakebed.core.settings import load
from lakebed.pipeline.bronze.samples import SampleLoader
from lakebed.pipeline.tables.maintenance import TableMaintenance
from lakebed.spark.settings import SparkSettings
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections
from lakebed.wiring.ticks import bronze_workers
from support.accepted_batches import ACCEPTED_NS, BatchesYard

pytestmark = pytest.mark.timeout(600)

KEEP_S = 7200.0


@pytest.fixture
def contexts(bucket_settings: StoreSettings) -> Any:
    """Contexts whose clock is so many seconds ahead: files of the bucket are then so much older."""

    def at(ahead_s: float, **settings: Any) -> Context:
        layer = {**bucket_settings.as_layer(), "bronze.keep_versions_s": KEEP_S, **settings}
        context = make_context(load(sections(), stack=layer), role="test")
        clock = ManualClock(SystemClock().now_ns() + round(ahead_s * 1e9))
        return msgspec.structs.replace(context, clock=clock)

    return at


def filled(spark: SparkSession, context: Context, bucket: Store, steps: int) -> SampleLoader:
    env, samples = BatchesYard(bucket), SampleLoader(spark, context)
    for n in range(steps):
        env.accept(n * 10, n * 10 + 9, at_s=n)
        assert samples.step(Limit()) is not None
    return samples


def seqs(samples: SampleLoader, version: int | None = None) -> list[int]:
    return sorted(row["seq"] for row in samples.table.read(version, columns=["seq"]).collect())


def parquets(bucket: Store) -> int:
    async def count() -> int:
        return len(
            [info async for info in bucket.list("tables/bronze/batches/lake/samples/") if info.key.endswith(".parquet")]
        )

    return asyncio.run(count())


def test_joining_files_keeps_every_row_and_every_version(spark: SparkSession, contexts: Any, bucket: Store) -> None:
    """One file instead of three; a reader of an older version, and one of what was added, see what they saw."""
    context = contexts(0)
    samples = filled(spark, context, bucket, 3)
    upkeep = TableMaintenance(context, lambda: spark)

    planned = upkeep.compact(dry_run=True)
    (done,) = upkeep.compact()

    assert [done] == planned
    assert ("bronze/batches/lake/samples", 3, 1) == (done.table, done.files_joined, done.files_made)
    state = samples.table.snapshot()
    assert (3, 1, 30) == (state.version, len(state.files), state.rows)
    assert {"accepted_at", "time", "time_ns", "agent_id"} <= set(state.files[0].low)
    assert list(range(30)) == seqs(samples)
    assert list(range(10)) == seqs(samples, 0)
    assert list(range(20, 30)) == sorted(row["seq"] for row in samples.table.added(1, 3).collect())
    assert [] == upkeep.compact()
    BatchesYard(bucket).accept(30, 39, at_s=9)
    assert samples.step(Limit()) is not None  # the offset is found behind the compaction
    assert list(range(40)) == seqs(samples)


def test_vacuum_spares_what_a_kept_version_needs(spark: SparkSession, contexts: Any, bucket: Store) -> None:
    """A reader at a pinned version reads on for the kept time; afterwards only what the table is stays."""
    samples = filled(spark, contexts(0), bucket, 2)
    TableMaintenance(contexts(0), lambda: spark).compact()

    early = TableMaintenance(contexts(KEEP_S / 2)).vacuum()
    pinned = seqs(samples, 1)
    planned = TableMaintenance(contexts(KEEP_S * 2)).vacuum(dry_run=True)
    before = parquets(bucket)
    (late,) = TableMaintenance(contexts(KEEP_S * 2)).vacuum()

    assert ([], list(range(20)), 3) == (early, pinned, before)
    assert [late] == planned
    assert (2, 1) == (late.files_swept, parquets(bucket))
    assert list(range(20)) == seqs(samples)
    with pytest.raises(Invalid, match="no table"):
        TableMaintenance(contexts(0)).vacuum("batches/sample")


def test_retention_removes_samples_by_their_acceptance(spark: SparkSession, contexts: Any, bucket: Store) -> None:
    """Samples older than the retention go; without one everything stays."""
    samples = filled(spark, contexts(0), bucket, 1)

    kept = TableMaintenance(contexts(0, **{"bronze.retention_days": 0}), lambda: spark).expire()
    (done,) = TableMaintenance(contexts(0, **{"bronze.retention_days": 1}), lambda: spark).expire()

    assert ([], 10, []) == (kept, done.rows_removed, seqs(samples))
    assert samples.step(Limit()) is None  # what has left does not come in again


def test_the_workers_bring_batches_in_and_keep_the_table_by_themselves(
    spark: SparkSession, spark_settings: SparkSettings, contexts: Any, bucket: Store
) -> None:
    """Two steps become two files, then one: nobody typed a command."""
    context = msgspec.structs.replace(contexts(0, **EAGER, **spark_settings.as_layer()), clock=SystemClock())
    env, samples = BatchesYard(bucket), SampleLoader(spark, context)

    async def until(held: Callable[[], bool], worker: asyncio.Task[None]) -> None:
        async with asyncio.timeout(300):
            while not await asyncio.to_thread(held):
                assert not worker.done(), worker.exception()
                await asyncio.sleep(0.1)

    async def play() -> None:
        upkeep, ingest = bronze_workers(context)
        assert ("bronze-upkeep", "pipeline") == (upkeep.name, ingest.name)
        bringing = asyncio.create_task(ingest.run())
        for number in range(2):
            await asyncio.to_thread(env.accept, number * 10, number * 10 + 9, at_s=recent_s() + number)
            await until(lambda wanted=number + 1: len(samples.table.snapshot().files) == wanted, bringing)  # type: ignore[misc]
        keeping = asyncio.create_task(upkeep.run())
        await until(lambda: len(samples.table.snapshot().files) == 1, keeping)
        for task in (bringing, keeping):
            task.cancel()
        await asyncio.gather(bringing, keeping, return_exceptions=True)

    asyncio.run(play())

    assert list(range(20)) == seqs(samples)


EAGER = {"bronze.run_every_s": 0.1, "bronze.upkeep_every_s": 0.1}


def recent_s() -> float:
    """Now, as the yard counts."""
    return SystemClock().now_ns() / 1e9 - ACCEPTED_NS / 1e9 - 60
