"""A tick's way, told from what is stored of it."""

from __future__ import annotations

import pytest

from lakebed.console.drawing import steps
from lakebed.ticks.audit import AuditRow
from lakebed.ticks.model import BronzeResult, CommitRecord, Failure, Part, TickState
from lakebed.views.ticks import stages

PARTS = {"1": Part("a", 10, 1000, "k1"), "2": Part("b", 10, 3000, "k2")}
COMMIT = CommitRecord(
    "s", "o", "p", "t", "20261116", "delta", "x", {}, BronzeResult(5, 1, {"orders": 3}), "", 4000, "a"
)


def row(state: str, **fields: str | int) -> AuditRow:
    return AuditRow("o", "p", "t", state, "a", 9000, 1, fields)


@pytest.mark.parametrize(
    ("state", "commit", "dispatched", "expected"),
    [
        (TickState(parts=PARTS), None, None, ["running", "waiting", "waiting", "waiting", "waiting"]),
        (TickState(state="finalizing", parts=PARTS), None, None, ["done", "running", "waiting", "waiting", "waiting"]),
        (
            TickState(state="failed", parts=PARTS, failure=Failure("BAD", "no")),
            None,
            None,
            ["done", "failed", "waiting", "waiting", "waiting"],
        ),
        (TickState(state="committed", parts=PARTS), COMMIT, None, ["done", "done", "done", "waiting", "waiting"]),
        (
            TickState(state="committed", parts=PARTS),
            COMMIT,
            row("running", tries=2),
            ["done", "done", "done", "running", "waiting"],
        ),
        (
            TickState(state="committed", parts=PARTS),
            COMMIT,
            row("failed"),
            ["done", "done", "done", "failed", "waiting"],
        ),
        (TickState(state="committed", parts=PARTS), COMMIT, row("done"), ["done"] * 5),
    ],
)
def test_each_stage_says_how_it_stands(
    state: TickState, commit: CommitRecord | None, dispatched: AuditRow | None, expected: list[str]
) -> None:
    """Parts, finalize, bronze, silver, gold, in this order, whatever is there."""
    found = stages(state, commit, dispatched, None)

    assert [stage.name for stage in found] == ["parts", "finalize", "bronze", "silver", "gold"]
    assert [stage.state for stage in found] == expected


def test_the_time_between_stages_is_told() -> None:
    found = steps(stages(TickState(state="committed", parts=PARTS), COMMIT, row("done"), None))

    assert [step.after_ms for step in found] == [None, 1000, 0, 5000, 0]
