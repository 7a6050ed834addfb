"""Bronze runs by itself only where the settings report it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.context import Context
from lakebed.core.errors import Corrupt, Invalid, Unavailable
from lakebed.core.feed import Limit
from lakebed.core.settings import load
from lakebed.pipeline.bronze import ingestion
from lakebed.pipeline.settings import BronzeSettings
from lakebed.pipeline.tables.maintenance import TableMaintenance
from lakebed.pipeline.workers import (
    FIRST_UPKEEP_S,
    LOADS_MAX,
    PAUSE_S,
    STEADY_S,
    maintenance_workers,
    pipeline_loops,
    repeated,
    retention_workers,
)
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections, workers


def context_of(**values: object) -> Context:
    stack = {"store.url": "memory:", **{f"bronze.{name}": value for name, value in values.items()}}
    return make_context(load(sections(), stack=stack), role="test")


async def nothing() -> Any:
    raise AssertionError("no pipeline was asked for")


def test_runs_are_asked_for_and_upkeep_is_not() -> None:
    """By default tables are kept and nothing is brought in; both can be switched."""
    assert ["bronze-upkeep"] == [worker.name for worker in maintenance_workers(context_of())]
    assert [] == maintenance_workers(context_of(upkeep_every_s=0))
    assert (0, 1) == tuple(len(pipeline_loops(context_of(run_every_s=every), nothing)) for every in (0, 30))


@pytest.mark.parametrize(("gold", "every_s", "loops"), [("", 15, 0), ("models", 15, 1), ("models", 0, 0)])
def test_models_are_looked_after_where_there_are_any_and_an_interval_is_set(
    gold: str, every_s: float, loops: int
) -> None:
    """A worker without models, or told to leave them, plans nothing."""
    stack = {"store.url": "memory:", "pipeline.gold": gold, "pipeline.models_every_s": every_s}
    context = make_context(load(sections(), stack=stack), role="test")

    assert loops == len(pipeline_loops(context, nothing))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["silver"], {"pipeline"}),
        (["ticks"], {"ticks-sweeper", "ticks-auditor", "pipeline"}),
        (["bronze"], {"bronze-upkeep", "pipeline"}),
        (["pipeline"], {"bronze-retention", "pipeline"}),
        (
            ["ticks", "silver", "bronze", "pipeline"],
            {"ticks-sweeper", "ticks-auditor", "bronze-upkeep", "bronze-retention", "pipeline"},
        ),
    ],
)
def test_one_worker_brings_every_source_to_gold_whichever_part_is_asked_for(
    parts: list[str], expected: set[str]
) -> None:
    """A process that runs ticks dispatches them; however many parts name the worker, it runs once."""
    found = [worker.name for worker in workers(context_of(), parts)]

    assert (len(expected), expected) == (len(found), set(found))


async def test_a_load_that_fails_is_tried_again_and_stops_nothing_beside_it(manual_clock: ManualClock) -> None:
    """The pipeline could not be opened twice, for reasons of its own and of ours; then a load runs."""
    tried: list[float] = []
    context = msgspec.structs.replace(context_of(run_every_s=30), clock=manual_clock)
    (loop,) = pipeline_loops(context, lambda: opened())

    async def opened() -> Any:
        tried.append(manual_clock.monotonic_s())
        if len(tried) == 1:
            raise Unavailable("the bucket is away")
        raise ValueError("a mistake")

    running = asyncio.create_task(loop())
    while len(tried) < 3:
        await manual_clock.advance(0.25)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running

    assert all(later - earlier >= PAUSE_S for earlier, later in pairwise(tried))


async def test_a_pause_grows_with_failures_in_a_row_and_begins_anew_after_a_steady_time(
    manual_clock: ManualClock,
) -> None:
    """A loop that ran for a minute before it failed is no loop that fails at once."""
    lived_s, counted = iter((0, 0, 1, STEADY_S, 0)), list[int]()

    async def loop() -> None:
        await manual_clock.sleep(next(lived_s))
        raise Unavailable("the bucket is away")

    def jitter_s(failures: int, *, base_s: float, cap_s: float) -> float:
        counted.append(failures)
        return 0.0

    context: Any = SimpleNamespace(clock=manual_clock, ids=SimpleNamespace(jitter_s=jitter_s))
    running = asyncio.create_task(repeated(context, "it failed", loop))
    async with asyncio.timeout(10):
        while len(counted) < 5:
            await manual_clock.advance(0.5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert [1, 2, 3, 0, 1] == counted


async def test_no_source_waits_for_the_load_of_a_slower_one(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One topic has a backlog of hours, and one fails each time: samples are loaded at their interval."""
    released, ran = threading.Event(), list[str]()

    class Loads:
        sources, refined = ("topic.slow", "topic.bad", "batches.samples"), None

        def __init__(self, context: Any, runner: Any) -> None: ...

        def run(self, *, only: list[str]) -> list[Any]:
            ran.extend(only)
            if only == ["topic.slow"]:
                released.wait(60)
            if only == ["topic.bad"]:
                raise Corrupt("a slice is damaged")
            return []

    async def opened() -> Any: ...

    monkeypatch.setattr(ingestion, "Ingestion", Loads)
    context = msgspec.structs.replace(context_of(run_every_s=30), clock=manual_clock)
    (loop,) = pipeline_loops(context, opened)
    running = asyncio.create_task(loop())
    try:
        async with asyncio.timeout(20):
            while ran.count("batches.samples") < 3 or ran.count("topic.bad") < 2:
                await manual_clock.advance(1.0)
                await asyncio.sleep(0.001)
    finally:
        released.set()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    assert 1 == ran.count("topic.slow")


