"""The metrics of many processes added up: each process's registry is read every half second.

The last reading of a killed process is kept, so a total never decreases. Counters are summed; a gauge is
the largest over processes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from lakebed.core.clock import Clock
from lakebed.core.metrics import TABLE, Metrics
from lakebed.core.runtime import Runtime

ENV = "DEMO_NUMBERS_FILE"  # where a scenario's process writes its metrics; no setting, so not LAKEBED_*
EVERY_S = 0.5
READINGS_MAX = 4000  # half an hour; then every second one is dropped

KINDS = {metric.name: metric.kind for metric in TABLE}

Snapshot = dict[str, Any]
Labels = tuple[tuple[str, str], ...]
Reading = dict[tuple[str, Labels], float]


def flatten(snapshot: Mapping[str, Any]) -> Reading:
    """A registry's snapshot as {(name, labels): value}."""
    out: Reading = {}
    for name, value in snapshot.items():
        if isinstance(value, list):
            for one in value:
                out[name, tuple(sorted(one["labels"].items()))] = float(one["value"])
        else:
            out[name, ()] = float(value)
    return out


def merge(readings: Sequence[Reading]) -> Reading:
    out: Reading = {}
    for reading in readings:
        for key, value in reading.items():
            out[key] = max(out.get(key, value), value) if KINDS.get(key[0]) == "gauge" else out.get(key, 0.0) + value
    return out


def total(reading: Reading, name: str, **labels: str) -> float:
    """The sum of every sample of this name that carries these labels."""
    wanted = set(labels.items())
    return sum(value for (known, each), value in reading.items() if known == name and wanted <= set(each))


def by(reading: Reading, name: str, label: str) -> dict[str, float]:
    """The samples of this name, added up by one label."""
    out: dict[str, float] = {}
    for (known, labels), value in reading.items():
        if known == name:
            key = dict(labels).get(label, "")
            out[key] = out.get(key, 0.0) + value
    return out


def buckets(reading: Reading, name: str) -> list[tuple[float, float]]:
    """A histogram as (upper bound, how many fell into that bucket), over all its labels."""
    at = sorted((float(le), count) for le, count in by(reading, f"{name}_bucket", "le").items() if le)
    return [(le, count - (at[n - 1][1] if n else 0.0)) for n, (le, count) in enumerate(at)]


class Observer:
    """Reads every source each half second and keeps the sums with their time."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._began_s = clock, clock.monotonic_s()
        self._urls: list[str] = []
        self._registries: list[Metrics] = []
        self._files: list[Path] = []
        self._last: dict[str, Reading] = {}
        self.readings: list[tuple[float, Reading]] = []

    def now_s(self) -> float:
        """Seconds since the demo began: the x of every plot."""
        return self._clock.monotonic_s() - self._began_s

    def watch(self, source: str | Metrics | Path) -> None:
        """Adds a source: a gateway's address, a registry of this process, or the file of a scenario's process."""
        if isinstance(source, str):
            self._urls.append(source)
        elif isinstance(source, Path):
            self._files.append(source)
        else:
            self._registries.append(source)

    async def run(self) -> None:
        """Until cancelled."""
        async with httpx2.AsyncClient(timeout=2.0, headers={"accept": "application/json"}) as client:
            while True:
                await self.read(client)
                await self._clock.sleep(EVERY_S)

    async def read(self, client: httpx2.AsyncClient) -> Reading:
        """Reads all sources once. A source that does not answer keeps its last reading."""
        await asyncio.gather(*(self._scrape(client, url) for url in self._urls))
        for number, metrics in enumerate(self._registries):
            self._last[f"registry {number}"] = flatten(metrics.snapshot())
        for file in self._files:
            with suppress(OSError, msgspec.DecodeError):
                self._last[str(file)] = flatten(msgspec.json.decode(await asyncio.to_thread(file.read_bytes)))
        merged = merge(list(self._last.values()))
        self.readings.append((self.now_s(), merged))
        if len(self.readings) > READINGS_MAX:
            self.readings = self.readings[::2]
        return merged

    @property
    def last(self) -> Reading:
        return self.readings[-1][1] if self.readings else {}

    def totals(self, name: str, **labels: str) -> list[tuple[float, float]]:
        return [(at_s, total(reading, name, **labels)) for at_s, reading in self.readings]

    def peaks(self, name: str, **labels: str) -> list[tuple[float, float]]:
        """The largest sample with this name and these labels at each instant: for ages, which do not add up."""
        wanted = set(labels.items())

        def most(reading: Reading) -> float:
            found = (value for (known, each), value in reading.items() if known == name and wanted <= set(each))
            return max(found, default=0.0)

        return [(at_s, most(reading)) for at_s, reading in self.readings]

    def moving_s(self) -> float:
        """When the first request to the store was counted. 0 when there was none."""
        return next((at_s for at_s, reading in self.readings if total(reading, "lakebed_store_requests_total")), 0.0)

    async def _scrape(self, client: httpx2.AsyncClient, url: str) -> None:
        with suppress(httpx2.HTTPError, msgspec.DecodeError):  # killed on purpose, or busy
            answer = await client.get(f"{url}/metrics")
            if answer.status_code == 200:
                self._last[url] = flatten(msgspec.json.decode(answer.content))


def rates(totals: Sequence[tuple[float, float]], over_s: float = 2.0) -> list[tuple[float, float]]:
    """Per second, over the `over_s` before each point. A total that decreases (a new source) counts as 0."""
    out: list[tuple[float, float]] = []
    start = 0
    for at_s, value in totals:
        while totals[start][0] < at_s - over_s and start < len(totals) - 1:
            start += 1
        since_s, before = totals[start]
        out.append((at_s, max(0.0, value - before) / (at_s - since_s) if at_s > since_s else 0.0))
    return out


async def counting(runtime: Runtime, work: Coroutine[Any, Any, None]) -> None:
    """Runs the work of a scenario's process and writes its metrics to the file named by ENV."""
    file = os.environ.get(ENV)
    keeping = asyncio.ensure_future(_keep(runtime, Path(file))) if file else None
    try:
        await work
    finally:
        if keeping and file:
            keeping.cancel()
            _write(runtime.metrics, Path(file))


async def _keep(runtime: Runtime, file: Path) -> None:
    while True:
        _write(runtime.metrics, file)
        await runtime.clock.sleep(EVERY_S)


def _write(metrics: Metrics, file: Path) -> None:
    part = file.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(metrics.snapshot()))
    part.replace(file)
