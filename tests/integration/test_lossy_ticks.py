"""Ticks when answers of the bucket are lost: two replicas and a dispatcher behind a proxy, one replica killed."""

from __future__ import annotations

import asyncio
import json
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lakebed.core.context import Context
from lakebed.store.settings import StoreSettings
from lakebed.ticks.adapters import open_audit, open_queue, open_vault
from lakebed.ticks.audit import COMMITTED
from lakebed.ticks.fakes import FakeBronze, FakeSilverJob
from lakebed.ticks.model import TickId
from support.fleet import Fleet, behind, context_of, fleet_of
from support.histories import Event, Seen, Write, check
from support.lossy_proxy import LossyProxy
from support.tick_fixtures import ORG, PAYLOAD_KEY, manifest, parquet, sha
from support.traffic import Traffic

pytestmark = pytest.mark.full

LOAD_S = 8.0
DROPPED, FINALIZED = 50, 16
PROJECTS = ("p-0", "p-1", "p-2", "p-3")
RETRIES_S = 100.0
DEADLINE_S = 100.0
ROWS = 2  # of each tick
QUICK = {
    "ticks.payload_key": PAYLOAD_KEY,
    "ticks.pipeline": "twin",
    "ticks.lease_s": 1.0,
    "ticks.retry_after_s": 0.1,
    "ticks.batch_window_s": 0.1,
    "ticks.poll_s": 0.1,
    "ticks.visibility_timeout_s": 3,
    "gateway.prove": "never",
}


class Sites:
    """One site for each project: it uploads a tick's parts to both replicas, and queries both to finalize it."""

    def __init__(self, urls: list[str], secrets: dict[str, str], traffic: Traffic) -> None:
        self._urls, self._secrets, self._traffic = urls, secrets, traffic
        self.history: list[Event] = []
        self.answers: dict[str, list[tuple[int, bytes]]] = {}

    async def run(self, http: aiohttp.ClientSession, project: str) -> None:
        for number in count():
            if not self._traffic.goes_on():
                return
            tick = f"20261115T{number:06d}__abc"
            parts = {seq: parquet([number * ROWS + seq], note=tick) for seq in (0, 1)}
            for seq, data in parts.items():
                path, headers = f"ticks/{tick}/parts/{seq}", {"x-sha256": sha(data)}
                await self._until_known(http, number + seq, "PUT", project, path, data, headers)
            body = json.dumps(manifest(parts, {0: 1, 1: 1}, tick=tick, project=project)).encode()
            answers = await asyncio.gather(
                *(
                    self._until_known(http, turn, "POST", project, f"ticks/{tick}/finalize", body, {})
                    for turn in range(2)
                )
            )
            self.answers[f"{project}/{tick}"] = answers
            self.history.append(Write(project, project, tick, "ok"))

    async def _until_known(
        self,
        http: aiohttp.ClientSession,
        turn: int,
        method: str,
        project: str,
        path: str,
        body: bytes,
        headers: dict[str, str],
    ) -> tuple[int, bytes]:
        """As an agent does: repeats, at the replicas in turn, while it gets no answer, or one that reports "later"."""
        headers = {"x-api-key": ORG, "x-api-secret": self._secrets[project], **headers}
        async with asyncio.timeout(RETRIES_S):
            for attempt in count(turn):
                url = f"{self._urls[attempt % 2]}/v1/projects/{project}/{path}"
                try:
                    async with http.request(method, url, data=body, headers=headers) as got:
                        status, answer = got.status, await got.read()
                except (aiohttp.ClientError, TimeoutError):
                    status, answer = 0, b""
                self._traffic.answers[f"{method} {status or 'none'}"] += 1
                if status in (200, 202):
                    return status, answer
                assert status in (0, 425) or status >= 500, f"{method} {path}: {status} {answer.decode()}"
                await asyncio.sleep(0.05)
        raise AssertionError("unreachable")


async def test_ticks_keep_their_promises_when_answers_are_lost(bucket_settings: StoreSettings, tmp_path: Path) -> None:
    """Every finalized tick is committed once, in order, answered alike by both replicas, and reaches silver."""
    clean = context_of({**bucket_settings.as_layer(), **QUICK})
    secrets = {project: await open_vault(clean).issue(ORG, project) for project in PROJECTS}
    with LossyProxy(bucket_settings.endpoint, seed=29) as proxy:
        settings = {**behind(bucket_settings, proxy.endpoint).as_layer(), **QUICK}
        async with fleet_of(tmp_path, settings) as fleet:
            *urls, _ = await asyncio.gather(
                fleet.gateway("g0", "ticks"), fleet.gateway("g1", "ticks"), fleet.worker("w0", "ticks,silver")
            )
            traffic = Traffic(proxy, seconds=LOAD_S, dropped=DROPPED, enough=lambda: len(sites.history) > FINALIZED)
            sites = Sites(urls, secrets, traffic)
            await run(sites, fleet)
            traffic.demand()
            dead = await dispatched(clean)

    print(dict(proxy.counts), dict(traffic.answers), len(sites.history))
    assert check([*sites.history, *await committed(clean)]) == []
    assert [] == [tick for tick, answers in sites.answers.items() if not alike(answers)]
    assert await rows(clean) == ROWS * len(sites.history)
    assert [] == [tick for tick in sites.answers if not await audited(clean, tick)]
    assert set(sites.answers) == await in_silver(clean)
    assert dead == 0


async def run(sites: Sites, fleet: Fleet) -> None:
    async def kill() -> None:
        await asyncio.sleep(LOAD_S / 3)
        await fleet.kill("g0")
        await fleet.restart("g0")

    timeout, connector = aiohttp.ClientTimeout(total=60.0), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http, asyncio.TaskGroup() as group:
        for project in PROJECTS:
            group.create_task(sites.run(http, project))
        group.create_task(kill())


def alike(answers: list[tuple[int, bytes]]) -> bool:
    return len(set(answers)) == 1 and json.loads(answers[0][1])["rows_inserted"] == ROWS


async def dispatched(context: Context) -> int:
    """Waits until no message is left; gives how many became dead letters."""
    async with asyncio.timeout(DEADLINE_S):
        while (depth := await open_queue(context).depth()).waiting + depth.in_flight:
            await asyncio.sleep(0.2)
    return depth.dead


async def committed(context: Context) -> list[Seen]:
    """The ticks of each project's bronze, in the order of their commits."""
    seen: list[Seen] = []
    for project in PROJECTS:
        ticks = (await FakeBronze(context).register(ORG, project).read()).value.ticks
        by_version = sorted(ticks, key=lambda tick: ticks[tick].versions["orders"])
        seen += [Seen(project, tick, ticks[tick].versions["orders"]) for tick in by_version]
    return seen


async def rows(context: Context) -> int:
    found: list[dict[str, Any]] = []
    for project in PROJECTS:
        found += (await FakeBronze(context).register(ORG, project).read()).value.rows.get("orders", {}).values()
    return len(found)


async def audited(context: Context, name: str) -> bool:
    project, _, tick = name.partition("/")
    return await open_audit(context, COMMITTED).get(TickId(ORG, project, tick)) is not None


async def in_silver(context: Context) -> set[str]:
    found: set[str] = set()
    for project in PROJECTS:
        runs = (await FakeSilverJob(context).register(ORG, project).read()).value.runs
        found |= {f"{project}/{tick}" for run in runs for tick in run}
    return found
