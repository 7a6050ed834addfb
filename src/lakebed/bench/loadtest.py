"""A load test of the log: brokers as processes, a routing manifest, a hammer, a collector, and a folder that tells all.

The folder is `<out>/<utc time>-<scenario>/`: the resolved scenario, the environment, the stack, the routing manifest,
each broker's log, samples of brokers, processes, host and client, remap events, the client's summary; and
`summary.json` and `report.html`, in which what clients were told is compared with what brokers say they took.
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
from lakebed.bench import routing
from lakebed.bench.brokers import SERVE, process
from lakebed.bench.harness import Stand
from lakebed.bench.loadtest_client import Client
from lakebed.bench.loadtest_page import page
from lakebed.bench.loadtest_samples import Samples, collect
from lakebed.bench.loadtest_summary import ARTIFACTS, ClientSummary, Summary, quantiles, totals, warnings_of
from lakebed.bench.routing import Manifest
from lakebed.bench.scenarios import Scenario, scenario
from lakebed.log.broker import Broker
from lakebed.log.model import TopicPartition
from lakebed.meta.sqlite import SqliteMeta
from lakebed.store.settings import StoreSettings


async def run(stand: Stand, name: str, out: Path) -> Summary:
    """Runs one scenario and leaves its folder behind. Raises Invalid for one that does not exist."""
    asked = scenario(name)
    folder = out / f"{datetime.fromtimestamp(time.time(), UTC):%Y%m%dT%H%M%SZ}-{name}"
    (folder / "logs").mkdir(parents=True)
    _write(folder / "resolved-config.json", asked)
    _write(folder / "environment.json", _environment())
    topics = {f"load-{number}": asked.partitions for number in range(asked.topics)}
    names = [f"broker-{number}" for number in range(asked.brokers)]
    manifest = routing.manifest(topics, names, owners_per_partition=asked.owners, seed=asked.seed)
    _write(folder / "routing-manifest.json", manifest)
    meta = {"meta.path": str((folder / "meta.sqlite").resolve()), "log.scenario": name}
    async with AsyncExitStack() as stack:
        pids: dict[str, int] = {}
        urls: dict[str, str] = {}
        for broker in names:
            log = folder / "logs" / f"{broker}.log"
            started = process(stand, SERVE, meta, started=_pid_of(pids, broker), log=log)
            urls[broker] = await stack.enter_async_context(started)
        _write(folder / "stack.json", {"brokers": urls, "pids": pids, "store": stand.settings.of(StoreSettings).url})
        await _precreate(stand, Path(meta["meta.path"]), manifest)
        client, ended = Client(asked, manifest, urls), asyncio.Event()
        collecting = asyncio.create_task(collect(folder, urls, pids, client, sample_s=asked.sample_s, ended=ended))
        killing = asyncio.create_task(_kill(asked, pids, client))
        cpu, began = time.process_time(), time.perf_counter()
        await client.hammer()
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        ended.set()
        killing.cancel()
        samples = await collecting
    return _told(folder, asked, manifest, client, samples, seconds, cpu / seconds)


def _pid_of(pids: dict[str, int], broker: str) -> Callable[[int], None]:
    return lambda pid: pids.__setitem__(broker, pid)


async def _precreate(stand: Stand, path: Path, manifest: Manifest) -> None:
    """Every partition exists before the clock starts."""
    context = stand.context("precreate")
    meta = SqliteMeta(path, clock=context.clock, ids=context.ids, metrics=context.metrics)
    broker = Broker(context, meta)
    await asyncio.gather(
        *(broker.writer.ensure(TopicPartition(route.topic, route.partition)) for route in manifest.routes)
    )
    await broker.stop()


async def _kill(asked: Scenario, pids: dict[str, int], client: Client) -> None:
    if asked.kill_at_s:
        await asyncio.sleep(asked.kill_at_s)
        broker, pid = next(iter(pids.items()))
        os.kill(pid, signal.SIGKILL)
        client.note(killed=broker)


def _told(
    folder: Path, asked: Scenario, manifest: Manifest, client: Client, samples: Samples, seconds: float, cpu: float
) -> Summary:
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
    took = totals(samples.latest)
    artifacts = {name: (folder / name).is_file() for name in ARTIFACTS}
    summary = Summary(
        scenario=asked.name,
        folder=str(folder),
        acknowledged_records=client.acknowledged,
        accepted_records=took.records,
        records_per_s=round(client.acknowledged / seconds, 1),
        latency_ms=own.latency_ms,
        remaps=sum("from" in event for event in client.remaps),
        generator_cpu=own.generator_cpu,
        warnings=warnings_of(asked, client.acknowledged, client.unknown, took.records, samples.latest, cpu, artifacts),
        brokers=took,
        artifacts=artifacts,
    )
    _write(folder / "summary.json", summary)
    drawn = page(
        asked,
        summary,
        manifest,
        client=samples.client,
        brokers=samples.brokers,
        latencies_ms=client.latencies_ms,
        events=client.remaps,
    )
    (folder / "report.html").write_text(drawn)
    return summary


def _environment() -> dict[str, Any]:
    """What the run ran on, so that another can judge its numbers."""
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
    said = subprocess.run(
        [git, "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return said.stdout.strip()


def _write(file: Path, value: Any) -> None:
    file.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2))
