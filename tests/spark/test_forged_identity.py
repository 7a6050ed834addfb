"""A sample's own `agent_id` label never replaces its sender: in Spark's source, in bronze, in rollups and in audits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pyspark.sql import SparkSession

import lakebed.spark
from lakebed.batches.codec.frame import columns_of, encode
from lakebed.batches.matchers import Selector, parse
from lakebed.batches.model import BatchIdentity, Sample
from lakebed.batches.window_query import RollupQuerier
from lakebed.core.feed import Limit
from lakebed.pipeline.audit.job import BucketAuditor
from lakebed.pipeline.bronze.samples import SampleLoader
from lakebed.rollups.workers import spark_job
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from support.audited_batches import AuditYard
from support.batch_frames import START_NS
from support.rollup_fixtures import make_roller, make_sources
from support.runtimes import runtime_on

pytestmark = pytest.mark.timeout(600)

SECOND_NS = 10**9
HOUR_NS = START_NS // (3600 * SECOND_NS) * 3600 * SECOND_NS


@pytest.fixture
def env(spark: SparkSession, bucket: Store, bucket_settings: StoreSettings) -> AuditYard:
    """Agent b sent 10.0 five times; agent a sent 666.0 five times and claims to be b."""
    made = AuditYard(spark, bucket, bucket_settings)
    for agent, value, labels in (("b", 10.0, {"host": "h"}), ("a", 666.0, {"host": "h", "agent_id": "b"})):
        samples = [Sample("cpu", START_NS + n * SECOND_NS, value, labels=labels) for n in range(5)]
        made.accept(encode(BatchIdentity(agent, "boot-1", 0, 4), columns_of(samples)))
    return made


def values(rows: Any) -> dict[str, set[float]]:
    """Values by agent, requested in SQL as an analyst does."""
    found = rows.groupBy("agent_id").agg({"value": "collect_set"}).collect()
    return {row["agent_id"]: set(row["collect_set(value)"]) for row in found}


@pytest.mark.full
def test_every_table_and_sum_names_the_real_sender(env: AuditYard) -> None:
    """Source, bronze and rollups give b what b sent; the audit finds every sample conserved for its real sender."""
    wanted = {"a": {666.0}, "b": {10.0}}
    lakebed.spark.register(env.spark, env.context.settings)
    source = env.spark.read.format("lakebed.batches").option("settle_s", "-1").load()

    assert wanted == values(source)
    assert [10.0] * 5 == [row["value"] for row in source.filter("agent_id = 'b'").collect()]

    bronze = SampleLoader(env.spark, env.context)
    while bronze.step(Limit()) is not None:
        pass
    rows = bronze.table.read()
    assert wanted == values(rows)
    assert {"host": "h", "agent_id": "b"} == rows.filter("agent_id = 'a'").first()["labels"]  # type: ignore[index]

    asyncio.run(make_roller(env.store, env.context.clock, job=spark_job(env.context, env.spark)).run())
    rollups = RollupQuerier(runtime_on(env.store, env.context.clock), make_sources(env.store, env.context.clock))
    for agent, total in (("a", 3330.0), ("b", 50.0)):
        selector = Selector("cpu", [parse(f"agent_id={agent}")])
        answer = asyncio.run(rollups.range(selector, 3600, HOUR_NS, HOUR_NS + 3600 * SECOND_NS))
        assert (3600, [total]) == (answer.resolution_s, [b.sum for series in answer.series for b in series.buckets])

    record = BucketAuditor(env.spark, env.context).run(horizon_s=0.0, verify=True)
    assert (True, ()) == (record.ok, record.conservation.rows)
    assert (10, 10) == (record.conservation.stages["bronze"], record.conservation.stages["rollup"])
