"""Reading, scanning and draining run beside each other, and workers share the stream, the scans and the rate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from lakebed.lifecycle.cluster import SHARDS, WorkerShards, claimed, owned, released, shard_of
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.seams import Family
from support.lifecycle_harness import DAY_S, Harness
from support.lifecycle_makers import rule

SECOND = 1_000_000_000


@pytest.mark.parametrize("rounding", ["exact", "midnight"])
async def test_a_scan_of_five_days_delays_no_sweep_and_no_drain(rounding: str) -> None:
    """One bucket takes five days to list; an object due after one day in another bucket goes after one day."""
    world = Harness(rounding=rounding, poll_s=5.0)

    class SlowList:
        def __getattr__(self, name: str) -> Any:
            return getattr(world.lake, name)

        async def scan(self, bucket: str, after: str = "", **bounds: str) -> AsyncGenerator[Family, None]:
            async for family in world.lake.scan(bucket, after, **bounds):
                if bucket == "large":
                    await world.clock.sleep(5 * DAY_S / 3)
                yield family

    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    for key in ("k1", "k2", "k3"):
        world.lake.write("large", key)
    await world.policy("large", rule(expiration_days=100))
    world.lake.write("b", "a")
    world.lake.write("b", "waits")
    await world.exceptions("waits")
    running = asyncio.create_task(world.new_worker(SlowList()).run())
    for _ in range(21):
        await world.clock.advance(DAY_S / 10)

    large = await world.state("large")
    assert ([], True) == (world.left(), large.scan is not None)
    for _ in range(40):
        await world.clock.advance(DAY_S / 10)
    assert (await world.action("EXPIRATION_DAYS", "large")).bootstrap_complete
    running.cancel()


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_shards_are_shared_evenly_and_taken_over_when_their_worker_is_gone(workers: int) -> None:
    """After a few reports every shard has an owner, and none has more than its share; an expired worker has none."""
    known = WorkerShards()
    names = [f"w{number}" for number in range(workers)]
    for _ in range(3):
        for name in names:
            known = claimed(known, name, 100, 30)
    counts = [len(owned(known, name)) for name in names]

    assert SHARDS == sum(counts)
    assert max(counts) <= -(-SHARDS // workers)
    for _ in range(2):
        known = claimed(known, "late", 131, 30)
    assert (frozenset(range(SHARDS)), ["late"]) == (owned(known, "late"), list(known.workers))
    assert WorkerShards() == released(known, "late")


def test_all_that_is_of_a_key_is_in_one_shard() -> None:
    """By bucket and folder: every shard has some."""
    assert shard_of("b", "x/y/1") == shard_of("b", "x/y/2")
    assert set(range(SHARDS)) == {shard_of("b", f"{number}/k") for number in range(50)}


async def test_two_workers_read_shards_of_their_own_and_delete_everything_once() -> None:
    """Each has half of them; together they serve the whole stream."""
    world = Harness(poll_s=2.0, lease_s=6.0)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    workers = [world.new_worker(world.lake) for _ in range(2)]
    running = [asyncio.create_task(worker.run()) for worker in workers]
    await world.clock.advance(20)
    shards = (await world.registers.shards.read()).value
    for number in range(40):
        world.lake.write("b", f"{number}/k")
    for _ in range(11):
        await world.clock.advance(DAY_S / 10)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)

    assert [SHARDS // 2] * 2 == [len(owned(shards, worker._name)) for worker in workers]
    assert ([], 40) == (world.left(), len(world.lake.removed))
    assert WorkerShards() == (await world.registers.shards.read()).value


@pytest.mark.parametrize("rounding", ["exact", "midnight"])
async def test_an_idle_bucket_shows_no_lag_at_any_time_of_the_day(rounding: str) -> None:
    """With the default rounding too: gauge, status and warning are silent for days; a real standstill is shown."""
    world = Harness(rounding=rounding, flush_lag_s=2.0, retention_s=2.6 * DAY_S)
    await world.policy("b", rule(expiration_days=1, tags=(("t", "1"),)))
    await world.run_round()
    operator = Operator(world.registers, world.settings)
    seen = set()
    for _ in range(60):
        await world.run_round(0.05)
        (row,) = await operator.status("b")
        lags = [world.metrics.value("lakebed_lifecycle_watermark_lag_seconds", stream=f"{DAY_S:g}s"),
                world.metrics.value("lakebed_lifecycle_predicate_lag_seconds"),
                world.metrics.value("lakebed_lifecycle_lag_warning", stream=f"{DAY_S:g}s")]  # fmt: skip
        seen |= {row["lag_s"], row["degraded"], *lags}
    assert {0.0, "NONE"} == seen
    await world.clock.advance(3 * DAY_S)
    (row,) = await operator.status("b")
    assert row["lag_s"] >= 2 * DAY_S


async def test_a_pause_is_noticed_by_a_running_worker_long_before_its_next_poll() -> None:
    """Its sweeps use a compiled snapshot for two polls; no policy changed, so only the request ends that."""
    world = Harness(poll_s=0.8 * DAY_S)
    await world.policy("b", rule(expiration_days=1))
    await world.policy("c", rule(expiration_days=1))
    await world.run_round()
    running = asyncio.create_task(world.worker.run())
    await world.clock.advance(1.0)
    for bucket in ("b", "c"):
        world.lake.write(bucket, "a")
    for _ in range(9):
        await world.clock.advance(DAY_S / 10)
    await Operator(world.registers).pause("b")
    for _ in range(3):
        await world.clock.advance(DAY_S / 10)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert (["a"], []) == (world.left("b"), world.left("c"))


async def test_a_wake_that_comes_during_a_round_is_followed_by_another_round() -> None:
    """What changed after the round had looked is not left to the next poll, an hour later."""
    world = Harness(poll_s=3600.0)
    worker = world.new_worker(world.lake)
    rounds = 0

    async def work() -> int:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            worker.wake("read")
        return world.clock.now_ns() + 3600 * SECOND

    running = asyncio.create_task(worker._repeat("read", work))
    for _ in range(5):
        await world.clock.advance(1.0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert 2 == rounds
