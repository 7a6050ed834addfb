"""What a worker does between rounds: it sleeps until something is due, is woken, retries, folds, keeps its lease."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from lakebed.core.clock import settle
from lakebed.core.errors import Unavailable
from lakebed.lifecycle import reader
from lakebed.lifecycle.enforcer import NAP_S, RETRY_S
from lakebed.lifecycle.leases import OngoingWork
from lakebed.lifecycle.model import ObjectIdentity
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.pending import PendingLog, PendingSegment
from lakebed.lifecycle.state import PendingItem
from lakebed.store.lease import HeldByAnother
from support.lifecycle_harness import DAY_S, Harness, failing
from support.lifecycle_makers import rule

SECOND_NS = 10**9


def _rounds(world: Harness) -> list[float]:
    """Seconds from now at which the worker begins a round."""
    began_s, at, run_round = world.clock.monotonic_s(), list[float](), world.worker._read_round

    async def noted() -> int:
        at.append(world.clock.monotonic_s() - began_s)
        return await run_round()

    world.worker._read_round = noted  # type: ignore[method-assign]
    return at


async def _run(world: Harness, seconds: int) -> None:
    running = asyncio.create_task(world.worker.run())
    await settle()
    for _ in range(seconds):
        await world.clock.advance(1.0)
        await settle()
    running.cancel()


async def test_between_rounds_the_worker_sleeps_until_the_next_poll_or_the_next_due_instant() -> None:
    """Polls every 40 s; an object that is due in between has a round at its own instant."""
    world = Harness(poll_s=40.0)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "a")  # due after 100 s
    rounds = _rounds(world)

    await _run(world, 125)

    assert [0, 40, 80, 100] == rounds[:4]
    assert [] == world.left()


async def test_a_worker_at_rest_is_woken_once_by_each_wish() -> None:
    """Within a nap, and not again and again by the same wish; a worker that nobody wakes sleeps on."""
    world = Harness(poll_s=1000.0)
    await world.policy("b", rule(expiration_days=90))
    await world.run_round()
    rounds = _rounds(world)
    running = asyncio.create_task(world.worker.run())
    await settle()
    for second in range(100):
        if second in (22, 61):
            await Operator(world.registers).wake("me")
        await world.clock.advance(1.0)
        await settle()
    running.cancel()

    assert 3 == len(rounds)
    assert 22 < rounds[1] <= 22 + NAP_S and 61 < rounds[2] <= 61 + NAP_S


async def test_a_round_that_could_not_go_on_is_repeated_soon() -> None:
    """A store that is away is asked again after a minute, not at the next poll an hour later."""
    world, store = failing(poll_s=3600.0)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "a")
    store.looks["a"] = Unavailable("away")

    stuck = await world.run_round(1.01)
    assert world.clock.now_ns() + round(RETRY_S * 1e9) == stuck.wake_ns
    store.looks.clear()
    good = await world.run_round(1.0)

    assert [] == world.left()
    assert good.wake_ns > world.clock.now_ns() + round(RETRY_S * 1e9)


async def test_the_state_of_a_removed_rule_is_kept_for_the_grace_and_not_longer() -> None:
    """Just before its end it is there, with the time it went; at its end it is forgotten; the other rule's stays."""
    world = Harness(grace_s=50.0)
    keep = rule(prefix="kept/", expiration_days=1)
    await world.policy("b", rule(prefix="gone/", expiration_days=1), keep)
    await world.run_round()
    await world.policy("b", keep)
    gone_ns = world.clock.now_ns()
    await world.run_round()
    await world.clock.advance(49.0)
    await world.worker.run_round()
    before = (await world.state()).actions
    await world.clock.advance(1.0)
    await world.worker.run_round()
    after = (await world.state()).actions

    assert [0, gone_ns] == sorted(state.gone_since_ns for state in before.values())
    assert [name for name, state in before.items() if not state.gone_since_ns] == list(after)


