"""The whole way through the wiring: parts over HTTP, a finalize that writes bronze, a dispatcher that runs silver."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import pytest
from pyspark.sql import SparkSession

from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.gateway.app import build
from lakebed.pipeline.runner import PipelineRunner
from lakebed.pipeline.workers import retention_workers
from lakebed.spark.lineage import lineage_of
from lakebed.spark.settings import SparkSettings
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from lakebed.ticks.adapters import open_audit, open_queue, open_vault
from lakebed.ticks.audit import COMMITTED, DISPATCHED
from lakebed.ticks.auditor import DispatchAuditor
from lakebed.ticks.dispatcher import Dispatcher
from lakebed.ticks.model import TickId
from lakebed.wiring.parts import sections
from lakebed.wiring.ticks import SparkFlow, SparkSilver, component
from support.lineage_receiver import Receiver, check, receiving
from support.recorded_spans import Recorded, error, parent_id, recording, span_id
from support.stored_ticks import Yard, parquet, table

DAY_S = 86_400.0
END_OF_SILVER = ("COMPLETE", "silver/acme/p1")
PAYLOAD_KEY = "0123456789abcdef0123456789abcdef0123456789A="


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


@pytest.fixture
def spans() -> Iterator[Recorded]:
    with recording() as found:
        yield found


@pytest.fixture
def context(
    spark: SparkSession,
    spark_settings: SparkSettings,
    bucket: Store,
    bucket_settings: StoreSettings,
    receiver: Receiver,
) -> Context:
    flags: dict[str, Any] = {"ticks.payload_key": PAYLOAD_KEY, "ticks.batch_window_s": 0.1, "ticks.poll_s": 0.05}
    flags |= {"pipeline.contracts": "examples", "pipeline.gold": "examples"}
    lineage = {"spark.lineage": {"url": receiver.url}}
    settings = load(sections(), flags=flags | spark_settings.as_layer() | bucket_settings.as_layer() | lineage)
    return Context(node="node-1", settings=settings, store=bucket, clock=SystemClock(), ids=Ids(), metrics=Metrics())


@pytest.fixture
def env(spark: SparkSession, bucket: Store, bucket_settings: StoreSettings) -> Yard:
    return Yard(spark, bucket, bucket_settings)


def orders(**columns: Any) -> bytes:
    return parquet(
        order_id=columns["ids"],
        customer_id=[1] * len(columns["ids"]),
        amount=columns["amounts"],
        status=["paid"] * len(columns["ids"]),
        updated_at=["2026-11-15 12:00:00"] * len(columns["ids"]),
    )


async def test_a_tick_goes_from_http_to_gold_once(context: Context, receiver: Receiver, spans: Recorded) -> None:
    """Finalize answers exact counts; a null key is a 422 with its class; silver runs once; each job tells lineage, and
    is a span inside what began it.
    """
    ticks = component(context)
    await ticks.start()
    secret = await open_vault(context).issue("acme", "p1")
    transport = httpx2.ASGITransport(app=build(context, [ticks]))
    client = httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=100.0)

    async def send(tick: str, body: bytes, **changed: Any) -> httpx2.Response:
        head = {"x-api-key": "acme", "x-api-secret": secret}
        path = f"/v1/projects/p1/ticks/{tick}"
        sha256 = hashlib.sha256(body).hexdigest()
        put = await client.put(f"{path}/parts/0", content=body, headers={**head, "x-sha256": sha256})
        assert put.status_code == 202, put.text
        reported, _ = table(body, primary_keys=("order_id",))
        output = msgspec.to_builtins(reported) | changed
        manifest = {"tick_id": tick, "project_id": "p1", "dt": "20261115", "tables": [output]}
        return await client.post(f"{path}/finalize", content=msgspec.json.encode(manifest), headers=head)

    good = await send("t1", orders(ids=[1, 2, 3], amounts=["1.00", "2.50", "oops"]))
    keyless = parquet(order_id=[None, 4], note=["a", "b"])
    bad = await send("t2", keyless)
    dispatcher = Dispatcher(
        context,
        queue=open_queue(context),
        dispatched=open_audit(context, DISPATCHED),
        job=SparkSilver(SparkFlow(context)),
    )
    rounds = [await dispatcher.round(), await dispatcher.round()]
    of, audits = TickId("acme", "p1", "t1"), {name: open_audit(context, name) for name in (COMMITTED, DISPATCHED)}
    auditor = DispatchAuditor(
        context, queue=open_queue(context), committed=audits[COMMITTED], dispatched=audits[DISPATCHED]
    )
    await auditor.replay(of, "to see it")
    rounds.append(await dispatcher.round())
    replayed = await audits[DISPATCHED].get(of)
    await ticks.stop()

    assert (200, 3, 0) == (good.status_code, good.json()["rows_inserted"], good.json()["rows_replaced"])
    assert bad.status_code == 422, bad.text
    assert bad.json()["error_class"]
    assert rounds == [1, 0, 1]
    assert replayed is not None
    (made,) = msgspec.json.decode(str(replayed.fields["detail"]))["silver"]
    assert ("orders", True, 3, 2, 1) == tuple(made[key] for key in ("table", "anew", "rows_in", "good", "quarantined"))
    again = await asyncio.to_thread(PipelineRunner(context).run_silver, "acme", "p1", ["t1"], {"orders": 0})
    assert again.silver == ()
    assert ["waiting", "waiting"] == [made.state for made in again.gold], "customers have not come yet"
    held = await asyncio.to_thread(_silver_rows, context)
    assert [1, 2] == held
    outcomes = {
        name: context.metrics.value("lakebed_silver_rows_total", outcome=name) for name in ("good", "quarantined")
    }
    assert {"good": 4.0, "quarantined": 2.0} == outcomes, "once, and once more by the replay"
    await asyncio.to_thread(_check_lineage, context, receiver)
    _check_spans(spans)


def _check_spans(spans: Recorded) -> None:
    by_id = {span_id(one): one for one in spans()}
    begun_by = {(one.name, by_id[parent_id(one)].name) for one in spans() if parent_id(one) in by_id}
    assert {("silver job", "ticks dispatch"), ("gold models", "silver job")} <= begun_by
    assert ["", "bad_manifest"] == [error(one) for one in spans() if one.name == "bronze commit"]


def _check_lineage(context: Context, receiver: Receiver) -> None:
    sender = lineage_of(context)._sender
    assert sender is not None
    assert sender.flush(timeout_s=100.0)
    for event in receiver.events:
        check(event)
    ends = {(kind, name) for kind, name in receiver.told() if kind != "START"}
    assert {
        ("COMPLETE", "bronze/acme/p1"),
        ("FAIL", "bronze/acme/p1"),
        ("COMPLETE", "silver/acme/p1"),
        ("COMPLETE", "gold/acme/p1"),
    } == ends
    first = next(event for event in receiver.events if (event["eventType"], event["job"]["name"]) == END_OF_SILVER)
    assert ["tables/bronze/ticks/acme/p1/orders"] == [each["name"].partition("/")[2] for each in first["inputs"]]
    names = ["tables/silver/acme/p1/orders", "tables/quarantine/acme/p1/orders"]
    assert names == [each["name"].partition("/")[2] for each in first["outputs"]]
    assert [2, 1] == [each["outputFacets"]["outputStatistics"]["rowCount"] for each in first["outputs"]]


async def test_old_rows_and_their_files_go_by_themselves(context: Context, env: Yard) -> None:
    """The daily worker removes rows past 365 days, then files that no kept version needs; young rows stay."""

    def commit(tick: str, body: bytes) -> None:
        env.bronze().commit(env.tick(tick, table(body)))

    await asyncio.to_thread(commit, "t1", parquet(id=[1, 2], note=["a", "b"]))
    await env.clock.advance(1_000 * DAY_S)  # past the bucket's own clock too, whose times the sweep goes by
    await asyncio.to_thread(commit, "t2", parquet(id=[2], note=["new"]))
    before = await _files(env)
    worker = retention_workers(msgspec.structs.replace(context, clock=env.clock))[0]
    task = asyncio.create_task(worker.run())

    async with asyncio.timeout(400):
        while await _files(env) > 1:
            await env.clock.advance(DAY_S)
            await asyncio.sleep(0.2)
            assert not task.done(), task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert (3, [(2, "new")]) == (before, await asyncio.to_thread(env.rows))


async def _files(env: Yard) -> int:
    return len([info.key async for info in env.store.list("tables/bronze/") if info.key.endswith(".parquet")])


def _silver_rows(context: Context) -> list[int]:
    flow = PipelineRunner(context)
    contract = next(one for one in flow.silver.contracts if one.table == "orders")
    return sorted(row["order_id"] for row in flow.silver.table(contract, "acme", "p1").read().collect())
