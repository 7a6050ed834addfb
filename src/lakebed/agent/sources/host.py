"""Host metrics from /proc, read on an interval. The parsers are pure: a file's text in, readings out.

A file that is missing or strange costs its own metrics only, and is counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from lakebed.agent.batcher import BadSampleReporter, Batcher, checked
from lakebed.batches.model import Kind, Sample
from lakebed.core.errors import Invalid
from lakebed.core.runtime import Runtime

Reading = tuple[str, float, Kind, dict[str, str]]

CPU_MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
MEMORY = ("MemTotal", "MemFree", "MemAvailable", "Buffers", "Cached", "SwapTotal", "SwapFree")
SECTOR_BYTES = 512  # the kernel's unit here, whatever the disk's
SKIPPED_DISKS = ("loop", "ram", "zram", "fd", "sr")
FILE_BYTES_MAX = 1024 * 1024


def cpu(text: str, ticks_per_s: int = 100) -> Iterator[Reading]:
    for line in text.splitlines():
        name, *numbers = line.split()
        if name.startswith("cpu") and name != "cpu":
            for mode, ticks in zip(CPU_MODES, numbers, strict=False):
                labels = {"cpu": name.removeprefix("cpu"), "mode": mode}
                yield "host_cpu_seconds_total", int(ticks) / ticks_per_s, Kind.COUNTER, labels


def memory(text: str) -> Iterator[Reading]:
    sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in text.splitlines())}
    for name in MEMORY:
        if name in sizes:
            yield "host_memory_bytes", float(sizes[name]), Kind.GAUGE, {"state": name}


def load(text: str) -> Iterator[Reading]:
    for minutes, number in zip(("1", "5", "15"), text.split(), strict=False):
        yield "host_load", float(number), Kind.GAUGE, {"minutes": minutes}


def disks(text: str) -> Iterator[Reading]:
    for line in text.splitlines():
        columns = line.split()
        device = columns[2]
        if device.startswith(SKIPPED_DISKS):
            continue
        reads, read_sectors, writes, written_sectors, busy_ms = (int(columns[i]) for i in (3, 5, 7, 9, 12))
        for name, value in (
            ("host_disk_reads_total", reads),
            ("host_disk_read_bytes_total", read_sectors * SECTOR_BYTES),
            ("host_disk_writes_total", writes),
            ("host_disk_written_bytes_total", written_sectors * SECTOR_BYTES),
            ("host_disk_busy_seconds_total", busy_ms / 1000),
        ):
            yield name, float(value), Kind.COUNTER, {"device": device}


def network(text: str) -> Iterator[Reading]:
    for line in text.splitlines()[2:]:
        device, _, rest = line.partition(":")
        columns = rest.split()
        for name, column in (
            ("host_network_received_bytes_total", 0),
            ("host_network_received_packets_total", 1),
            ("host_network_receive_errors_total", 2),
            ("host_network_sent_bytes_total", 8),
            ("host_network_sent_packets_total", 9),
            ("host_network_send_errors_total", 10),
        ):
            yield name, float(columns[column]), Kind.COUNTER, {"device": device.strip()}


def space(path: str = "/") -> Iterator[Reading]:
    stat = os.statvfs(path)
    for state, blocks in (("total", stat.f_blocks), ("free", stat.f_bfree), ("available", stat.f_bavail)):
        yield "host_filesystem_bytes", float(blocks * stat.f_frsize), Kind.GAUGE, {"mount": path, "state": state}


READERS: tuple[tuple[str, Callable[[str], Iterator[Reading]]], ...] = (
    ("stat", cpu),
    ("meminfo", memory),
    ("loadavg", load),
    ("diskstats", disks),
    ("net/dev", network),
)


class HostSource:
    def __init__(self, runtime: Runtime, batcher: Batcher, *, interval_s: float, proc: Path = Path("/proc")) -> None:
        clock, metrics = runtime.clock, runtime.metrics
        self._batcher, self._interval_s, self._clock, self._proc = batcher, interval_s, clock, proc
        self._bad_samples = BadSampleReporter("host", metrics)

    async def run(self) -> None:
        """Reads until cancelled."""
        while True:
            await self._batcher.put(self.read())
            await self._clock.sleep(self._interval_s)

    def read(self) -> list[Sample]:
        now_ns = self._clock.now_ns()
        samples: list[Sample] = []
        bad: list[tuple[int, str]] = []
        for name, parse in (*READERS, ("", lambda text: space())):
            try:
                text = self._text(name) if name else ""
                samples += [checked(metric, now_ns, value, kind, labels) for metric, value, kind, labels in parse(text)]
            except (OSError, ValueError, IndexError, Invalid) as error:
                bad.append((0, f"{name or 'statvfs'}: {error}"))
        self._bad_samples.report(bad, origin=str(self._proc))
        return samples

    def _text(self, name: str) -> str:
        with (self._proc / name).open("rb") as file:
            return file.read(FILE_BYTES_MAX).decode(errors="replace")
