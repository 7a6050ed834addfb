"""The demo fails when a number does not add up, and reports on a page what it saw."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx2
import pytest

from lakebed.core.clock import ManualClock, SystemClock
from lakebed.core.errors import Invalid, Unavailable
from lakebed.core.metrics import TABLE
from lakebed.core.settings import load
from lakebed.demo import display, run
from lakebed.demo.metrics import Observer
from lakebed.demo.run import SCENARIOS, DemoResult, agree
from lakebed.demo.scenario import CheckResult, DemoLog, Fault, ProgressLine, ScenarioContext, StepCount
from lakebed.wiring.parts import resolve, sections
from support.doc_commands import misunderstood

NAMES = {metric.name for metric in TABLE}


def stage(shown: list[ProgressLine]) -> ScenarioContext:
    return ScenarioContext(
        folder=Path("nowhere"),
        settings=load(sections()),
        environment={},
        gateway_url="",
        scale=1.0,
        seed=7,
        report=shown.append,
        observer=Observer(ManualClock()),
    )


def scenario(play: Any, after: tuple[str, ...] = ()) -> ModuleType:
    module = ModuleType("scenario")
    module.__dict__.update(TITLE="title", NEXT=(), AFTER=after, play=play)
    return module


def test_steps_that_saw_other_numbers_break_the_total() -> None:
    """A thing of which one step lost some is named as broken, with every step's number."""
    found = agree([StepCount("rows", "sent", 10), StepCount("cats", "seen", 2), StepCount("rows", "stored", 9)])

    assert [
        CheckResult("totals", "rows add up", False, "10 sent → 9 stored"),
        CheckResult("totals", "cats add up", True, "2 seen"),
    ] == found


def test_a_demo_that_proved_nothing_did_not_hold() -> None:
    """An empty list of invariants is not success, and neither is one broken among many."""
    good, bad = CheckResult("a", "x", True, ""), CheckResult("a", "y", False, "")

    assert [False, True, False] == [DemoResult(p, {}, ()).held for p in ((), (good,), (good, bad))]


async def test_scenarios_overlap_but_wait_for_what_they_need() -> None:
    """One that comes after another starts when that has ended; others do not wait for it."""
    order: list[str] = []
    second_ran = asyncio.Event()

    async def first(_: ScenarioContext) -> None:
        await second_ran.wait()
        order.append("first")

    async def second(_: ScenarioContext) -> None:
        order.append("second")
        second_ran.set()

    async def third(_: ScenarioContext) -> None:
        order.append("third")

    chosen = {"third": scenario(third, ("first",)), "first": scenario(first), "second": scenario(second)}
    async with asyncio.timeout(100):
        seconds = await run._play_all(stage([]), chosen, SystemClock())

    assert ["second", "first", "third"] == order
    assert ["third", "first", "second"] == list(seconds)


@pytest.mark.parametrize("error", [Unavailable("gone"), ValueError("a mistake")])
async def test_a_scenario_that_breaks_is_a_finding_and_the_others_go_on(error: Exception) -> None:
    """Whatever a scenario raises is a broken invariant of its own."""

    async def broken(_: ScenarioContext) -> None:
        raise error

    async def good(each: ScenarioContext) -> None:
        each.check("it holds", True, "seen")

    there = stage([])
    async with asyncio.timeout(100):
        await run._play_all(there, {"broken": scenario(broken), "good": scenario(good)}, SystemClock())

    assert {("broken", False), ("good", True)} == {(each.scenario, each.held) for each in there.log.proven}


@pytest.mark.parametrize(("only", "scale"), [(("nonsense",), 1.0), ((), 0.0), ((), float("nan"))])
async def test_what_cannot_be_played_is_refused_before_anything_starts(only: tuple[str, ...], scale: float) -> None:
    """A wrong name or scale is Invalid, and no stack was started for it."""
    with pytest.raises(Invalid):
        await run.run(
            Path("nowhere"),
            scale=scale,
            seed=1,
            only=only,
            report=print,
            report_stack=print,
            observer=Observer(ManualClock()),
            log=DemoLog(),
        )

    assert not Path("nowhere").exists()


def test_every_scenario_says_what_it_is_and_what_to_type_next() -> None:
    """Each is a module with a title, commands that would be understood, and things it comes after that exist."""
    for name, place in SCENARIOS.items():
        module = resolve(place)
        assert module.TITLE
        assert [""] * len(module.NEXT) == [misunderstood(command) for command in module.NEXT]
        assert set(getattr(module, "AFTER", ())) <= set(SCENARIOS) - {name}


def test_every_number_shown_is_in_the_table_of_metrics() -> None:
    """No bar and no plot of the demo is fed by a name that nobody counts."""
    shown = {flow.metric for flow in display.FLOWS} | set(display.LAGS) | set(display.BACKLOGS)
    shown |= {metric for _, metric in display.LATENCIES} | {metric for _, metric, _ in display.TROUBLES}

    assert set() == shown - NAMES


async def test_the_page_tells_what_held_and_what_was_broken_on_purpose() -> None:
    """The report carries every invariant, fault and plot, and hostile words in them stay words."""
    observer = Observer(ManualClock())
    async with httpx2.AsyncClient() as client:
        await observer.read(client)
    outcome = DemoResult(
        (CheckResult("agents", "none is lost", True, "5 of 5"), CheckResult("log", "in order", False, "<script>")),
        {"agents": 3.0},
        ("lakebed doctor",),
        faults=(Fault("agents", "a collector was killed", 1.5),),
    )

    report = display.html_report(outcome, observer, scale=1.0, seed=7)
    page = str(report)

    for words in ("1 of 2", "none is lost", "a collector was killed", "lakebed doctor", "Throughput", "price"):
        assert words in page
    assert "&lt;script&gt;" in page
    assert 2 == page.count("<script>"), "uPlot and page.js"
    assert ["section", "text", "facts", "text", "table"] == [part["kind"] for part in report._parts[:5]]
    assert "cores, Python" in report._parts[3]["words"], "the summary, and where it was measured, come first"
    silent, told = [], False
    for part in report._parts:
        told = part["kind"] == "text" or (told and part["kind"] != "section")
        if part["kind"] in ("chart", "bars") and not (told or part["about"]):
            silent.append(part["title"])
    assert [] == silent, "a plot says what to see, or its section does"


def test_plain_lines_name_their_scenario() -> None:
    """In a pipe every line represents itself."""
    assert "agents    ⚡ killed" == display.plain(ProgressLine("agents", "fault", "killed"))
    assert "log       ▶ A log" == display.plain(ProgressLine("log", "begin", "A log"))


def test_a_spark_line_is_as_high_as_its_values() -> None:
    """The largest is a full block, nothing is empty, and only the last ones are shown."""
    assert " ▄█" == display.spark([0.0, 5.0, 10.0])
    assert display.SPARK_POINTS == len(display.spark([1.0] * 500))


def test_the_live_picture_can_be_drawn_at_any_time(capsys: pytest.CaptureFixture[str]) -> None:
    """With nothing read yet and with bars under way, the table is there."""
    from rich.console import Console

    log = DemoLog()
    log.expected["log records"] = 10.0
    view = display.LiveDisplay(Observer(ManualClock()), log)
    view.report(ProgressLine("agents", "line", "[bold]not markup[/bold]"))

    Console(file=sys.stdout, width=100).print(view.picture())

    shown = capsys.readouterr().out
    assert "samples accepted" in shown
    assert "[bold]not markup[/bold]" in shown
