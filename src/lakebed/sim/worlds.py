"""The worlds there are. A part adds a row here and a script in `sim/<part>.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import cast

import msgspec

from lakebed.errors import Invalid
from lakebed.sim.world import STEPS_MAX, World, line

Script = Callable[[World], Awaitable[None]]


class Row(msgspec.Struct, frozen=True):
    """A world: `script` names an async function of one World, as `module:name`, imported only when played."""

    name: str
    about: str
    script: str


WORLDS: tuple[Row, ...] = (
    Row("register", "many processes change one register", "lakebed.sim.store:register"),
    Row("batches", "agents, collectors, reconcilers and sweepers on one bucket", "lakebed.sim.batches:batches"),
    Row("agent", "an agent killed again and again before failing collectors", "lakebed.sim.agent:agent"),
    Row("lease", "many processes want one lease", "lakebed.sim.store:lease"),
    Row("queue", "ingestors and collectors on one queue, with poison, sweeps and fail-over", "lakebed.sim.queue:queue"),
    Row("log", "brokers, compactors, vacuum and operator on a few partitions", "lakebed.sim.log:log"),
    Row("boot", "many processes start on a fresh bucket", "lakebed.sim.store:boot"),
    Row("ticks", "replicas and dispatchers bring the same ticks to silver", "lakebed.sim.ticks:ticks"),
    Row("lifecycle", "workers expire objects under a changing policy", "lakebed.sim.lifecycle:lifecycle"),
    Row("versions", "workers expire versions, kept and suspended", "lakebed.sim.lifecycle:versions"),
)


class Played(msgspec.Struct, frozen=True):
    """What became of one seed. `digest` is the whole trace in one number."""

    world: str
    seed: int
    steps: int
    virtual_s: float
    digest: str
    cut: bool
    trace: tuple[str, ...] = ()


def find(name: str) -> Script:
    for row in WORLDS:
        if row.name == name:
            module, _, function = row.script.partition(":")
            return cast(Script, getattr(import_module(module), function))
    raise Invalid(f"there is no world {name!r}", hint=f"one of {', '.join(row.name for row in WORLDS)}")


def play(name: str, seed: int, steps: int = STEPS_MAX, *, traced: bool = False) -> Played:
    """Plays one seed of a world; `traced` keeps every line of what happened. Raises InvariantBroken."""
    world = World(seed, name=name, steps=steps)
    world.run(find(name))
    trace = tuple(map(line, world.trace)) if traced else ()
    return Played(name, seed, world.steps, round(world.loop.time(), 3), world.digest(), world.cut, trace)


def deaths(life: Callable[[int], bool], *, awaits_max: int = 200) -> int:
    """Plays `life(k)`, in which a process dies at its k-th await at the store, for k = 1, 2, … until it outlives k.

    `life` gives back whether it died. Returns how many deaths there were; a life of more awaits is Invalid.
    """
    for number in range(1, awaits_max + 1):
        if not life(number):
            return number - 1
    raise Invalid(f"this life has more than {awaits_max} awaits at the store", hint="make it shorter")
