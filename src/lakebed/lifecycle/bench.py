"""`lakebed bench lifecycle`: routing, deletes beside plain S3 deletes, scans, rounds on buckets of two sizes; one
worker on its own (`bench_scale`), and beside SeaweedFS's (`bench_peer`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import obstore

from lakebed.bench.harness import BenchEnvironment, Check, Contender, at_least, at_most, measured, rate, rounds_of
from lakebed.lifecycle.bench_peer import peer_checks
from lakebed.lifecycle.bench_scale import scale_checks
from lakebed.lifecycle.enforcer import Enforcer
from lakebed.lifecycle.engine import Activation, PolicySnapshot, compile_policies
from lakebed.lifecycle.model import Calendar, Mode, Rule
from lakebed.lifecycle.policy import render_xml
from lakebed.lifecycle.resolver import Seams
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.workers import LifecycleServices, open_services
from lakebed.store.admin import client
from lakebed.store.obstore_client import open_bucket
from lakebed.store.settings import StoreSettings

DELETES_BAR = 0.6  # ours ÷ bare
STEADY_BAR = 1.5  # a round on a bucket ten times as large ÷ a round on the small one
RULES_BAR = 1.5  # routing with ten times the rules ÷ without
GROUPS_BAR = 1.5  # one event in one of thirty delay groups ÷ in one of three
MANY_GROUPS = 30
CONCURRENCY = 16
SETTINGS = LifecycleSettings(
    day_s=1.0, rounding="exact", small_delay_s=0.1, flush_lag_s=0.1, lookback_s=1.0, concurrency=CONCURRENCY
)


class OneBucketPolicies:
    """One bucket's policy: a round of the bench is not a round of everything."""

    def __init__(self, lake: Any, bucket: str) -> None:
        self._lake, self._bucket = lake, bucket
        self.get, self.put, self.changes = lake.get, lake.put, lake.changes

    async def all(self) -> Sequence[Any]:
        found = await self._lake.get(self._bucket)
        return [] if found is None else [found]


