"""Lifecycle's gauges show the number that an operator acts on."""

from __future__ import annotations

import pytest

from lakebed.lifecycle.gauges import Gauges
from lakebed.lifecycle.model import Position, StreamKind
from lakebed.lifecycle.state import Stream, Troubles
from lakebed.lifecycle.troubles import block, lift
from lakebed.metrics import Metrics

SECOND_NS = 10**9


@pytest.mark.parametrize(
    ("delay_s", "lag_s", "shown_s", "stream"),
    [(1, 8, 7.0, "1s"), (1, 1, 0.0, "1s"), (60, 8, 0.0, "60s"), (None, 8, 8.0, "predicate")],
)
def test_a_stream_lags_by_what_it_is_behind_its_own_delay(
    metrics: Metrics, delay_s: int | None, lag_s: int, shown_s: float, stream: str
) -> None:
    """A stream that waits as it should lags by nothing; one that is 7 s later than that lags by 7 s."""
    delay_ns = None if delay_s is None else delay_s * SECOND_NS

    Gauges(metrics).lag(delay_ns, lag_s * SECOND_NS, high=lag_s > 7)

    def value(name: str, **labels: str) -> float | None:
        found = metrics.registry.get_sample_value(name, labels)
        return None if found is None else float(found)

    assert shown_s == value("lakebed_lifecycle_watermark_lag_seconds", stream=stream)
    assert float(lag_s > 7) == value("lakebed_lifecycle_lag_warning", stream=stream)
    if delay_s is None:
        assert shown_s == value("lakebed_lifecycle_predicate_lag_seconds")


def test_blockers_are_counted_by_kind_and_bucket_and_go_back_to_nothing(metrics: Metrics) -> None:
    """Two places that stand still in one bucket are two; when both are decided the gauge says 0, and still says it."""
    gauges, troubles = Gauges(metrics), Troubles()
    for place in (1, 2):
        stream = Stream(StreamKind.ORIGINAL, 5, Position(place, 0))
        troubles = block(troubles, stream, bucket="b", key="k", now_ns=1, reason="r", error="e")

    def shown(bucket: str) -> float | None:
        labels = {"stream_kind": StreamKind.ORIGINAL.value, "bucket": bucket}
        return metrics.registry.get_sample_value("lakebed_lifecycle_blocked_streams", labels)

    gauges.blockers(troubles)
    assert (2, 0, None) == (shown("b"), shown(""), shown("other"))
    for ident in list(troubles.blockers):
        troubles, _ = lift(troubles, ident)
    gauges.blockers(troubles)
    assert (0, 0) == (shown("b"), shown(""))
