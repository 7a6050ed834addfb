"""Workers are kept running: restarted with growing, bounded pauses, watched, and cancelled at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.context import Context, Worker
from lakebed.core.errors import Unavailable
from lakebed.gateway.app import build
from lakebed.wiring.worker_supervisor import (
    DOWN_AFTER,
    PAUSE_BASE_S,
    PAUSE_CAP_S,
    STEADY_S,
    SupervisedWorkers,
    WorkerSupervisor,
)
from support.gateway_fixtures import client_of, context_with

LONGEST_PAUSE_S = PAUSE_BASE_S + PAUSE_CAP_S


class Flaky:
    """Fails at once as often as configured, then runs until cancelled."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.runs = 0
        self.put_down = False

    async def run(self) -> None:
        self.runs += 1
        if self.runs <= self.failures:
            raise Unavailable("no store")
        try:
            await asyncio.Event().wait()
        finally:
            self.put_down = True


def kept(context: Context, run: Callable[[], Awaitable[None]]) -> tuple[WorkerSupervisor, SupervisedWorkers]:
    supervisor = WorkerSupervisor(Worker("flaky", run), context)
    return supervisor, SupervisedWorkers([supervisor])


async def test_a_failed_worker_is_started_again_and_counted() -> None:
    """Each restart is one count, each pause is bounded, and the worker runs in the end."""
    clock = ManualClock()
    context = context_with(clock)
    flaky = Flaky(failures=3)
    supervisor, group = kept(context, flaky.run)

    await group.start()
    await clock.advance(10.0)  # 3 pauses of at most 1, 1.5 and 2.5 seconds

    assert flaky.runs == 4
    assert context.metrics.value("lakebed_worker_restarts_total", worker="flaky") == 3
    assert (await supervisor.health()).status == "degraded"
    await group.stop()


async def test_a_worker_that_keeps_failing_is_down_and_pauses() -> None:
    """It never spins: over an hour it is tried at least once per longest pause, at most once per shortest."""
    clock = ManualClock()
    flaky = Flaky(failures=1_000_000)
    supervisor, group = kept(context_with(clock), flaky.run)

    await group.start()
    await clock.advance(3600.0)

    assert 3600 / LONGEST_PAUSE_S <= flaky.runs <= 1000
    health = await supervisor.health()
    assert health.status == "down"
    assert "no store" in health.detail
    assert flaky.runs >= DOWN_AFTER
    await group.stop()


async def test_a_worker_that_ran_long_enough_is_well_again() -> None:
    """Old failures are forgotten once it runs steadily."""
    clock = ManualClock()
    supervisor, group = kept(context_with(clock), Flaky(failures=1).run)

    await group.start()
    await clock.advance(LONGEST_PAUSE_S + STEADY_S)

    assert (await supervisor.health()).status == "ok"
    await group.stop()


async def test_a_worker_that_returns_is_started_again() -> None:
    """A role runs until it is cancelled; one that ends by itself is not lost."""
    clock = ManualClock()
    runs = 0

    async def ends() -> None:
        nonlocal runs
        runs += 1

    _, group = kept(context_with(clock), ends)
    await group.start()
    await clock.advance(LONGEST_PAUSE_S)

    assert runs >= 2
    await group.stop()


async def test_stopping_cancels_and_waits_for_what_is_put_down() -> None:
    """A cancelled worker may finish its `finally` before the process ends."""
    clock = ManualClock()
    flaky = Flaky(failures=0)
    _, group = kept(context_with(clock), flaky.run)
    await group.start()
    await clock.advance(0.0)

    await group.stop()

    assert flaky.put_down


async def test_one_failing_worker_does_not_stop_another() -> None:
    """Workers live and die alone."""
    clock = ManualClock()
    context = context_with(clock)
    good, bad = Flaky(failures=0), Flaky(failures=10)
    group = SupervisedWorkers(
        [WorkerSupervisor(Worker("good", good.run), context), WorkerSupervisor(Worker("bad", bad.run), context)]
    )

    await group.start()
    await clock.advance(LONGEST_PAUSE_S * 3)

    assert (good.runs, bad.runs > 1) == (1, True)
    await group.stop()


async def test_health_names_each_worker() -> None:
    """The workers' own little app reports how each of them is."""
    clock = ManualClock()
    context = context_with(clock)
    supervisor, group = kept(context, Flaky(failures=1_000).run)
    app = build(context, [group], checks={supervisor.name: supervisor.health})

    async with app.router.lifespan_context(app), client_of(app) as client:
        await clock.advance(0.0)
        answer = await client.get("/healthz")

    assert answer.json()["components"]["flaky"]["status"] == "degraded"
    assert answer.json()["components"]["workers"]["status"] == "ok"


