"""The demo: a stack of its own, every part's scenario on it, several at a time, and the list of what was proven.

A scenario is lakebed.demo.<name> with TITLE, NEXT and play(stage); one that needs what another leaves says so in AFTER.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType

import msgspec

from lakebed.clock import Clock, SystemClock
from lakebed.demo.numbers import Observer
from lakebed.demo.stage import Counted, Fault, Proven, Record, Stage, Told
from lakebed.embedded.endpoints import child_environment
from lakebed.embedded.stack import Event, Stack
from lakebed.errors import Invalid, LakebedError
from lakebed.ids import Ids
from lakebed.parts import sections
from lakebed.settings import env_name, load

# The order in which they are begun, as lanes get free. What moves first comes first, what takes longest second.
SCENARIOS: tuple[str, ...] = ("agents", "ticks", "store", "queue", "log", "lifecycle", "pipeline")

LANES_MAX = 3  # scenarios at a time: more only wait for each other on two cores
SCENARIO_S = 600.0  # one that takes longer is a finding
TOTALS = "totals"


class Outcome(msgspec.Struct, frozen=True):
    """What the demo proved, and how long each scenario took."""

    proven: tuple[Proven, ...]
    seconds: dict[str, float]
    next: tuple[str, ...]
    counted: tuple[Counted, ...] = ()
    faults: tuple[Fault, ...] = ()
    total_s: float = 0.0
    moving_s: float = 0.0  # when the first bar moved
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
    tell: Callable[[Told], None],
    tell_stack: Callable[[Event], None],
    observer: Observer,
    record: Record,
) -> Outcome:
    """Starts a stack in `folder`, plays the scenarios and ends everything again. One that breaks is a finding."""
    unknown = sorted(set(only) - set(SCENARIOS))
    if unknown:
        raise Invalid(f"no scenario is named {', '.join(unknown)}", hint=f"scenarios: {', '.join(SCENARIOS)}")
    if not scale > 0:
        raise Invalid(f"a scale of {scale:g} leaves nothing to do", hint="--scale 0.2 is quick")
    clock = SystemClock()
    # Scenarios start the Spark they need; two more in the stack's own processes would only take its cores.
    os.environ.setdefault(env_name("pipeline.warm"), "false")
    stack = Stack(folder, clock=clock, ids=Ids(), tell=tell_stack)
    endpoints = await stack.start()
    beside = [asyncio.create_task(stack.watch()), asyncio.create_task(observer.run())]
    stage = Stage(
        folder=stack.folder,
        settings=load(sections(), stack=endpoints.as_settings()),
        environment=child_environment(stack.folder, endpoints.bucket),
        gateway_url=endpoints.gateway,
        scale=scale,
        seed=seed,
        tell=tell,
        observer=observer,
        record=record,
    )
    for url in (endpoints.gateway, endpoints.workers):
        observer.watch(url)
    chosen = {name: import_module(f"lakebed.demo.{name}") for name in SCENARIOS if not only or name in only}
    try:
        seconds = await _play_all(stage, chosen, clock)
        for proven in agree(record.counted):
            stage.of(TOTALS).check(proven.name, proven.held, proven.seen)
    finally:
        for task in beside:
            task.cancel()
        for task in beside:
            with suppress(asyncio.CancelledError, LakebedError):
                await task
        await stack.stop(hurry=True)
    following = dict.fromkeys(command for scenario in chosen.values() for command in scenario.NEXT)
    return Outcome(
        tuple(record.proven),
        seconds,
        tuple(following),
        tuple(record.counted),
        tuple(record.faults),
        round(observer.now_s(), 1),
        round(observer.moving_s(), 1),
    )


async def _play_all(stage: Stage, chosen: dict[str, ModuleType], clock: Clock) -> dict[str, float]:
    """Plays them in lanes; one that waits for another holds no lane meanwhile."""
    lanes = asyncio.Semaphore(LANES_MAX)
    ended = {name: asyncio.Event() for name in chosen}
    seconds: dict[str, float] = {}

    async def one(name: str, scenario: ModuleType) -> None:
        try:
            for other in getattr(scenario, "AFTER", ()):
                if other in ended:
                    await ended[other].wait()
            async with lanes:
                began_s = clock.monotonic_s()
                await _play(stage.of(name), scenario)
                seconds[name] = round(clock.monotonic_s() - began_s, 1)
        finally:
            ended[name].set()

    async with asyncio.TaskGroup() as group:
        for name, scenario in chosen.items():
            group.create_task(one(name, scenario))
    return {name: seconds[name] for name in chosen}


async def _play(stage: Stage, scenario: ModuleType) -> None:
    stage.say("begin", scenario.TITLE)
    try:
        async with asyncio.timeout(SCENARIO_S):
            await scenario.play(stage)
    except LakebedError as error:
        stage.check("the scenario ran to its end", False, f"{error.code}: {error.message}")
    except TimeoutError:
        stage.check("the scenario ran to its end", False, f"it did not end in {SCENARIO_S:.0f} s")
    except Exception as error:  # a mistake in a scenario must not hide what the others prove
        stage.check("the scenario ran to its end", False, f"{type(error).__name__}: {error}"[:300])
    finally:
        await stage.clear()
    stage.say("end", scenario.TITLE)


def agree(counted: Iterable[Counted]) -> list[Proven]:
    """For each thing: every step saw as many of it. Pure."""
    things: dict[str, list[Counted]] = {}
    for each in counted:
        things.setdefault(each.thing, []).append(each)
    return [
        Proven(
            TOTALS,
            f"{thing} add up",
            len({each.count for each in steps}) == 1,
            " → ".join(f"{each.count:,} {each.step}" for each in steps),
        )
        for thing, steps in things.items()
    ]
