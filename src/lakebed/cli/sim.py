"""`lakebed sim`."""

from __future__ import annotations

from typing import Any

from lakebed import logs
from lakebed.cli import exits
from lakebed.cli.output import Output, emit, say
from lakebed.clock import SystemClock
from lakebed.errors import Invalid
from lakebed.sim.world import STEPS_MAX, InvariantBroken
from lakebed.sim.worlds import WORLDS, play

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
    """Play seeded worlds; the same seed gives the same trace. A broken invariant prints how to replay it.

    Parameters
    ----------
    seed
        the first seed.
    steps
        store operations after which a world is ended where it stands.
    world
        the world to play, or `all`.
    count
        how many seeds, one after the other.
    trace
        print every event of the seeds that held, too.
    """
    logs.configure("error")  # what a part logs about simulated faults is not a finding
    if not 1 <= count <= COUNT_MAX or steps < 1:
        raise Invalid(f"--count is 1 to {COUNT_MAX} and --steps at least 1")
    logs.configure("critical")  # what goes wrong in a world is meant to; its trace tells it
    rows: list[dict[str, Any]] = []
    for name in [row.name for row in WORLDS] if world == "all" else [world]:
        row, broken = _play(name, seed, steps, count, trace)
        rows.append(row)
        if broken is not None:
            say(str(broken))
    emit(rows, output)
    return exits.OK if all(row["held"] for row in rows) else exits.FAILED


def _play(name: str, seed: int, steps: int, count: int, traced: bool) -> tuple[dict[str, Any], InvariantBroken | None]:
    """One world's row: what was played until the first broken invariant, and how fast."""
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
