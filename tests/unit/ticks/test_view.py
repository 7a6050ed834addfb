"""A tick's stages, read from what is stored of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any
from unittest.mock import ANY

import msgspec
import pytest

from lakebed.core.clock import ManualClock, now_ms
from lakebed.core.context import Context
from lakebed.core.errors import NotFound
from lakebed.store.memory import MemoryStore
from lakebed.ticks import commit_times, transitions
from lakebed.ticks import view as views
from lakebed.ticks.adapters import open_audit
from lakebed.ticks.audit import DISPATCHED, AuditRow
from lakebed.ticks.model import (
    BronzeResult,
    CommitRecord,
    FinalizeResult,
    StoredPart,
    TickFailure,
    TickId,
    TickMessage,
    TickState,
)
from lakebed.ticks.page import steps
from lakebed.ticks.queue import ReceivedMessage
from lakebed.ticks.receiver import Receiver, register_of
from lakebed.ticks.view import stages
from support.tick_fixtures import ORG, PROJECT, TICK, Service, context_of, parquet, sha

PARTS = {"1": StoredPart("a", 10, 1000, "k1"), "2": StoredPart("b", 10, 3000, "k2")}
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
            TickState(state="failed", parts=PARTS, failure=TickFailure("BAD", "no")),
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

    of_one = await views.project_statuses(context, "acme", "p-1")
    of_all = await views.project_statuses(context)

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


@pytest.mark.parametrize(
    ("state", "commit", "dispatched", "report", "expected"),
    [
        (TickState(created_at_ms=500), None, None, None, [(500, 0, "deleted, or none yet"), (0, 0, "")]),
        (TickState(parts=PARTS), None, None, None, [(1000, 3000, "2 parts"), (0, 0, ""), (0, 0, "")]),
        (TickState(state="finalizing", parts=PARTS, updated_at_ms=3500), None, None, None, [ANY, (3500, 0, "")]),
        (
            TickState(state="failed", parts=PARTS, updated_at_ms=3600, failure=TickFailure("BAD", "no")),
            None, None, None, [ANY, (3600, 0, "BAD"), (0, 0, "")],
        ),
        (
            TickState(state="committed", parts=PARTS), COMMIT, None, None,
            [ANY, (3000, 4000, "delta, one conditional write"), (4000, 0, "5 inserted, 1 replaced"),
             (0, 0, "its message waits"), (0, 0, "")],
        ),
        (TickState(state="committed"), COMMIT, None, None, [ANY, (4000, 4000, "delta, one conditional write")]),
        (TickState(state="committed"), COMMIT, row("running", tries=2), None, [ANY, ANY, ANY, (9000, 0, "attempt 2")]),
        (TickState(state="committed"), COMMIT, row("running"), None, [ANY, ANY, ANY, (9000, 0, "attempt 1")]),
        (
            TickState(state="committed"), COMMIT, row("failed", detail="x" * 300), None,
            [ANY, ANY, ANY, (9000, 0, "x" * 200), (0, 0, "")],
        ),
        (
            TickState(state="committed"), COMMIT, row("done"), None,
            [ANY, ANY, ANY, (9000, 0, "no contract for its tables"), (9000, 0, "no model")],
        ),
        (
            TickState(state="committed"), COMMIT, row("done"),
            {"silver": [{"table": "a", "good": 3, "quarantined": 1}, {"table": "b", "good": 2, "quarantined": 0}],
             "gold": [{"table": "daily"}, {"name": "weekly"}, "other"]},
            [ANY, ANY, ANY, (9000, 0, "a: 3 good, 1 quarantined, b: 2 good, 0 quarantined"),
             (9000, 0, "daily, weekly")],
        ),
    ],
)  # fmt: skip
def test_each_stage_says_when_it_was_and_what_it_did(
    state: TickState, commit: CommitRecord | None, dispatched: AuditRow | None, report: Any, expected: list[Any]
) -> None:
    """The time of a stage is its own, 0 for one that was not reached; its detail counts parts, rows or tries."""
    found = stages(state, commit, dispatched, report)

    assert expected == [(stage.at_ms, stage.end_ms, stage.detail) for stage in found[: len(expected)]]


async def test_a_tick_is_shown_from_its_parts_to_its_report(manual_clock: ManualClock) -> None:
    """Parts and bytes, the committed versions, and what the finished job reported."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    service = Service(context)
    await service.issue()
    tick = TickId(ORG, PROJECT, TICK)
    manifest = await service.upload()
    uploading = await views.view(context, tick)
    assert (await service.finalize(manifest)).status_code == 200
    committed = await views.view(context, tick)
    detail = '{"silver": [{"table": "orders", "good": 5, "quarantined": 0}]}'
    done = AuditRow(ORG, PROJECT, TICK, "done", "a", 9000, 2**40, {"detail": detail})
    await open_audit(context, DISPATCHED).create(done)
    dispatched = await views.view(context, tick)

    sizes = sum(each["bytes"] for each in manifest["tables"][0]["parquets"])
    assert ("uploading", 2, sizes, {}, None) == (
        uploading.state, uploading.parts, uploading.size_bytes, uploading.versions, uploading.report,
    )  # fmt: skip
    assert ("committed", ["orders"], "") == (committed.state, list(committed.versions), committed.message)
    assert (ORG, PROJECT, TICK) == (committed.org_id, committed.project_id, committed.tick_id)
    assert {"silver": [{"table": "orders", "good": 5, "quarantined": 0}]} == dispatched.report
    assert "orders: 5 good, 0 quarantined" == dispatched.stages[3].detail


