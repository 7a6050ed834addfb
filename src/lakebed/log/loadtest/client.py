"""The load test's client and its sampler.

The client sends produce requests to the owners of partitions, over raw sockets. A broker that does not answer is
skipped for a while; its partitions go to other brokers of their owner set, never outside it. The sampler collects
metrics of brokers, their processes, the host and the client.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from lakebed.bench.load import LoadConnection, LoadRequest, cpu_s, post, rss_bytes
from lakebed.log.bench import frames_of
from lakebed.log.kafka.bench import LibrdkafkaHistory, librdkafka
from lakebed.log.loadtest import plan
from lakebed.log.loadtest.plan import LoadTestScenario, PartitionRoute, RoutingManifest
from lakebed.log.loadtest.summary import ANOMALIES_MAX, OtherLoad, quantiles, total
from lakebed.log.model import FIRST_OFFSET

DOWN_S = 1.0  # how long a broker that did not answer is skipped
ATTEMPTS_MAX = 10

METRICS_REQUEST = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/json\r\n\r\n"


class LoadTestClient:
    """Sends requests and counts their outcomes."""

    def __init__(self, scenario: LoadTestScenario, manifest: RoutingManifest, urls: Mapping[str, str]) -> None:
        self._scenario, self._manifest, self._urls = scenario, manifest, urls
        self.acknowledged = self.requests = self.failed = self.unknown = 0
        self.latencies_ms: list[float] = []
        self.inflight: Counter[str] = Counter()
        self.down: dict[str, float] = {}
        self.remaps: list[dict[str, Any]] = []
        self.statuses: Counter[int] = Counter()
        self.began = time.perf_counter()

    async def hammer(self) -> None:
        """Sends until the time of the scenario is over."""
        scenario, manifest = self._scenario, self._manifest
        requests = {
            (route, broker): frames_of(
                self._urls[broker], route.topic, route.partition, scenario.records_per_request, scenario.record_bytes
            )
            for route in manifest.routes
            for broker in route.owners
        }
        self.began = time.perf_counter()
        ends = self.began + scenario.seconds

        async def lane(number: int) -> None:
            connections = {broker: LoadConnection(url) for broker, url in self._urls.items()}
            turn = number
            while time.perf_counter() < ends:
                route = manifest.routes[turn % len(manifest.routes)]
                turn += scenario.lanes
                await self._send(route, turn, requests, connections)
            for connection in connections.values():
                connection.close()

        await asyncio.gather(*(lane(number) for number in range(scenario.lanes)))

    def note(self, **event: Any) -> None:
        self.remaps.append({"at_s": round(time.perf_counter() - self.began, 3), **event})

    async def _send(
        self,
        route: PartitionRoute,
        turn: int,
        requests: Mapping[tuple[PartitionRoute, str], LoadRequest],
        connections: Mapping[str, LoadConnection],
    ) -> None:
        for attempt in range(ATTEMPTS_MAX):
            now = time.perf_counter()
            down = {broker for broker, until in self.down.items() if until > now}
            broker = plan.choose(
                route, turn + attempt, selection=self._scenario.selection, inflight=self.inflight, down=down
            )
            if broker is None:
                await asyncio.sleep(DOWN_S / 4)
                continue
            request = requests[route, broker]
            self.requests += 1
            self.inflight[broker] += 1
            try:
                status, _ = await connections[broker].request(request.data)
            except OSError:
                self.unknown += 1
                self.down[broker] = time.perf_counter() + DOWN_S
                self.note(topic=route.topic, partition=route.partition, **{"from": broker})
                continue
            finally:
                self.inflight[broker] -= 1
            self.latencies_ms.append((time.perf_counter() - now) * 1e3)
            self.statuses[status] += 1
            if status == 200:
                self.acknowledged += request.records
                return
            self.failed += 1
            await asyncio.sleep(0.05)


class LoadTestConsumers:
    """Lanes that read every partition from its begin, each its share of them, until they have all that was written."""

    def __init__(self, scenario: LoadTestScenario, manifest: RoutingManifest, urls: Mapping[str, str]) -> None:
        self._count, self._urls = scenario.consumers, urls
        self._next = {(route.topic, route.partition): FIRST_OFFSET for route in manifest.routes}
        self.consumed = self.gaps = 0
        self.statuses: Counter[int] = Counter()

    async def run(self, ended: asyncio.Event) -> None:
        partitions = list(self._next)
        await asyncio.gather(
            *(self._lane(number, partitions[number :: self._count], ended) for number in range(self._count))
        )

    async def _lane(self, number: int, mine: list[tuple[str, int]], ended: asyncio.Event) -> None:
        """After the end of the load, reads on until nothing is left."""
        urls, left = list(self._urls.values()), bool(mine)
        turn = number
        while left or (mine and not ended.is_set()):
            last, turn = ended.is_set(), turn + 1
            connection = LoadConnection(urls[turn % len(urls)])
            wanted = [{"topic": t, "partition": p, "fetch_offset": self._next[t, p]} for t, p in mine]
            body = msgspec.json.encode(
                {"topic_partitions": wanted, "max_wait_ms": 1000}
            )  # longer than a gateway may be behind
            request = post(urls[turn % len(urls)], "/v1/consume", body, 1, content_type="application/json")
            try:
                status, answer = await connection.request(request.data)
            except OSError:
                await asyncio.sleep(DOWN_S / 4)
                continue  # a broker that was killed: the next one has the same
            finally:
                connection.close()
            self.statuses[status] += 1
            if status != 200:
                await asyncio.sleep(DOWN_S / 4)
                continue
            left = sum(self._take(result) for result in msgspec.json.decode(answer)["results"]) > 0 or not last

    def _take(self, result: dict[str, Any]) -> int:
        at = (result["topic"], result["partition"])
        if not result["count"]:
            return 0
        self.gaps += result["start_offset"] != self._next[at]
        self._next[at] = result["next_offset"]
        self.consumed += result["count"]
        return int(result["count"])


class LoadTestKafkaClients:
    """librdkafka's producers, each of which sends some records and waits for their acknowledgement, again and again;
    and its consumers, one group that reads all of that. The history of both is checked."""

    PARTITIONS, RECORDS = 8, 2000

    def __init__(self, scenario: LoadTestScenario, servers: str, topics: str) -> None:
        self._scenario, self._servers = scenario, servers
        self._topics = [f"{topics}-kafka-{number}" for number in range(scenario.kafka_clients)]
        self._history: LibrdkafkaHistory | None = None

    async def prepare(self) -> None:
        """Creates the topics. Without the package there are no Kafka clients."""
        client = librdkafka() if self._topics else None
        if client is not None:
            self._history = await asyncio.to_thread(
                LibrdkafkaHistory, client, self._servers, self._topics, self.PARTITIONS
            )

    async def hammer(self) -> None:
        """Sends until the time of the scenario is over."""
        if self._history is None:
            return
        ended, produce = threading.Event(), self._history.produce
        sending = [
            asyncio.create_task(asyncio.to_thread(produce, f"p{number}", topic, self.RECORDS, ended))
            for number, topic in enumerate(self._topics)
        ]
        await asyncio.wait(sending, timeout=self._scenario.seconds)
        ended.set()
        await asyncio.gather(*sending)

    async def consume(self, load_over: asyncio.Event) -> None:
        """Reads until the load is over and everything is read."""
        if self._history is None:
            return
        ended, consume = threading.Event(), self._history.consume
        reading = [
            asyncio.create_task(asyncio.to_thread(consume, f"c{number}", ended))
            for number in range(self._scenario.kafka_consumers)
        ]
        await load_over.wait()
        ended.set()
        await asyncio.gather(*reading)

    def outcome(self, consumers: LoadTestConsumers) -> OtherLoad:
        """What was acknowledged and read beside the HTTP producers."""
        history = self._history
        if history is None:
            return OtherLoad(0, consumers.consumed, consumers.gaps)
        found = history.anomalies() if self._scenario.kafka_consumers else []
        shown = [f"{one.kind} in {one.partition}: {one.detail}" for one in found[:ANOMALIES_MAX]]
        return OtherLoad(history.acknowledged, consumers.consumed, consumers.gaps, history.consumed, shown)


class LoadTestSamples(msgspec.Struct):
    """The latest metrics of each broker and compactor, rows for the plots, and what was stored at the end."""

    latest: dict[str, dict[str, Any]] = {}
    brokers: list[dict[str, Any]] = []
    client: list[dict[str, Any]] = []
    stored_bytes: int = 0


async def collect(
    folder: Path,
    urls: Mapping[str, str],
    pids: Mapping[str, int],
    client: LoadTestClient,
    *,
    sample_s: float,
    ended: asyncio.Event,
) -> LoadTestSamples:
    """Samples until `ended`, and once more at the end."""
    samples = LoadTestSamples()
    with (folder / "metrics-30s.jsonl").open("wb") as metrics, (folder / "client-30s.jsonl").open("wb") as own:
        measured = 0
        while True:
            last = ended.is_set()
            for broker, url in urls.items():
                await _sample(samples, broker, url, pids[broker], client, metrics)
            row = {"at_ms": int(time.time() * 1000), **_client(client, client.latencies_ms[measured:])}
            measured = len(client.latencies_ms)
            samples.client.append(row)
            own.write(msgspec.json.encode(row) + b"\n")
            if last:
                return samples
            try:
                await asyncio.wait_for(ended.wait(), sample_s)
            except TimeoutError:
                continue


async def _sample(
    samples: LoadTestSamples, broker: str, url: str, pid: int, client: LoadTestClient, file: BinaryIO
) -> None:
    connection = LoadConnection(url)
    try:
        _, body = await connection.request(METRICS_REQUEST)
        found: dict[str, Any] = msgspec.json.decode(body)
    except OSError:
        return  # a broker that is gone gives no more samples; the summary reports it
    finally:
        connection.close()
    samples.latest[broker] = found
    process = {"cpu_s": round(cpu_s(pid), 2), "rss_bytes": rss_bytes(pid)}
    row = {"broker": broker, "at_s": round(time.perf_counter() - client.began, 3), "process": process}
    samples.brokers.append(
        row | {"records": total(found, "lakebed_log_records_total", direction="in"), "host_load": os.getloadavg()[0]}
    )
    file.write(
        msgspec.json.encode(
            {"at_ms": int(time.time() * 1000), **row, "host": {"load": os.getloadavg()}, "metrics": found}
        )
        + b"\n"
    )


def _client(client: LoadTestClient, latencies_ms: list[float]) -> dict[str, Any]:
    return {
        "at_s": round(time.perf_counter() - client.began, 3),
        "acknowledged": client.acknowledged,
        "requests": client.requests,
        "failed": client.failed,
        "unknown": client.unknown,
        "cpu_s": round(time.process_time(), 3),
        "latency_ms": quantiles(latencies_ms),
    }
