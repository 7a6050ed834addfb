"""A tick from an agent's files to gold: a wrong part is replaced, silver runs once, other engines read gold."""

from __future__ import annotations

import asyncio
import hashlib
import io
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lakebed.core.context import Context
from lakebed.core.settings import Secret, env_name, load
from lakebed.demo.scenario import ScenarioContext
from lakebed.store.settings import StoreSettings
from lakebed.ticks import packing
from lakebed.ticks.adapters import open_audit, open_queue, open_vault
from lakebed.ticks.audit import DISPATCHED
from lakebed.ticks.auditor import DispatchAuditor
from lakebed.ticks.dispatcher import Dispatcher
from lakebed.ticks.model import TickId
from lakebed.ticks.packing import PackedTick
from lakebed.ticks.uploader import Uploader, client
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections
from lakebed.wiring.ticks import SparkFlow, SparkSilver

TITLE = "Ticks: files become tables, through failures"
NEXT = ("lakebed ticks push FOLDER --project P --key id", "lakebed silver status")

ORG, PROJECT = "acme", "shop"
CUSTOMERS = 40
STATUSES = ("open", "paid", "shipped", "cancelled")


async def play(stage: ScenarioContext) -> None:
    layer = stage.settings.of(StoreSettings).as_layer()
    flags = {
        "pipeline.contracts": "examples",
        "pipeline.gold": "examples",
        "pipeline.warm": True,
        "spark.quick": True,
        "ticks.batch_window_s": 0.5,
    }
    context = make_context(load(sections(), stack=layer, flags=flags), role="demo")
    stage.watch(context.metrics)
    stage.report("a gateway starts, and Spark with it")
    env = {env_name(key): str(value) for key, value in {**flags, "pipeline.warm": "true"}.items()}
    _, url = await stage.gateway("ticks-gateway", parts=("ticks",), env=env)
    secret = Secret(await open_vault(context).issue(ORG, PROJECT))
    folder = stage.folder / "demo" / "tick"
    orders, bad = _write(folder, stage.scaled(20_000))
    stage.expect("tick rows in bronze", orders + CUSTOMERS)
    packed = packing.pack(
        packing.find([folder]),
        project_id=PROJECT,
        tick_id="20261115T120000__demo",
        dt="20261115",
        keys={"orders": ["order_id"], "customers": ["customer_id"]},
    )
    await _upload(stage, context, url, secret, packed, orders + CUSTOMERS)
    await _silver(stage, context, packed, orders - bad, bad)


async def _upload(
    stage: ScenarioContext, context: Context, url: str, secret: Secret, packed: PackedTick, rows: int
) -> None:
    wrong = max(packed.files)
    address = f"/v1/projects/{PROJECT}/ticks/{packed.tick_id}"
    async with client(url, ORG, secret) as http:
        uploader = Uploader(http, context)
        other = _another()
        sent = await http.put(
            f"{address}/parts/{wrong}", content=other, headers={"x-sha256": hashlib.sha256(other).hexdigest()}
        )
        stage.fault("other bytes were uploaded as one of the parts")
        refused = await http.post(f"{address}/finalize", content=packed.manifest.encode())
        body = refused.json()
        named = refused.status_code == 409 and body["mismatched_sha"] == [wrong]
        stage.check(
            "the response names the wrong part",
            sent.status_code == 202 and named,
            f"409: missing {body['missing']}, another hash {body['mismatched_sha']}",
        )
        began_s = context.clock.monotonic_s()
        result = await uploader.upload(packed, resume=True)
        took_s = context.clock.monotonic_s() - began_s
        stage.counted("tick rows", "in the agent's files", rows)
        stage.counted("tick rows", "in bronze", result.rows_inserted)
        stage.check(
            "only that part is sent again, and the tick commits",
            (result.rows_inserted, result.rows_replaced) == (rows, 0),
            f"{result.rows_inserted} rows in bronze, {took_s:.1f} s after the first finalize",
        )
        again = await http.post(f"{address}/finalize", content=packed.manifest.encode())
        stage.check(
            "a repeated finalize gets the first result", again.json()["committed_at"] == result.committed_at, "200"
        )
        stolen = await http.put("/v1/projects/other/ticks/x/parts/1", content=b"x", headers={"x-sha256": "0" * 64})
        stage.check("another project is denied", stolen.status_code == 403, str(stolen.status_code))


