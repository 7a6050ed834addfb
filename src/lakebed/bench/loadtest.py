"""A load test of the log: brokers as processes, a routing manifest, a hammer, a collector, and a folder that tells all.

The folder is `<out>/<utc time>-<scenario>/`: `resolved-config.json`, `stack.json`, `routing-manifest.json`,
`metrics-30s.jsonl`, `client-30s.jsonl`, `remap-events.jsonl`, `client-summary.json` and `summary.json`, in which
what clients were told is compared with what brokers say they took; whatever does not add up is a warning.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from lakebed.bench import routing
from lakebed.bench.brokers import process
from lakebed.bench.hammer import Connection, Request
from lakebed.bench.harness import Stand
from lakebed.bench.log import frames_of
from lakebed.bench.routing import Manifest, Route, Selection
from lakebed.errors import Invalid
from lakebed.log.broker import Broker
from lakebed.log.model import TopicPartition
from lakebed.meta.sqlite import SqliteMeta
from lakebed.store.settings import StoreSettings

DOWN_S = 1.0  # how long a broker that did not answer is left alone
ATTEMPTS_MAX = 10


class Scenario(msgspec.Struct, frozen=True):
    name: str
    brokers: int = 2
    topics: int = 1
    partitions: int = 8
    owners: int = 2
    selection: Selection = "round_robin"
    lanes: int = 32
    records_per_request: int = 50
    record_bytes: int = 1024
    seconds: float = 10.0
    sample_s: float = 1.0
    kill_at_s: float = 0.0  # one broker is killed with -9 at this time; 0: none is
    seed: int = 7


SCENARIOS = {
    one.name: one
    for one in (
        Scenario("steady"),
        Scenario("wide", partitions=128, owners=1),
        Scenario("kill", brokers=3, seconds=12.0, kill_at_s=5.0, selection="least_inflight"),
        Scenario("smoke", seconds=2.0, partitions=4, lanes=8, sample_s=0.5),
    )
}


class Summary(msgspec.Struct, frozen=True):
    scenario: str
    folder: str
    acknowledged_records: int
    accepted_records: int
    records_per_s: float
    latency_ms: dict[str, float]
    remaps: int
    generator_cpu: float
    warnings: list[str]


class _Client:
    """What the hammer knows and has seen."""

    def __init__(self) -> None:
        self.acknowledged = self.requests = self.failed = self.unknown = 0
        self.latencies: list[float] = []
        self.inflight: Counter[str] = Counter()
        self.down: dict[str, float] = {}
        self.remaps: list[dict[str, Any]] = []
        self.statuses: Counter[int] = Counter()


async def run(stand: Stand, name: str, out: Path) -> Summary:
    """Runs one scenario and leaves its folder behind. Raises Invalid for one that does not exist."""
    if name not in SCENARIOS:
        raise Invalid(f"there is no scenario {name!r}", hint=f"one of: {', '.join(SCENARIOS)}")
    scenario = SCENARIOS[name]
    folder = out / f"{datetime.fromtimestamp(time.time(), UTC):%Y%m%dT%H%M%SZ}-{name}"
    folder.mkdir(parents=True)
    _write(folder / "resolved-config.json", scenario)
    topics = {f"load-{number}": scenario.partitions for number in range(scenario.topics)}
    names = [f"broker-{number}" for number in range(scenario.brokers)]
    manifest = routing.manifest(topics, names, owners_per_partition=scenario.owners, seed=scenario.seed)
    _write(folder / "routing-manifest.json", manifest)
    meta = {"meta.path": str((folder / "meta.sqlite").resolve())}
    async with AsyncExitStack() as stack:
        pids: dict[str, int] = {}
        urls: dict[str, str] = {}
        for broker in names:
            command = ["lakebed", "serve", "--parts", "log", "--port", "0", "--log", "error"]
            told = pids_of(pids, broker)
            urls[broker] = await stack.enter_async_context(process(stand, command, meta, started=told))
        _write(folder / "stack.json", {"brokers": urls, "pids": pids, "store": stand.settings.of(StoreSettings).url})
        await _precreate(stand, meta, manifest)
        client = _Client()
        ended = asyncio.Event()
        collecting = asyncio.create_task(_collect(folder, urls, client, scenario.sample_s, ended))
        killing = asyncio.create_task(_kill(scenario, pids, client))
        cpu, began = time.process_time(), time.perf_counter()
        await _hammer(scenario, manifest, urls, client)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        ended.set()
        killing.cancel()
        samples = await collecting
    return _summary(folder, scenario, client, samples, seconds, cpu)


def pids_of(pids: dict[str, int], broker: str) -> Callable[[int], None]:
    return lambda pid: pids.__setitem__(broker, pid)


async def _precreate(stand: Stand, meta: dict[str, str], manifest: Manifest) -> None:
    """Every partition exists before the clock starts."""
    context = stand.context("precreate")
    ordered = SqliteMeta(Path(meta["meta.path"]), clock=context.clock, ids=context.ids, metrics=context.metrics)
    broker = Broker(context, ordered)
    await asyncio.gather(
        *(broker.writer.ensure(TopicPartition(route.topic, route.partition)) for route in manifest.routes)
    )
    await broker.stop()


async def _hammer(scenario: Scenario, manifest: Manifest, urls: dict[str, str], client: _Client) -> None:
    requests = {
        (route, broker): frames_of(
            urls[broker], route.topic, route.partition, scenario.records_per_request, scenario.record_bytes
        )
        for route in manifest.routes
        for broker in route.owners
    }
    ends = time.perf_counter() + scenario.seconds

    async def lane(number: int) -> None:
        connections = {broker: Connection(url) for broker, url in urls.items()}
        turn = number
        while time.perf_counter() < ends:
            route = manifest.routes[turn % len(manifest.routes)]
            turn += scenario.lanes
            await _send(scenario, route, turn, requests, connections, client)
        for connection in connections.values():
            connection.close()

    await asyncio.gather(*(lane(number) for number in range(scenario.lanes)))


async def _send(
    scenario: Scenario,
    route: Route,
    turn: int,
    requests: dict[tuple[Route, str], Request],
    connections: dict[str, Connection],
    client: _Client,
) -> None:
    for attempt in range(ATTEMPTS_MAX):
        now = time.perf_counter()
        down = {broker for broker, until in client.down.items() if until > now}
        broker = routing.choose(
            route, turn + attempt, selection=scenario.selection, inflight=client.inflight, down=down
        )
        if broker is None:
            await asyncio.sleep(DOWN_S / 4)
            continue
        request = requests[route, broker]
        client.requests += 1
        client.inflight[broker] += 1
        try:
            status, _ = await connections[broker].ask(request.data)
        except OSError:
            client.unknown += 1
            client.down[broker] = time.perf_counter() + DOWN_S
            client.remaps.append(
                {"at_s": round(now, 3), "topic": route.topic, "partition": route.partition, "from": broker}
            )
            continue
        finally:
            client.inflight[broker] -= 1
        client.latencies.append((time.perf_counter() - now) * 1e3)
        client.statuses[status] += 1
        if status == 200:
            client.acknowledged += request.records
            return
        client.failed += 1
        await asyncio.sleep(0.05)


async def _collect(
    folder: Path, urls: dict[str, str], client: _Client, sample_s: float, ended: asyncio.Event
) -> dict[str, dict[str, Any]]:
    """Samples every broker's metrics and the client's own counters; one last time when the hammer rests."""
    latest: dict[str, dict[str, Any]] = {}
    asking = b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: application/json\r\n\r\n"
    with (folder / "metrics-30s.jsonl").open("wb") as metrics, (folder / "client-30s.jsonl").open("wb") as own:
        while True:
            last = ended.is_set()
            for broker, url in urls.items():
                connection = Connection(url)
                try:
                    _, body = await connection.ask(asking)
                    latest[broker] = msgspec.json.decode(body)
                except OSError:
                    continue
                finally:
                    connection.close()
                row = {"at_ms": int(time.time() * 1000), "broker": broker, "metrics": latest[broker]}
                metrics.write(msgspec.json.encode(row) + b"\n")
            counters = {"acknowledged": client.acknowledged, "requests": client.requests, "failed": client.failed}
            own.write(msgspec.json.encode({"at_ms": int(time.time() * 1000), **counters}) + b"\n")
            if last:
                return latest
            try:
                await asyncio.wait_for(ended.wait(), sample_s)
            except TimeoutError:
                continue


async def _kill(scenario: Scenario, pids: dict[str, int], client: _Client) -> None:
    if scenario.kill_at_s:
        await asyncio.sleep(scenario.kill_at_s)
        broker, pid = next(iter(pids.items()))
        os.kill(pid, signal.SIGKILL)
        client.remaps.append({"at_s": round(time.perf_counter(), 3), "killed": broker})


def _summary(
    folder: Path, scenario: Scenario, client: _Client, samples: dict[str, dict[str, Any]], seconds: float, cpu: float
) -> Summary:
    latencies = sorted(client.latencies) or [0.0]
    spread = {
        "p50": round(latencies[len(latencies) // 2], 2),
        "p99": round(latencies[int(len(latencies) * 0.99) - 1], 2),
        "max": round(latencies[-1], 2),
    }
    with (folder / "remap-events.jsonl").open("wb") as events:
        for event in client.remaps:
            events.write(msgspec.json.encode(event) + b"\n")
    own = {
        "acknowledged_records": client.acknowledged,
        "requests": client.requests,
        "failed": client.failed,
        "unknown": client.unknown,
        "statuses": {str(status): count for status, count in client.statuses.items()},
        "seconds": round(seconds, 2),
        "latency_ms": spread,
        "generator_cpu": round(cpu / seconds, 3),
    }
    _write(folder / "client-summary.json", own)
    accepted = sum(int(_sample(sample, "lakebed_log_records_total", direction="in")) for sample in samples.values())
    summary = Summary(
        scenario.name,
        str(folder),
        client.acknowledged,
        accepted,
        round(client.acknowledged / seconds, 1),
        spread,
        sum("from" in event for event in client.remaps),
        round(cpu / seconds, 3),
        warnings_of(scenario, client.acknowledged, client.unknown, accepted, samples, cpu / seconds),
    )
    _write(folder / "summary.json", summary)
    return summary


def warnings_of(
    scenario: Scenario, acknowledged: int, unknown: int, accepted: int, samples: dict[str, Any], cpu: float
) -> list[str]:
    """Where the two sides of the run do not agree, or the run itself is not to be trusted."""
    found: list[str] = []
    doubtful = unknown * scenario.records_per_request
    if accepted < acknowledged and not scenario.kill_at_s:
        found.append(f"brokers took {accepted} records, but clients were acknowledged {acknowledged}")
    if accepted > acknowledged + doubtful:
        found.append(f"brokers took {accepted} records; clients know of {acknowledged} and {doubtful} doubtful ones")
    if len(samples) < scenario.brokers:
        found.append(f"only {len(samples)} of {scenario.brokers} brokers were ever sampled")
    if scenario.kill_at_s:
        found.append("a broker was killed: what it took after its last sample is not counted")
    if cpu > 0.8:
        found.append(f"the generator used {cpu:.2f} of a core: it may have been the bottleneck")
    if acknowledged == 0:
        found.append("nothing was acknowledged")
    return found


def _sample(metrics: dict[str, Any], name: str, **labels: str) -> float:
    return next((float(one["value"]) for one in metrics.get(name, []) if one["labels"] == labels), 0.0)


def _write(file: Path, value: Any) -> None:
    file.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2))
