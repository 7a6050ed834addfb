"""The demo fails when a number does not add up, and says on a page what it saw."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx2
import pytest

from docs_ground import misunderstood
from lakebed.clock import ManualClock, SystemClock
from lakebed.demo import account, live, run
from lakebed.demo.numbers import Observer
from lakebed.demo.run import SCENARIOS, Outcome, agree
from lakebed.demo.stage import Counted, Fault, Proven, Record, Stage, Told
from lakebed.errors import Invalid, Unavailable
from lakebed.metrics import TABLE
from lakebed.parts import sections
from lakebed.settings import load

NAMES = {metric.name for metric in TABLE}


def stage(told: list[Told]) -> Stage:
    return Stage(
        folder=Path("nowhere"),
        settings=load(sections()),
        environment={},
        gateway_url="",
        scale=1.0,
        seed=7,
        tell=told.append,
        observer=Observer(ManualClock()),
    )


def scenario(play: Any, after: tuple[str, ...] = ()) -> ModuleType:
    module = ModuleType("scenario")
    module.__dict__.update(TITLE="title", NEXT=(), AFTER=after, play=play)
    return module


def test_steps_that_saw_other_numbers_break_the_total() -> None:
    """A thing of which one step lost some is named as broken, with every step's number."""
    found = agree([Counted("rows", "sent", 10), Counted("cats", "seen", 2), Counted("rows", "stored", 9)])

    assert [
        Proven("totals", "rows add up", False, "10 sent → 9 stored"),
        Proven("totals", "cats add up", True, "2 seen"),
    ] == found


def test_a_demo_that_proved_nothing_did_not_hold() -> None:
    """An empty list of invariants is not success, and neither is one broken among many."""
    good, bad = Proven("a", "x", True, ""), Proven("a", "y", False, "")

    assert [False, True, False] == [Outcome(p, {}, ()).held for p in ((), (good,), (good, bad))]


async def test_scenarios_overlap_but_wait_for_what_they_need() -> None:
    """One that comes after another starts when that has ended; others do not wait for it."""
    order: list[str] = []
    second_ran = asyncio.Event()

    async def first(_: Stage) -> None:
        await second_ran.wait()
        order.append("first")

    async def second(_: Stage) -> None:
        order.append("second")
        second_ran.set()

    async def third(_: Stage) -> None:
        order.append("third")

    chosen = {"third": scenario(third, ("first",)), "first": scenario(first), "second": scenario(second)}
    async with asyncio.timeout(100):
        seconds = await run._play_all(stage([]), chosen, SystemClock())

    assert ["second", "first", "third"] == order
    assert ["third", "first", "second"] == list(seconds)


@pytest.mark.parametrize("error", [Unavailable("gone"), ValueError("a mistake")])
async def test_a_scenario_that_breaks_is_a_finding_and_the_others_go_on(error: Exception) -> None:
    """Whatever a scenario raises is a broken invariant of its own."""

    async def broken(_: Stage) -> None:
        raise error

    async def good(each: Stage) -> None:
        each.check("it holds", True, "seen")

    there = stage([])
    async with asyncio.timeout(100):
        await run._play_all(there, {"broken": scenario(broken), "good": scenario(good)}, SystemClock())

    assert {("broken", False), ("good", True)} == {(each.scenario, each.held) for each in there.record.proven}


@pytest.mark.parametrize(("only", "scale"), [(("nonsense",), 1.0), ((), 0.0), ((), float("nan"))])
async def test_what_cannot_be_played_is_refused_before_anything_starts(only: tuple[str, ...], scale: float) -> None:
    """A wrong name or scale is Invalid, and no stack was started for it."""
    with pytest.raises(Invalid):
        await run.run(
            Path("nowhere"),
            scale=scale,
            seed=1,
            only=only,
            tell=print,
            tell_stack=print,
            observer=Observer(ManualClock()),
            record=Record(),
        )

    assert not Path("nowhere").exists()


def test_every_scenario_says_what_it_is_and_what_to_type_next() -> None:
    """Each is a module with a title, commands that would be understood, and things it comes after that exist."""
    from importlib import import_module

    for name in SCENARIOS:
        module = import_module(f"lakebed.demo.{name}")
        assert module.TITLE
        assert [""] * len(module.NEXT) == [misunderstood(command) for command in module.NEXT]
        assert set(getattr(module, "AFTER", ())) <= set(SCENARIOS) - {name}


def test_every_number_shown_is_in_the_table_of_metrics() -> None:
    """No bar and no plot of the demo is fed by a name that nobody counts."""
    shown = {flow.metric for flow in live.FLOWS} | set(account.LAGS) | set(account.BACKLOGS)
    shown |= {metric for _, metric in account.LATENCIES} | {metric for _, metric, _ in account.TROUBLES}

    assert set() == shown - NAMES


async def test_the_page_tells_what_held_and_what_was_broken_on_purpose() -> None:
    """The report carries every invariant, fault and plot, and hostile words in them stay words."""
    observer = Observer(ManualClock())
    async with httpx2.AsyncClient() as client:
        await observer.read(client)
    outcome = Outcome(
        (Proven("agents", "none is lost", True, "5 of 5"), Proven("log", "in order", False, "<script>")),
        {"agents": 3.0},
        ("lakebed doctor",),
        faults=(Fault("agents", "a collector was killed", 1.5),),
    )

    page = str(account.account(outcome, observer, scale=1.0, seed=7))

    for words in ("1 of 2", "none is lost", "a collector was killed", "lakebed doctor", "Throughput", "price"):
        assert words in page
    assert "<script>" not in page


def test_plain_lines_name_their_scenario() -> None:
    """In a pipe every line stands for itself."""
    assert "agents    ⚡ killed" == live.plain(Told("agents", "fault", "killed"))
    assert "log       ▶ A log" == live.plain(Told("log", "begin", "A log"))


def test_a_spark_line_is_as_high_as_its_values() -> None:
    """The largest is a full block, nothing is empty, and only the last ones are shown."""
    assert " ▄█" == live.spark([0.0, 5.0, 10.0])
    assert live.SPARK_POINTS == len(live.spark([1.0] * 500))


def test_the_live_picture_can_be_drawn_at_any_time(capsys: pytest.CaptureFixture[str]) -> None:
    """With nothing read yet and with bars under way, the table is there."""
    from rich.console import Console

    record = Record()
    record.expected["log records"] = 10.0
    view = live.Live(Observer(ManualClock()), record)
    view.tell(Told("agents", "line", "[bold]not markup[/bold]"))

    Console(file=sys.stdout, width=100).print(view.picture())

    shown = capsys.readouterr().out
    assert "samples accepted" in shown
    assert "[bold]not markup[/bold]" in shown
