"""Batches when answers of the bucket are lost: two collectors behind a proxy, each batch sent to both, one killed."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lakebed.batches import paths
from lakebed.batches.model import AcceptedBatch
from lakebed.batches.reader import RawBatches, read_frame, verified
from lakebed.batches.reconciler import Reconciler
from lakebed.core.context import Context
from lakebed.store.model import read_record
from lakebed.store.settings import StoreSettings
from support.batch_frames import frame_of, submit
from support.fleet import Fleet, behind, context_of, fleet_of
from support.histories import Event, Seen, Write, check
from support.lossy_proxy import LossyProxy
from support.runtimes import runtime_on
from support.traffic import Traffic

pytestmark = pytest.mark.full

LOAD_S = 6.0
DROPPED, ACKNOWLEDGED = 60, 200
AGENTS = 8
RETRIES_S = 100.0
BOOT = "boot-1"


class Agents:
    """Agents that number their batches, and what both collectors answered to each."""

    def __init__(self, urls: list[str], traffic: Traffic) -> None:
        self._urls, self._traffic = urls, traffic
        self.history: list[Event] = []
        self.fresh: dict[str, int] = {}  # identity → how many answers called the batch new

    async def run(self, http: aiohttp.ClientSession, agent: str) -> None:
        """Each batch goes to both collectors at once, until both acknowledge it; every fourth with rival bytes."""
        for number in count():
            if not self._traffic.goes_on():
                return
            start = number * 10
            frames = [frame_of(start, start + 9, agent=agent)] * 2
            if number % 4 == 3:
                frames[1] = frame_of(start, start + 9, agent=agent, value=2.0)
            answers = await asyncio.gather(
                *(self._until_known(http, url, frame) for url, frame in zip(self._urls, frames, strict=True))
            )
            self.fresh[f"{agent}/{start}"] = sum(answer.get("duplicate") is False for _, answer in answers)
            for (status, _), frame in zip(answers, frames, strict=True):
                outcome = "ok" if status == 200 else "fail"
                sha256 = submit(frame).sha256
                self.history.append(Write(agent, agent, sha256, outcome, start))  # type: ignore[arg-type]

    async def _until_known(self, http: aiohttp.ClientSession, url: str, frame: bytes) -> tuple[int, dict[str, Any]]:
        """As an agent does: repeats until it is answered."""
        async with asyncio.timeout(RETRIES_S):
            while True:
                try:
                    async with http.post(f"{url}/v1/batches", data=frame) as got:
                        status, answer = got.status, await got.json(content_type=None)
                except (aiohttp.ClientError, TimeoutError, ValueError):
                    status, answer = 0, {}
                self._traffic.answers[f"{status or 'none'} {answer.get('code', '')}".strip()] += 1
                if status in (200, 409):
                    return status, answer
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("pack_ms", [0, 30])
async def test_batches_keep_their_promises_when_answers_are_lost(
    bucket_settings: StoreSettings, tmp_path: Path, pack_ms: int
) -> None:
    """One manifest for each identity, with the bytes that were acknowledged; other bytes are refused, everywhere."""
    with LossyProxy(bucket_settings.endpoint, seed=19) as proxy:
        settings = {**behind(bucket_settings, proxy.endpoint).as_layer(), "gateway.prove": "never"}
        settings["batches.pack_ms"] = pack_ms
        async with fleet_of(tmp_path, settings) as fleet:
            urls = list(await asyncio.gather(fleet.gateway("g0", "batches"), fleet.gateway("g1", "batches")))
            traffic = Traffic(proxy, seconds=LOAD_S, dropped=DROPPED, enough=lambda: len(agents.history) > ACKNOWLEDGED)
            agents = Agents(urls, traffic)
            await run(agents, fleet)
    traffic.demand()

    context = context_of(bucket_settings.as_layer())
    found = await accepted(context)

    print(dict(proxy.counts), dict(traffic.answers), len(agents.history))
    assert check([*agents.history, *found]) == []
    assert max(agents.fresh.values()) == 1
    assert await by_time(context) == len(found)


async def run(agents: Agents, fleet: Fleet) -> None:
    async def kill() -> None:
        await asyncio.sleep(LOAD_S / 3)
        await fleet.kill("g0")
        await fleet.restart("g0")

    timeout, connector = aiohttp.ClientTimeout(total=60.0), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http, asyncio.TaskGroup() as group:
        for number in range(AGENTS):
            group.create_task(agents.run(http, f"agent-{number}"))
        group.create_task(kill())


async def accepted(context: Context) -> list[Seen]:
    """Every accepted batch in order of its numbers; its blob is there, with these bytes."""
    found = []
    async for info in context.store.list(paths.ACCEPTED):
        manifest = read_record(await context.store.get(info.key), AcceptedBatch)
        verified(await read_frame(context.store, manifest.place), manifest.frame_sha256)
        found.append((manifest.agent_id, manifest.seq_start, manifest.frame_sha256))
    return [Seen(agent, sha256, start) for agent, start, sha256 in sorted(found)]


async def by_time(context: Context) -> int:
    """How many batches the index by time has, once the reconciler has repaired it."""
    store, clock, ids, metrics = context.store, context.clock, context.ids, context.metrics
    await Reconciler(runtime_on(store, clock, ids=ids, metrics=metrics), overlap_s=900.0, concurrency=4).audit()
    return len([each async for each in RawBatches(store).entries(0, 2**62)])
