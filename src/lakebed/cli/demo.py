"""`lakebed demo`."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from lakebed.cli import exits
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import in_loop

if TYPE_CHECKING:
    from lakebed.demo.run import Outcome
    from lakebed.embedded.stack import Event

REPORT = Path("lakebed-demo.html")


def demo(
    *only: Annotated[str, Parameter(help="scenarios to play (default: all)")],
    scale: Annotated[float, Parameter(help="how much of everything: 0.2 is quick, 5 is thorough")] = 1.0,
    seed: Annotated[int, Parameter(help="makes the scenarios' own choices repeatable")] = 7,
    keep: Annotated[Path | None, Parameter(help="folder to keep the stack's data in")] = None,
    report: Annotated[Path, Parameter(help="where to write the page with plots")] = REPORT,
    output: Output = "table",
) -> int:
    """Run every part on a stack of its own, with faults, and prove the totals. Exits 0 only if all held."""
    from lakebed import logs
    from lakebed.clock import SystemClock
    from lakebed.demo.account import account
    from lakebed.demo.live import Live, Plain
    from lakebed.demo.numbers import Observer
    from lakebed.demo.run import run
    from lakebed.demo.stage import Record

    logs.configure("error")  # what happens is told in the demo's own words
    folder = keep or Path(tempfile.mkdtemp(prefix="lakebed-demo-"))
    observer, record = Observer(SystemClock()), Record()
    watched = Live(observer, record) if sys.stderr.isatty() else Plain(say)

    def tell_stack(event: Event) -> None:
        if event.what == "ready":
            watched.say(f"{event.name:<9} ready in {event.seconds:.1f} s  {event.detail}")
        elif event.what == "died":
            watched.say(f"{event.name:<9} died: {event.detail}")

    try:
        with watched:
            outcome = in_loop(
                lambda: run(
                    folder,
                    scale=scale,
                    seed=seed,
                    only=only,
                    tell=watched.tell,
                    tell_stack=tell_stack,
                    observer=observer,
                    record=record,
                )
            )
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(str(account(outcome, observer, scale=scale, seed=seed)), encoding="utf-8")
    outcome = msgspec.structs.replace(outcome, report=str(report.absolute()))
    _summary(outcome, keep)
    if output != "table":
        emit(outcome, output)
    return exits.OK if outcome.held else exits.FAILED


def _summary(outcome: Outcome, keep: Path | None) -> None:
    broken = [each for each in outcome.proven if not each.held]
    say(f"\n{len(outcome.proven) - len(broken)} of {len(outcome.proven)} invariants held, in {outcome.total_s:.0f} s")
    say(f"the first bar moved after {outcome.moving_s:.0f} s")
    for each in broken:
        say(f"  BROKEN  {each.scenario}: {each.name}: {each.seen}")
    say(f"the page with plots: {outcome.report}")
    say("\nWhat to type next:")
    where = f" --dir {keep}" if keep else ""
    for command in dict.fromkeys((f"lakebed up{where} --detach", *outcome.next)):
        say(f"  .venv/bin/{command}")
