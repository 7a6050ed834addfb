"""`lakebed bench`."""

from __future__ import annotations

import asyncio

import uvloop

from lakebed.bench.harness import Report, Stand
from lakebed.bench.run import BENCHES, run
from lakebed.cli import exits
from lakebed.cli.lend import lent
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where


def bench(name: str, /, *, quick: bool = False, where: Where = Where(), output: Output = "table") -> int:
    """Measure a part beside the bare thing beneath it, in the same run. A missed bar is printed as missed.

    Parameters
    ----------
    name
        a bench, or `all`.
    quick
        end in 45 seconds.
    """
    held = True
    with lent(where) as settings:
        for each in BENCHES if name == "all" else (name,):
            say(f"bench {each}{' (quick)' if quick else ''}")
            stand = Stand(settings, quick, lambda line: say(f"  {line}"))
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the loop that servers run on
                report = runner.run(run(each, stand))
            held = held and report.held
            _show(report, output)
    return exits.OK if held else exits.FAILED


def _show(report: Report, output: str) -> None:
    if output != "table":
        emit(report, output)
        return
    emit(
        [
            {
                "check": check.name,
                "value": f"{check.value:,.3f}" if check.unit == "ratio" else f"{check.value:,.1f}",
                "unit": check.unit,
                "spread": f"{check.spread:,.3f}" if check.unit == "ratio" else f"{check.spread:,.1f}",
                "bar": "" if check.bar is None else f"{check.bar:g}",
                "": "" if check.bar is None else ("held" if check.passed else "MISSED"),
            }
            for check in report.checks
        ]
    )
    say(f"{report.name}: {'every bar held' if report.held else 'A BAR WAS MISSED'} in {report.seconds} s")
