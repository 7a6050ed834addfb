"""Workers are kept running: restarted with growing, bounded pauses, watched, and cancelled at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from conftest_gateway import client_of, context_with

from lakebed.clock import ManualClock
from lakebed.context import Context, Worker
from lakebed.errors import Unavailable
from lakebed.gateway.app import build
from lakebed.gateway.work import DOWN_AFTER, PAUSE_BASE_S, PAUSE_CAP_S, STEADY_S, Crew, Foreman

LONGEST_PAUSE_S = PAUSE_BASE_S + PAUSE_CAP_S


class Flaky:
    """Fails at once as often as told, then runs until cancelled."""

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


def kept(context: Context, run: Callable[[], Awaitable[None]]) -> tuple[Foreman, Crew]:
    foreman = Foreman(Worker("flaky", run), context)
    return foreman, Crew([foreman])


async def test_a_failed_worker_is_started_again_and_counted() -> None:
    """Each restart is one count, each pause is bounded, and the worker runs in the end."""
    clock = ManualClock()
    context = context_with(clock)
    flaky = Flaky(failures=3)
    foreman, crew = kept(context, flaky.run)

    await crew.start()
    await clock.advance(10.0)  # 3 pauses of at most 1, 1.5 and 2.5 seconds

    assert flaky.runs == 4
    assert context.metrics.value("lakebed_worker_restarts_total", worker="flaky") == 3
    assert (await foreman.health()).status == "degraded"
    await crew.stop()


async def test_a_worker_that_keeps_failing_is_down_and_pauses() -> None:
    """It never spins: over an hour it is tried at least once per longest pause, at most once per shortest."""
    clock = ManualClock()
    flaky = Flaky(failures=1_000_000)
    foreman, crew = kept(context_with(clock), flaky.run)

    await crew.start()
    await clock.advance(3600.0)

    assert 3600 / LONGEST_PAUSE_S <= flaky.runs <= 1000
    health = await foreman.health()
    assert health.status == "down"
    assert "no store" in health.detail
    assert flaky.runs >= DOWN_AFTER
    await crew.stop()


async def test_a_worker_that_ran_long_enough_is_well_again() -> None:
    """Old failures are forgotten once it runs steadily."""
    clock = ManualClock()
    foreman, crew = kept(context_with(clock), Flaky(failures=1).run)

    await crew.start()
    await clock.advance(LONGEST_PAUSE_S + STEADY_S)

    assert (await foreman.health()).status == "ok"
    await crew.stop()


async def test_a_worker_that_returns_is_started_again() -> None:
    """A role runs until it is cancelled; one that ends by itself is not lost."""
    clock = ManualClock()
    runs = 0

    async def ends() -> None:
        nonlocal runs
        runs += 1

    _, crew = kept(context_with(clock), ends)
    await crew.start()
    await clock.advance(LONGEST_PAUSE_S)

    assert runs >= 2
    await crew.stop()


async def test_stopping_cancels_and_waits_for_what_is_put_down() -> None:
    """A cancelled worker may finish its `finally` before the process ends."""
    clock = ManualClock()
    flaky = Flaky(failures=0)
    _, crew = kept(context_with(clock), flaky.run)
    await crew.start()
    await clock.advance(0.0)

    await crew.stop()

    assert flaky.put_down


async def test_one_failing_worker_does_not_stop_another() -> None:
    """Workers live and die alone."""
    clock = ManualClock()
    context = context_with(clock)
    good, bad = Flaky(failures=0), Flaky(failures=10)
    crew = Crew([Foreman(Worker("good", good.run), context), Foreman(Worker("bad", bad.run), context)])

    await crew.start()
    await clock.advance(LONGEST_PAUSE_S * 3)

    assert (good.runs, bad.runs > 1) == (1, True)
    await crew.stop()


async def test_health_names_each_worker() -> None:
    """The workers' own little app tells how each of them is."""
    clock = ManualClock()
    context = context_with(clock)
    foreman, crew = kept(context, Flaky(failures=1_000).run)
    app = build(context, [crew], checks={foreman.name: foreman.health})

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

    foreman, crew = kept(context_with(clock), run)
    await crew.start()
    await clock.advance(20.0)  # 5 pauses of at most 1, 1.5, 2.5, 4.5 and 8.5 seconds
    assert ("down", DOWN_AFTER + 1) == ((await foreman.health()).status, runs)

    await clock.advance(STEADY_S)
    fails.set()
    await clock.advance(LONGEST_PAUSE_S)

    health = await foreman.health()
    assert ("degraded", DOWN_AFTER + 2) == (health.status, runs)
    assert "after 1 failures" in health.detail
    await crew.stop()
