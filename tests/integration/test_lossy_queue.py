"""The queue when answers of the bucket are lost: two gateways, three collectors behind a proxy, one of each killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from lakebed.core.context import Context
from lakebed.core.http import json_response
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.roles import Queue
from lakebed.store.settings import StoreSettings
from support.fleet import Fleet, behind, context_of, fleet_of
from support.histories import Event, Handled, Seen, Write, check
from support.lossy_proxy import LossyProxy
from support.traffic import Traffic

LOAD_S = 9.0
DROPPED, ACKNOWLEDGED = 60, 200
PRODUCERS = 16
NAME = "orders"
COLLECTORS = ("c0", "c1", "c2")
REFUSED_STATUSES = frozenset({400, 413, 415, 422})  # nothing was enqueued
QUICK = {
    "gateway.prove": "never",
    "queue.flush_interval_s": 0.002,
    "queue.heartbeat_timeout_s": 3.0,
    "queue.done_cleanup_threshold": 20,
    "queue.prefetch_batches": 2,
    "queue.parallel": "true",  # all collectors write to the consumer manifest all the time
}


class Taken(NamedTuple):
    """A batch that was delivered and acked; `by` nobody when its collector was killed before it could say so."""

    sequence: int
    values: list[str]
    by: str


@pytest.mark.full
async def test_the_queue_keeps_its_promises_when_answers_are_lost(
    bucket_settings: StoreSettings, tmp_path: Path
) -> None:
    """Every entry that was called durable is enqueued once, in its producer's order, and acked by one collector."""
    history: list[Event] = []
    with LossyProxy(bucket_settings.endpoint, seed=17) as proxy:
        settings = {**behind(bucket_settings, proxy.endpoint).as_layer(), **QUICK}
        async with fleet_of(tmp_path, settings) as fleet:
            urls = list(await asyncio.gather(fleet.gateway("g0", "queue"), fleet.gateway("g1", "queue")))
            start_collectors(fleet)
            traffic = Traffic(
                proxy, seconds=LOAD_S, dropped=DROPPED, enough=lambda: acknowledged(history) > ACKNOWLEDGED
            )
            await run(fleet, urls, traffic, history)
        told = {name: fleet.said(name) for name in COLLECTORS}
    traffic.demand()

    rest, letters = await drain(context_of({**bucket_settings.as_layer(), **QUICK}))

    lines = [line for each in told.values() for line in each]
    print(dict(proxy.counts), dict(traffic.answers), acknowledged(history), len(lines))
    assert check([*history, *delivered(told, rest)], shared=True) == []
    assert letters == []
    assert sum("acked" in line for line in lines) > 20
    assert not [line for line in lines if line.get("failed") == "corrupt"]


def acknowledged(history: list[Event]) -> int:
    return sum(isinstance(one, Write) and one.outcome == "ok" for one in history)


def start_collectors(fleet: Fleet) -> None:
    for name in COLLECTORS:
        fleet.script(name, ["support/queue_collector.py", NAME, name])


async def run(fleet: Fleet, urls: list[str], traffic: Traffic, history: list[Event]) -> None:
    """Producers post at both gateways in turn; a gateway and a collector are killed and started again."""

    async def kill() -> None:
        await asyncio.sleep(LOAD_S / 3)
        await fleet.kill("g0")
        await fleet.restart("g0")
        await fleet.kill("c0")
        fleet.script("c0", ["support/queue_collector.py", NAME, "c0"])

    timeout = aiohttp.ClientTimeout(total=90.0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http, asyncio.TaskGroup() as group:
        for number in range(PRODUCERS):
            group.create_task(produce(http, urls, f"p{number}", traffic, history))
        group.create_task(kill())


async def produce(
    http: aiohttp.ClientSession, urls: list[str], who: str, traffic: Traffic, history: list[Event]
) -> None:
    """Posts each entry once: without an answer it may be enqueued or not, and is there at most once."""
    for number in count():
        if not traffic.goes_on():
            return
        value = f"{who}-{number}"
        body = bytes(json_response([KeyValueEntry(b"k", value.encode())]).body)
        answer: dict[str, Any] = {}
        status = 0
        try:
            url = f"{urls[number % 2]}/v1/queues/{NAME}/entries"
            async with http.post(url, data=body, headers={"content-type": "application/json"}) as got:
                status, answer = got.status, await got.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            await asyncio.sleep(0.05)
        traffic.answers[f"{status or 'none'} {answer.get('code', '')}".strip()] += 1
        outcome = "ok" if status == 200 else "fail" if status in REFUSED_STATUSES else "unknown"
        history.append(Write(who, NAME, value, outcome, answer.get("sequence")))  # type: ignore[arg-type]


async def drain(context: Context) -> tuple[list[Taken], list[str]]:
    """What is left, acknowledged by a collector without the proxy; and the dead letters."""
    queue = Queue.of(context, NAME)
    collector = queue.collector("drain")
    rest: list[Taken] = []
    async with asyncio.timeout(60.0):
        while (await queue.status()).pending:
            batch = await collector.next_batch()
            if batch is None:  # claimed by a collector that was killed: free when its claim is stale
                await asyncio.sleep(0.1)
                continue
            await collector.ack(batch)
            rest.append(Taken(batch.sequence, [entry.value.decode() for entry in batch.entries], collector.id))
    await collector.close()
    return rest, [letter.reason async for letter in queue.dead_letters.letters()]


def delivered(told: dict[str, list[Any]], rest: list[Taken]) -> list[Event]:
    """What was acked by whom, in order. The last batch of a collector that was killed may be acked: it cannot say."""
    taken = [Taken(*one) for lines in told.values() for one in acked(lines)] + rest
    handled = [Handled(one.by, NAME, one.sequence) for one in taken if one.by]
    found = {one.sequence: one.values for one in taken}
    return [*handled, *(Seen(NAME, value, at) for at, values in sorted(found.items()) for value in values)]


def acked(lines: list[Any]) -> Iterator[tuple[int, list[str], str]]:
    """What one collector acked, and what it was given and could not say more of before it was killed."""
    for number, line in enumerate(lines):
        if "given" not in line:
            continue
        end = next((later for later in lines[number + 1 :] if {"acked", "fenced", "given"} & later.keys()), {})
        if end.get("acked") == line["given"]:
            yield line["given"], line["values"], end["by"]
        elif "fenced" not in end:
            yield line["given"], line["values"], ""
