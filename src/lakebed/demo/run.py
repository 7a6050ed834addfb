"""The demo: starts a stack, runs every part's scenario on it, several at a time, and collects the check results.

A scenario is a part's `demo` module with TITLE, NEXT and play(ScenarioContext); one that needs another's results names
it in AFTER.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import msgspec

from lakebed.core.clock import Clock, SystemClock
from lakebed.core.errors import Invalid, LakebedError
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.core.settings import env_name, load
from lakebed.demo.metrics import Observer
from lakebed.demo.scenario import CheckResult, DemoLog, Fault, ProgressLine, ScenarioContext, StepCount
from lakebed.embedded.endpoints import child_environment
from lakebed.embedded.stack import Stack, StackEvent
from lakebed.wiring.parts import PARTS, resolve, sections

# Scenarios start in the order of the table as slots get free, except these: first data first, then the longest.
FIRST = ("agent", "ticks")
SCENARIOS: dict[str, str] = {
    part.name: part.demo for part in sorted(PARTS, key=lambda part: part.name not in FIRST) if part.demo
}

PARALLEL_MAX = 3  # scenarios at a time: more only wait for each other on two cores
SCENARIO_S = 600.0  # a scenario that takes longer fails
TOTALS = "totals"
DISPATCH_S = 24 * 3600.0  # no demo takes that long


class DemoResult(msgspec.Struct, frozen=True):
    """The check results of a demo run, and how long each scenario took."""

    proven: tuple[CheckResult, ...]
    seconds: dict[str, float]
    next: tuple[str, ...]
    counted: tuple[StepCount, ...] = ()
    faults: tuple[Fault, ...] = ()
    total_s: float = 0.0
    moving_s: float = 0.0  # when the first request to the store was counted
    report: str = ""

    @property
    def held(self) -> bool:
        return bool(self.proven) and all(each.held for each in self.proven)


async def run(
    folder: Path,
    *,
    scale: float,
    seed: int,
    only: Sequence[str],
    report: Callable[[ProgressLine], None],
    report_stack: Callable[[StackEvent], None],
    observer: Observer,
    log: DemoLog,
) -> DemoResult:
    """Starts a stack in `folder`, runs the scenarios and stops everything. A scenario that fails is a failed check."""
    unknown = sorted(set(only) - set(SCENARIOS))
    if unknown:
        raise Invalid(f"no scenario is named {', '.join(unknown)}", hint=f"scenarios: {', '.join(SCENARIOS)}")
    if not scale > 0:
        raise Invalid(f"a scale of {scale:g} leaves nothing to do", hint="use a positive number: --scale 0.2 is quick")
    clock = SystemClock()
    # Scenarios start the Spark they need; two more in the stack's own processes would only take its cores.
    os.environ.setdefault(env_name("pipeline.warm"), "false")
    # The scenario dispatches its ticks itself: the stack's own worker looks once, when there are none, and not again.
    os.environ.setdefault(env_name("ticks.poll_s"), str(DISPATCH_S))
    stack = Stack(folder, runtime=Runtime(clock, Ids(), Metrics()), report=report_stack)
    endpoints = await stack.start()
    beside = [asyncio.create_task(stack.watch()), asyncio.create_task(observer.run())]
    stage = ScenarioContext(
        folder=stack.folder,
        settings=load(sections(), stack=endpoints.as_settings()),
        environment=child_environment(stack.folder, endpoints.bucket),
        gateway_url=endpoints.gateway,
        scale=scale,
        seed=seed,
        report=report,
        observer=observer,
        log=log,
    )
    for url in (endpoints.gateway, endpoints.workers):
        observer.watch(url)
    chosen = {name: resolve(place) for name, place in SCENARIOS.items() if not only or name in only}
    try:
        seconds = await _play_all(stage, chosen, clock)
        for proven in agree(log.counted):
            stage.of(TOTALS).check(proven.name, proven.held, proven.seen)
    finally:
        for task in beside:
            task.cancel()
        for task in beside:
            with suppress(asyncio.CancelledError, LakebedError):
                await task
        await stack.stop(hurry=True)
    following = dict.fromkeys(command for scenario in chosen.values() for command in scenario.NEXT)
    return DemoResult(
        tuple(log.proven),
        seconds,
        tuple(following),
        tuple(log.counted),
        tuple(log.faults),
        round(observer.now_s(), 1),
        round(observer.moving_s(), 1),
    )


async def _play_all(stage: ScenarioContext, chosen: dict[str, ModuleType], clock: Clock) -> dict[str, float]:
    """Runs them in parallel; a scenario that waits for another takes no slot."""
    slots = asyncio.Semaphore(PARALLEL_MAX)
    ended = {name: asyncio.Event() for name in chosen}
    seconds: dict[str, float] = {}

    async def one(name: str, scenario: ModuleType) -> None:
        try:
            for other in getattr(scenario, "AFTER", ()):
                if other in ended:
                    await ended[other].wait()
            async with slots:
                began_s = clock.monotonic_s()
                await _play(stage.of(name), scenario)
                seconds[name] = round(clock.monotonic_s() - began_s, 1)
        finally:
            ended[name].set()

    async with asyncio.TaskGroup() as group:
        for name, scenario in chosen.items():
            group.create_task(one(name, scenario))
    return {name: seconds[name] for name in chosen}


async def _play(stage: ScenarioContext, scenario: ModuleType) -> None:
    stage.emit("begin", scenario.TITLE)
    try:
        async with asyncio.timeout(SCENARIO_S):
            await scenario.play(stage)
    except LakebedError as error:
        stage.check("the scenario ran to its end", False, f"{error.code}: {error.message}")
    except TimeoutError:
        stage.check("the scenario ran to its end", False, f"it did not end in {SCENARIO_S:.0f} s")
    except Exception as error:  # a bug in one scenario must not hide the results of the others
        stage.check("the scenario ran to its end", False, f"{type(error).__name__}: {error}"[:300])
    finally:
        await stage.clear()
    stage.emit("end", scenario.TITLE)


def agree(counted: Iterable[StepCount]) -> list[CheckResult]:
    """For each thing: whether every step counted the same number. Pure."""
    things: dict[str, list[StepCount]] = {}
    for each in counted:
        things.setdefault(each.thing, []).append(each)
    return [
        CheckResult(
            TOTALS,
            f"{thing} add up",
            len({each.count for each in steps}) == 1,
            " → ".join(f"{each.count:,} {each.step}" for each in steps),
        )
        for thing, steps in things.items()
    ]
