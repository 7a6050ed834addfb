"""One table of metrics: what is not in it cannot be counted."""

from __future__ import annotations

import pytest

from lakebed.metrics import TABLE, Metrics


def test_a_metric_that_is_not_in_the_table_is_refused() -> None:
    """Asking for an unknown metric, or for one as another kind, is an error."""
    metrics = Metrics()

    with pytest.raises(KeyError):
        metrics.counter("lakebed_made_up_total")
    with pytest.raises(KeyError):
        metrics.gauge("lakebed_store_requests_total")


def test_names_are_unique_and_say_their_unit() -> None:
    """Every name is ours, appears once, and counters end in _total."""
    names = [metric.name for metric in TABLE]

    assert len(set(names)) == len(names)
    assert all(name.startswith("lakebed_") for name in names)
    assert all(metric.name.endswith("_total") == (metric.kind == "counter") for metric in TABLE)
    assert all(metric.about.endswith(".") for metric in TABLE)


def test_every_metric_of_the_table_can_be_made_and_shown() -> None:
    """The whole table registers and appears in the Prometheus text."""
    metrics = Metrics()

    for metric in TABLE:
        made = getattr(metrics, metric.kind)(metric.name)
        child = made.labels(*("x" for _ in metric.labels)) if metric.labels else made
        (child.observe if metric.kind == "histogram" else child.inc)(1)

    text = metrics.prometheus().decode()
    assert all(metric.name in text for metric in TABLE)
    assert "# EOF" in metrics.openmetrics().decode()


def test_json_text_and_value_agree() -> None:
    """The JSON snapshot, the text and `value` show the same number."""
    metrics = Metrics()
    metrics.counter("lakebed_store_requests_total").labels(verb="get").inc(3)

    assert metrics.value("lakebed_store_requests_total", verb="get") == 3.0
    assert metrics.snapshot()["lakebed_store_requests_total"] == [{"labels": {"verb": "get"}, "value": 3.0}]
    assert b'lakebed_store_requests_total{verb="get"} 3.0' in metrics.prometheus()


def test_exemplars_are_possible() -> None:
    """OpenMetrics text carries an exemplar that was given."""
    metrics = Metrics()
    metrics.histogram("lakebed_http_seconds").labels(route="/x").observe(0.2, {"trace_id": "abc"})

    assert 'trace_id="abc"' in metrics.openmetrics().decode()
