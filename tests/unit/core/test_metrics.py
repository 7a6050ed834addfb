"""One table of metrics: what is not in it cannot be counted."""

from __future__ import annotations

import pytest

from lakebed.core.metrics import TABLE, Metrics


def test_a_metric_that_is_not_in_the_table_is_refused() -> None:
    """Querying for an unknown metric, or for one as another kind, is an error."""
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


def test_a_sample_without_labels_is_a_number_in_json_and_a_histogram_is_its_samples() -> None:
    """Times of creation are left out; a sample that was never touched is 0."""
    metrics = Metrics()
    metrics.counter("lakebed_queue_entries_total").inc(2)
    metrics.histogram("lakebed_http_seconds").labels(route="/x").observe(0.2)
    shown = metrics.snapshot()

    assert 2.0 == shown["lakebed_queue_entries_total"]
    assert [{"labels": {"route": "/x"}, "value": 1.0}] == shown["lakebed_http_seconds_count"]
    assert [] == [name for name in shown if name.endswith("_created")]
    assert 0.0 == metrics.value("lakebed_http_seconds_count", route="/y")


def test_a_metric_is_made_once_and_two_registries_share_nothing() -> None:
    one, other = Metrics(), Metrics()
    one.counter("lakebed_queue_entries_total").inc()
    one.counter("lakebed_queue_entries_total").inc()

    assert (2.0, 0.0) == (one.value("lakebed_queue_entries_total"), other.value("lakebed_queue_entries_total"))


def test_a_histogram_has_the_bounds_of_its_line_in_the_table() -> None:
    """Latencies have the usual ones; others report their own."""
    for metric in (metric for metric in TABLE if metric.kind == "histogram"):
        metrics = Metrics()
        made = metrics.histogram(metric.name)
        (made.labels(*("x" for _ in metric.labels)) if metric.labels else made).observe(1)
        (family,) = metrics.registry.collect()
        bounds = [sample.labels["le"] for sample in family.samples if sample.name.endswith("_bucket")]

        assert [*map(float, metric.buckets), float("inf")] == [float(bound) for bound in bounds], metric.name
        assert sorted(metric.buckets) == list(metric.buckets)
