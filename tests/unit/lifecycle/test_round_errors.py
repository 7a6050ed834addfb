"""Rounds that meet an error or another worker: what failed is retried, everything else goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from lakebed.core.clock import settle
from lakebed.core.errors import Corrupt, Unavailable
from lakebed.lifecycle import paths
from lakebed.lifecycle.cluster import LogReach
from lakebed.lifecycle.enforcer import NAP_S, NOTE_S, RETRY_S
from lakebed.lifecycle.model import Mode, Position, StreamKind
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.seams import ChangeEvent, Family
from support.lifecycle_harness import DAY_S, Harness, failing
from support.lifecycle_makers import rule

SECOND_NS = 10**9


class Script:
    """The lake, with whole seams replaced by name."""

    def __init__(self, inner: Any, **replaced: Any) -> None:
        self._inner = inner
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def scripted(world: Harness, **replaced: Any) -> None:
    world.worker = world.new_worker(Script(world.lake, **replaced))


async def run(world: Harness, seconds: int) -> None:
    running = asyncio.create_task(world.worker.run())
    await settle()
    for _ in range(seconds):
        await world.clock.advance(1.0)
        await settle()
    running.cancel()


# The loop.


async def test_a_round_that_failed_is_repeated_after_the_poll_interval() -> None:
    """The worker does not end with the error and does not spin."""
    world = Harness(poll_s=20.0)
    at: list[float] = []

    async def work() -> int:
        at.append(world.clock.monotonic_s())
        if len(at) < 3:
            raise Unavailable("away")
        return world.clock.now_ns() + 1000 * SECOND_NS

    world.worker._read_round = work  # type: ignore[method-assign]
    await run(world, 65)

    assert [0, 20, 40, 60] == at


async def test_a_due_instant_that_is_already_past_leaves_a_short_rest() -> None:
    """At least 50 ms lie between two rounds: a worker never takes the whole processor."""
    world = Harness(poll_s=20.0)
    at: list[float] = []

    async def work() -> int:
        at.append(world.clock.monotonic_s())
        return world.clock.now_ns() - 5 * SECOND_NS

    world.worker._read_round = work  # type: ignore[method-assign]
    running = asyncio.create_task(world.worker.run())
    await world.clock.advance(0.2)
    running.cancel()

    assert [0, 0.05, 0.1, 0.15, 0.2] == [round(one, 3) for one in at]


async def test_a_wake_register_that_cannot_be_read_does_not_end_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker sleeps until its own instant, and a later wish is still noticed within one nap."""
    world = Harness(poll_s=3600.0)
    read, broken = world.registers.wake.read, False
    rounds: list[float] = []

    async def work() -> int:
        rounds.append(world.clock.monotonic_s())
        return world.clock.now_ns() + 3600 * SECOND_NS

    async def maybe() -> Any:
        if broken:
            raise Unavailable("away")
        return await read()

    monkeypatch.setattr(world.registers.wake, "read", maybe)
    world.worker._read_round = work  # type: ignore[method-assign]
    running = asyncio.create_task(world.worker.run())
    await world.clock.advance(NAP_S)
    broken = True
    await world.clock.advance(30.0)
    assert [0.0] == rounds
    broken = False
    await Operator(world.registers).wake("me")
    await world.clock.advance(2 * NAP_S)
    running.cancel()

    assert 2 == len(rounds)


# The streams, each with its error.


async def test_a_listing_that_cannot_be_read_blocks_its_bucket_and_no_other() -> None:
    """The blocker says so, the walk is not repeated until an operator decides, and the other bucket is walked."""
    world = Harness()
    walked: list[str] = []

    async def scan(bucket: str, after: str = "", **bounds: str) -> AsyncGenerator[Family, None]:
        walked.append(bucket)
        if bucket == "bad" and walked.count("bad") == 1:
            raise Corrupt("no such listing")
        async for family in world.lake.scan(bucket, after, **bounds):
            yield family

    scripted(world, scan=scan)
    for bucket in ("bad", "good"):
        await world.policy(bucket, rule(expiration_days=1))
    first = await world.run_round()
    second = await world.run_round(0.01)
    (blocker,) = await Operator(world.registers).blockers()

    assert [("bad", False, True), ("good", True, False)] == [(w.bucket, w.complete, w.blocked) for w in first.scans]
    assert [("bad", False, True)] == [(w.bucket, w.complete, w.blocked) for w in second.scans]
    assert (StreamKind.BOOTSTRAP, "bad", "") == (blocker.stream.kind, blocker.stream.bucket, blocker.key)
    assert ("the listing cannot be read: FATAL_EVENT_ERROR", "no such listing") == (blocker.reason, blocker.last_error)
    assert (world.clock.now_ns() - SECOND_NS, 1) == (blocker.first_seen_ns, blocker.retries)
    assert ["bad", "good"] == walked

    await Operator(world.registers).resume(blocker.blocker_id)
    assert [True] == [scan.complete for scan in (await world.run_round(0.01)).scans]


