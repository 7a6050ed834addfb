"""Samples, records of a topic and entries of a queue reach silver and gold, each row once, through real Spark."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from lakebed.core.context import Context
from lakebed.core.settings import load
from lakebed.delta.model import TableSpec
from lakebed.pipeline.audit.flow import FlowCheck
from lakebed.pipeline.bronze.ingestion import Ingestion
from lakebed.pipeline.models.runs import runs
from lakebed.pipeline.models.worker import ModelWorker
from lakebed.pipeline.runner import PipelineRunner
from lakebed.pipeline.tables.table import Table
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.roles import Queue
from lakebed.spark.location import Location
from lakebed.spark.settings import SparkSettings
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections
from support.accepted_batches import BatchesYard
from support.topic_records import LogYard

pytestmark = pytest.mark.timeout(600)

EMPTY = '{"type":"struct","fields":[]}'
RECORDS = {
    "orders.yaml": "table: orders\nkeys: [id]\ncolumns:\n  id: {type: long, required: true}\n  agent: string\n",
    "jobs.yaml": "kind: queue\ntable: jobs\nsource: work\nkeys: [id]\ncolumns:\n  id: {type: long, required: true}\n",
}
CONTRACTS = {
    "loads.yaml": """
table: loads
source: batches.samples
keys: [agent_id, boot_id, seq]
columns:
  agent_id: {type: string, required: true}
  boot_id: {type: string, required: true}
  seq: {type: long, required: true}
  value: double
checks: {few: seq < 28}
""",
    "orders.yaml": """
table: orders
source: topic.orders
keys: [id]
order_by: [position]
columns:
  id: {type: long, required: true}
  agent: string
  position: {type: long, from: _offset}
""",
    "jobs.yaml": """
table: jobs
source: queue.jobs
keys: [id]
columns:
  id: {type: long, required: true}
  sequence: {type: long, from: _sequence}
