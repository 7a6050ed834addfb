"""Rules judged by Spark over a real bucket and over a report, and what was found applied; the ledger, by SQL."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.embedded.endpoints import BucketEndpoints
from lakebed.lifecycle.drainer import ApplyReport
from lakebed.lifecycle.ledger import SPEC, LedgerMover
from lakebed.lifecycle.model import Rule
from lakebed.lifecycle.policy import render_xml, rules_of
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.spark_job import apply, candidate_count, scan
from lakebed.lifecycle.workers import open_services, state_of
from lakebed.pipeline.tables.table import Table
from lakebed.spark.location import Location
from lakebed.spark.settings import SparkSettings
from lakebed.store import admin
from lakebed.store.connect import connect
from lakebed.store.settings import StoreSettings
from lakebed.wiring.parts import sections
from support.runtimes import runtime_of

pytestmark = pytest.mark.timeout(900)  # the first of a lane waits for Spark, its own jobs and the days that pass

LONG_DAY_S = 1_000.0  # in which nothing grows a day old, however long the test takes
DAY_S = 12.0  # one that passes; much longer than it takes to put an object and to apply what was found
RULES = (Rule("tmp", prefix="tmp/", expiration_days=1), Rule("tagged", tags=(("tmp", "1"),), expiration_days=1))


@pytest.fixture
def context(weed: BucketEndpoints, spark_settings: SparkSettings) -> Context:
    told: dict[str, Any] = weed.as_settings() | {
        "store.prefix": f"lcs-{Ids().token()}",
        "lifecycle.rounding": "exact",
        "lifecycle.day_s": LONG_DAY_S,
    }
    told |= {f"{spark_settings.section}.{key}": value for key, value in msgspec.structs.asdict(spark_settings).items()}
    settings = load(sections(), flags=told)
    clock, ids, metrics = SystemClock(), Ids(), Metrics()
    store = connect(settings.of(StoreSettings), runtime_of(clock, ids, metrics))
    return Context(node="spark-test", settings=settings, store=store, clock=clock, ids=ids, metrics=metrics)


def with_day(context: Context, day_s: float) -> Context:
    """The same lake, whose days are so long."""
    told = msgspec.structs.replace(context.settings.of(LifecycleSettings), day_s=day_s)
    return msgspec.structs.replace(context, settings=context.settings.having(told))


@pytest.fixture
def name(weed: BucketEndpoints) -> str:
    """A bucket with four objects under `tmp/`, one elsewhere, all old enough for a rule of one day."""
    bucket = f"lcs-{Ids().token()}"
    s3 = admin.client(weed.store_settings())
    s3.create_bucket(Bucket=bucket)
    for key in (*(f"tmp/{n}" for n in range(4)), "kept"):
        s3.put_object(Bucket=bucket, Key=key, Body=b"12345")
    return bucket


@pytest.mark.full
def test_a_bucket_is_judged_by_spark_and_the_candidates_are_applied_by_the_guarded_delete(
    spark: SparkSession, context: Context, name: str, weed: BucketEndpoints
) -> None:
    """Before the policy is enabled it says how many and how much; afterwards only what the policy wants goes."""
    s3 = admin.client(weed.store_settings())
    policy = render_xml(RULES)

    now = scan(context, name, rules_of(policy))
    ahead = scan(context, name, rules_of(policy), days_ahead=30.0, keep=True)

    assert 0 == now.count
    assert ("list", 5, 4, 20, 1) == (ahead.source, ahead.scanned, ahead.count, ahead.bytes, ahead.undecided)
    assert {"tagged/EXPIRATION_DAYS": 1, "tmp/EXPIRATION_DAYS": 4} == ahead.by_action
    assert {f"tmp/{n}" for n in range(4)} | {"kept"} == {one.key for one in ahead.sample}

    s3.put_object(Bucket=name, Key="tmp/3", Body=b"new")

    async def enable_and_apply() -> tuple[int, ApplyReport, ApplyReport]:
        async with open_services(with_day(context, DAY_S)) as site:
            count = await candidate_count(site, name)
            before = await apply(site, name)  # no policy is in force: candidates alone delete nothing
            await site.lake.put(name, policy)
            await asyncio.sleep(DAY_S + 1.5)
            s3.put_object(Bucket=name, Key="tmp/2", Body=b"newer")
            return count, before, await apply(site, name)

    count, before, after = asyncio.run(enable_and_apply())

    assert (5, 0) == (count, before.deleted)
    assert ApplyReport(keys=5, deleted=3, passed=2) == after
    assert ["kept", "tmp/2"] == [one["Key"] for one in s3.list_objects_v2(Bucket=name)["Contents"]]


@pytest.mark.full
def test_versions_and_a_report_are_judged_alike(
    spark: SparkSession, context: Context, weed: BucketEndpoints, tmp_path: Path
) -> None:
    """Noncurrent versions by their successor's time, from a listing of versions and from an S3 Inventory report."""
    bucket, s3 = f"lcv-{Ids().token()}", admin.client(weed.store_settings())
    s3.create_bucket(Bucket=bucket)
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    for body in (b"1", b"22", b"333"):
        s3.put_object(Bucket=bucket, Key="k", Body=body)
    policy = render_xml((Rule("old", noncurrent_days=1), Rule("few", newer_noncurrent=5)))
    moment = pa.array([1_700_000_000_000, 1_700_000_100_000]).cast(pa.timestamp("ms", "UTC"))
    rows = pa.table(
        {
            "bucket": ["b", "b"], "key": ["k", "k"], "size": [7, 9], "last_modified_date": moment,
            "e_tag": ["a", "b"], "version_id": ["1", "2"], "is_latest": [False, True],
            "is_delete_marker": [False, False],
        }
    )  # fmt: skip
    pq.write_table(rows, tmp_path / "data.parquet")
    data = (tmp_path / "data.parquet").read_bytes()
    manifest = {
        "sourceBucket": "b", "destinationBucket": "arn:aws:s3:::b", "version": "2016-11-30",
        "creationTimestamp": "1763164800000", "fileFormat": "Parquet",
        "fileSchema": "message s3.inventory { " + " ".join(f"required binary {n};" for n in rows.column_names) + " }",
        "files": [{"key": "data.parquet", "size": len(data), "MD5checksum": hashlib.md5(data).hexdigest()}],
    }  # fmt: skip
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))

    listed = scan(context, bucket, rules_of(policy), days_ahead=30.0)
    reported = scan(context, bucket, rules_of(policy), inventory=str(tmp_path / "manifest.json"))

    assert ("versions", 3, 2, 3) == (listed.source, listed.scanned, listed.count, listed.bytes)
    assert ("inventory", 1, 7, "1") == (
        reported.source, reported.count, reported.bytes, reported.sample[0].version_id
    )  # fmt: skip


