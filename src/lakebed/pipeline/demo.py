"""Demo of the pipeline: a listing becomes a table that other engines read; samples are counted at each stage."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from lakebed.batches import paths
from lakebed.batches.settings import ReconcilerSettings
from lakebed.core.context import Context
from lakebed.demo.scenario import ScenarioContext
from lakebed.pipeline.settings import BronzeSettings, PipelineSettings
from lakebed.rollups.demo import prove_rollups
from lakebed.rollups.workers import spark_job
from lakebed.spark.settings import SparkSettings
from lakebed.store.settings import StoreSettings

if TYPE_CHECKING:
    from lakebed.pipeline.bronze.runs import IngestReport
    from lakebed.pipeline.tables.table import Table

TITLE = "Spark and tables, without jars"
NEXT = ("lakebed env", "lakebed pipeline run", "lakebed audit")
AFTER = ("agent", "queue", "log", "ticks")  # the objects they wrote become rows, and are audited
APPLICATION = "demo"
STEP_OBJECTS = 500  # of one commit: bronze has several versions then
GRACE_S = 1.0  # no agent sends any more


async def play(stage: ScenarioContext) -> None:
    context = stage.context()
    listed = [(info.key.split("/")[0], info.key, info.size) async for info in context.store.list("")]
    stage.report(f"Starting Spark; {len(listed)} objects of the bucket become rows")
    await asyncio.to_thread(_tabulate, stage, context, listed)


def _tabulate(stage: ScenarioContext, context: Context, listed: list[tuple[str, str, int]]) -> None:
    from lakebed.delta.model import TableSpec, WriteBatch
    from lakebed.pipeline.tables.table import Table
    from lakebed.spark.location import Location
    from lakebed.spark.session import open_session

    began = context.clock.monotonic_s()
    settings = SparkSettings(quick=True, master=stage.settings.of(SparkSettings).master)
    spark = open_session(settings)
    stage.report(f"Spark {spark.version} ready in {context.clock.monotonic_s() - began:.1f} s")
    rows = spark.createDataFrame(listed, "folder string, key string, size long")
    table = Table(
        spark,
        TableSpec("demo/objects", rows.schema.json(), keys=("key",)),
        context,
        location=Location.of(stage.settings.of(StoreSettings)),
    )
    table.append(rows, WriteBatch(APPLICATION, 1))
    again = table.append(rows, WriteBatch(APPLICATION, 1))
    newer = [(folder, key, size + 1) for folder, key, size in listed[:3]]
    upserted = table.upsert(spark.createDataFrame(newer, rows.schema), WriteBatch(APPLICATION, 2))
    total = table.read().selectExpr("count(*)", "sum(size)").first()
    assert total is not None
    wanted = (len(listed), sum(size for _, _, size in listed) + min(3, len(listed)))
    stage.check("rows are stored exactly once", again.repeated and total[0] == wanted[0], f"{total[0]} rows")
    stage.check("an upsert replaces by key", upserted.rows_replaced == min(3, len(listed)), f"{total[1]} bytes in all")
    stage.check("totals agree", tuple(total) == wanted, f"{tuple(total)}")
    _read_elsewhere(stage, table, wanted[0])
    check_bronze(stage, context, spark, settings)
    check_gold(stage, context, spark, settings)
    asyncio.run(prove_rollups(stage, context, spark_job(context, spark)))
    check_conserved(stage, context, spark)


def _read_elsewhere(stage: ScenarioContext, table: Table, wanted: int) -> None:
    import deltalake

    from lakebed.spark.location import Location

    location = Location.of(stage.settings.of(StoreSettings))
    delta = deltalake.DeltaTable(location.uri(table.spec.root), storage_options=location.storage_options())
    found = (delta.version(), delta.to_pyarrow_table().num_rows)
    stage.check("delta-rs reads the same version", found == (table.snapshot().version, wanted), f"version {found[0]}")


def load_samples(context: Context, settings: SparkSettings) -> IngestReport:
    """Loads every accepted batch into bronze as the pipeline does, so that the runs page has the load."""
    from lakebed.pipeline.bronze.ingestion import SAMPLES_WORD, Ingestion

    given = context.settings.having(settings).having(BronzeSettings(step_objects=STEP_OBJECTS))
    (report,) = Ingestion(msgspec.structs.replace(context, settings=given)).run(only=[SAMPLES_WORD])
    return report


def check_bronze(stage: ScenarioContext, context: Context, spark: Any, settings: SparkSettings) -> None:
    """Loads every accepted batch into bronze; checks it against the manifests and against the agents' own disks."""
    from lakebed.pipeline.bronze.samples import SampleLoader

    sent = asyncio.run(_sent(context))
    if not sent:
        return
    report = load_samples(context, settings)
    good = report.good
    stage.report(f"{report.rows_in} samples of {report.objects} accepted batches were loaded into bronze")
    rows = SampleLoader(spark, context).table.read(columns=["agent_id", "boot_id", "seq", "metric", "value"]).cache()
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
        stage.check("bronze matches the counts on the agents' disks", short == 0, f"{len(made)} agents, {short} differ")


