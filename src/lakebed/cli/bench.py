"""`lakebed bench`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import uvloop

from lakebed.bench.harness import Report, Stand
from lakebed.bench.run import BENCHES, run
from lakebed.cli import exits
from lakebed.cli.lend import lent
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where
from lakebed.errors import Invalid


def bench(
    name: str,
    /,
    *,
    quick: bool = False,
    scenario: str = "",
    out: Path = Path("bench-results"),
    where: Where = Where(),
    output: Output = "table",
) -> int:
    """Measure a part beside the bare thing beneath it, in the same run. A missed bar is printed as missed.

    Parameters
    ----------
    name
        a bench, or `all`.
    quick
        be brief: most end within 45 seconds, `pipeline` within 90.
    scenario
        of `log`: a load test instead, by one of steady, wide, kill and smoke.
    out
        where a load test leaves its folder, with a report to look at.
    """
    if scenario:
        return _load_test(name, scenario, out, where, output)
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


def _load_test(name: str, scenario: str, out: Path, where: Where, output: Output) -> int:
    from lakebed.bench.loadtest import run as run_scenario

    if name != "log":
        raise Invalid(f"bench {name} has no scenarios", hint="lakebed bench log --scenario steady")
    with lent(where) as settings, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        summary = runner.run(run_scenario(Stand(settings, False, lambda line: say(f"  {line}")), scenario, out))
    emit(summary, output)
    say(f"look at {summary.folder}/report.html")
    return exits.OK


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