""",
}
GOLD = """select o.agent, count(distinct l.seq) as samples, count(distinct j.id) as jobs
from {{ ref('orders') }} o join {{ ref('loads') }} l on l.agent_id = o.agent cross join {{ ref('jobs') }} j
group by o.agent
"""


@pytest.fixture
def context(bucket_settings: StoreSettings, spark_settings: SparkSettings, tmp_path: Path) -> Context:
    for name, files in (("records", RECORDS), ("contracts", CONTRACTS), ("gold", {"activity.sql": GOLD})):
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    layer = {
        **bucket_settings.as_layer(),
        **spark_settings.as_layer(),
        "meta.path": str(tmp_path / "meta.sqlite"),
        "bronze.topics": str(tmp_path / "records"),
        "pipeline.contracts": str(tmp_path / "contracts"),
        "pipeline.gold": str(tmp_path / "gold"),
    }
    return make_context(load(sections(), stack=layer), role="test")


def rows(spark: SparkSession, context: Context, name: str) -> list[dict[str, Any]]:
    return [row.asDict() for row in opened(spark, context, name).read().collect()]


def opened(spark: SparkSession, context: Context, name: str) -> Table:
    """The table as its own log describes it."""
    location = Location.of(context.settings.of(StoreSettings))
    state = Table(spark, TableSpec(name, EMPTY), context, location=location).snapshot()
    spec = TableSpec(name, state.schema_json, keys=state.keys)
    return Table(spark, spec, context, location=location, known=state)


async def enqueued(context: Context, *ids: int) -> None:
    ingestor = Queue.of(context, "work").ingestor()
    watcher = await ingestor.ingest([KeyValueEntry(b"k", b'{"id": %d}' % number) for number in ids])
    await ingestor.flush()
    await watcher.await_durable()
    await ingestor.close()


def test_samples_records_and_entries_reach_gold_once(spark: SparkSession, bucket: Store, context: Context) -> None:
    """Two loads, one row of each kind wrong or changed: silver accounts for every row, gold joins all three sources."""
    batches, log = BatchesYard(bucket), LogYard(context)
    batches.accept(0, 19)
    log.append("orders", b'{"id": 1, "agent": "agent-x"}', b'{"id": 2, "agent": "agent-a"}')
    asyncio.run(enqueued(context, 1, 2))
    ingestion = Ingestion(context)
    ingestion.run()
    assert ingestion.refined is not None
    first = {report.table: report for report in ingestion.refined.silver}
    batches.accept(20, 29)
    log.append("orders", b'{"id": 1, "agent": "agent-a"}')
    asyncio.run(enqueued(context, 3))

    ingestion.run()
    second = {report.table: report for report in ingestion.refined.silver}
    Ingestion(context).run()  # another process, which finds nothing new

    assert {"loads": (20, 20, 0), "orders": (2, 2, 0), "jobs": (2, 2, 0)} == {
        name: (report.rows_in, report.good, report.quarantined) for name, report in first.items()
    }
    assert {"loads": (10, 8, 2), "orders": (1, 1, 0), "jobs": (1, 1, 0)} == {
        name: (report.rows_in, report.good, report.quarantined) for name, report in second.items()
    }
    assert [(1, "agent-a", 3), (2, "agent-a", 2)] == sorted(
        (row["id"], row["agent"], row["position"]) for row in rows(spark, context, "silver/lake/main/orders")
    )
    assert list(range(28)) == sorted(row["seq"] for row in rows(spark, context, "silver/lake/main/loads"))
    assert 2 == len(rows(spark, context, "quarantine/lake/main/loads"))
    assert [{"agent": "agent-a", "samples": 28, "jobs": 3}] == rows(spark, context, "gold/lake/main/activity")
    check = FlowCheck(spark, context)
    assert {"loads": (30, 28, 2, 0, 0), "orders": (3, 2, 0, 0, 0), "jobs": (3, 3, 0, 0, 0)} == {
        flow.table: (flow.bronze, flow.silver, flow.quarantined, flow.lost, flow.behind) for flow in check.run()
    }
    assert {"lake/main/activity": 1} == check.gold()


def test_a_model_is_made_when_enough_records_of_a_topic_wait(
    spark: SparkSession, context: Context, tmp_path: Path
) -> None:
    """One is too few; with the second both are loaded, and go through silver to the model, without a schedule."""
    counted = "-- lag: topic.orders | 2\nselect agent, count(*) as orders from silver.orders group by agent"
    (tmp_path / "gold" / "counted.sql").write_text(counted)
    runner, log = PipelineRunner(context), LogYard(context)
    worker = ModelWorker(runner, context)

    async def round_of(names: list[str]) -> None:
        assert names == await worker.round()
        await asyncio.gather(*worker._running.values())

    log.append("orders", b'{"id": 1, "agent": "agent-x"}')
    asyncio.run(round_of([]))
    log.append("orders", b'{"id": 2, "agent": "agent-x"}')
    before = runner.lags(["topic.orders"])
    asyncio.run(round_of(["counted"]))

    assert ({"topic.orders": 2}, {"topic.orders": 0}) == (before, runner.lags(["topic.orders"]))
    assert [{"agent": "agent-x", "orders": 2}] == rows(spark, context, "gold/lake/main/counted")
    assert "lag" in {each.trigger for each in asyncio.run(runs(context.store))}


def test_the_audit_finds_a_row_that_silver_or_the_quarantine_lacks(
    spark: SparkSession, bucket: Store, context: Context
) -> None:
    """Rows are taken out of both: each is counted as lost, under its table."""
    BatchesYard(bucket).accept(20, 29)
    Ingestion(context).run()
    opened(spark, context, "silver/lake/main/loads").delete("seq >= 21 and seq <= 22")
    aside = opened(spark, context, "quarantine/lake/main/loads")
    aside.replace(aside.read().limit(1))

    [flow] = FlowCheck(spark, context).run()

    assert ("loads", "batches.samples", 10, 6, 1, 3) == (
        flow.table, flow.source, flow.bronze, flow.silver, flow.quarantined, flow.lost,
    )  # fmt: skip


def test_compaction_and_retention_between_two_loads_double_nothing(
    spark: SparkSession, bucket: Store, context: Context
) -> None:
    """Files are joined and old ones swept while silver is behind: it is rebuilt, and every sample is there once."""
    batches = BatchesYard(bucket)
    for start in (0, 10):
        batches.accept(start, start + 9)
        ingestion = Ingestion(context)
        ingestion._wanted = set()  # bronze alone: silver falls behind
        ingestion.run()
    Ingestion(context).run()
    batches.accept(20, 27)
    behind = Ingestion(context)
    behind._wanted = set()
    behind.run()
    bronze = opened(spark, context, "bronze/batches/lake/samples")
    old = {file.path for file in bronze.snapshot().files}
    bronze.compact()
    for path in old:
        asyncio.run(bucket.delete(f"{bronze.spec.root}/{path}"))

    Ingestion(context).run()

    assert list(range(28)) == sorted(row["seq"] for row in rows(spark, context, "silver/lake/main/loads"))