SAMPLES_CONTRACT = """table: demo_samples
source: batches.samples
keys: [agent_id, boot_id, seq]
columns:
  agent_id: {type: string, required: true}
  boot_id: {type: string, required: true}
  seq: {type: long, required: true}
  value: double
"""
ORDERS_CONTRACT = """table: TABLE
source: SOURCE
keys: [number]
columns:
  number: {type: long, required: true}
  agent: {type: string, required: true}
"""
ACTIVITY = """select o.agent, o.orders, s.samples
from (select agent, count(*) as orders from {{ ref('TABLE') }} group by agent) o
join (select agent_id, count(*) as samples from {{ ref('demo_samples') }} group by agent_id) s on s.agent_id = o.agent
"""
ORDERS_EACH = 5  # records of the topic, for each agent


def check_gold(stage: ScenarioContext, context: Context, spark: Any, settings: SparkSettings) -> None:
    """Samples and the records of a topic go through silver into one gold table, each counted there once."""
    from lakebed.delta.model import TableSpec
    from lakebed.pipeline.bronze.ingestion import Ingestion
    from lakebed.pipeline.bronze.places import LAKE
    from lakebed.pipeline.tables.table import Table
    from lakebed.spark.location import Location

    sent = asyncio.run(_sent(context))
    if not sent:
        return
    name = f"demo_orders_{context.ids.token()[:6]}"
    agents = sorted({agent for agent, _ in sent})
    asyncio.run(_order(stage.gateway_url, name, agents))
    folder = stage.folder / "demo" / name
    for kind, file, text in (
        ("topics", "orders.yaml", ORDERS_CONTRACT.replace("SOURCE", name)),
        ("contracts", "orders.yaml", ORDERS_CONTRACT.replace("SOURCE", f"topic.{name}")),
        ("contracts", "samples.yaml", SAMPLES_CONTRACT),
        ("gold", f"{name}_by_agent.sql", ACTIVITY),
    ):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        (folder / kind / file).write_text(text.replace("TABLE", name))
    given = context.settings.having(settings).having(BronzeSettings(topics=str(folder / "topics")))
    given = given.having(PipelineSettings(contracts=str(folder / "contracts"), gold=str(folder / "gold")))
    Ingestion(msgspec.structs.replace(context, settings=given)).run()
    location = Location.of(stage.settings.of(StoreSettings))
    spec = TableSpec("/".join(("gold", *LAKE, f"{name}_by_agent")), '{"type":"struct","fields":[]}')
    rows = Table(spark, spec, context, location=location).read().collect()
    samples, orders = sum(row["samples"] for row in rows), sum(row["orders"] for row in rows)
    stage.counted("accepted samples", "counted in gold", samples)
    stage.check(
        "gold counts every sample and every record of a topic once",
        (sum(sent.values()), ORDERS_EACH * len(agents)) == (samples, orders),
        f"{samples} samples and {orders} records of {len(rows)} agents",
    )


async def _order(url: str, topic: str, agents: list[str]) -> None:
    """Sends a few records for each agent to a topic of their own."""
    import httpx2

    records = [
        msgspec.json.encode({"number": number, "agent": agent}).decode()
        for number, agent in enumerate(agent for agent in agents for _ in range(ORDERS_EACH))
    ]
    part = {"topic": topic, "partition": 0, "records": records}
    async with httpx2.AsyncClient(timeout=20.0) as client:
        answer = await client.post(f"{url}/v1/produce", content=msgspec.json.encode({"topic_partitions": [part]}))
        answer.raise_for_status()


async def _sent(context: Context) -> Counter[tuple[str, str]]:
    """How many numbers each boot has used, by the identities that were accepted."""
    sent: Counter[tuple[str, str]] = Counter()
    async for info in context.store.list(paths.ACCEPTED):
        identity = paths.identity_of(info.key)
        sent[identity.agent_id, identity.boot_id] += identity.samples
    return sent


def _made(stage: ScenarioContext) -> dict[str, int]:
    """How many values each agent of the fleets has recorded on its disk."""
    notes = (stage.folder / "demo").glob("fleet-*/*/progress")
    return {note.parent.name: int(note.read_text() or 0) for note in notes}


def check_conserved(stage: ScenarioContext, context: Context, spark: Any) -> None:
    """Audits the bucket, as `lakebed audit` does: what agents numbered is accepted, in bronze, and in rollups."""
    from lakebed.pipeline.audit.job import BucketAuditor

    horizon_s = context.settings.of(ReconcilerSettings).gc_horizon_s
    record = BucketAuditor(spark, context).run(horizon_s=horizon_s, verify=True, grace_s=GRACE_S)
    kept = record.conservation
    if not kept.stages.get("accepted"):
        return
    counts = " → ".join(f"{name} {count}" for name, count in kept.stages.items())
    stage.check("no sample is lost, doubled or changed from agents to tables", not kept.wrong, counts)
    wrong = {f"{total.finding} {total.kind}": total.objects for total in record.totals if total.wrong}
    stage.check(
        "the audit finds nothing missing, corrupt or unindexed", not wrong, f"{record.objects} objects, {wrong}"
    )
