"""Gateways with real Spark as processes: they answer before it is there, and a kill -9 in a finalize loses nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import deltalake
import httpx2
import pytest

from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import Secret, env_name, load
from lakebed.spark.location import Location
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from lakebed.ticks.adapters import open_vault
from lakebed.ticks.model import FinalizeResult
from lakebed.ticks.packing import PackedTick, find, pack
from lakebed.ticks.uploader import Uploader, client
from lakebed.wiring.parts import sections
from support.finalize_crash_points import STEPS
from support.process_output import next_line
from support.stored_ticks import parquet

SUPPORT = Path(__file__).parents[1] / "support"
DEADLINE_S = 250.0
ORG, PROJECT = "acme", "shop"
QUICK = {
    "ticks.payload_key": "0123456789abcdef0123456789abcdef0123456789A=", "ticks.lease_s": 2.0, "gateway.prove": "never",
    "spark.quick": "true", "spark.master": "local[2]", "spark.driver_memory": "512m", "spark.shuffle_partitions": 2,
}  # fmt: skip


class Env:
    """Gateways on one bucket, and an agent that uploads to them."""

    def __init__(self, settings: StoreSettings, folder: Path, store: Store) -> None:
        layer = {**settings.as_layer(), **QUICK}
        self._env = {env_name(key): str(value) for key, value in layer.items()}
        self.context = Context(
            node="test",
            settings=load(sections(), flags=layer),
            store=store,
            clock=SystemClock(),
            ids=Ids(),
            metrics=Metrics(),
        )
        self.folder, self._running = folder, list[asyncio.subprocess.Process]()
        self.location = Location.of(settings)
        self.secret = Secret("")

    async def start(self, command: str = "serve", *, dies_at: str = "") -> tuple[asyncio.subprocess.Process, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LAKEBED_")}
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(SUPPORT / "finalize_crash_points.py"), command, "--parts", "ticks",
            env={**clean, **self._env, "PYTHONPATH": os.pathsep.join(sys.path), "DIES_AT": dies_at},
            cwd=self.folder, stdout=asyncio.subprocess.PIPE, stderr=(self.folder / "log").open("ab"),
        )  # fmt: skip
        self._running.append(process)
        return process, json.loads(await next_line(process, self.folder / "log"))["url"]

    async def clear(self) -> None:
        for process in self._running:
            if process.returncode is None:
                process.kill()
            await process.wait()

    def packed(self, tick: str) -> PackedTick:
        """A tick of two tables: 400 orders in two parts and 5 customers."""
        folder = self.folder / tick
        folder.mkdir()
        for seq in (0, 1):
            ids = list(range(seq * 200, seq * 200 + 200))
            (folder / f"orders_seq={seq}.parquet").write_bytes(parquet(id=ids, note=[tick] * 200))
        (folder / "customers.parquet").write_bytes(parquet(id=list(range(5)), note=[tick] * 5))
        return pack(find([folder]), project_id=PROJECT, tick_id=tick, dt="20261115", keys={"": ["id"]})

    async def upload(self, url: str, packed: PackedTick, **more: Any) -> FinalizeResult:
        async with client(url, ORG, self.secret) as http, asyncio.timeout(DEADLINE_S):
            return await Uploader(http, self.context, **more).upload(packed, resume=True)

    def notes(self, table: str) -> dict[str, int]:
        """How many rows of a bronze table each tick has, as delta-rs reads it; each key once."""
        uri = self.location.uri(f"tables/bronze/ticks/{ORG}/{PROJECT}/{table}")
        found = deltalake.DeltaTable(uri, storage_options=self.location.storage_options()).to_pyarrow_table()
        assert found.num_rows == len(set(found.column("id").to_pylist())), "a key is there twice"
        reported = found.column("note").to_pylist()
        return {note: reported.count(note) for note in sorted(set(reported))}


@pytest.fixture
async def test_env(tmp_path: Path, bucket_settings: StoreSettings, bucket: Store) -> AsyncIterator[Env]:
    made = Env(bucket_settings, tmp_path, bucket)
    made.secret = Secret(await open_vault(made.context).issue(ORG, PROJECT))
    yield made
    await made.clear()


async def _spark(url: str) -> str:
    async with httpx2.AsyncClient(timeout=DEADLINE_S) as http:
        answer = await http.get(f"{url}/healthz")
    assert answer.status_code == 200, answer.text
    reported: str = answer.json()["components"]["ticks"]["detail"]
    return reported.rpartition("Spark: ")[2]


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_a_gateway_answers_while_spark_starts_behind_it(test_env: Env) -> None:
    """/healthz is 200 before Spark is there; Spark gets ready by itself, without a tick, and SIGTERM ends both."""
    process, url = await test_env.start()

    first = await _spark(url)
    async with asyncio.timeout(DEADLINE_S):
        while (state := await _spark(url)) != "ready":
            assert state in ("off", "starting")
            await asyncio.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    code = await asyncio.wait_for(process.wait(), DEADLINE_S)

    assert (True, 0) == (first in ("off", "starting"), code)


@pytest.mark.timeout(900)
@pytest.mark.full
async def test_a_gateway_killed_inside_sparks_work_is_finished_by_the_agents_retry(test_env: Env) -> None:
    """kill -9 before a log entry and between two tables: the retry at another replica counts rows once."""
    _, heir_url = await test_env.start()
    answers: dict[str, tuple[int, int]] = {}
    codes: list[int] = []

    for step in STEPS:
        packed = test_env.packed(step)
        victim, url = await test_env.start(dies_at=step)
        sending = asyncio.create_task(test_env.upload(url, packed, tries_max=1))
        codes.append(await asyncio.wait_for(victim.wait(), DEADLINE_S))
        await asyncio.gather(sending, return_exceptions=True)
        result = await test_env.upload(heir_url, packed)
        answers[step] = (result.rows_inserted, result.rows_replaced)

    assert [-signal.SIGKILL] * len(STEPS) == codes
    assert [(405, 0), (0, 405)] == list(answers.values())
    assert {"between_two_tables": 400} == await asyncio.to_thread(test_env.notes, "orders")
    assert {"between_two_tables": 5} == await asyncio.to_thread(test_env.notes, "customers")
