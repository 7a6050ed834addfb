"""Everything between an agent's folder and gold with the AWS-shaped parts: SQS and DynamoDB servers, and real Spark."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import boto3
import deltalake
import pytest

from lakebed.core.clock import SystemClock
from lakebed.core.settings import env_name, load
from lakebed.spark.location import Location
from lakebed.store.settings import StoreSettings
from lakebed.ticks.adapters import open_audit, open_queue, open_vault
from lakebed.ticks.audit import COMMITTED, DISPATCHED
from lakebed.ticks.model import TickId
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections
from support.aws_servers import aws_server
from support.process_output import next_line
from support.stored_ticks import parquet

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

ORG, PROJECT, TICK = "acme", "shop", "t-1"
DEADLINE_S = 400.0
AWS = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
SETTINGS: dict[str, Any] = {
    "ticks.payload_key": "0123456789abcdef0123456789abcdef0123456789A=",
    "ticks.queue": "sqs", "ticks.audit": "dynamodb",
    "ticks.batch_window_s": 0.2, "ticks.poll_s": 0.2, "gateway.prove": "never", "spark.quick": "true",
    "spark.master": "local[2]", "spark.driver_memory": "512m", "spark.shuffle_partitions": 2,
    "pipeline.contracts": "examples", "pipeline.gold": "examples",
    **{f"ticks.{name}": value for name, value in AWS.items()},
}  # fmt: skip


class Stack:
    """A gateway, a worker and an agent as processes, on one bucket and one AWS server."""

    def __init__(self, folder: Path, layer: dict[str, Any]) -> None:
        self.folder, self.layer = folder, layer
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LAKEBED_")}
        self.env = {**clean, **{env_name(key): str(value) for key, value in layer.items()}}
        self.env["PYTHONPATH"] = os.pathsep.join(sys.path)
        self.context = make_context(load(sections(), flags=layer, env={}), role="test")
        self._running: list[asyncio.subprocess.Process] = []

    async def start(self, *arguments: str, **more: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "lakebed", *arguments, env={**self.env, **more}, cwd=self.folder,
            stdout=asyncio.subprocess.PIPE, stderr=(self.folder / "log").open("ab"),
        )  # fmt: skip
        self._running.append(process)
        return process

    async def serve(self, command: str) -> str:
        process = await self.start(command, "--parts", "ticks", "--port", "0")
        url: str = json.loads(await next_line(process, self.folder / "log"))["url"]
        return url

    async def clear(self) -> None:
        for process in self._running:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def rows(self, name: str) -> list[dict[str, Any]]:
        location = Location.of(self.context.settings.of(StoreSettings))
        uri, options = location.uri(f"tables/{name}"), location.storage_options()
        return list(deltalake.DeltaTable(uri, storage_options=options).to_pyarrow_table().to_pylist())


@pytest.fixture
async def stack(tmp_path: Path, bucket_settings: StoreSettings) -> AsyncIterator[Stack]:
    with aws_server("ministack") as url:
        made = Stack(tmp_path, {**bucket_settings.as_layer(), **SETTINGS, "ticks.aws_endpoint": url})
        yield made
        await made.clear()


def write_tick(folder: Path) -> None:
    folder.mkdir(parents=True)
    orders = parquet(
        order_id=[1, 2, 3, 4], customer_id=[7, 7, 8, 8], amount=["1.00", "2.50", "4.00", "oops"],
        status=["paid", "open", "cancelled", "paid"], updated_at=["2026-11-15 12:00:00"] * 4,
    )  # fmt: skip
    (folder / "orders.parquet").write_bytes(orders)
    customers = parquet(customer_id=[7, 8], name=["Ann", "Bob"], country=["DE", "FR"])
    (folder / "customers.parquet").write_bytes(customers)
    (folder / "_ready").touch()


async def test_a_folder_of_an_agent_reaches_gold_through_sqs_and_dynamodb(stack: Stack) -> None:
    """Each row is in bronze, silver or quarantine; gold adds them up; DynamoDB has both rows, and SQS is empty."""
    write_tick(stack.folder / "drop" / TICK)
    secret = await open_vault(stack.context).issue(ORG, PROJECT)
    url = await stack.serve("serve")
    await stack.serve("work")
    told = {
        "folder": "drop", "project_id": PROJECT, "org_id": ORG, "api_secret": secret, "urls": [url],
        "keys": {"orders": ["order_id"], "customers": ["customer_id"]}, "interval_s": 0.2,
    }  # fmt: skip
    agent = await stack.start("agent", "run", "--agent-id", "a", LAKEBED_AGENT_TICKS=json.dumps([told]))
    of, dispatched = TickId(ORG, PROJECT, TICK), open_audit(stack.context, DISPATCHED)
    clock = SystemClock()
    async with asyncio.timeout(DEADLINE_S):
        while (row := await dispatched.get(of)) is None or row.state != "done":
            assert agent.returncode is None, (stack.folder / "log").read_text()[-2000:]
            assert row is None or row.state != "failed", row
            await clock.sleep(0.5)
        while (stack.folder / "drop" / TICK).exists():  # the agent removes it after the answer
            await clock.sleep(0.1)

    committed = await open_audit(stack.context, COMMITTED).get(of)
    assert committed is not None
    assert (6, 0, "customers=0,orders=0") == tuple(
        committed.fields[name] for name in ("rows_inserted", "rows_replaced", "bronze_db_etag")
    )
    of_layer = {layer: await asyncio.to_thread(stack.rows, f"{layer}/{ORG}/{PROJECT}/orders") for layer in LAYERS}
    assert {"bronze/ticks": [1, 2, 3, 4], "silver": [1, 2, 3]} == {
        layer: sorted(row["order_id"] for row in of_layer[layer]) for layer in ("bronze/ticks", "silver")
    }
    assert 1 == len(of_layer["quarantine"])
    spent = await asyncio.to_thread(stack.rows, f"gold/{ORG}/{PROJECT}/spent_by_customer")
    assert {7: (2, "3.50"), 8: (0, "0.00")} == {one["customer_id"]: (one["orders"], str(one["spent"])) for one in spent}
    depth = await open_queue(stack.context).depth()
    assert (0, 0, 0) == (depth.waiting, depth.in_flight, depth.dead)
    keys = await asyncio.to_thread(_keys, stack.layer["ticks.aws_endpoint"])
    assert {"bronze_committed": [f"{ORG}/{PROJECT}/{TICK}"], "silver_dispatched": [f"{ORG}/{PROJECT}/{TICK}"]} == keys


LAYERS = ("bronze/ticks", "silver", "quarantine")


def _keys(url: str) -> dict[str, list[str]]:
    """What the DynamoDB server itself has, by table, read by Amazon's own client."""
    database = boto3.client("dynamodb", endpoint_url=url, region_name="us-east-1", **AWS)
    tables = {name: name.removeprefix("lakebed-") for name in database.list_tables()["TableNames"]}
    return {
        short: [item["tick_key"]["S"] for item in database.scan(TableName=name)["Items"]]
        for name, short in tables.items()
    }
