"""Whom the agent asks next, and what it shows of its queue."""

from __future__ import annotations

from pathlib import Path

from agent_worlds import ScriptedCollectors, frame, open_spool

from lakebed.agent.alerts import Alerts
from lakebed.agent.order import Order, OrderLimits
from lakebed.agent.sender import Sender
from lakebed.agent.waiting import inline
from lakebed.clock import ManualClock
from lakebed.ids import Ids
from lakebed.metrics import Metrics

LIMITS = OrderLimits(concurrency=2, base_s=0.5, cap_s=30.0, retry_after_max_s=300.0, denied_s=60.0, hedge_share_max=0.2)


def test_a_collector_is_not_left_alone_for_longer_than_the_limit() -> None:
    """A Retry-After of a year, from a proxy or a wrong clock, rests the collector for as long as is allowed."""
    order = Order(["http://one"], LIMITS, Ids.seeded(1))
    (lane,) = order.lanes

    order.failed(lane, 1000.0, retry_after_s=365 * 86400.0)

    assert 1300.0 <= lane.rests_until_s <= 1300.0 + LIMITS.base_s
    assert None is order.lane(1299.9)
    assert lane is order.lane(1301.0)


def test_the_queue_is_shown_by_what_waits_in_it(tmp_path: Path, metrics: Metrics) -> None:
    """Batches and bytes that wait, and none that are parked."""
    spool = open_spool(tmp_path)
    alerts = Alerts(tmp_path / "alerts", metrics=metrics, now_ms=lambda: 7)
    sender = Sender(
        spool,
        Order(["http://one"], LIMITS, Ids.seeded(1)),
        ScriptedCollectors(),
        alerts,
        hedge_after_s=0.0,
        concurrency=2,
        clock=ManualClock(),
        metrics=metrics,
        aside=inline,
    )
    spool.append([frame("boot-1", 0, 0, size=5000), frame("boot-1", 1, 1, size=5000)])

    sender._gauge()

    assert (2, spool.pending_bytes, 0) == tuple(
        metrics.value(f"lakebed_agent_{name}") for name in ("queue_batches", "queue_bytes", "parked_batches")
    )
    assert spool.pending_bytes >= 10_000
