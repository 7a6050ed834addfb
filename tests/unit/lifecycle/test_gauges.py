"""Lifecycle's gauges show the number that an operator acts on."""

from __future__ import annotations

import pytest

from lakebed.core.metrics import Metrics
from lakebed.lifecycle.blockers import Failure, block, lift
from lakebed.lifecycle.gauges import Gauges
from lakebed.lifecycle.model import Position, StreamKind
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.state import BlockerState, Stream
from support.lifecycle_harness import DAY_S, Harness
from support.lifecycle_makers import rule

SECOND_NS = 10**9


@pytest.mark.parametrize(
    ("delay_s", "behind_s", "shown_s", "stream"),
    [(1, 7, 7.0, "1s"), (1, 0, 0.0, "1s"), (60, -52, 0.0, "60s"), (None, 8, 8.0, "predicate")],
)
def test_a_stream_lags_by_what_it_is_behind(
    metrics: Metrics, delay_s: int | None, behind_s: int, shown_s: float, stream: str
) -> None:
    """A stream that waits as it should lags by nothing; one that is 7 s later than that lags by 7 s."""
    delay_ns = None if delay_s is None else delay_s * SECOND_NS

    Gauges(metrics).lag(delay_ns, behind_s * SECOND_NS, high=behind_s > 6)

    def value(name: str, **labels: str) -> float | None:
        found = metrics.registry.get_sample_value(name, labels)
        return None if found is None else float(found)

    assert shown_s == value("lakebed_lifecycle_watermark_lag_seconds", stream=stream)
    assert float(behind_s > 6) == value("lakebed_lifecycle_lag_warning", stream=stream)
    if delay_s is None:
        assert shown_s == value("lakebed_lifecycle_predicate_lag_seconds")


@pytest.mark.parametrize("rounding", ["midnight", "exact"])
async def test_a_stream_that_waits_for_midnight_is_not_behind(rounding: str) -> None:
    """Rules are due at midnight by default: late in the day the cursor stands where it should, and the gauge says 0."""
    world = Harness(rounding=rounding)
    await world.policy("b", rule(expiration_days=1))
    for _ in range(6):
        await world.run_round(days=0.5)
    midnight_s = world.clock.now_ns() / SECOND_NS // DAY_S * DAY_S
    await world.clock.advance(midnight_s + DAY_S - world.clock.now_ns() / SECOND_NS)
    await world.run_round(days=0.01)

    await world.run_round(days=0.9)
    on_time = world.metrics.value("lakebed_lifecycle_watermark_lag_seconds", stream="100s")
    operator = Operator(world.registers, world.settings)
    (before,) = await operator.status("b")
    await world.clock.advance(3 * DAY_S)
    await world.worker._monitor.judge(await world.worker.compile(), {})
    late = world.metrics.value("lakebed_lifecycle_watermark_lag_seconds", stream="100s")
    (after,) = await operator.status("b")

    assert (0.0, 0.0) == (on_time, before["lag_s"])
    assert (3 * DAY_S, 3 * DAY_S) == (late, after["lag_s"])


def test_blockers_are_counted_by_kind_and_bucket_and_go_back_to_nothing(metrics: Metrics) -> None:
    """Two places that stand still in one bucket are two; when both are decided the gauge says 0, and still says it."""
    gauges, blockers = Gauges(metrics), BlockerState()
    for place in (1, 2):
        stream = Stream(StreamKind.ORIGINAL, place, Position(place, 0))
        blockers = block(blockers, [Failure(stream, "b", "k", "TRANSPORT_ERROR", "e")], 1, reason="r")

    def shown(bucket: str) -> float | None:
        labels = {"stream_kind": StreamKind.ORIGINAL.value, "bucket": bucket}
        return metrics.registry.get_sample_value("lakebed_lifecycle_blocked_streams", labels)

    gauges.blockers(blockers)
    assert (2, 0, None) == (shown("b"), shown(""), shown("other"))
    for ident in list(blockers.blockers):
        blockers, _ = lift(blockers, ident)
    gauges.blockers(blockers)
    assert (0, 0) == (shown("b"), shown(""))
