"""Lifecycle as people look at it: how far each stream is behind."""

from __future__ import annotations

from lakebed.clock import ManualClock
from lakebed.lifecycle.ledger import Ledger
from lakebed.lifecycle.model import ActionKind, Identity, Position
from lakebed.lifecycle.shelf import changed
from lakebed.lifecycle.state import LedgerRow, ReaderState
from lakebed.lifecycle.workers import shelf_of
from lakebed.store.memory import MemoryStore
from lakebed.views import lifecycle as views
from ticks_kit import context_of

DAY_NS = 86_400 * 10**9


async def test_a_stream_is_behind_by_what_is_due_and_not_by_its_delay(manual_clock: ManualClock) -> None:
    """A cursor 30 days before the last midnight is not behind when the rule waits 30 days and is due at midnight."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    now_ns = manual_clock.now_ns()
    midnight_ns = now_ns // DAY_NS * DAY_NS
    assert now_ns > midnight_ns + 3600 * 10**9
    state = ReaderState(
        originals={
            str(30 * DAY_NS): Position(midnight_ns - 30 * DAY_NS),
            str(DAY_NS): Position(midnight_ns - DAY_NS - 100 * 10**9),
        },
        predicate=Position(now_ns - 65 * 10**9),
    )
    await shelf_of(context).reader.change(changed(lambda _: state))

    rows = await views.streams(context)

    assert [("delay 1 d", 86_400.0, 100.0), ("delay 30 d", 30 * 86_400.0, 0.0), ("predicates", 0.0, 5.0)] == [
        (row.stream, row.delay_s, row.behind_s) for row in rows
    ]


async def test_of_one_key_the_newest_verdicts_are_shown_in_order(manual_clock: ManualClock) -> None:
    """More verdicts than are shown: the last ones, and none of another key or bucket."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    book = Ledger(context.store, context.clock, context.ids)
    for number in range(5):
        for bucket, key in (("b", "k"), ("b", "other"), ("c", "k")):
            row = LedgerRow(
                manual_clock.now_ns(), f"run-{number}", bucket, key, "hash", ActionKind.EXPIRATION_DAYS, "DELETE",
                Identity(1, 1), "original",
            )  # fmt: skip
            await book.append([row])
        await manual_clock.advance(1.0)

    of_key = await views.ledger(context, "b", "k", limit=2)
    of_bucket = await views.ledger(context, "b", limit=3)

    assert [("k", "run-3"), ("k", "run-4")] == [(row["key"], row["run"]) for row in of_key]
    assert ["run-3", "run-4", "run-4"] == [row["run"] for row in of_bucket]
    assert {"planned"} == {row["outcome"] for row in of_bucket}