async def test_a_tick_that_failed_says_why(manual_clock: ManualClock) -> None:
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    service = Service(context)
    await service.issue()
    manifest = await service.upload()
    manifest["tables"][0]["row_count"] = 99
    assert (await service.finalize(manifest)).status_code >= 400

    found = await views.view(context, TickId(ORG, PROJECT, TICK))
    state = (await register_of(context, TickId(ORG, PROJECT, TICK)).read()).value

    assert state.failure is not None and state.failure.message
    assert ("failed", state.failure.message) == (found.state, found.message)


async def test_a_tick_that_does_not_exist_is_not_found() -> None:
    with pytest.raises(NotFound, match=TICK) as refused:
        await views.view(context_of(), TickId(ORG, PROJECT, TICK))

    assert "lakebed ticks status" in refused.value.hint


@pytest.mark.parametrize(
    ("dispatched", "expected"),
    [
        (None, None),
        (row("running", detail='{"silver": []}'), None),
        (row("failed", detail='{"silver": []}'), None),
        (row("done"), None),
        (row("done", detail="no json"), None),
        (row("done", detail='{"silver": []}'), {"silver": []}),
    ],
)
def test_only_a_finished_job_has_a_report(dispatched: AuditRow | None, expected: Any) -> None:
    """Text that is no JSON is no report; an unfinished or failed job has none."""
    assert expected == views.report_of(dispatched)


async def test_dead_letters_say_what_they_are_or_that_they_do_not_decode() -> None:
    """A letter that does not decode is shown with its begin: one bad letter hides no other."""
    message = TickMessage(ORG, PROJECT, TICK, "delta", "20261115", "ticks/bronze", "orders=3", "2026-11-15T12:00:00Z")
    good = ReceivedMessage("m-1", "r-1", msgspec.json.encode(message).decode(), 4)
    bad = ReceivedMessage("m-2", "r-2", "{" * 300, 5)

    reported, broken = views._letter(good), views._letter(bad)

    assert ("m-1", 4, TICK) == (reported["message_id"], reported["receives"], reported["tick_id"])
    assert ("m-2", 5, "", "{" * 200) == (broken["message_id"], broken["receives"], broken["tick_id"], broken["body"])
    assert broken["error"]


async def test_projects_and_their_ticks_are_bounded(manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many ticks the newest are shown; the counts by state are of all that were looked at. One that is named is
    found behind the limit.
    """
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    monkeypatch.setattr(views, "TICKS_SHOWN", 2)
    monkeypatch.setattr(views, "PROJECTS_MAX", 2)
    for project in ("p-1", "p-2", "p-3"):
        for number in range(3):
            data = parquet([1])

            async def chunks(data: bytes = data) -> AsyncIterator[bytes]:
                yield data

            await Receiver(context).put(TickId("acme", project, f"20261115T12000{number}__a"), 1, sha(data), chunks())

    found = await views.project_statuses(context)
    (named,) = await views.project_statuses(context, project_id="p-2")
    (last,) = await views.project_statuses(context, project_id="p-3")

    assert [("acme", "p-1"), ("acme", "p-2")] == [(one.org_id, one.project_id) for one in found]
    assert ["20261115T120002__a", "20261115T120001__a"] == [tick.tick_id for tick in named.ticks]
    assert {"uploading": 3} == named.states == last.states


async def test_silver_with_nothing_to_do_is_not_behind() -> None:
    found = await views.silver_status(context_of())

    assert (0, 0, 0.0) == (found["undispatched"], found["waiting"], found["lag_s"])


async def finished(context: Context, name: str, delay_s: float, rows: int) -> TickId:
    """A tick whose commit is noted now, and whose state has its result so much later."""
    clock, tick = context.clock, TickId(ORG, PROJECT, name)
    assert isinstance(clock, ManualClock)
    await commit_times.note(context, tick)
    await clock.advance(delay_s)
    result = FinalizeResult(name, "committed", rows - 1, 1, "")
    await register_of(context, tick).change(
        lambda now: transitions.finish(now, tick, result, manifest=None, now_ms=now_ms(clock))
    )
    return tick


@pytest.mark.parametrize("delay_s", [0.0, 0.5, 7.0, 25.0, 59.0])
async def test_each_tick_is_counted_once_in_the_span_in_which_it_was_finished(
    manual_clock: ManualClock, delay_s: float
) -> None:
    """However long before that its commit was noted; at the end of a span it is in that one, and a replay counts as
    none."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    begin_ms = now_ms(manual_clock)
    done: list[int] = []
    for number in range(3):
        tick = await finished(context, f"t{number}", delay_s, 10**number)
        done.append(now_ms(manual_clock))
        await manual_clock.advance(2.0)
        await commit_times.note(context, tick)
        await manual_clock.advance(3.0)
    await commit_times.note(context, TickId(ORG, PROJECT, "unfinished"))

    end_ms = now_ms(manual_clock) + 60_000
    ends = sorted({*range(begin_ms - 1, end_ms, 5_000), *done, *(at + 1 for at in done), end_ms})
    spans = list(pairwise(ends))
    found = [await views.committed_between(context, *span) for span in spans]
    whole = await views.committed_between(context, begin_ms - 1, end_ms)

    wanted = [sum(10**number for number, at in enumerate(done) if from_ms < at <= to_ms) for from_ms, to_ms in spans]
    assert (3, 111) == whole
    assert wanted == [rows for _, rows in found]


async def test_a_count_of_ticks_reads_a_bounded_number_of_them(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of more it says the number that it has read, and no other."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    monkeypatch.setattr(views, "COUNTED_MAX", 2)
    begin_ms = now_ms(manual_clock)
    for number in range(4):
        await manual_clock.advance(1.0)
        await finished(context, f"t{number}", 0.0, 5)

    assert (2, 10) == await views.committed_between(context, begin_ms, now_ms(manual_clock))
