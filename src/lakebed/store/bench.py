"""`lakebed bench store`: the store beside bare obstore on the same bucket; the overhead is at most 10 %."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import obstore

from lakebed.bench.harness import BenchEnvironment, Check, at_least, measured, rate, rounds_of
from lakebed.store.obstore_client import open_bucket
from lakebed.store.settings import StoreSettings

KIB = 1024
MIB = 1024 * 1024
OVERHEAD_BAR = 0.9  # ours ÷ bare


async def bench(environment: BenchEnvironment) -> Sequence[Check]:
    context = environment.context()
    store, clock, ids = context.store, context.clock, context.ids
    settings = environment.settings.of(StoreSettings)
    bare = open_bucket(settings)
    under = f"{settings.prefix}/" if settings.prefix else ""  # our store adds it
    root = f"bench/{ids.token()}"
    small, large = b"s" * KIB, b"l" * MIB
    # Many short rounds: other load then affects both alike.
    rounds, many, few = (15, 100, 16) if environment.quick else (61, 200, 24)

    async def bare_create(key: str, data: bytes) -> Any:
        return await obstore.put_async(bare, under + key, data, mode="create")

    async def bare_get(key: str) -> Any:
        return bytes(await (await obstore.get_async(bare, under + key)).bytes_async())

    def creates(verb: Callable[[str, bytes], Awaitable[Any]], count: int, data: bytes, lanes: int) -> Any:
        async def measured() -> float:
            jobs = [partial(verb, f"{root}/{ids.token()}", data) for _ in range(count)]
            return await rate(clock, count, lambda: spread(lanes, jobs))

        return measured

    def gets(verb: Callable[[str], Awaitable[Any]], key: str, count: int, lanes: int) -> Any:
        async def measured() -> float:
            return await rate(clock, count, lambda: spread(lanes, [partial(verb, key)] * count))

        return measured

    await store.create(f"{root}/large", large)
    environment.report("creates of 1 KiB, puts and gets of 1 MiB, ours and bare in turn")
    creating = await rounds_of(
        rounds,
        {"ours": creates(store.create, many, small, 16), "bare": creates(bare_create, many, small, 16)},
    )
    putting = await rounds_of(
        rounds, {"ours": creates(store.create, few, large, 8), "bare": creates(bare_create, few, large, 8)}
    )
    getting = await rounds_of(
        rounds,
        {
            "ours": gets(store.get, f"{root}/large", few * 4, 8),
            "bare": gets(bare_get, f"{root}/large", few * 4, 8),
        },
    )
    cpu = await _cpu_per_create(store.create, root, ids, small)
    async for info in store.list(f"{root}/"):
        await store.delete(info.key)
    return [
        measured("creates of 1 KiB, ours", creating["ours"], "1/s"),
        measured("creates of 1 KiB, bare obstore", creating["bare"], "1/s"),
        at_least("creates, ours ÷ bare", creating["ours"], creating["bare"], OVERHEAD_BAR),
        measured("puts of 1 MiB, ours", putting["ours"], "MiB/s"),
        measured("puts of 1 MiB, bare obstore", putting["bare"], "MiB/s"),
        at_least("put bandwidth, ours ÷ bare", putting["ours"], putting["bare"], OVERHEAD_BAR),
        measured("gets of 1 MiB, ours", getting["ours"], "MiB/s"),
        measured("gets of 1 MiB, bare obstore", getting["bare"], "MiB/s"),
        at_least("get bandwidth, ours ÷ bare", getting["ours"], getting["bare"], OVERHEAD_BAR),
        measured("CPU per create", [cpu], "µs"),
    ]


async def spread(lanes: int, jobs: Sequence[Callable[[], Awaitable[Any]]]) -> None:
    """Runs the jobs on `lanes` concurrent lanes."""
    waiting = iter(jobs)

    async def lane() -> None:
        for job in waiting:
            await job()

    await asyncio.gather(*(lane() for _ in range(lanes)))


async def _cpu_per_create(create: Callable[[str, bytes], Awaitable[Any]], root: str, ids: Any, data: bytes) -> float:
    began = time.process_time()
    await spread(16, [lambda: create(f"{root}/{ids.token()}", data)] * 300)
    return (time.process_time() - began) / 300 * 1e6
