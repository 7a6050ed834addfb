"""`lakebed demo`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from lakebed.cli import exits
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import in_loop

if TYPE_CHECKING:
    from lakebed.demo.run import Outcome
    from lakebed.embedded.stack import Event


def demo(
    *only: Annotated[str, Parameter(help="scenarios to play (default: all)")],
    scale: Annotated[float, Parameter(help="how much of everything: 0.2 is quick, 5 is thorough")] = 1.0,
    seed: Annotated[int, Parameter(help="makes the scenarios' own choices repeatable")] = 7,
    keep: Annotated[Path | None, Parameter(help="folder to keep the stack's data in")] = None,
    output: Output = "table",
) -> int:
    """Run every part once on a stack of its own, with faults, and prove the totals. Exits 0 only if all held."""
    from lakebed import logs
    from lakebed.demo.run import run

    logs.configure("error")  # what happens is told in the demo's own words
    folder = keep or Path(tempfile.mkdtemp(prefix="lakebed-demo-"))
    try:
        outcome = in_loop(lambda: run(folder, scale=scale, seed=seed, only=only, tell=say, tell_stack=_tell))
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    if output == "table":
        _summary(outcome, keep)
    else:
        emit(outcome, output)
    return exits.OK if outcome.held else exits.FAILED


def _tell(event: Event) -> None:
    if event.what == "ready":
        say(f"{event.name:<10} ready in {event.seconds:.1f} s  {event.detail}")
    elif event.what == "died":
        say(f"{event.name:<10} died: {event.detail}")


def _summary(outcome: Outcome, keep: Path | None) -> None:
    broken = [each for each in outcome.proven if not each.held]
    say("")
    say(f"{len(outcome.proven) - len(broken)} of {len(outcome.proven)} invariants held")
    for each in broken:
        say(f"  BROKEN  {each.scenario}: {each.name}: {each.seen}")
    say("\nWhat to type next:")
    where = f" --dir {keep}" if keep else ""
    for command in dict.fromkeys((f"lakebed up{where} --detach", *outcome.next)):
        say(f"  .venv/bin/{command}")
