"""A load test of the log: brokers as processes, a routing manifest, a client, samples, and a folder with the results.

The folder is `<out>/<utc time>-<scenario>/`: the resolved scenario, the environment, the stack, the routing manifest,
each broker's log, samples of brokers, processes, host and client, remap events, the client's summary; and
`summary.json` and `report.html`, which compare the records acknowledged to clients with those that brokers accepted.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from lakebed import __version__
from lakebed.bench.commands import note_of
from lakebed.bench.harness import BenchEnvironment
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.settings import load
from lakebed.embedded.endpoints import TARGETS_FILE, write_targets
from lakebed.embedded.ports import HOST, HeldPorts
from lakebed.log.bench import SERVE, process
from lakebed.log.broker import Broker
from lakebed.log.loadtest import plan
from lakebed.log.loadtest.client import (
    LoadTestClient,
    LoadTestConsumers,
    LoadTestKafkaClients,
    LoadTestSamples,
    collect,
)
from lakebed.log.loadtest.plan import LoadTestScenario, RoutingManifest, scenario
from lakebed.log.loadtest.summary import (
    ARTIFACTS,
    ClientSummary,
    LoadTestSummary,
    OtherLoad,
    page,
    quantiles,
    totals,
    warnings_of,
)
from lakebed.log.model import TopicPartition
from lakebed.log.services import LogServices
from lakebed.meta.connect import connect
from lakebed.meta.protocol import Meta
from lakebed.meta.settings import MetaSettings
from lakebed.store.settings import StoreSettings

WORK = ("lakebed", "work", "--parts", "log", "--port", "0", "--log", "warning")


async def run(environment: BenchEnvironment, name: str, out: Path) -> LoadTestSummary:
    """Runs one scenario and writes its folder. Raises Invalid for an unknown scenario."""
    chosen = scenario(name)
    folder = out / f"{datetime.fromtimestamp(time.time(), UTC):%Y%m%dT%H%M%SZ}-{name}"
    (folder / "logs").mkdir(parents=True)
    _write(folder / "resolved-config.json", chosen)
    _write(folder / "environment.json", _environment())
    prefix = f"load-{Ids().token()}"  # of this run's topics: another run may have used the metadata store
    topics = {f"{prefix}-{number}": chosen.partitions for number in range(chosen.topics)}
    names = [f"broker-{number}" for number in range(chosen.brokers)]
    manifest = plan.manifest(topics, names, owners_per_partition=chosen.owners, seed=chosen.seed)
    _write(folder / "routing-manifest.json", manifest)
    meta = {**_meta(environment, folder), "log.scenario": name}
    async with AsyncExitStack() as stack:
        pids: dict[str, int] = {}
        urls: dict[str, str] = {}
        workers: dict[str, str] = {}
        ports = stack.enter_context(HeldPorts(Ids()))
        kafka = {broker: ports.take() for broker in names}
        for broker in names:
            log = folder / "logs" / f"{broker}.log"
            serve = [*SERVE, "--kafka-port", str(kafka[broker])]
            started = process(environment, serve, meta, started=_pid_of(pids, broker), log=log)
            urls[broker] = await stack.enter_async_context(started)
        for number in range(chosen.compactors):
            worker = f"compactor-{number}"
            log = folder / "logs" / f"{worker}.log"
            compact = {
                "log.compact_every_s": str(chosen.compact_every_s),
                "log.compact_min_bytes": str(chosen.compact_min_bytes),
            }
            working = process(environment, WORK, {**meta, **compact}, started=_pid_of(pids, worker), log=log)
            workers[worker] = await stack.enter_async_context(working)
        write_targets(targets := out / TARGETS_FILE, [*urls.values(), *workers.values()])
        stack.callback(targets.unlink, missing_ok=True)
        where = {"store": environment.settings.of(StoreSettings).url, "meta": meta.get("meta.backend", "sqlite")}
        _write(folder / "stack.json", {"brokers": urls, "compactors": workers, "pids": pids, **where})
        await _precreate(environment, meta, manifest)
        client, ended = LoadTestClient(chosen, manifest, urls), asyncio.Event()
        servers = ",".join(f"{HOST}:{port}" for port in kafka.values())
        kafka_clients, consumers = (
            LoadTestKafkaClients(chosen, servers, prefix),
            LoadTestConsumers(chosen, manifest, urls),
        )
        await kafka_clients.prepare()
        load_over = asyncio.Event()
        consuming = asyncio.gather(consumers.run(load_over), kafka_clients.consume(load_over))
        sampled = {**urls, **workers}
        collecting = asyncio.create_task(collect(folder, sampled, pids, client, sample_s=chosen.sample_s, ended=ended))
        killing = asyncio.create_task(_kill(chosen, pids, client))
        cpu, began = time.process_time(), time.perf_counter()
        await asyncio.gather(client.hammer(), kafka_clients.hammer())
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        load_over.set()
        await consuming
        ended.set()
        killing.cancel()
        samples = await collecting
        samples.stored_bytes = await _stored_bytes(environment, meta)
    others = kafka_clients.outcome(consumers)
    return _summarize(environment, folder, chosen, manifest, client, others, samples, seconds, cpu / seconds)


def _pid_of(pids: dict[str, int], broker: str) -> Callable[[int], None]:
    return lambda pid: pids.__setitem__(broker, pid)


def _meta(environment: BenchEnvironment, folder: Path) -> dict[str, str]:
    """The metadata store of the settings, with a file or a folder of this run's own."""
    given = environment.settings.of(MetaSettings)
    match given.backend:
        case "oxia":
            own = {"meta.address": given.address, "meta.namespace": given.namespace, "meta.sorting": given.sorting}
        case "bucket":
            own = {"meta.prefix": f"{given.prefix}-{Ids().token()}"}
        case _:
            return {"meta.path": str((folder / "meta.sqlite").resolve())}
    return {"meta.backend": given.backend, **own}


