"""The scale page is made from measured loops of every part, and the testbed's time is that of its requests."""

from __future__ import annotations

import re

import pytest

from lakebed.wiring.scale import GET_S, SIZES, LoopRun, M, ScaleRow, row_of, run_loop
from lakebed.wiring.scale_loops import LOOPS
from lakebed.wiring.scale_page import PLANS, page
from support.doc_commands import ROOT

PAGE, COST = (ROOT / "docs/scale.md").read_text(), (ROOT / "docs/cost.md").read_text()
DEMANDED = {
    "accept",
    "derived writes",
    "live query",
    "reconciler",
    "retention",
    "roller",
    "bronze step",
    "queue",
    "log flight",
    "compactor",
    "tick auditor",
    "lifecycle reader",
}
LOOP = {loop.name: loop for loop in LOOPS}


def cells(name: str) -> list[tuple[float, float, float]]:
    """Load, limit and headroom of a loop at each size, as the page has them."""
    (row,) = (line for line in PAGE.splitlines() if re.match(rf"\| {re.escape(name)}( \(shared\))? \| \w+/s", line))
    found = re.findall(r"([\d.]+), ([\d.]+), \*\*([\d.]+)\*\*", re.sub(r"(?<=\d),(?=\d{3})", "", row))
    return [(float(load), float(limit), float(headroom)) for load, limit, headroom in found]


@pytest.mark.parametrize("name", sorted(DEMANDED))
def test_the_page_names_every_loop_with_load_limit_and_headroom(name: str) -> None:
    """Each number is there for S, M and L, and headroom is limit ÷ load."""
    rows = cells(name)

    assert [LOOP[name].load(size) for size in SIZES] == pytest.approx([load for load, _, _ in rows], rel=0.05)
    for load, limit, headroom in rows:
        assert headroom == pytest.approx(limit / load, rel=0.07, abs=0.006)


def test_the_loops_of_batches_and_rollups_have_twice_the_load_at_m() -> None:
    at_m = {name: cells(name)[SIZES.index(M)][2] for name in DEMANDED}

    assert {} == {name: headroom for name, headroom in at_m.items() if LOOP[name].own and headroom < 2.0}


def test_what_breaks_at_l_has_a_plan_and_the_page_its_sections() -> None:
    for heading in ("## Hot prefixes", "## Cost", "## What breaks first at L", "## A day of outage at M"):
        assert heading in PAGE
    for name in DEMANDED:
        if cells(name)[-1][2] < 1:
            assert f"**{name}**" in PAGE
            assert PLANS[name] in PAGE


def test_the_page_is_what_its_rows_say() -> None:
    """Rows in, page out: other numbers give another page, and prices follow the counted table."""
    done = LoopRun(1_000, 0.9, 0.1)
    rows = [row_of(loop, size, done) for loop in LOOPS for size in SIZES]

    made = page(rows, COST)

    assert all(f"| {loop.name}" in made for loop in LOOPS)
    assert made != page([_slower(row) for row in rows], COST)
    assert made != page(rows, COST.replace("| 6182 |", "| 9999 |"))


def _slower(row: ScaleRow) -> ScaleRow:
    return ScaleRow(
        row.loop, row.size, row.unit, row.load, row.processes, row.limit / 2, row.headroom / 2, 0.5, row.own
    )


def test_a_loop_takes_the_time_of_its_requests() -> None:
    """The tick auditor reads row after row: it cannot be faster than one read in 20 ms, whatever this machine is."""
    done = run_loop(LOOP["tick auditor"], M, quick=True)

    assert 0 < done.per_s(1) <= 1 / GET_S
    assert done.waited_s >= done.units * GET_S


def test_only_what_is_divided_grows_with_processes() -> None:
    """Half of the time is one process's own: four processes are not four times as fast."""
    half, whole = LoopRun(100, 1.0, 1.0, alone_s=1.0), LoopRun(100, 1.0, 1.0)

    assert (50.0, 80.0) == (half.per_s(1), half.per_s(4))
    assert (50.0, 200.0) == (whole.per_s(1), whole.per_s(4))
