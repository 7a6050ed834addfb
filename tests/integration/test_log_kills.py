"""Brokers and compactors as real processes on a real bucket, killed with -9 under load: the history stays clean."""

from __future__ import annotations

import asyncio
import time
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from httpx2 import AsyncClient, HTTPError

from lakebed.core.settings import env_name
from lakebed.core.settings import load as load_settings
from lakebed.log.checker import Operation, Poll, Send, check
from lakebed.log.services import LogServices
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections
from support.log_processes import DEADLINE_S, Crew, crew_of

PARTITIONS = (0, 1)
LOAD_S = 8.0  # and on, until enough was acknowledged and everybody was killed
KILLS, ACKNOWLEDGED = 6, 50


class Load:
    """How long it continues: by what has happened, not by how quick the machine is."""

    def __init__(self, history: list[Operation]) -> None:
        self._history, self._began_s, self.kills = history, time.monotonic(), 0

    def goes_on(self) -> bool:
        past_s = time.monotonic() - self._began_s
        acknowledged = sum(isinstance(one, Send) and one.outcome == "ok" for one in self._history)
        enough = past_s > LOAD_S and self.kills >= KILLS and acknowledged > ACKNOWLEDGED
        return not enough and past_s < DEADLINE_S


async def produce(client: AsyncClient, url: str, requested: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """What a client may believe afterwards: ok, fail (nothing was appended) or info."""
    try:
        answer = await client.post(f"{url}/v1/produce", content=msgspec.json.encode({"topic_partitions": [requested]}))
        result = answer.json()["results"][0]
    except (HTTPError, KeyError, ValueError):
        return "info", {}
    if result["ok"]:
        return "ok", result
    sure = result["error_type"] in ("LogFenced", "BackPressureRejected", "OutOfOrderSequence")
    return ("fail" if sure else "info"), result


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_killed_brokers_and_compactors_leave_a_clean_history(
    log_settings: dict[str, str], tmp_path: Path
) -> None:
    """Every acknowledged record is read once at its offset, in order, no matter who was killed while it was written."""
    history: list[Operation] = []
    async with crew_of(tmp_path, log_settings) as (supervised, ports):
        for name, command, port in zip(
            ("b0", "b1", "w0", "w1"), ("serve", "serve", "work", "work"), ports, strict=True
        ):
            await supervised.start(name, command, port)
        for name in ("b0", "b1"):
            await supervised.ready(name)
        load = Load(history)
        await asyncio.gather(
            *(produce_for(supervised, history, f"c{n}", load, stamped=n % 2 == 0) for n in range(6)),
            *(consume_for(supervised, history, f"r{n}", load) for n in range(2)),
            kill_for(supervised, ports, load),
        )
        await supervised.ready("b0")
        await final_read(supervised, history)
        await something_is_compacted(log_settings)
        for name in ("w0", "w1"):
            supervised.children[name].kill()

    acknowledged = [one for one in history if isinstance(one, Send) and one.outcome == "ok"]
    assert len(acknowledged) > ACKNOWLEDGED
    assert check(history) == []
    await nothing_referenced_is_missing(log_settings)


async def produce_for(supervised: Crew, history: list[Operation], name: str, load: Load, *, stamped: bool) -> None:
    sequence = dict.fromkeys(PARTITIONS, 0)
    number = 0
    async with AsyncClient(timeout=15.0) as client:
        while load.goes_on():
            partition, number = PARTITIONS[number % 2], number + 1
            record = f"{name}-{number}"
            requested: dict[str, Any] = {"topic": "t", "partition": partition, "records": [record]}
            if stamped:
                requested |= {"producer_id": name, "sequence": sequence[partition]}
            outcome, result = await produce(client, supervised.urls[f"b{number % 2}"], requested)
            deadline = time.monotonic() + DEADLINE_S
            for attempt in count():
                if outcome == "ok" or not stamped or time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.25)
                outcome, result = await produce(client, supervised.urls[f"b{attempt % 2}"], requested)
            assert not stamped or outcome == "ok", f"{record} never got through: {result}"
            sequence[partition] += 1
            offset = result.get("start_offset") if outcome == "ok" else None
            history.append(Send(name, f"t/{partition}", record, outcome, offset))  # type: ignore[arg-type]


async def consume_for(supervised: Crew, history: list[Operation], name: str, load: Load) -> None:
    at = dict.fromkeys(PARTITIONS, 1)
    async with AsyncClient(timeout=15.0) as client:
        while load.goes_on():
            for partition in PARTITIONS:
                found = await fetch(client, supervised.urls[name.replace("r", "b")], partition, at[partition])
                if found:
                    history.append(Poll(name, f"t/{partition}", found))
                    at[partition] = found[-1][0] + 1


async def fetch(client: AsyncClient, url: str, partition: int, offset: int) -> list[tuple[int, str]] | None:
    """None when nobody reported anything: that is not an end."""
    requested = {
        "topic_partitions": [{"topic": "t", "partition": partition, "fetch_offset": offset}],
        "max_wait_ms": 100,
    }
    try:
        answer = await client.post(f"{url}/v1/consume", content=msgspec.json.encode(requested))
        (result,) = answer.json()["results"]
    except (HTTPError, KeyError, ValueError):
        return None
    return list(enumerate(result["records"], offset)) if result["ok"] else None


async def kill_for(supervised: Crew, ports: list[int], load: Load) -> None:
    """Brokers and compactors in turn, each as soon as it is there, and started again at once."""
    victims = [("b0", "serve", ports[0]), ("w0", "work", ports[2]), ("b1", "serve", ports[1]), ("w1", "work", ports[3])]
    while load.goes_on():
        name, command, port = victims[load.kills % len(victims)]
        await supervised.ready(name)
        await asyncio.sleep(1.2)
        supervised.children[name].kill()
        await supervised.children[name].wait(DEADLINE_S)
        await supervised.start(name, command, port)
        load.kills += 1


async def final_read(supervised: Crew, history: list[Operation]) -> None:
    async with AsyncClient(timeout=15.0) as client, asyncio.timeout(DEADLINE_S):
        for partition in PARTITIONS:
            offset = 1
            while (found := await fetch(client, supervised.urls["b0"], partition, offset)) != []:
                if found is None:
                    await asyncio.sleep(0.1)
                    continue
                history.append(Poll("final", f"t/{partition}", found, final=True))
                offset = found[-1][0] + 1


async def something_is_compacted(settings: dict[str, str]) -> None:
    """However often they were killed, the compactors that are left get to it."""
    env = {env_name(key): value for key, value in settings.items() if value}
    services = LogServices(make_context(load_settings(sections(), env=env), role="test"))
    async with asyncio.timeout(DEADLINE_S):
        while not [
            span
            async for tp in services.records.partitions()
            async for span in services.records.all_spans(tp)
            if span.entry.type == "COMPACTED"
        ]:
            await asyncio.sleep(0.2)
    await services.meta.close()


async def nothing_referenced_is_missing(settings: dict[str, str]) -> None:
    """Every blob that control, compaction or index name is in the bucket."""
    env = {env_name(key): value for key, value in settings.items() if value}
    services = LogServices(make_context(load_settings(sections(), env=env), role="test"))
    compacted = 0
    async for tp in services.records.partitions():
        async for span in services.records.all_spans(tp):
            compacted += span.entry.type == "COMPACTED"
            assert (await services.reader.batch(span)).records.count == span.entry.msg_count
    assert compacted > 0
    await services.meta.close()
