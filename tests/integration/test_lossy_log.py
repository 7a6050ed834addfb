"""The log when answers of the bucket are lost: two gateways and a compactor behind a proxy, one gateway killed.

5 % of the answers to PUT, POST and DELETE are dropped after the bucket has carried the request out, 5 % of all
requests are late, some reads break off, and some conditional PUTs arrive twice. What clients were answered is judged
against what a reader without the proxy finds.
"""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lakebed.core.context import Context
from lakebed.log.checker import Operation, Poll, Send
from lakebed.log.checker import check as check_log
from lakebed.log.model import FIRST_OFFSET, TopicPartition
from lakebed.log.services import LogServices
from lakebed.store.settings import StoreSettings
from support.fleet import Fleet, behind, context_of, fleet_of
from support.histories import Event, Seen, Write, check
from support.lossy_proxy import LossyProxy
from support.traffic import Traffic

LOAD_S = 8.0
DROPPED, ACKNOWLEDGED = {"sqlite": 25, "bucket": 50}, 200
PARTITIONS = (0,)
FORGOTTEN = "OutOfOrderSequence"  # to a producer that sends its batches in order: an acknowledged one is gone
RETRIES_S = 100.0
QUICK = {
    "gateway.prove": "never",
    "log.compact_every_s": 0.5,
    "log.compact_min_entries": 8,
    "log.claim_s": 2.0,
    "log.vacuum_every_s": 2.0,
    "log.vacuum_horizon_s": 6.0,
    "log.batch_max_delay_ms": 5,
}


class Clients:
    """Producers and readers over HTTP, and what they were answered."""

    def __init__(self, urls: list[str], traffic: Traffic) -> None:
        self.urls, self.traffic = urls, traffic
        self.history: list[Event] = []
        self.polls: list[Operation] = []

    @property
    def acknowledged(self) -> int:
        return sum(isinstance(one, Write) and one.outcome == "ok" for one in self.history)

    async def idempotent(self, http: aiohttp.ClientSession, name: str) -> None:
        """Repeats each batch at both gateways in turn until it is acknowledged: promised once, and in order."""
        sequence = dict.fromkeys(PARTITIONS, 0)
        for number in count():
            if not self.traffic.goes_on():
                return
            partition = PARTITIONS[number % len(PARTITIONS)]
            requested = {"topic": "t", "partition": partition, "records": [f"{name}-{number}"]}
            requested |= {"producer_id": name, "sequence": sequence[partition]}
            async with asyncio.timeout(RETRIES_S):
                for attempt in count(number):
                    outcome, offset = await self._produce(http, attempt, requested)
                    if outcome == "ok":
                        break
                    assert outcome != FORGOTTEN, f"{name}-{number} is refused: the log has forgotten an earlier batch"
                    await asyncio.sleep(0.05)
            sequence[partition] += 1
            self.history.append(Write(name, f"t/{partition}", f"{name}-{number}", "ok", offset))

    async def plain(self, http: aiohttp.ClientSession, name: str) -> None:
        """Sends each record once, whatever the answer: it is there once if it was acknowledged, at most once if nobody
        knows, and not at all after any other error: a client would send it again.
        """
        for number in count():
            if not self.traffic.goes_on():
                return
            partition = PARTITIONS[number % len(PARTITIONS)]
            requested = {"topic": "t", "partition": partition, "records": [f"{name}-{number}"]}
            outcome, offset = await self._produce(http, number, requested)
            self.history.append(Write(name, f"t/{partition}", f"{name}-{number}", outcome, offset))  # type: ignore[arg-type]

    async def tail(self, http: aiohttp.ClientSession, name: str, url: str, partition: int) -> None:
        """Reads on from the beginning through one gateway."""
        offset = FIRST_OFFSET
        while self.traffic.goes_on():
            requested = [{"topic": "t", "partition": partition, "fetch_offset": offset}]
            result = await self._ask(http, f"{url}/v1/consume", {"topic_partitions": requested, "max_wait_ms": 100})
            if not result.get("ok"):
                await asyncio.sleep(0.05)
                continue
            found = list(enumerate(result["records"], offset))
            if found:
                self.polls.append(Poll(name, f"t/{partition}", found))
                self.history += [Seen(f"t/{partition}", record, at, final=False) for at, record in found]
                offset += len(found)

    async def _produce(
        self, http: aiohttp.ClientSession, turn: int, requested: dict[str, Any]
    ) -> tuple[str, int | None]:
        url = self.urls[turn % len(self.urls)]
        result = await self._ask(http, f"{url}/v1/produce", {"topic_partitions": [requested]})
        if result.get("ok"):
            return "ok", result["start_offset"]
        error = result.get("error_type", "OutcomeUnknown")
        return (FORGOTTEN if error == FORGOTTEN else "unknown" if error == "OutcomeUnknown" else "fail"), None

    async def _ask(self, http: aiohttp.ClientSession, url: str, requested: dict[str, Any]) -> dict[str, Any]:
        """The one result of the answer; nothing when the gateway went away."""
        path = url.rsplit("/", 1)[1]
        try:
            async with http.post(url, json=requested) as answer:
                result: dict[str, Any] = (await answer.json(content_type=None))["results"][0]
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError):
            self.traffic.answers[f"{path}: none"] += 1
            return {}
        self.traffic.answers[f"{path}: {answer.status} {result.get('error_type', '')}".strip()] += 1
        return result


