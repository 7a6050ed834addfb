"""Reading, scanning and draining run beside each other, and workers share the stream, the scans and the rate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from lakebed.core.errors import Invalid, Unavailable
from lakebed.lifecycle import paths, reader
from lakebed.lifecycle.cluster import SHARDS, WorkerShards, claimed, owned, prefer_worker_id, released, shard_of
from lakebed.lifecycle.leases import hold
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.seams import Family
from support.lifecycle_harness import DAY_S, Harness, failing
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


async def test_the_first_scan_of_a_new_policy_waits_for_no_scan_under_way() -> None:
    """One bucket takes five days to list; a policy put meanwhile is scanned at once, and the long scan ends."""
    world = Harness(poll_s=DAY_S)
    listed: list[str] = []

    class SlowList:
        def __getattr__(self, name: str) -> Any:
            return getattr(world.lake, name)

        async def scan(self, bucket: str, after: str = "", **bounds: str) -> AsyncGenerator[Family, None]:
            listed.append(bucket)
            async for family in world.lake.scan(bucket, after, **bounds):
                if bucket == "large":
                    await world.clock.sleep(5 * DAY_S / 3)
                yield family

    for key in ("k1", "k2", "k3"):
        world.lake.write("large", key)
    await world.policy("large", rule(expiration_days=100))
    world.lake.write("b", "a")
    await world.clock.advance(2 * DAY_S)
    running = asyncio.create_task(world.new_worker(SlowList()).run())
    await world.clock.advance(1.0)
    await world.policy("b", rule(expiration_days=1))
    for _ in range(10):
        await world.clock.advance(1.0)

    assert ([], True) == (world.left(), (await world.state("large")).scan is not None)
    assert (await world.action("EXPIRATION_DAYS")).joined
    for _ in range(60):
        await world.clock.advance(DAY_S / 10)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (await world.action("EXPIRATION_DAYS", "large")).bootstrap_complete
    assert ["b", "large"] == sorted(listed)  # no scan was started twice


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


async def test_deletes_of_a_worker_keep_to_the_rate_of_the_settings() -> None:
    """A second's turns are saved up; then ten a second. What the cluster shares is in test_batches.py."""
    world = Harness(deletes_per_s=10.0)
    for number in range(60):
        world.lake.write("b", f"k{number:02d}")
    await world.clock.advance(2 * DAY_S)
    await world.policy("b", rule(expiration_days=1))
    running = asyncio.create_task(world.worker.run_round())
    counts: list[int] = []
    for _ in range(60):
        await world.clock.advance(0.1)
        counts.append(len(world.lake.removed))
    await running

    assert all(count <= 11 + number for number, count in enumerate(counts, 1))
    assert (60, []) == (counts[-1], world.left())


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

    assert [SHARDS // 2] * 2 == [len(owned(shards, worker._shards.name)) for worker in workers]
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


async def test_a_sweep_that_looked_through_only_so_many_events_goes_on_when_the_next_are_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What no rule wants lies between two objects that are due within a second: the second waits for no poll."""
    monkeypatch.setattr(reader, "PEEK_EVENTS", 3)
    world = Harness(poll_s=10 * DAY_S)
    await world.policy("b", rule(prefix="x/", expiration_days=1))
    await world.run_round()
    running = asyncio.create_task(world.worker.run())
    await world.clock.advance(1.0)
    for key in ("x/first", *(f"other/{number}" for number in range(6)), "x/second"):
        world.lake.write("b", key)
        await world.clock.advance(0.1)
    await world.clock.advance(DAY_S + 2.0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert [] == [key for key in world.left() if key.startswith("x/")]


async def test_an_action_that_joins_while_a_sweep_compiles_needs_no_other_scan() -> None:
    """The cursors were read before it joined: only what is stored now says whether they serve it."""
    world = Harness()
    await world.policy("other", rule(expiration_days=2))
    await world.run_round()
    other = world.new_worker(world.lake)
    await world.policy("b", rule(expiration_days=1))
    run, joined = other._compiler.run, []

    async def joins_meanwhile(cursors: Any) -> Any:
        if not joined:
            joined.append(await world.run_round())
        return await run(cursors)

    other._compiler.run = joins_meanwhile  # type: ignore[method-assign]
    sweeps = await other._read()

    action = await world.action("EXPIRATION_DAYS")
    assert (True, "") == (action.bootstrap_complete, action.why_scan)
    assert any(sweep.superseded for sweep in sweeps)  # the next sweep comes soon


async def test_first_scans_of_many_buckets_join_the_sweeps_together() -> None:
    """Each join moves cursors back, which ends sweeps under way and makes the next one compile all buckets again."""
    world = Harness(poll_s=DAY_S)
    buckets = [f"b{number:02d}" for number in range(40)]
    for bucket in buckets:
        await world.policy(bucket, rule(expiration_days=1))
        world.lake.write(bucket, "a")
    compiled, everything = [], world.lake.all

    async def counted() -> Any:
        compiled.append(world.clock.now_ns())
        return await everything()

    world.lake.all = counted  # type: ignore[method-assign]
    running = asyncio.create_task(world.worker.run())
    for _ in range(50):
        await world.clock.advance(0.2)
    joined = {(await world.action("EXPIRATION_DAYS", bucket)).joined for bucket in buckets}
    seen = len(compiled)
    await world.clock.advance(1.1 * DAY_S)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert 0 not in joined
    assert len(joined) <= 10
    assert seen <= 20
    assert [] == [bucket for bucket in buckets if world.left(bucket)]


def test_work_prefers_the_same_worker_while_it_lives() -> None:
    """Every worker is preferred for some; when one goes, only its work moves."""
    known = WorkerShards(workers={"w1": 50, "w2": 50, "w3": 20})
    before = {f"action{number}": prefer_worker_id(known, f"action{number}", 10) for number in range(50)}
    after = {work: prefer_worker_id(known, work, 30) for work in before}

    assert {"w1", "w2", "w3"} == set(before.values())
    assert {"w1", "w2"} == set(after.values())
    assert all(after[work] == worker for work, worker in before.items() if worker != "w3")
    assert "" == prefer_worker_id(known, "action0", 60)


@pytest.mark.parametrize("comes", [True, False])
async def test_exceptions_are_left_to_the_preferred_worker_unless_it_does_not_come(comes: bool) -> None:
    """The other one drains them a lease later; nothing waits for a worker that hangs."""
    world = Harness(lease_s=20.0)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "waits")
    ref = await world.exceptions("waits")
    other = world.new_worker(world.lake)
    await world.clock.advance(1.01 * DAY_S)
    workers = {one._shards.name: one for one in (world.worker, other)}
    for worker in workers.values():
        await worker._shards.claim()
    preferred = prefer_worker_id((await world.registers.shards.read()).value, str(ref), world.clock.now_ns())
    (unlike,) = [worker for name, worker in workers.items() if name != preferred]

    wakes = await unlike._drain(await unlike.compile())
    assert (["waits"], 1) == (world.left(), len(wakes))
    if comes:
        await workers[preferred]._drain(await workers[preferred].compile())
    else:
        await world.clock.advance(19.9)
        for worker in workers.values():
            await worker._shards.claim()
        await unlike._drain(await unlike.compile())

    assert [] == world.left()


@pytest.mark.parametrize("how", ["down", "blocked", "held"])
async def test_a_safety_scan_that_cannot_go_on_is_tried_again_after_a_pause(how: str) -> None:
    """The store does not answer, an operator must decide, another worker has it: policies are compiled now and then."""
    world, store = failing(poll_s=10.0)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    compiled, everything = [], world.lake.all

    async def counted() -> Any:
        compiled.append(world.clock.now_ns())
        return await everything()

    async def down(*_: Any, **__: Any) -> AsyncGenerator[Family, None]:
        raise Unavailable("down") if how == "down" else Invalid("damaged")
        yield  # type: ignore[unreachable]

    world.lake.all = counted  # type: ignore[method-assign]
    await world.clock.advance(8 * DAY_S)
    async with AsyncExitStack() as stack:
        if how == "held":
            await hold(world.registers, paths.scan_lease("b", 0), "another", 1000.0, stack)
        else:
            store.scan = down  # type: ignore[method-assign, assignment]
        running = asyncio.create_task(world.worker.run())
        for _ in range(20):
            await world.clock.advance(1.0)
        seen = len(compiled)
    store.scan = world.lake.scan  # type: ignore[method-assign, assignment]
    for _ in range(20):
        await world.clock.advance(1.0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert seen <= 10
    scanned_ns = (await world.action("EXPIRATION_DAYS")).last_scan_ns
    assert (how == "blocked") is (scanned_ns < world.clock.now_ns() - 100 * SECOND)


async def test_a_delete_that_fails_for_seconds_makes_no_blocker_while_others_fall_due_all_the_time() -> None:
    """Every event that is due wakes the reader; what failed is tried again after a pause, not at each of them."""
    world, store = failing(poll_s=10.0)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    running = asyncio.create_task(world.worker.run())
    await world.clock.advance(1.0)
    world.lake.write("b", "fails")
    for number in range(80):
        await world.clock.advance(0.1)
        world.lake.write("b", f"{number}/k")
    store.deletes["fails"] = Unavailable("down")
    await world.clock.advance(DAY_S - 9.0)
    for _ in range(140):
        await world.clock.advance(0.05)
    tried = len([key for key in store.tried if key == "fails"])
    blocked = (await world.blockers()).blockers
    del store.deletes["fails"]
    for _ in range(30):
        await world.clock.advance(1.0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert ({}, True) == (blocked, 1 <= tried <= 3)
    assert [] == world.left()


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
