"""`lakebed sim`: finds a world in the table of parts and runs seeds of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec

from lakebed.cli import exits
from lakebed.cli.output import Output, emit, say
from lakebed.core import logs
from lakebed.core.clock import SystemClock
from lakebed.core.errors import Invalid
from lakebed.sim.world import STEPS_MAX, InvariantBroken, World, line
from lakebed.wiring.part import SimWorld
from lakebed.wiring.parts import PARTS, resolve

Script = Callable[[World], Awaitable[None]]


WORLDS: tuple[SimWorld, ...] = tuple(world for part in PARTS for world in part.worlds)


class SeedResult(msgspec.Struct, frozen=True):
    """The result of one seed. `digest` is a hash of the whole trace."""

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
            return cast(Script, resolve(row.script))
    raise Invalid(f"there is no world {name!r}", hint=f"one of {', '.join(row.name for row in WORLDS)}")


def play(name: str, seed: int, steps: int = STEPS_MAX, *, traced: bool = False) -> SeedResult:
    """Runs one seed of a world; `traced` keeps every line of the trace. Raises InvariantBroken."""
    world = World(seed, name=name, steps=steps)
    world.run(find(name))
    trace = tuple(map(line, world.trace)) if traced else ()
    return SeedResult(name, seed, world.steps, round(world.loop.time(), 3), world.digest(), world.cut, trace)


def deaths(life: Callable[[int], bool], *, awaits_max: int = 200) -> int:
    """Runs `life(k)`, in which a process dies at its k-th await at the store, for k = 1, 2, … until it does not die.

    `life` returns whether it died. Returns the number of deaths; raises Invalid after `awaits_max`.
    """
    for number in range(1, awaits_max + 1):
        if not life(number):
            return number - 1
    raise Invalid(f"this life has more than {awaits_max} awaits at the store", hint="make it shorter")


COUNT_MAX = 1_000_000


def sim(
    *,
    seed: int = 0,
    steps: int = STEPS_MAX,
    world: str = "all",
    count: int = 1,
    trace: bool = False,
    output: Output = "table",
) -> int:
    """Run seeded simulations; the same seed gives the same trace. A broken invariant prints how to replay it.

    Parameters
    ----------
    seed
        the first seed.
    steps
        store operations after which a world is stopped.
    world
        the world to run, or `all`.
    count
        how many seeds to run, in order.
    trace
        print every event, also of seeds that held.
    """
    if not 1 <= count <= COUNT_MAX or steps < 1:
        raise Invalid(f"--count is 1 to {COUNT_MAX} and --steps at least 1")
    logs.configure("critical")  # faults in a world are intended; its trace shows them
    rows: list[dict[str, Any]] = []
    for name in [row.name for row in WORLDS] if world == "all" else [world]:
        row, broken = _play(name, seed, steps, count, trace)
        rows.append(row)
        if broken is not None:
            say(str(broken))
    emit(rows, output)
    return exits.OK if all(row["held"] for row in rows) else exits.FAILED


def _play(name: str, seed: int, steps: int, count: int, traced: bool) -> tuple[dict[str, Any], InvariantBroken | None]:
    """One world's row: the seeds that ran until the first broken invariant, and how fast."""
    clock = SystemClock()
    begin_s = clock.monotonic_s()
    taken, digest, played, broken = 0, "", 0, None
    try:
        for each in range(seed, seed + count):
            one = play(name, each, steps, traced=traced)
            for event in one.trace:
                say(event)
            taken, digest, played = taken + one.steps, one.digest, played + 1
    except InvariantBroken as error:
        broken = error
    seconds = clock.monotonic_s() - begin_s
    row = {
        "world": name,
        "seed": seed,
        "played": played,
        "steps": taken,
        "digest": digest,  # of the last seed that held
        "seeds_per_s": round(played / seconds, 1) if seconds > 0 else 0.0,
        "held": broken is None,
        "broken": None if broken is None else {"what": broken.what, "seed": broken.seed, "step": broken.step},
        "replay": None if broken is None else broken.replay,
    }
    return row, broken