async def _silver(stage: ScenarioContext, context: Context, packed: PackedTick, good: int, bad: int) -> None:
    tick = TickId(ORG, PROJECT, packed.tick_id)
    queue, dispatched = open_queue(context), open_audit(context, DISPATCHED)
    auditor = DispatchAuditor(
        context, queue=queue, committed=open_audit(context, "bronze_committed"), dispatched=dispatched
    )
    await auditor.resend(tick)
    stage.fault("the message to silver was put into the queue twice")
    flow = SparkFlow(context)
    dispatcher = Dispatcher(context, queue=queue, dispatched=dispatched, job=SparkSilver(flow))
    messages = await dispatcher.round()
    row, jobs = await dispatched.get(tick), context.metrics.value("lakebed_ticks_jobs_total", outcome="done")
    state = row.state if row else "missing"
    stage.check("silver is dispatched once", (jobs, state) == (1.0, "done"), f"{messages} messages, {jobs:.0f} job")
    stage.check("no tick is undispatched", not await auditor.undispatched(), f"queue: {await queue.depth()}")
    await asyncio.to_thread(_read, stage, context, await flow.open(), good, bad)


def _read(stage: ScenarioContext, context: Context, flow: Any, good: int, bad: int) -> None:
    """Silver and quarantine add up, and gold reads the same in Spark and beside it."""
    silver = flow.silver
    contract = next(each for each in silver.contracts if each.table == "orders")
    kept = silver.table(contract, ORG, PROJECT).read().count()
    quarantined = silver.quarantine(contract, ORG, PROJECT).read().count()
    stage.counted("order rows", "in the agent's files", good + bad)
    stage.counted("order rows", "in silver and quarantine", kept + quarantined)
    stage.check(
        "good and quarantined rows add up",
        (kept, quarantined) == (good, bad),
        f"{kept} good, {quarantined} quarantined",
    )
    engine, rows = _other_engine(context)
    spark = flow.gold.table(ORG, PROJECT, "gold.spent_by_country").read().collect()
    open_orders = silver.table(contract, ORG, PROJECT).read().where("status <> 'cancelled'").count()
    stage.counted("orders not cancelled", "in silver", open_orders)
    stage.counted("orders not cancelled", "counted in gold", sum(row["orders"] for row in spark))
    mine = sorted((row["country"], row["orders"], row["spent"]) for row in spark)
    stage.check(
        "gold reads the same in another engine", bool(rows) and rows == mine, f"{engine}, {len(rows)} countries"
    )


def _other_engine(context: Context) -> tuple[str, list[tuple[Any, ...]]]:
    """Gold by DuckDB where it is installed, else by delta-rs alone."""
    import deltalake

    from lakebed.spark.location import Location

    location = Location.of(context.settings.of(StoreSettings))
    table = deltalake.DeltaTable(
        location.uri(f"tables/gold/{ORG}/{PROJECT}/spent_by_country"), storage_options=location.storage_options()
    )
    gold = table.to_pyarrow_table()
    try:
        import duckdb
    except ImportError:
        columns = gold.select(["country", "orders", "spent"]).to_pydict()
        return "delta-rs", sorted(zip(columns["country"], columns["orders"], columns["spent"], strict=True))
    found = duckdb.from_arrow(gold).project("country, orders, spent").order("country").fetchall()
    return "DuckDB", found


def _write(folder: Path, count: int) -> tuple[int, int]:
    """The agent's files: pages of orders, every hundredth with a negative amount, and customers."""
    folder.mkdir(parents=True, exist_ok=True)
    at = datetime(2026, 11, 15, tzinfo=UTC)
    pages = 4
    each = max(1, count // pages)
    for page in range(pages):
        numbers = range(page * each, (page + 1) * each)
        _page(folder / f"orders_seq={page + 1:03d}.parquet", numbers, at)
    pq.write_table(
        pa.table(
            {
                "customer_id": pa.array(range(CUSTOMERS), pa.int64()),
                "name": [f"customer {n}" for n in range(CUSTOMERS)],
                "country": [("de", "fr", "br", "in")[n % 4] for n in range(CUSTOMERS)],
            }
        ),
        folder / "customers.parquet",
    )
    total = each * pages
    return total, sum(n % 100 == 7 for n in range(total))


def _page(file: Path, numbers: range, at: datetime) -> None:
    amounts = [Decimal(-1 if n % 100 == 7 else n % 500).quantize(Decimal("0.01")) for n in numbers]
    rows = {
        "order_id": pa.array(numbers, pa.int64()),
        "customer_id": pa.array([n % CUSTOMERS for n in numbers], pa.int64()),
        "amount": pa.array(amounts, pa.decimal128(12, 2)),
        "status": [STATUSES[n % 4] for n in numbers],
        "updated_at": pa.array([at + timedelta(seconds=n) for n in numbers], pa.timestamp("us", "UTC")),
    }
    pq.write_table(pa.table(rows), file)


def _another() -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"order_id": pa.array([1], pa.int64())}), out)
    return out.getvalue()
