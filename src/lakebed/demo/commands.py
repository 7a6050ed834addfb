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
    from lakebed.demo.run import DemoResult
    from lakebed.embedded.stack import StackEvent

REPORT = Path("lakebed-demo.html")


def demo(
    *only: Annotated[str, Parameter(help="scenarios to run (default: all)")],
    scale: Annotated[float, Parameter(help="factor on the amount of data: 0.2 is quick, 5 is thorough")] = 1.0,
    seed: Annotated[int, Parameter(help="seed of the scenarios' random choices")] = 7,
    keep: Annotated[Path | None, Parameter(help="keep the stack's data in this folder")] = None,
    report: Annotated[Path, Parameter(help="file for the HTML report")] = REPORT,
    output: Output = "table",
) -> int:
    """Run every part on a temporary stack, with faults, and check the totals. Exits 0 only if all checks held."""
    from lakebed.core import logs
    from lakebed.core.clock import SystemClock
    from lakebed.demo.display import LiveDisplay, PlainDisplay, html_report
    from lakebed.demo.metrics import Observer
    from lakebed.demo.run import run
    from lakebed.demo.scenario import DemoLog

    logs.configure("error")  # the demo reports its own progress
    folder = keep or Path(tempfile.mkdtemp(prefix="lakebed-demo-"))
    observer, log = Observer(SystemClock()), DemoLog()
    display = LiveDisplay(observer, log) if sys.stderr.isatty() else PlainDisplay(say)

    def report_stack(event: StackEvent) -> None:
        if event.what == "ready":
            display.say(f"{event.name:<9} ready in {event.seconds:.1f} s  {event.detail}")
        elif event.what == "died":
            display.say(f"{event.name:<9} died: {event.detail}")

    try:
        with display:
            outcome = in_loop(
                lambda: run(
                    folder,
                    scale=scale,
                    seed=seed,
                    only=only,
                    report=display.report,
                    report_stack=report_stack,
                    observer=observer,
                    log=log,
                )
            )
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(str(html_report(outcome, observer, scale=scale, seed=seed)), encoding="utf-8")
    outcome = msgspec.structs.replace(outcome, report=str(report.absolute()))
    _summary(outcome, keep)
    if output != "table":
        emit(outcome, output)
    return exits.OK if outcome.held else exits.FAILED


def _summary(outcome: DemoResult, keep: Path | None) -> None:
    broken = [each for each in outcome.proven if not each.held]
    say(f"\n{len(outcome.proven) - len(broken)} of {len(outcome.proven)} invariants held, in {outcome.total_s:.0f} s")
    say(f"first request after {outcome.moving_s:.0f} s")
    for each in broken:
        say(f"  BROKEN  {each.scenario}: {each.name}: {each.seen}")
    say(f"report: {outcome.report}")
    say("\nNext:")
    if keep:
        say(f"  export LAKEBED_DIR={keep.absolute()}")  # the commands below find the stack there
    for command in dict.fromkeys(("lakebed up --detach", *outcome.next)):
        say(f"  .venv/bin/{command}")
