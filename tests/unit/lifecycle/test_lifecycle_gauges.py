"""What a worker shows is what its registers say now."""

from __future__ import annotations

from lifecycle_harness import Harness
from lifecycle_makers import rule

from lakebed.lifecycle.gauges import Gauges
from lakebed.lifecycle.model import StreamKind
from lakebed.lifecycle.state import Blocker, Stream, Troubles
from lakebed.metrics import Metrics

BLOCKED = "lakebed_lifecycle_blocked_streams"


def blocker(ident: str) -> Blocker:
    return Blocker(ident, Stream(StreamKind.ORIGINAL), "b", "k", "why", "error", 0, 0, 3)


def test_a_blocker_is_shown_as_long_as_it_lasts() -> None:
    """Two are counted by the kind of their stream; resumed ones are not shown any more."""
    metrics = Metrics()
    gauges = Gauges(metrics)

    gauges.troubles(Troubles(blockers={"1": blocker("1"), "2": blocker("2")}))
    before = metrics.value(BLOCKED, stream_kind=StreamKind.ORIGINAL.value)
    gauges.troubles(Troubles())

    assert 2.0 == before
    assert 0.0 == metrics.value(BLOCKED, stream_kind=StreamKind.ORIGINAL.value)


async def test_a_tick_shows_modes_and_counts_events() -> None:
    """An action's mode is shown while its rule stands, and every event a sweep read is counted."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1))
    await world.tick()
    world.lake.write("b", "a")
    await world.tick(1.01)
    shown = world.metrics.snapshot()

    assert ["event_driven"] == [one["labels"]["mode"] for one in shown["lakebed_lifecycle_action_mode"]]
    assert 1.0 <= sum(one["value"] for one in shown["lakebed_lifecycle_events_total"])
    assert 0.0 == sum(one["value"] for one in shown[BLOCKED])
