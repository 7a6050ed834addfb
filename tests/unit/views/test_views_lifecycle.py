"""Lifecycle as people look at it: how far each stream is behind."""

from __future__ import annotations

from lakebed.clock import ManualClock
from lakebed.lifecycle.model import Position
from lakebed.lifecycle.shelf import changed
from lakebed.lifecycle.state import ReaderState
from lakebed.lifecycle.workers import shelf_of
from lakebed.store.memory import MemoryStore
from lakebed.views import lifecycle as views
from ticks_kit import context_of

DAY_NS = 86_400 * 10**9


async def test_a_stream_is_behind_by_what_is_due_and_not_by_its_delay(manual_clock: ManualClock) -> None:
    """A cursor 30 days back is not behind when the rule waits 30 days; the small delay counts for all."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    now_ns = manual_clock.now_ns()
    state = ReaderState(
        originals={
            str(30 * DAY_NS): Position(now_ns - 30 * DAY_NS - 60 * 10**9),
            str(DAY_NS): Position(now_ns - DAY_NS - 160 * 10**9),
        },
        predicate=Position(now_ns - 65 * 10**9),
    )
    await shelf_of(context).reader.change(changed(lambda _: state))

    rows = await views.streams(context)

    assert [("delay 1 d", 86_400.0, 100.0), ("delay 30 d", 30 * 86_400.0, 0.0), ("predicates", 0.0, 5.0)] == [
        (row.stream, row.delay_s, row.behind_s) for row in rows
    ]
