"""The demo: a stack of its own, every part's scenario on it, and the list of what was proven."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import msgspec

from lakebed.clock import SystemClock
from lakebed.demo.stage import Proven, Stage
from lakebed.embedded.endpoints import child_environment
from lakebed.embedded.stack import Event, Stack
from lakebed.errors import Invalid, LakebedError
from lakebed.ids import Ids
from lakebed.parts import sections
from lakebed.settings import env_name, load

# Each is lakebed.demo.<name> with TITLE, NEXT and play(stage); they are played in this order.
SCENARIOS: tuple[str, ...] = ("store", "agents", "queue", "log", "lifecycle", "pipeline", "ticks")


class Outcome(msgspec.Struct, frozen=True):
    """What the demo proved, and how long each scenario took."""

    proven: tuple[Proven, ...]
    seconds: dict[str, float]
    next: tuple[str, ...]

    @property
    def held(self) -> bool:
        return bool(self.proven) and all(each.held for each in self.proven)


async def run(
    folder: Path,
    *,
    scale: float,
    seed: int,
    only: Sequence[str],
    tell: Callable[[str], None],
    tell_stack: Callable[[Event], None],
) -> Outcome:
    """Starts a stack in `folder`, plays the scenarios and ends everything again. One that breaks is a finding."""
    unknown = sorted(set(only) - set(SCENARIOS))
    if unknown:
        raise Invalid(f"no scenario is named {', '.join(unknown)}", hint=f"scenarios: {', '.join(SCENARIOS)}")
    clock = SystemClock()
    # Scenarios start the Spark they need; two more in the stack's own processes would only take its cores.
    os.environ.setdefault(env_name("pipeline.warm"), "false")
    stack = Stack(folder, clock=clock, ids=Ids(), tell=tell_stack)
    endpoints = await stack.start()
    watching = asyncio.create_task(stack.watch())
    stage = Stage(
        folder=stack.folder,
        settings=load(sections(), stack=endpoints.as_settings()),
        environment=child_environment(stack.folder, endpoints.bucket),
        gateway_url=endpoints.gateway,
        scale=scale,
        seed=seed,
        tell=lambda line: tell(f"  {line}"),
    )
    seconds: dict[str, float] = {}
    following: list[str] = []
    try:
        for name in [name for name in SCENARIOS if not only or name in only]:
            scenario = import_module(f"lakebed.demo.{name}")
            stage.scenario = name
            tell(f"\n{scenario.TITLE}")
            began = clock.monotonic_s()
            try:
                await scenario.play(stage)
            except LakebedError as error:
                stage.check("the scenario ran to its end", False, f"{error.code}: {error.message}")
            seconds[name] = round(clock.monotonic_s() - began, 1)
            following += scenario.NEXT
    finally:
        watching.cancel()
        await stage.clear()
        await stack.stop(hurry=True)
    return Outcome(tuple(stage.proven), seconds, tuple(following))
