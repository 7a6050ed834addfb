"""The worlds there are. A part adds a row here and a script in `sim/<part>.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import cast

import msgspec

from lakebed.errors import Invalid
from lakebed.sim.world import STEPS_MAX, World

Script = Callable[[World], Awaitable[None]]


class Row(msgspec.Struct, frozen=True):
    """A world: `script` names an async function of one World, as `module:name`, imported only when played."""

    name: str
    about: str
    script: str


WORLDS: tuple[Row, ...] = (
    Row("register", "many processes change one register", "lakebed.sim.store:register"),
    Row("lease", "many processes want one lease", "lakebed.sim.store:lease"),
    Row("log", "brokers, compactors, vacuum and operator on a few partitions", "lakebed.sim.log:log"),
)


class Played(msgspec.Struct, frozen=True):
    """What became of one seed. `digest` is the whole trace in one number."""

    world: str
    seed: int
    steps: int
    virtual_s: float
    digest: str
    cut: bool


def find(name: str) -> Script:
    for row in WORLDS:
        if row.name == name:
            module, _, function = row.script.partition(":")
            return cast(Script, getattr(import_module(module), function))
    raise Invalid(f"there is no world {name!r}", hint=f"one of {', '.join(row.name for row in WORLDS)}")


def play(name: str, seed: int, steps: int = STEPS_MAX, *, script: Script | None = None) -> Played:
    """Plays one seed of a world. Raises InvariantBroken."""
    world = World(seed, name=name, steps=steps)
    world.run(script or find(name))
    return Played(name, seed, world.steps, round(world.loop.time(), 3), world.digest(), world.cut)
