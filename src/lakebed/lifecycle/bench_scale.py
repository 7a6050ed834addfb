"""What one worker does on its own: scans, events, rest and punctuality, with entries created at the filer.

Rates are per second of the worker's CPU as well as per second of time: a busy machine changes the second one more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from lakebed.bench.harness import BenchEnvironment, Check, measured
from lakebed.core.context import Context
from lakebed.core.errors import NotFound
from lakebed.filer import s3
from lakebed.filer.client import FilerClient
from lakebed.filer.model import Attributes, FilerEntry, Mutation, MutationKind, Transaction
from lakebed.filer.settings import FilerSettings
from lakebed.lifecycle.cursors import rewound
from lakebed.lifecycle.engine import Activation, compile_policies
from lakebed.lifecycle.model import SECOND_NS, Calendar, Mode, Rule, StreamResolution
from lakebed.lifecycle.policy import render_xml
from lakebed.lifecycle.reader import LifecycleReader
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.state import ReaderState, changed
from lakebed.lifecycle.workers import LifecycleServices, open_services

SCAN_BAR = 20_000.0  # objects per CPU second
EVENTS_BAR = 20_000.0  # events per CPU second
IDLE_BAR = 0.05  # of a core
LATE_BAR = 2.0  # seconds behind the due instant
FOLDER_MODE, FILE_MODE = 0o20000000775, 0o660
FOLDERS = 20
BATCH = 1000
LOOK_S = 0.05
GONE_S = 120.0


async def scale_checks(environment: BenchEnvironment) -> Sequence[Check]:
    quick = environment.quick
    objects, buckets = (20_000, 50) if quick else (300_000, 500)
    since_ns = environment.context().clock.now_ns()
    async with _filled(environment, objects) as (context, name):
        environment.report(f"a scan of {objects:,} objects, and their events through 505 rules")
        scanned = await _scan(context, name, objects)
        routed = await _events(context, name, objects, since_ns)
    checks = [
        measured("scan", [scanned[0]], "objects/s"),
        _at_least("scan, per CPU second of the worker", scanned[1], "objects/s", SCAN_BAR),
        measured("events read and routed", [routed[0]], "events/s"),
        _at_least("events read and routed, per CPU second of the worker", routed[1], "events/s", EVENTS_BAR),
    ]
    environment.report(f"a worker at rest with {buckets} buckets, and how late an object goes")
    poll_s = 6.0 if quick else 60.0
    idle = await _with_buckets(environment, LifecycleSettings(poll_s=poll_s), buckets, _idle)
    day_s = 4.0 if quick else 20.0
    soon = LifecycleSettings(day_s=day_s, rounding="exact", small_delay_s=0.1, flush_lag_s=0.5, lookback_s=1.0)
    late = await _with_buckets(environment, soon, buckets, _late)
    checks.append(_at_most(f"a worker at rest, {buckets} buckets", idle, "cores", IDLE_BAR))
    checks.append(_at_most(f"deletion behind its due instant, {buckets} buckets", late, "s", LATE_BAR))
    return checks


def _at_least(name: str, value: float, unit: str, bar: float) -> Check:
    return Check(name, round(value, 4), unit, bar, value >= bar)


def _at_most(name: str, value: float, unit: str, bar: float) -> Check:
    return Check(name, round(value, 4), unit, bar, value <= bar)


def _folder(name: str, rules: tuple[Rule, ...], now_ns: int) -> FilerEntry:
    extended = {s3.LIFECYCLE: render_xml(rules)} if rules else {}
    return FilerEntry(name, True, Attributes(0, now_ns, now_ns, FOLDER_MODE), extended=extended)


async def _create(filer: FilerClient, folder: str, entry: FilerEntry) -> None:
    path = f"{folder}/{entry.name}"
    await filer.transact(Transaction(path, (), (Mutation(MutationKind.PUT, folder, entry.name, entry),)))


@asynccontextmanager
async def _filled(environment: BenchEnvironment, count: int) -> AsyncIterator[tuple[Context, str]]:
    """A bucket of young objects with tags, and state of its own."""
    context = environment.apart()
    name = f"bench-{context.ids.token()}"
    async with FilerClient.of(context.settings.of(FilerSettings), context) as filer:
        now_ns = context.clock.now_ns()
        seen = Attributes(64, now_ns // SECOND_NS * SECOND_NS, now_ns, FILE_MODE, "application/octet-stream")
        tags = {f"{s3.TAG}kind": b"raw", "Seaweed-X-Amz-ETag": b"0" * 32}
        await _create(filer, s3.BUCKETS, _folder(name, (), now_ns))
        for begin in range(0, count, BATCH):
            some = [
                (number % FOLDERS, FilerEntry(f"{number:08d}.parquet", False, seen, (), tags, b"x" * 64))
                for number in range(begin, min(count, begin + BATCH))
            ]
            await asyncio.gather(*(_create(filer, f"{s3.BUCKETS}/{name}/d{at:02d}", one) for at, one in some))
        yield context, name
        await filer.delete(s3.BUCKETS, name, recursive=True)


async def _scan(context: Context, name: str, count: int) -> tuple[float, float]:
    async with open_services(context) as services:
        await services.lake.put(name, render_xml((Rule("kept", expiration_days=1000),)))
        snapshot = await services.enforcer.compile()
        began_s, used_s = time.monotonic(), time.process_time()
        found = await services.enforcer.scan(name, snapshot)
        assert found is not None and found.complete and found.scanned == count, found
        rates = count / (time.monotonic() - began_s), count / (time.process_time() - used_s)
        await services.lake.put(name, b"")
        return rates


class _NothingToDo:
    """Resolves everything at once: what is measured comes before."""

    async def settle(self, works: Sequence[object]) -> list[StreamResolution]:
        return [StreamResolution.DONE] * len(works)


async def _events(context: Context, name: str, count: int, since_ns: int) -> tuple[float, float]:
    """Every event matches a rule of one of three delays; cursors are stored as always."""
    days = (1, 1, 7, 7, 30)
    rules = {f"b{n}": tuple(Rule(prefix=f"p{i}/", expiration_days=days[i]) for i in range(5)) for n in range(100)}
    rules[name] = tuple(Rule(prefix=f"d{i:02d}/", expiration_days=days[i % 5]) for i in range(FOLDERS))
    settings = LifecycleSettings(day_s=1e-6, rounding="exact", small_delay_s=0.1, flush_lag_s=0.1)
    snapshot = compile_policies(rules, lambda _: Activation(Mode.EVENT_DRIVEN, True), Calendar(1000, "exact"))
    async with open_services(context) as services:
        floors = [(delay_ns, since_ns) for delay_ns in snapshot.original_delay_groups]

        def back(state: ReaderState) -> ReaderState:
            return rewound(state, floors, generation=1, reach=snapshot.reach, begins_ns=0)

        for register in services.state.readers:
            await register.change(changed(back))
        reader = LifecycleReader(services.lake, _NothingToDo(), services.state, settings)  # type: ignore[arg-type]
        began_s, used_s = time.monotonic(), time.process_time()
        run = await reader.run(snapshot, _alive)
        took = time.monotonic() - began_s, time.process_time() - used_s
        assert count == sum(sweep.worked for sweep in run.sweeps), run
        return count / took[0], count / took[1]


async def _alive() -> None:
    return None


Measure = Callable[[LifecycleServices, FilerClient, Sequence[str]], Awaitable[float]]


async def _with_buckets(
    environment: BenchEnvironment, settings: LifecycleSettings, count: int, measure: Measure
) -> float:
    """A worker whose first scans are done runs while `measure` looks at it."""
    apart = msgspec.structs.replace(environment, settings=environment.settings.having(settings)).apart()
    filer = FilerClient.of(apart.settings.of(FilerSettings), apart)
    names = [f"bench-{apart.ids.token()}" for _ in range(count)]
    async with filer, open_services(apart) as services:
        rules = [(Rule("r", expiration_days=1 + number % 3),) for number in range(count)]
        folders = [_folder(name, some, apart.clock.now_ns()) for name, some in zip(names, rules, strict=True)]
        await asyncio.gather(*(_create(filer, s3.BUCKETS, one) for one in folders))
        try:
            await services.enforcer.run_round()
            worker = asyncio.ensure_future(services.enforcer.run())
            try:
                await asyncio.sleep(2.0)  # the loops have begun to wait
                return await measure(services, filer, names)
            finally:
                worker.cancel()
                await asyncio.gather(worker, return_exceptions=True)
        finally:
            for begin in range(0, count, 50):
                await asyncio.gather(
                    *(filer.delete(s3.BUCKETS, one, recursive=True) for one in names[begin : begin + 50])
                )


async def _idle(services: LifecycleServices, _: FilerClient, __: Sequence[str]) -> float:
    """The share of a core, over one poll."""
    began_s, used_s = time.monotonic(), time.process_time()
    await asyncio.sleep(services.settings.poll_s)
    return (time.process_time() - used_s) / (time.monotonic() - began_s)


async def _late(services: LifecycleServices, filer: FilerClient, names: Sequence[str]) -> float:
    """How long behind its due instant an object was still there; the bucket has the rule of one day."""
    now_ns = services.state.clock.now_ns()
    seen = Attributes(64, now_ns // SECOND_NS * SECOND_NS, now_ns, FILE_MODE)
    folder = f"{s3.BUCKETS}/{names[0]}"
    await _create(filer, folder, FilerEntry("k", False, seen, content=b"x" * 64))
    due_s = now_ns / SECOND_NS + services.settings.day_s
    while services.state.clock.now_ns() / SECOND_NS < due_s + GONE_S:
        try:
            await filer.lookup(folder, "k")
        except NotFound:
            break
        await asyncio.sleep(LOOK_S)
    return services.state.clock.now_ns() / SECOND_NS - due_s