async def test_the_ledger_is_moved_into_its_table_at_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 30 s, counted from the worker's start; 0 is never."""
    for fold_s, expected in ((30.0, [30, 60, 90]), (0.0, [])):
        world = Harness(fold_s=fold_s)
        began_s, moved = world.clock.monotonic_s(), list[float]()

        async def move(world: Harness = world, began_s: float = began_s, moved: list[float] = moved) -> None:
            moved.append(world.clock.monotonic_s() - began_s)

        monkeypatch.setattr(world.worker._mover, "run", move)
        for _ in range(10):
            await world.clock.advance(10.0)
            await world.worker.run_round()
        assert expected == moved


async def test_a_lease_is_renewed_while_its_holder_works() -> None:
    """Work that goes on for longer than the lease keeps it; another worker is refused until it ends."""
    world = Harness(lease_s=30.0)
    other = world.new_worker(world.lake)
    other._node = "other"
    async with AsyncExitStack() as stack:
        alive = await world.worker._hold("own/lease", stack)
        writes = []
        for _ in range(8):
            await world.clock.advance(9.0)
            before = (await world.store.head("own/lease")).etag
            await alive()
            writes.append((await world.store.head("own/lease")).etag != before)
            async with AsyncExitStack() as refused:
                with pytest.raises(HeldByAnother):
                    await other._hold("own/lease", refused)
    assert [False, True] * 4 == writes  # when a third of it is over, not at each batch
    async with AsyncExitStack() as stack:
        await other._hold("own/lease", stack)


async def test_a_later_round_of_another_worker_stays_on_record() -> None:
    """A worker whose clock is behind does not take the record back."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    noted = (await world.registers.last_round.read()).value
    later = type(noted)(at_ns=noted.at_ns + 3600 * SECOND_NS, who="other")
    await world.registers.last_round.change(lambda _: (later, None))

    await world.run_round(20 / DAY_S)

    assert later == (await world.registers.last_round.read()).value


async def test_a_sweep_looks_through_only_so_many_events_for_the_next_due_instant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five events that no rule wants, one second apart: the third is taken for the next, and the sweep ends there."""
    monkeypatch.setattr(reader, "PEEK_EVENTS", 3)
    world = Harness(poll_s=10_000.0)
    await world.policy("b", rule(prefix="x/", expiration_days=1))
    await world.run_round()
    await world.run_round(1.5)
    began_ns = world.clock.now_ns()
    for number in range(5):
        await world.clock.advance(1.0)
        world.lake.write("b", f"other/{number}")

    world.worker = world.new_worker(world.lake)
    (sweep,) = (await world.run_round(0.1)).sweeps

    assert began_ns + round((3 + DAY_S) * SECOND_NS) == sweep.next_due_ns


def test_an_exception_is_due_at_its_instant_and_the_earliest_comes_first() -> None:
    """The worker sleeps until the earliest: at that very nanosecond it must be found."""
    dues = (("c", 9), ("b", 7), ("a", 7))
    items = [PendingItem(name, "", at_ns, ObjectIdentity(1, 1)) for name, at_ns in dues]
    log = PendingLog().after(PendingSegment(upserts=tuple(items)), 1)

    assert 7 == log.next_due_ns
    assert [[], ["a", "b"], ["a", "b", "c"]] == [[item.key for item in log.due(at_ns)] for at_ns in (6, 7, 9)]
    assert 9 == log.after(PendingSegment(tombstones=tuple(item.id for item in items[1:])), 2).next_due_ns


async def test_work_in_progress_is_not_started_twice_and_a_fault_is_raised() -> None:
    """An error that is expected is left to the next start; any other ends the loop, as one of its own would."""
    work, gate, started = OngoingWork(2), asyncio.Event(), list[str]()

    def piece(name: str, error: Exception | None = None) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            started.append(name)
            if error is not None:
                raise error
            await gate.wait()

        return run

    async def now() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def never() -> None:
        await asyncio.Event().wait()

    work.start({"long": piece("long"), "down": piece("down", Unavailable("down"))})
    await work.wait(now())
    work.start({"long": piece("long"), "down": piece("down", Unavailable("down"))})
    await work.wait(now())
    assert ["long", "down", "down"] == started
    work.start({"fault": piece("fault", RuntimeError("a bug"))})
    with pytest.raises(RuntimeError, match="a bug"):
        await work.wait(never())
    gate.set()
    await work.wait(never())  # nothing is in progress any more
    work.start({"long": piece("again")})
    (task,) = work.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await work.wait(never())