async def bench(environment: BenchEnvironment) -> Sequence[Check]:
    context = environment.context()
    clock = context.clock
    count, events = (400, 20_000) if environment.quick else (2000, 100_000)
    rounds = 3 if environment.quick else 5

    environment.report(f"{events} events through 100 buckets × 5 rules, and through ten times as many rules")
    few, many, spread = _compiled(5), _compiled(50), _compiled(50, days=range(1, MANY_GROUPS + 1))
    routed = [await rate(clock, events, lambda: _route(few, events)) for _ in range(rounds)]
    crowded = [await rate(clock, events, lambda: _route(many, events)) for _ in range(rounds)]
    fewer = events // 10
    sparse = [await rate(clock, fewer * MANY_GROUPS, lambda: _route(spread, fewer)) for _ in range(rounds)]
    dense = [events_s * len(few.original_delay_groups) for events_s in routed]

    async with open_services(context) as services:
        environment.report(f"{count} due objects deleted by a scan, and by plain S3 deletes, {CONCURRENCY} at once")
        ours, bare = [], []
        for _ in range(rounds):
            ours.append(await _expire(environment, services, count))
            bare.append(await _delete(environment, services, count))
    environment.report(f"scans and rounds over {count // 2} and {count * 5} objects that are kept")
    scanned, (small_s, large_s) = await _steady(environment, (count // 2, count * 5))
    return [
        *await scale_checks(environment),
        *await peer_checks(environment),
        measured("events routed, 500 rules", routed, "events/s"),
        at_most("routing time, 5,000 rules beside 500", routed, crowded, RULES_BAR),
        measured(f"events × delay groups, {len(few.original_delay_groups)} groups", dense, "/s"),
        measured(f"events × delay groups, {MANY_GROUPS} groups", sparse, "/s"),
        at_most("time per event and delay group, 30 groups beside 3", dense, sparse, GROUPS_BAR),
        measured("deletes, by rules", ours, "objects/s"),
        measured("deletes, bare S3", bare, "objects/s"),
        at_least("deletes, ours beside bare", ours, bare, DELETES_BAR),
        measured("bootstrap scan", [scanned], "objects/s"),
        measured(f"a round, {count // 2} objects", small_s, "s"),
        measured(f"a round, {count * 5} objects", large_s, "s"),
        at_most("a round, ten times the objects", large_s, small_s, STEADY_BAR),
    ]


def _compiled(rules: int, days: Sequence[int] = (1, 1, 7, 7, 30)) -> PolicySnapshot:
    ready = Activation(Mode.EVENT_DRIVEN, True)
    policies = {
        f"b{n}": tuple(Rule(prefix=f"p{i:03d}/", expiration_days=days[i % len(days)]) for i in range(rules))
        for n in range(100)
    }
    return compile_policies(policies, lambda _: ready, Calendar())


async def _route(snapshot: PolicySnapshot, events: int) -> None:
    """Each event once per delay group, as the reader does."""
    for number in range(events):
        bucket, key = f"b{number % 100}", f"p{number % 5:03d}/key-{number}"
        for delay_ns in snapshot.original_delay_groups:
            snapshot.match_original(bucket, key, delay_ns)


@asynccontextmanager
async def _bucket(environment: BenchEnvironment, count: int) -> AsyncIterator[tuple[str, Any]]:
    """A bucket of its own, filled."""
    settings = environment.settings.of(StoreSettings)
    name = f"bench-{environment.context().ids.token()}"
    s3 = client(settings)
    await asyncio.to_thread(s3.create_bucket, Bucket=name)
    store = open_bucket(msgspec.structs.replace(settings, url=f"s3://{name}", prefix=""))
    await _all(count, lambda number: obstore.put_async(store, f"d/{number:06d}", b"x" * 64))
    yield name, store


async def _all(count: int, work: Any) -> None:
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one(number: int) -> None:
        async with slots:
            await work(number)

    await asyncio.gather(*(one(number) for number in range(count)))


def _worker(services: LifecycleServices, name: str) -> Enforcer:
    seams = Seams(services.lake, services.lake, OneBucketPolicies(services.lake, name))
    return Enforcer(services.lake, seams, services.state, SETTINGS, node="bench", reserved=services.reserved)


async def _expire(environment: BenchEnvironment, services: LifecycleServices, count: int) -> float:
    async with _bucket(environment, count) as (name, _):
        await services.state.clock.sleep(SETTINGS.day_s + 1.0)
        await services.lake.put(name, render_xml((Rule("all", expiration_days=1),)))
        worker = _worker(services, name)
        snapshot = await worker.compile()
        made = await rate(services.state.clock, count, lambda: worker.scan(name, snapshot))
        left = [family async for family in services.lake.scan(name)]
        assert not left, f"{len(left)} objects are still there"
        await services.lake.put(name, b"")
        return made


async def _delete(environment: BenchEnvironment, services: LifecycleServices, count: int) -> float:
    async with _bucket(environment, count) as (_, store):
        return await rate(
            services.state.clock,
            count,
            lambda: _all(count, lambda number: obstore.delete_async(store, f"d/{number:06d}")),
        )


async def _steady(environment: BenchEnvironment, counts: Sequence[int]) -> tuple[float, list[list[float]]]:
    """The rate of the last bootstrap scan, and how long rounds take afterwards, for each bucket in turn.

    Each has state of its own: a worker that does not see a bucket's policy says that it is gone, and the next one that
    sees it would scan.
    """
    clock, scanned = environment.context().clock, 0.0
    async with AsyncExitStack() as stack:
        workers: dict[str, Enforcer] = {}
        for count in counts:
            name, _ = await stack.enter_async_context(_bucket(environment, count))
            services = await stack.enter_async_context(open_services(environment.apart()))
            await services.lake.put(name, render_xml((Rule("kept", expiration_days=1000),)))
            workers[name] = worker = _worker(services, name)
            snapshot = await worker.compile()
            scanned = await rate(clock, count, partial(worker.scan, name, snapshot))
            await worker.run_round()

        def contender(worker: Enforcer) -> Contender:
            async def measured() -> float:
                return 1.0 / await rate(clock, 1, worker.run_round)

            return measured

        seen = await rounds_of(15, {name: contender(worker) for name, worker in workers.items()})
        for name in workers:
            await services.lake.put(name, b"")  # every lake is the same store
        return scanned, [seen[name] for name in workers]
