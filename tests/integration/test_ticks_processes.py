"""Ticks with real replicas on the real bucket, killed with -9: every row of the scenario table that needs a death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import env_name, load
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from lakebed.ticks.adapters import open_audit, open_queue, open_vault
from lakebed.ticks.audit import COMMITTED
from lakebed.ticks.fakes import FakeBronze, FakeSilverJob
from lakebed.ticks.model import TickId
from lakebed.ticks.receiver import register_of
from lakebed.wiring.parts import sections
from support.process_output import next_line
from support.tick_fixtures import ORG, PAYLOAD_KEY, PROJECT, TICK, manifest, parquet, sha

SUPPORT = Path(__file__).parents[1] / "support"
DEADLINE_S = 150.0
OF = TickId(ORG, PROJECT, TICK)
PARTS = {1: parquet([1, 2, 3]), 2: parquet([4, 5])}
SAID = manifest(PARTS, {1: 3, 2: 2})
QUICK = {
    "ticks.payload_key": PAYLOAD_KEY, "ticks.pipeline": "twin", "ticks.lease_s": 1.0, "ticks.retry_after_s": 0.2,
    "ticks.batch_window_s": 0.2, "ticks.poll_s": 0.1, "ticks.visibility_timeout_s": 3, "gateway.prove": "never",
}  # fmt: skip


class Fleet:
    """Replicas and workers as processes; `support/ticks_crash_points.py` gives them a step to die at."""

    def __init__(self, settings: StoreSettings, folder: Path, store: Store) -> None:
        layer = {**settings.as_layer(), **QUICK}
        self._env = {env_name(key): str(value) for key, value in layer.items()}
        self._folder, self._running = folder, list[asyncio.subprocess.Process]()
        clock = SystemClock()
        self.context = Context(
            node="test", settings=load(sections(), flags=layer), store=store, clock=clock, ids=Ids(), metrics=Metrics()
        )
        self.secret = ""

    async def start(self, command: str, *, dies_at: str = "") -> tuple[asyncio.subprocess.Process, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LAKEBED_")}
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(SUPPORT / "ticks_crash_points.py"), command, "--parts", "ticks,silver",
            env={**clean, **self._env, "PYTHONPATH": os.pathsep.join(sys.path), "DIES_AT": dies_at},
            cwd=self._folder, stdout=asyncio.subprocess.PIPE, stderr=(self._folder / "log").open("ab"),
        )  # fmt: skip
        self._running.append(process)
        return process, json.loads(await next_line(process, self._folder / "log"))["url"]

    async def clear(self) -> None:
        for process in self._running:
            if process.returncode is None:
                process.kill()
            await process.wait()

    def client(self, url: str) -> httpx2.AsyncClient:
        headers = {"x-api-key": ORG, "x-api-secret": self.secret}
        return httpx2.AsyncClient(
            base_url=f"{url}/v1/projects/{PROJECT}/ticks/{TICK}", headers=headers, timeout=DEADLINE_S
        )

    async def put(self, url: str, seq: int) -> int:
        async with self.client(url) as http:
            answer = await http.put(f"/parts/{seq}", content=PARTS[seq], headers={"x-sha256": sha(PARTS[seq])})
            return answer.status_code

    async def finalize(self, url: str) -> httpx2.Response:
        """As an agent does: tried again while the answer is 425 or 5xx."""
        async with self.client(url) as http, asyncio.timeout(DEADLINE_S):
            while True:
                answer = await http.post("/finalize", content=json.dumps(SAID).encode())
                if answer.status_code not in (425, 503):
                    return answer
                await asyncio.sleep(0.1)

    async def rows(self) -> int:
        tables = (await FakeBronze(self.context).register(ORG, PROJECT).read()).value
        return len(tables.rows.get("orders", {}))


@pytest.fixture
async def fleet(tmp_path: Path, bucket_settings: StoreSettings, bucket: Store) -> AsyncIterator[Fleet]:
    made = Fleet(bucket_settings, tmp_path, bucket)
    made.secret = await open_vault(made.context).issue(ORG, PROJECT)
    yield made
    await made.clear()


async def died(process: asyncio.subprocess.Process) -> int:
    return await asyncio.wait_for(process.wait(), DEADLINE_S)


STEPS = ("before_bronze", "after_bronze", "after_record", "after_send", "after_audit", "after_result")


@pytest.mark.parametrize(
    "step",
    ["after_bronze", *(pytest.param(step, marks=pytest.mark.full) for step in STEPS if step != "after_bronze")],
)
async def test_a_replica_killed_between_two_steps_is_finished_by_the_next_try(fleet: Fleet, step: str) -> None:
    """kill -9 anywhere in a finalize: another replica answers the retry, with the rows counted once."""
    (victim, url), (_, heir_url) = await asyncio.gather(fleet.start("serve", dies_at=step), fleet.start("serve"))
    assert [202, 202] == [await fleet.put(url, seq) for seq in PARTS]

    with pytest.raises(httpx2.HTTPError):
        await fleet.finalize(url)
    code = await died(victim)
    answer = await fleet.finalize(heir_url)
    again = await fleet.finalize(heir_url)

    assert -signal.SIGKILL == code
    assert (200, 5, 0) == (answer.status_code, answer.json()["rows_inserted"], answer.json()["rows_replaced"])
    assert (answer.content, 5) == (again.content, await fleet.rows())
    sent = [each.message().tick_id for each in await open_queue(fleet.context).receive(10)]
    assert {TICK} == set(sent)
    assert await open_audit(fleet.context, COMMITTED).get(OF) is not None


@pytest.mark.full
async def test_a_replica_killed_in_the_middle_of_a_part_leaves_no_part(fleet: Fleet) -> None:
    """Half a body, then kill -9: the agent's next try is received whole, elsewhere."""
    (victim, url), (_, heir_url) = await asyncio.gather(fleet.start("serve"), fleet.start("serve"))
    half_sent = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield PARTS[1][:100]
        half_sent.set()
        await asyncio.sleep(DEADLINE_S)

    async with fleet.client(url) as http:
        sending = asyncio.create_task(http.put("/parts/1", content=slowly(), headers={"x-sha256": sha(PARTS[1])}))
        await asyncio.wait_for(half_sent.wait(), DEADLINE_S)
        victim.kill()
        await died(victim)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

    assert not (await register_of(fleet.context, OF).read()).value.exists
    assert [202, 202, 200] == [await fleet.put(heir_url, seq) for seq in (1, 2, 1)]
    assert 5 == (await fleet.finalize(heir_url)).json()["rows_inserted"]