async def test_a_failure_after_a_steady_run_is_the_first_again() -> None:
    """A worker that failed often, then ran for long and failed once more, is degraded and not down."""
    clock = ManualClock()
    fails = asyncio.Event()
    runs = 0

    async def run() -> None:
        nonlocal runs
        runs += 1
        if runs > DOWN_AFTER:
            await fails.wait()
            fails.clear()
        raise Unavailable("no store")

    supervisor, group = kept(context_with(clock), run)
    await group.start()
    await clock.advance(20.0)  # 5 pauses of at most 1, 1.5, 2.5, 4.5 and 8.5 seconds
    assert ("down", DOWN_AFTER + 1) == ((await supervisor.health()).status, runs)

    await clock.advance(STEADY_S)
    fails.set()
    await clock.advance(LONGEST_PAUSE_S)

    health = await supervisor.health()
    assert ("degraded", DOWN_AFTER + 2) == (health.status, runs)
    assert "after 1 failures" in health.detail
    await group.stop()


async def test_a_worker_is_down_after_its_fifth_failure_in_a_row_and_not_before() -> None:
    """Health reports how often it failed, why, and whether it runs again."""
    clock = ManualClock()
    fails = asyncio.Event()

    async def run() -> None:
        await fails.wait()
        fails.clear()
        raise Unavailable("no store")

    supervisor, group = kept(context_with(clock), run)
    await group.start()
    assert "ok" == (await supervisor.health()).status
    seen = []
    for _ in range(DOWN_AFTER):
        fails.set()
        await clock.advance(0.0)
        waiting = await supervisor.health()
        await clock.advance(LONGEST_PAUSE_S)
        running = await supervisor.health()
        assert (waiting.status, waiting.detail.replace("waiting for its restart", "running again")) == (
            running.status, running.detail,
        )  # fmt: skip
        assert waiting.detail.startswith("waiting for its restart after")
        seen.append((running.status, running.detail))

    assert ["degraded"] * (DOWN_AFTER - 1) + ["down"] == [status for status, _ in seen]
    assert [f"running again after {n} failures: no store" for n in range(1, 6)] == [detail for _, detail in seen]
    await group.stop()


async def test_a_worker_runs_steadily_from_sixty_seconds_on() -> None:
    clock = ManualClock()
    context = context_with(clock)
    context.ids.jitter_s = lambda *_, **__: 0.0  # type: ignore[method-assign]
    supervisor, group = kept(context, Flaky(failures=1).run)
    await group.start()
    await clock.advance(PAUSE_BASE_S)

    await clock.advance(STEADY_S - 0.1)
    before = (await supervisor.health()).status
    await clock.advance(0.1)

    assert ("degraded", "ok") == (before, (await supervisor.health()).status)
    await group.stop()


async def test_pauses_grow_with_each_failure_and_are_never_zero() -> None:
    """The number of the failure is given to the backoff, with its base and its cap."""
    clock = ManualClock()
    context = context_with(clock)
    requested: list[tuple[int, float, float]] = []

    def jitter(attempt: int, *, base_s: float, cap_s: float) -> float:
        requested.append((attempt, base_s, cap_s))
        return 0.0

    context.ids.jitter_s = jitter  # type: ignore[method-assign]
    flaky = Flaky(failures=3)
    _, group = kept(context, flaky.run)
    await group.start()
    await clock.advance(0.0)
    assert 1 == flaky.runs
    assert 0 == context.metrics.value("lakebed_worker_restarts_total", worker="flaky")  # not before it is started again
    await clock.advance(PAUSE_BASE_S * 3)

    assert [(number, PAUSE_BASE_S, PAUSE_CAP_S) for number in range(3)] == requested
    assert 4 == flaky.runs
    await group.stop()


@pytest.mark.parametrize(("error", "reported"), [(KeyError("secret"), "KeyError"), (None, "it returned")])
async def test_health_says_the_kind_of_a_failure_that_is_not_ours(error: Exception | None, reported: str) -> None:
    clock = ManualClock()

    async def run() -> None:
        if error is not None:
            raise error

    supervisor, group = kept(context_with(clock), run)
    await group.start()
    await clock.advance(0.0)

    assert f"waiting for its restart after 1 failures: {reported}" == (await supervisor.health()).detail
    await group.stop()


async def test_workers_whose_supervisor_ended_are_named() -> None:
    """A supervisor never ends by itself: when one did, its worker is not restarted."""
    clock = ManualClock()
    supervisors = [WorkerSupervisor(Worker(name, Flaky(0).run), context_with(clock)) for name in ("a", "b")]
    group = SupervisedWorkers(supervisors)
    await group.start()
    await clock.advance(0.0)
    assert "ok" == (await group.health()).status

    group._tasks[1].cancel()
    await clock.advance(0.0)

    health = await group.health()
    assert ("down", "no supervisor for b") == (health.status, health.detail)
    await group.stop()
    assert all(task.done() for task in group._tasks)