async def _precreate(environment: BenchEnvironment, meta: dict[str, str], manifest: RoutingManifest) -> None:
    """Every partition exists before the clock starts."""
    context = environment.context("precreate")
    broker = Broker(context, _connected(context, meta))
    await asyncio.gather(
        *(broker.writer.ensure(TopicPartition(route.topic, route.partition)) for route in manifest.routes)
    )
    await broker.stop()


async def _stored_bytes(environment: BenchEnvironment, meta: dict[str, str]) -> int:
    """What is in the bucket at the end. A worker's own scan comes a minute after its start."""
    context = environment.context("measure")
    services = LogServices(context, _connected(context, meta))
    try:
        return (await services.store.measure()).stored_bytes
    finally:
        await services.close()


def _connected(context: Context, meta: dict[str, str]) -> Meta:
    settings = load([MetaSettings], stack={key: value for key, value in meta.items() if key.startswith("meta.")})
    return connect(settings.of(MetaSettings), context)


async def _kill(chosen: LoadTestScenario, pids: dict[str, int], client: LoadTestClient) -> None:
    if chosen.kill_at_s:
        await asyncio.sleep(chosen.kill_at_s)
        broker, pid = next(iter(pids.items()))
        os.kill(pid, signal.SIGKILL)
        client.note(killed=broker)


def _summarize(
    environment: BenchEnvironment,
    folder: Path,
    chosen: LoadTestScenario,
    manifest: RoutingManifest,
    client: LoadTestClient,
    others: OtherLoad,
    samples: LoadTestSamples,
    seconds: float,
    cpu: float,
) -> LoadTestSummary:
    with (folder / "remap-events.jsonl").open("wb") as events:
        for event in client.remaps:
            events.write(msgspec.json.encode(event) + b"\n")
    own = ClientSummary(
        acknowledged_records=client.acknowledged,
        requests=client.requests,
        failed=client.failed,
        unknown=client.unknown,
        statuses={str(status): count for status, count in client.statuses.items()},
        seconds=round(seconds, 2),
        latency_ms=quantiles(client.latencies_ms),
        generator_cpu=round(cpu, 3),
    )
    _write(folder / "client-summary.json", own)
    took = totals({**samples.latest, "run": {"lakebed_log_s3_stored_bytes": samples.stored_bytes}})
    artifacts = {name: (folder / name).is_file() for name in ARTIFACTS}
    summary = LoadTestSummary(
        scenario=chosen.name,
        folder=str(folder),
        acknowledged_records=client.acknowledged,
        accepted_records=took.records,
        records_per_s=round(client.acknowledged / seconds, 1),
        latency_ms=own.latency_ms,
        remaps=sum("from" in event for event in client.remaps),
        generator_cpu=own.generator_cpu,
        warnings=warnings_of(
            chosen, client.acknowledged, client.unknown, took.records, samples.latest, cpu, artifacts, others
        ),
        others=others,
        brokers=took,
        artifacts=artifacts,
    )
    _write(folder / "summary.json", summary)
    drawn = page(
        chosen,
        summary,
        manifest,
        client=samples.client,
        brokers=samples.brokers,
        latencies_ms=client.latencies_ms,
        events=client.remaps,
        note=note_of("log", environment.settings),
    )
    (folder / "report.html").write_text(drawn)
    return summary


def _environment() -> dict[str, Any]:
    """The environment of the run, to interpret its numbers."""
    return {
        "lakebed": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
    }


def _commit() -> str:
    git = shutil.which("git")
    if git is None:
        return ""
    described = subprocess.run(
        [git, "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return described.stdout.strip()


def _write(file: Path, value: Any) -> None:
    file.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2))
