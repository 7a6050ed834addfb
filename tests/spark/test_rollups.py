"""Rollups on Spark: the same chunks, byte for byte, as made in this process, on a real bucket."""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from lakebed.batches import paths
from lakebed.batches.model import Sample
from lakebed.core.clock import ManualClock, SystemClock
from lakebed.core.context import Context
from lakebed.core.errors import Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import Settings
from lakebed.rollups.codec.statistics import BUCKET_SQL, buckets_of
from lakebed.rollups.generations import generation
from lakebed.rollups.local_job import LocalJob
from lakebed.rollups.model import RollupState
from lakebed.rollups.paths import INDEX, MANIFESTS, ROLLUP, rollup_key
from lakebed.rollups.spark_job import gathered
from lakebed.rollups.workers import spark_job
from lakebed.spark.settings import SparkSettings
from lakebed.store.memory import MemoryStore
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from support.rollup_fixtures import WINDOWS_S, accept, ask, by_hand, frame, make_roller, shown

HOUR_NS = 1_760_000_400_000_000_000
END_NS = HOUR_NS + 3 * 3600 * 10**9


@pytest.fixture
def context(
    spark: SparkSession, spark_settings: SparkSettings, bucket: Store, bucket_settings: StoreSettings, metrics: Metrics
) -> Context:
    settings = Settings({StoreSettings: bucket_settings, SparkSettings: spark_settings}, {})
    return Context(node="test", settings=settings, store=bucket, clock=SystemClock(), ids=Ids(), metrics=metrics)


def some(agent: int, seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        Sample(
            f"metric {n % 3}/é%",
            HOUR_NS + 3000 * 10**9 + n * 17 * 10**9,
            float(rng.normal()) if n % 19 else float("nan"),
            labels={"host": f"h{n % 4}"} if n % 5 else {},
        )
        for n in range(100)
    ]


async def test_spark_makes_the_chunks_that_this_process_makes(context: Context) -> None:
    """Same keys, same bytes, same index and manifest; an unreadable blob is quarantined by both."""
    clock = ManualClock(END_NS)
    stores: list[Store] = [context.store, MemoryStore(clock=clock)]
    reported = []
    for number in range(20):
        held = some(number % 4, number)
        data = frame(f"agent-{number % 4}", number * 100, held)
        accepted = [await accept(store, data, END_NS - (number + 1) * 10**9) for store in stores]
        if number == 7:
            for store in stores:
                await store.delete(accepted[0].raw_blob_key)
                await store.create(accepted[0].raw_blob_key, data[:-9])
        else:
            reported += [(f"agent-{number % 4}", sample) for sample in held]

    reports = [
        await make_roller(store, clock, job=spark_job(context) if store is context.store else LocalJob(store)).run()
        for store in stores
    ]

    assert reports[0] == reports[1]
    assert (19, 1900, ["corrupt"]) == (
        reports[0].batches,
        reports[0].samples,
        [each.problem.split(":")[0] for each in reports[0].unreadable],
    )
    for prefix in (ROLLUP, INDEX, MANIFESTS):
        made = [{info.key: (await store.get(info.key)).data async for info in store.list(prefix)} for store in stores]
        assert made[0] and made[0] == made[1]
    for metric in ("metric 0/é%", "metric 1/é%"):
        answer = await ask(context.store, clock, metric, 300, HOUR_NS, END_NS)
        assert by_hand(reported, metric, 300) == shown(answer)
        assert 300 == answer.resolution_s


async def test_a_chunk_that_stands_with_other_bytes_makes_a_new_generation(context: Context) -> None:
    """What a crash left half made and cannot be made the same again is abandoned, and never counts."""
    clock = ManualClock(END_NS)
    reported = some(0, 1)
    await accept(context.store, frame("a", 0, reported), END_NS - 10**9)
    (entry,) = [info.key async for info in context.store.list(paths.ACCEPTED_BY_TIME)]
    mine = generation(RollupState(), [paths.parse_by_time(entry)[0]], WINDOWS_S)
    squatted = rollup_key(60, HOUR_NS, "metric 0/é%", mine.id, 0)
    await context.store.create(squatted, b"other")

    report = await make_roller(context.store, clock, job=spark_job(context)).run()

    assert (100, 1, 1) == (report.samples, report.generations, report.abandoned)
    answer = await ask(context.store, clock, "metric 0/é%", 60, HOUR_NS, END_NS)
    assert by_hand([("a", sample) for sample in reported], "metric 0/é%", 60) == shown(answer)
    assert not [why for why in answer.why_partial if "cannot be read" in why]


async def test_a_bucket_that_is_away_ends_the_run_and_nothing_counts(context: Context) -> None:
    """Executors that cannot reach the bucket make the run Unavailable; the next one does it all."""
    clock = ManualClock(END_NS)
    reported = some(0, 1)
    await accept(context.store, frame("a", 0, reported), END_NS - 10**9)
    away = msgspec.structs.replace(
        context.settings.of(StoreSettings), endpoint="http://127.0.0.1:9", retries=0, retry_timeout_s=0.1
    )
    lost = Settings({StoreSettings: away, SparkSettings: context.settings.of(SparkSettings)}, {})
    broken = msgspec.structs.replace(context, settings=lost)

    with pytest.raises(Unavailable):
        await make_roller(context.store, clock, job=spark_job(broken)).run()
    report = await make_roller(context.store, clock, job=spark_job(context)).run()

    assert 100 == report.samples
    answer = await ask(context.store, clock, "metric 1/é%", 60, HOUR_NS, END_NS)
    assert by_hand([("a", sample) for sample in reported], "metric 1/é%", 60) == shown(answer)


def test_sql_finds_the_same_buckets(spark: SparkSession) -> None:
    """The bucket of a value is the same in Spark's SQL: a sketch can be built of any DataFrame."""
    values = [0.0, -0.0, 1.0, -3.75, 1e300, 5e-324, -1e-310, 123456.789, float("inf"), float("-inf"), 0.1]

    rows = spark.createDataFrame([(value,) for value in values], "value double").selectExpr(BUCKET_SQL).collect()

    assert buckets_of(np.array(values)).tolist() == [row[0] for row in rows]


def test_rows_of_many_metrics_become_chunks_in_shares_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each table once and in order, however many go together."""
    monkeypatch.setattr("lakebed.rollups.spark_job.BYTES_AT_ONCE", 20)
    tables = [pa.table({"n": [number, number]}) for number in range(5)]  # of 16 bytes

    assert [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4]] == [each["n"].to_pylist() for each in gathered(tables)]
