"""A tick's way, told from what is stored of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from lakebed.clock import ManualClock
from lakebed.console.drawing import steps
from lakebed.store.memory import MemoryStore
from lakebed.ticks.audit import AuditRow
from lakebed.ticks.model import BronzeResult, CommitRecord, Failure, Part, TickId, TickState
from lakebed.ticks.receiver import Receiver
from lakebed.views import ticks as views
from lakebed.views.ticks import stages
from ticks_kit import Service, context_of, parquet, sha

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


async def test_a_project_is_shown_of_the_org_that_was_asked_for_alone() -> None:
    """Two orgs have a project of the same name: neither sees the other's ticks."""
    context = context_of()
    for org, tick in (("acme", "20261115T120000__a"), ("other", "20261115T120000__b")):
        data = parquet([1])

        async def chunks(data: bytes = data) -> AsyncIterator[bytes]:
            yield data

        await Receiver(context).put(TickId(org, "p-1", tick), 1, sha(data), chunks())

    of_one = await views.standing(context, "acme", "p-1")
    of_all = await views.standing(context)

    assert [("acme", ["20261115T120000__a"])] == [(row.org_id, [each.tick_id for each in row.ticks]) for row in of_one]
    assert ["acme", "other"] == [row.org_id for row in of_all]


async def test_silver_is_behind_by_the_oldest_tick_that_waits(manual_clock: ManualClock) -> None:
    """Two committed ticks wait for silver, a minute apart: the lag is that of the first."""
    service = Service(context_of(MemoryStore(clock=manual_clock), clock=manual_clock))
    await service.issue()
    for tick in ("20261115T120000__a", "20261115T120100__b"):
        assert (await service.finalize(await service.upload(tick), tick=tick)).status_code == 200
        await manual_clock.advance(60.0)

    found = await views.silver_status(service.context)

    assert (2, 2, 0) == (found["undispatched"], found["waiting"], found["dead"])
    assert 120.0 == found["lag_s"]