async def test_a_listing_that_is_away_is_walked_again_soon() -> None:
    """An outage of one bucket is no blocker: the round says that it could not go on."""
    world = Harness(poll_s=3600.0)

    async def scan(bucket: str, after: str = "", **bounds: str) -> AsyncGenerator[Family, None]:
        raise Unavailable("away")
        yield

    scripted(world, scan=scan)
    await world.policy("b", rule(expiration_days=1))
    run_round = await world.run_round()

    assert [(False, False)] == [(scan.complete, scan.blocked) for scan in run_round.scans]
    assert world.clock.now_ns() + round(RETRY_S * SECOND_NS) == run_round.wake_ns
    assert [] == await Operator(world.registers).blockers()


async def test_a_blocked_walk_does_not_hurry_the_next_round() -> None:
    """Only an operator can help: the next round comes with the poll."""
    world, store = failing(poll_s=3600.0, retries_max=1)
    world.lake.write("b", "a")
    store.deletes["a"] = Unavailable("away")
    await world.clock.advance(2 * DAY_S)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    run_round = await world.run_round(0.01)

    assert [True] == [scan.blocked for scan in run_round.scans]
    assert world.clock.now_ns() + 3600 * SECOND_NS == run_round.wake_ns


async def test_an_event_log_that_is_away_is_read_again_soon_and_nothing_is_demoted() -> None:
    """A broken stream is an outage, not a lost log."""
    world = Harness(poll_s=3600.0)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()

    async def read(after: Position, until_ns: int) -> AsyncGenerator[ChangeEvent, None]:
        raise Unavailable("away")
        yield

    scripted(world, read=read)
    run_round = await world.run_round(1.0)

    assert [(None, True, False)] == [(s.delay_ns, s.halted, s.blocked) for s in run_round.sweeps]
    assert world.clock.now_ns() + round(RETRY_S * SECOND_NS) == run_round.wake_ns
    assert Mode.EVENT_DRIVEN is (await world.action("EXPIRATION_DAYS")).mode
    assert 0 == (await world.registers.log.read()).value.generation


async def test_a_log_that_cannot_be_probed_keeps_the_retention_known_last() -> None:
    """The gates still go by the shorter reach that was seen before the outage."""
    world = Harness(retention_s=50 * DAY_S)
    world.lake.log_begins_ns = world.clock.now_ns() - round(3 * DAY_S * SECOND_NS)
    await world.run_round()

    async def reach() -> LogReach:
        raise Unavailable("away")

    scripted(world, reach=reach)
    await world.run_round(1.0)

    assert 4 * DAY_S == world.metrics.value("lakebed_lifecycle_log_retention_seconds")


# Other workers.


async def held(world: Harness, key: str) -> AsyncExitStack:
    """The lease in the hands of another worker."""
    other, stack = world.new_worker(world.lake), AsyncExitStack()
    other._node = "other"
    await other._hold(key, stack)
    return stack


async def test_a_walk_that_another_worker_does_is_left_to_it() -> None:
    """No walk of ours, no error, and the bucket is walked when the other one is done."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1))
    async with await held(world, paths.scan_lease("b", 0)):
        assert () == (await world.run_round()).scans
    assert [True] == [scan.complete for scan in (await world.run_round()).scans]


async def test_a_sweep_that_another_worker_does_is_left_to_it() -> None:
    """What is due stays for whoever has the shards."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "a")
    await world.clock.advance(1.01 * DAY_S)
    await world.other_reader()
    assert () == (await world.run_round()).sweeps
    assert ["a"] == world.left()
    await world.other_reader(alive=False)
    await world.run_round()
    assert [] == world.left()


async def test_a_drain_that_another_worker_does_is_left_to_it_and_other_actions_are_drained() -> None:
    """The lease is per action: one that is held does not keep the next from its exceptions."""
    world = Harness()
    await world.policy("b", rule(prefix="x", expiration_days=2), rule(prefix="y", expiration_days=2))
    await world.run_round()
    for key in ("x1", "y1"):
        world.lake.write("b", key)
    first = await world.exceptions("x1", prefix="x")
    await world.exceptions("y1", prefix="y")

    await world.clock.advance(2.1 * DAY_S)
    async with await held(world, paths.drain_lease(first)):
        await world.run_round()
        assert ["x1"] == world.left()
    await world.run_round(0.01)
    assert [] == world.left()


