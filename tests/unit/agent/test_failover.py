"""Whom the agent queries next, and what it shows of its queue."""

from __future__ import annotations

from pathlib import Path

from lakebed.agent.alerts import Alerts
from lakebed.agent.failover import DEMOTED_S, WAITS_MAX, SendLimits, SendOrder
from lakebed.agent.model import ParkedBatch, QueuedBatch
from lakebed.agent.sender import Sender
from lakebed.core.clock import ManualClock
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from support.agent_fakes import ScriptedCollectors, frame, inline, open_spool
from support.runtimes import runtime_of

LIMITS = SendLimits(concurrency=2, base_s=0.5, cap_s=30.0, retry_after_max_s=300.0, denied_s=60.0, hedge_share_max=0.2)


def test_a_collector_is_not_left_alone_for_longer_than_the_limit() -> None:
    """A Retry-After of a year, from a proxy or a wrong clock, rests the collector for as long as is allowed."""
    order = SendOrder(["http://one"], LIMITS, Ids.seeded(1))
    (collector,) = order.collectors

    order.failed(collector, 1000.0, retry_after_s=365 * 86400.0)

    assert 1300.0 <= collector.paused_until_s <= 1300.0 + LIMITS.base_s
    assert None is order.collector(1299.9)
    assert collector is order.collector(1301.0)


def test_the_queue_is_shown_by_what_waits_in_it(tmp_path: Path, metrics: Metrics) -> None:
    """Batches and bytes that wait; parked ones are counted apart."""
    disk_queue = open_spool(tmp_path)
    alerts = Alerts(tmp_path / "alerts", metrics=metrics, now_ms=lambda: 7)
    sender = Sender(
        runtime_of(ManualClock(), metrics=metrics),
        disk_queue,
        SendOrder(["http://one"], LIMITS, Ids.seeded(1)),
        ScriptedCollectors(),
        alerts,
        hedge_after_s=0.0,
        concurrency=2,
        offload=inline,
    )
    disk_queue.append([frame("boot-1", number, number, size=5000) for number in range(3)])
    oldest = disk_queue.claim()
    assert oldest is not None
    disk_queue.park(oldest, ParkedBatch("a", "boot-1", 0, 0, "rejected", oldest.sha256, 7, oldest.size_bytes))

    sender._gauge()

    assert (2, 2 * 8192, 1) == tuple(
        metrics.value(f"lakebed_agent_{name}") for name in ("queue_batches", "queue_bytes", "parked_batches")
    )


def test_a_collector_that_lost_to_a_hedge_is_asked_last_for_a_while() -> None:
    """And first again afterwards; alone, it is queried all the same."""
    order = SendOrder(["http://one", "http://two"], LIMITS, Ids.seeded(1))
    slow, quick = order.collectors

    assert slow is order.collector(1000.0)
    order.lost_hedge(slow, 1000.0)

    assert [quick, quick, slow] == [
        order.collector(at_s) for at_s in (1000.0, 1000.0 + DEMOTED_S - 0.1, 1000.0 + DEMOTED_S)
    ]
    assert slow is order.collector(1000.0, other_than=quick)


def test_a_shorter_wish_does_not_shorten_a_rest() -> None:
    """Two answers of one moment: the longer Retry-After counts, in whichever order they come, and as one fall."""
    for requested in ((60.0, 5.0), (5.0, 60.0)):
        order = SendOrder(["http://one"], LIMITS, Ids.seeded(1))
        (collector,) = order.collectors
        for retry_after_s in requested:
            order.failed(collector, 1000.0, retry_after_s=retry_after_s)
        order.failed(collector, 1001.0)

        assert 1060.0 <= collector.paused_until_s <= 1060.0 + LIMITS.base_s
        assert (1, 1) == (collector.failures, collector.pauses)
        assert collector.paused_until_s == order.next_s(1001.0)


def test_a_success_that_began_before_the_fall_does_not_open_a_collector() -> None:
    """One that began after it does; until then one request at a time goes to it."""
    order = SendOrder(["http://one"], LIMITS, Ids.seeded(1))
    (collector,) = order.collectors
    before = collector.pauses
    order.failed(collector, 1000.0)
    order.succeeded(collector, pauses=before)
    assert (1, None) == (collector.failures, order.collector(1000.0))

    order.started(collector)
    assert None is order.collector(2000.0)  # the probe is under way
    order.succeeded(collector, pauses=collector.pauses)
    assert (0, collector) == (collector.failures, order.collector(1000.0))


def test_hedges_are_a_share_of_the_successes_after_a_first_burst() -> None:
    """Five at first, then one for every five successes, and never more than five saved up."""
    order = SendOrder(["http://one"], LIMITS, Ids.seeded(1))
    (collector,) = order.collectors

    def hedges() -> int:
        return sum(order.may_hedge() for _ in range(20))

    assert [5, 0] == [hedges(), hedges()]
    for _ in range(11):
        order.succeeded(collector, pauses=0)
    assert 2 == hedges()
    for _ in range(100):
        order.succeeded(collector, pauses=0)
    assert 5 == hedges()


def test_batches_that_rest_are_remembered_up_to_a_limit() -> None:
    """Rests that are over are forgotten when there are too many; those that are not are kept."""
    order = SendOrder(["http://one"], LIMITS, Ids.seeded(1))

    def entry(number: int) -> QueuedBatch:
        return QueuedBatch(1, "boot", number, number, "0" * 64, 1)

    for number in range(WAITS_MAX):
        order.set_back(entry(number), 1000.0)
    assert order.failed_before(entry(0)) and order.waits(entry(0), 1000.0)
    order.set_back(entry(WAITS_MAX), 5000.0)

    assert not any(order.failed_before(entry(number)) for number in range(WAITS_MAX))
    assert order.waits(entry(WAITS_MAX), 5000.0)
    order.forget(entry(WAITS_MAX))
    assert not order.failed_before(entry(WAITS_MAX))