def test_the_ledger_is_a_table_for_duckdb_polars_and_spark(spark: SparkSession, context: Context, name: str) -> None:
    """The same counts of outcomes by every engine, and `why` still tells the whole story."""

    async def live() -> int:
        async with open_services(with_day(context, 1.5)) as site:
            await site.lake.put(name, render_xml(RULES[:1]))
            await asyncio.sleep(3.0)
            await site.enforcer.scan(name, await site.enforcer.compile())
            return await LedgerMover(state_of(context)).run()

    assert 2 == asyncio.run(live())

    location = Location.of(context.settings.of(StoreSettings))
    uri, options = location.uri(SPEC.root), location.storage_options()
    table = Table(spark, SPEC, context, location=location)
    by_spark = {row["outcome"]: row["count"] for row in table.read().groupBy("outcome").count().collect()}
    ledger = deltalake.DeltaTable(uri, storage_options=options).to_pyarrow_dataset()  # noqa: F841 (read by DuckDB)
    by_duckdb = dict(duckdb.sql("SELECT outcome, count(*) FROM ledger WHERE rule_id = 'tmp' GROUP BY 1").fetchall())
    by_polars = dict(
        pl.scan_delta(uri, storage_options=options).group_by("outcome").agg(pl.len()).collect().iter_rows()
    )

    assert {"PLANNED": 4, "DELETED": 4} == by_spark == by_duckdb == by_polars