async def test_the_ledger_is_not_moved_twice_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While another worker moves it, ours waits for its next interval; a failed move is no failed round."""
    world = Harness(fold_s=30.0)
    moved: list[float] = []

    async def move() -> int:
        moved.append(world.clock.monotonic_s())
        if len(moved) == 1:
            raise Unavailable("away")
        return 0

    monkeypatch.setattr(world.worker._mover, "run", move)
    await world.clock.advance(31.0)
    async with await held(world, paths.FOLD_LEASE):
        await world.worker.run_round()
    assert [] == moved
    for _ in range(3):
        await world.clock.advance(30.0)
        await world.worker.run_round()

    assert [61, 91, 121] == moved


async def test_a_lease_that_cannot_be_released_does_not_fail_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """It expires by itself."""
    world = Harness()

    async def release(*_: Any) -> None:
        raise Unavailable("away")

    monkeypatch.setattr("lakebed.lifecycle.leases.Lease.release", release)
    await world.policy("b", rule(expiration_days=1))

    assert [True] == [scan.complete for scan in (await world.run_round()).scans]


async def test_a_round_that_cannot_be_recorded_is_recorded_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure holds nothing up and does not count as noted; a noted round rests for NOTE_S."""
    world = Harness()
    change, tries = world.registers.last_round.change, list[float]()

    async def maybe(decide: Any) -> Any:
        tries.append(world.clock.monotonic_s())
        if len(tries) == 1:
            raise Unavailable("away")
        return await change(decide)

    monkeypatch.setattr(world.registers.last_round, "change", maybe)
    await world.run_round()
    for _ in range(int(NOTE_S) + 2):
        await world.run_round(1 / DAY_S)

    assert [0, 1, 1 + NOTE_S] == tries
    assert ("test", world.clock.now_ns() - SECOND_NS) == (
        (await world.registers.last_round.read()).value.who,
        (await world.registers.last_round.read()).value.at_ns,
    )


# When the next round is.


async def test_a_round_is_planned_for_the_next_safety_scan() -> None:
    """Of live actions alone: a paused action's scan wakes nobody."""
    world = Harness(poll_s=10_000_000.0)
    await world.policy("b", rule(prefix="x", expiration_days=90), rule(prefix="y", abort_days=1))
    began_ns = world.clock.now_ns()
    first = await world.run_round()
    await Operator(world.registers).pause(
        "b", next(n for n in (await world.state()).actions if n.endswith("ABORT_MPU"))
    )
    second = await world.run_round(0.1)

    assert began_ns + round(DAY_S * SECOND_NS) == first.wake_ns  # uploads are scanned daily
    assert began_ns + round(30 * DAY_S * SECOND_NS) == second.wake_ns


async def test_a_bucket_whose_actions_are_all_paused_is_not_walked() -> None:
    """Not when a scan is due, and not when an operator asks for a walk of it."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    operator = Operator(world.registers)
    await operator.pause("b")
    await operator.rebootstrap("b")

    assert () == (await world.run_round(9)).scans


async def test_a_safety_scan_runs_at_its_instant_and_not_before() -> None:
    """To the nanosecond: the round that was planned for it must find it due."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    due_ns = (await world.action("EXPIRATION_DAYS")).next_scan_ns
    await world.clock.advance((due_ns - world.clock.now_ns()) / SECOND_NS - 1e-9)
    before = await world.worker.run_round()
    await world.clock.advance(1e-9)

    assert due_ns == world.clock.now_ns()
    assert () == before.scans
    assert [True] == [scan.complete for scan in (await world.worker.run_round()).scans]


async def test_an_exception_that_stays_due_is_retried_after_a_second() -> None:
    """What could not be drained does not make the worker spin."""
    world, store = failing(poll_s=1000.0)
    await world.policy("b", rule(expiration_days=2))
    await world.run_round()
    world.lake.write("b", "a")
    due_ns = world.clock.now_ns() + round(2 * DAY_S * SECOND_NS)
    await world.exceptions("a")
    planned = await world.run_round(0.1)
    store.looks["a"] = Unavailable("away")
    stuck = await world.run_round(2)

    assert due_ns == planned.wake_ns
    assert world.clock.now_ns() + SECOND_NS == stuck.wake_ns
    assert ["a"] == world.left()


async def test_each_compile_has_its_own_number_and_knows_the_versioned_buckets() -> None:
    """A snapshot says which buckets keep versions: removals mean something else there."""
    world = Harness()
    world.lake.versioned.add("v")
    for bucket in ("b", "v"):
        await world.policy(bucket, rule(expiration_days=1))

    first, second = await world.worker.compile(), await world.worker.compile()

    assert (1, 2) == (first.snapshot_id, second.snapshot_id)
    assert frozenset({"v"}) == second.versioned
    assert {"b": False, "v": True} == {ref.bucket: one.predicate_sensitive for ref, one in second.actions.items()}


async def test_a_drain_ends_with_the_batch_in_which_something_could_not_be_resolved() -> None:
    """What comes behind it waits for the next round: an outage is not met once per exception."""
    world, store = failing(batch=2)
    await world.policy("b", rule(expiration_days=2))
    await world.run_round()
    for key in ("a", "m", "z"):
        world.lake.write("b", key)
        await world.clock.advance(0.1)
    await world.exceptions("a", "m", "z")
    store.looks["m"] = Unavailable("away")
    await world.run_round(2.1)
    assert ["m", "z"] == world.left()
    store.looks.clear()
    await world.run_round(0.01)
    assert [] == world.left()