async def test_a_source_that_pauses_keeps_no_other_from_its_turn(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More sources than are loaded at once: each is loaded before the first interval is over."""
    ran, at_once, most = list[str](), set[str](), list[int]()

    class Loads:
        sources, refined = tuple(f"topic.t{n}" for n in range(LOADS_MAX + 2)), None

        def __init__(self, context: Any, runner: Any) -> None: ...

        def run(self, *, only: list[str]) -> list[Any]:
            at_once.update(only)
            most.append(len(at_once))
            threading.Event().wait(0.02)
            at_once.difference_update(only)
            ran.extend(only)
            return []

    async def opened() -> Any: ...

    monkeypatch.setattr(ingestion, "Ingestion", Loads)
    context = msgspec.structs.replace(context_of(run_every_s=30), clock=manual_clock)
    (loop,) = pipeline_loops(context, opened)
    running = asyncio.create_task(loop())
    try:
        async with asyncio.timeout(10):
            while len(ran) < LOADS_MAX + 2:
                await asyncio.sleep(0.001)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    assert sorted(Loads.sources) == sorted(ran)
    assert max(most) <= LOADS_MAX


@pytest.mark.parametrize("made", [retention_workers, maintenance_workers])
async def test_upkeep_begins_soon_after_a_start_and_then_keeps_its_interval(
    made: Any, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is deployed every day would never come to what is done once a day."""
    ran: list[float] = []

    def noted(self: Any) -> list[Any]:
        ran.append(manual_clock.monotonic_s())
        return []

    async def none(*given: Any) -> dict[str, int]:
        return {}

    monkeypatch.setattr(TableMaintenance, "expire", noted)
    monkeypatch.setattr(TableMaintenance, "compact", noted)
    monkeypatch.setattr(TableMaintenance, "vacuum", lambda self: [])
    monkeypatch.setattr("lakebed.pipeline.runner.vacuum_tables", none)
    interval = {"bronze.upkeep_every_s": 7200, "pipeline.retention_interval_s": 7200}
    settings = load(sections(), stack={"store.url": "memory:", **interval})
    context = msgspec.structs.replace(make_context(settings, role="test"), clock=manual_clock)
    began = manual_clock.monotonic_s()
    running = asyncio.create_task(made(context)[0].run())
    try:
        async with asyncio.timeout(20):
            while len(ran) < 2:
                await manual_clock.advance(60.0)
                await asyncio.sleep(0.001)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    assert FIRST_UPKEEP_S <= ran[0] - began < FIRST_UPKEEP_S + 600
    assert 7200 <= ran[1] - ran[0] < 7800


def test_settings_are_limits_of_a_step() -> None:
    """What a commit takes is bounded three ways, and none of the bounds can be nothing."""
    assert Limit(5, 6, 7) == BronzeSettings(step_objects=5, step_rows=6, step_bytes=7).limit
    with pytest.raises(Invalid, match="step_rows"):
        BronzeSettings.of({"step_rows": 0})
