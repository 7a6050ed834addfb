"""`lakebed bench`: runs benches of the parts on the named bucket, or on a temporary one."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from lakebed.bench.harness import Bench, BenchEnvironment, BenchReport
from lakebed.cli import exits
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where
from lakebed.core import logs
from lakebed.core.clock import SystemClock
from lakebed.core.errors import Invalid
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.core.settings import Settings
from lakebed.embedded.weed import Weed
from lakebed.gateway.settings import GatewaySettings
from lakebed.store.fast.puts import PutClient
from lakebed.store.settings import StoreSettings
from lakebed.wiring.parts import PARTS, resolve

BENCHES: dict[str, str] = {part.name: part.bench for part in PARTS if part.bench}
BENCHES["scale"] = "lakebed.wiring.scale:bench"  # of all parts together
LOAD_TESTS: dict[str, str] = {part.name: part.load_test for part in PARTS if part.load_test}
WITHOUT_STORE = ("gateway", "scale")  # in process: neither a server nor a store is in what it measures
WITH_SERVER = ("batches", "log")  # through a gateway process
FAST_PATHS = (
    "measured with the fast paths, which apply to plain HTTP with a static key pair: "
    "not to TLS, not to instance roles, and not while tracing"
)


def note_of(name: str, settings: Settings) -> str:
    """The sentence that belongs beside the numbers of a bench: where its fast paths apply; empty without them."""
    if name in WITHOUT_STORE:
        return ""
    served_fast = name in WITH_SERVER and settings.of(GatewaySettings).fast_path
    return FAST_PATHS if served_fast or PutClient.applies(settings.of(StoreSettings)) else ""


async def run(name: str, env: BenchEnvironment) -> BenchReport:
    if name not in BENCHES:
        raise Invalid(f"there is no bench {name!r}", hint=f"one of: {', '.join(BENCHES)}, all")
    bench: Bench = resolve(BENCHES[name])
    clock = SystemClock()
    began = clock.monotonic_s()
    checks = await bench(env)
    seconds = round(clock.monotonic_s() - began, 1)
    return BenchReport(name, tuple(checks), env.quick, seconds, note_of(name, env.settings))


@contextmanager
def temporary_bucket(where: Where) -> Iterator[Settings]:
    """Settings whose store answers: the named bucket, or a SeaweedFS that runs until the end of the block."""
    if where.names_a_bucket:
        yield where.settings()
        return
    with tempfile.TemporaryDirectory(prefix="lakebed-") as folder:
        clock = SystemClock()
        began = clock.monotonic_s()
        weed = Weed(Path(folder), runtime=Runtime(clock, Ids(), Metrics()))
        endpoints = asyncio.run(weed.start())
        try:
            say(f"temporary bucket ready in {clock.monotonic_s() - began:.1f} s")
            yield where.settings(stack=endpoints.as_settings())
        finally:
            asyncio.run(weed.stop(grace_s=0.0))


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
    """Measure a part relative to the raw store or server below it, in the same run. Exits 1 when a bar is missed.

    Parameters
    ----------
    name
        a bench, or `all`.
    quick
        short run: most end within 45 seconds, `pipeline` and `tables` within 90.
    scenario
        run a load test instead: of `log` steady, wide, kill, mixed or smoke; of `ticks` fleet, soak or smoke.
    out
        folder for the results and the report of a load test.
    """
    logs.configure("warning")  # a bench reports its own progress
    if scenario:
        return _load_test(name, scenario, out, where, output)
    held = True
    with temporary_bucket(where) as settings:
        for each in BENCHES if name == "all" else (name,):
            say(f"bench {each}{' (quick)' if quick else ''}")
            env = BenchEnvironment(settings, quick, lambda line: say(f"  {line}"))
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the loop that servers run on
                report = runner.run(run(each, env))
            held = held and report.held
            _show(report, output)
    return exits.OK if held else exits.FAILED


def _load_test(name: str, scenario: str, out: Path, where: Where, output: Output) -> int:
    place = LOAD_TESTS.get(name)
    if place is None:
        raise Invalid(f"bench {name} has no scenarios", hint=f"those with scenarios: {', '.join(LOAD_TESTS)}")
    with temporary_bucket(where) as settings, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        env = BenchEnvironment(settings, False, lambda line: say(f"  {line}"))
        summary = runner.run(resolve(place)(env, scenario, out))
    emit(summary, output)
    if note := note_of(name, settings):
        say(note)
    say(f"report: {summary.folder}/report.html")
    return exits.OK if getattr(summary, "held", True) else exits.FAILED


def _show(report: BenchReport, output: str) -> None:
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
    if report.note:
        say(f"{report.name}: {report.note}")