@pytest.mark.full
async def test_a_replica_killed_after_a_part_landed_has_it(fleet: Fleet) -> None:
    """The part was stored and registered, only the answer was lost: the next try is 200 already_present."""
    (victim, url), (_, heir_url) = await asyncio.gather(
        fleet.start("serve", dies_at="after_part"), fleet.start("serve")
    )

    with pytest.raises(httpx2.HTTPError):
        await fleet.put(url, 1)
    await died(victim)

    assert 200 == await fleet.put(heir_url, 1)


async def test_a_drained_replica_lets_its_projects_go_at_once(fleet: Fleet) -> None:
    """After SIGTERM the other replica need not wait for a lease to run out."""
    (first, url), (_, other_url) = await asyncio.gather(fleet.start("serve"), fleet.start("serve"))
    for seq in PARTS:
        await fleet.put(url, seq)
    await fleet.finalize(url)

    first.send_signal(signal.SIGTERM)
    code = await died(first)
    status = await _status(fleet, other_url)

    assert (0, "") == (code, status["owner"])
    assert {"committed": 1} == status["states"]


@pytest.mark.full
async def test_a_dispatcher_killed_in_its_job_is_replaced_and_silver_has_the_tick(fleet: Fleet) -> None:
    """kill -9 while the job runs: the message comes back, the silent row is taken over, the job runs again."""
    (_, url), (victim, _) = await asyncio.gather(fleet.start("serve"), fleet.start("work", dies_at="before_job"))
    for seq in PARTS:
        await fleet.put(url, seq)
    await fleet.finalize(url)
    code = await died(victim)
    await fleet.start("work")

    silver = FakeSilverJob(fleet.context).register(ORG, PROJECT)
    async with asyncio.timeout(DEADLINE_S):
        while not (runs := (await silver.read()).value.runs):
            await asyncio.sleep(0.1)
        while (depth := await open_queue(fleet.context).depth()).waiting + depth.in_flight:
            await asyncio.sleep(0.1)

    assert (-signal.SIGKILL, ((TICK,),), 0) == (code, runs, depth.dead)


async def _status(fleet: Fleet, url: str) -> Any:
    async with fleet.client(url) as http:
        return (await http.get(f"{url}/v1/projects/{PROJECT}/status")).json()
