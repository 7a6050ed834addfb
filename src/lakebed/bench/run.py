"""Which benches there are, and running one."""

from __future__ import annotations

from importlib import import_module

from lakebed.bench.harness import Bench, Report, Stand
from lakebed.clock import SystemClock
from lakebed.errors import Invalid

BENCHES: tuple[str, ...] = ("store", "gateway", "batches", "agent", "queue", "log", "ticks", "lifecycle", "pipeline")


async def run(name: str, stand: Stand) -> Report:
    if name not in BENCHES:
        raise Invalid(f"there is no bench {name!r}", hint=f"one of: {', '.join(BENCHES)}, all")
    bench: Bench = import_module(f"lakebed.bench.{name}").bench
    clock = SystemClock()
    began = clock.monotonic_s()
    checks = await bench(stand)
    return Report(name, tuple(checks), stand.quick, round(clock.monotonic_s() - began, 1))