@pytest.mark.parametrize("backend", ["sqlite", pytest.param("bucket", marks=pytest.mark.full)])
async def test_the_log_keeps_its_promises_when_answers_are_lost(
    backend: str, bucket_settings: StoreSettings, tmp_path: Path
) -> None:
    """Every acknowledged record is at its offset, once, in its producer's order, no matter who reads it."""
    meta = {"meta.backend": backend, "meta.path": str(tmp_path / "meta.sqlite")}
    with LossyProxy(bucket_settings.endpoint, seed=13) as proxy:
        settings = {**behind(bucket_settings, proxy.endpoint).as_layer(), **meta, **QUICK}
        async with fleet_of(tmp_path, settings) as fleet:
            *urls, _ = await asyncio.gather(
                fleet.gateway("g0", "log"), fleet.gateway("g1", "log"), fleet.worker("w0", "log")
            )
            traffic = Traffic(
                proxy, seconds=LOAD_S, dropped=DROPPED[backend], enough=lambda: clients.acknowledged > ACKNOWLEDGED
            )
            clients = Clients(urls, traffic)
            await run(clients, fleet)
    traffic.demand()

    final = await read_back(context_of({**bucket_settings.as_layer(), **meta}))

    print(dict(proxy.counts), dict(traffic.answers), clients.acknowledged)
    assert check([*clients.history, *final]) == []
    assert check_log(operations(clients, final)) == []
    assert not [answer for answer in traffic.answers if "Corrupt" in answer], traffic.answers


async def run(clients: Clients, fleet: Fleet) -> None:
    """Eight producers and four readers; one gateway is killed in the middle and started again behind the proxy."""

    async def kill() -> None:
        await asyncio.sleep(LOAD_S / 3)
        await fleet.kill("g0")
        await fleet.restart("g0")

    timeout = aiohttp.ClientTimeout(total=60.0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http, asyncio.TaskGroup() as group:
        for number in range(6):
            group.create_task(clients.idempotent(http, f"i{number}"))
        for number in range(2):
            group.create_task(clients.plain(http, f"p{number}"))
        for number, url in enumerate(clients.urls):
            for partition in PARTITIONS:
                group.create_task(clients.tail(http, f"r{number}", url, partition))
        group.create_task(kill())


async def read_back(context: Context) -> list[Seen]:
    """Every record of the log in order, by a reader that has seen nothing of it before."""
    services = LogServices(context)
    found: list[Seen] = []
    for partition in PARTITIONS:
        tp = TopicPartition("t", partition)
        offset, end = FIRST_OFFSET, (await services.reader.control(tp)).sequence_counter
        while offset <= end:
            fetched = await services.reader.read(tp, offset, bytes_max=1024 * 1024)
            records = [record for part in fetched.parts for record in part]
            found += [Seen(f"t/{partition}", bytes(each).decode(), at) for at, each in enumerate(records, offset)]
            offset = fetched.next_offset
    await services.meta.close()
    return found


def operations(clients: Clients, final: list[Seen]) -> list[Operation]:
    """The same history for the checker that load tests of the log use."""
    outcomes = {"ok": "ok", "fail": "fail", "unknown": "info"}
    sends: list[Operation] = [
        Send(one.client, one.place, one.value, outcomes[one.outcome], one.position)  # type: ignore[arg-type]
        for one in clients.history
        if isinstance(one, Write)
    ]
    reads: list[Operation] = [Poll("final", one.place, [(one.position or 0, one.value)], final=True) for one in final]
    return [*sends, *clients.polls, *reads]
