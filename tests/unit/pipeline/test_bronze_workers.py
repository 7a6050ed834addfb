"""Bronze runs by itself only where the settings report it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.context import Context
from lakebed.core.errors import Invalid, Unavailable
from lakebed.core.feed import Limit
from lakebed.core.settings import load
from lakebed.pipeline.settings import BronzeSettings
from lakebed.pipeline.workers import PAUSE_S, maintenance_workers, pipeline_loops
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


def test_settings_are_limits_of_a_step() -> None:
    """What a commit takes is bounded three ways, and none of the bounds can be nothing."""
    assert Limit(5, 6, 7) == BronzeSettings(step_objects=5, step_rows=6, step_bytes=7).limit
    with pytest.raises(Invalid, match="step_rows"):
        BronzeSettings.of({"step_rows": 0})
