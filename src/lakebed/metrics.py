"""Every number Lakebed shows comes from here: one table of metrics, one registry per process (or per test).

Asking for a metric that is not in the table is an error, so the table is complete by construction.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metric(msgspec.Struct, frozen=True):
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    about: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = LATENCY_S


TABLE: tuple[Metric, ...] = (
    # store
    Metric("lakebed_store_requests_total", "counter", "Requests to the object store.", ("verb",)),
    Metric("lakebed_store_failures_total", "counter", "Requests to the object store that failed.", ("verb", "kind")),
    Metric("lakebed_store_bytes_total", "counter", "Bytes moved to (in) and from (out) the store.", ("direction",)),
    Metric("lakebed_store_doubts_total", "counter", "Conditional writes whose answer was decided by reading."),
    Metric("lakebed_register_writes_total", "counter", "Registers written by compare-and-swap.", ("register",)),
    Metric("lakebed_register_changes_total", "counter", "Changes carried by those writes.", ("register",)),
    Metric("lakebed_register_conflicts_total", "counter", "Compare-and-swaps that met a newer value.", ("register",)),
    # gateway
    Metric("lakebed_http_requests_total", "counter", "HTTP requests answered.", ("route", "method", "status")),
    Metric("lakebed_http_seconds", "histogram", "Time to answer an HTTP request.", ("route",)),
    Metric("lakebed_worker_restarts_total", "counter", "Workers started again after they failed.", ("worker",)),
    # lifecycle
    Metric(
        "lakebed_lifecycle_verdicts_total",
        "counter",
        "Guarded deletes, by what became of them.",
        ("bucket", "kind", "outcome"),
    ),
    Metric("lakebed_lifecycle_events_total", "counter", "Events read, once per sweep.", ("stream",)),
    Metric("lakebed_lifecycle_scanned_total", "counter", "Keys and uploads looked at by walks.", ("bucket",)),
    Metric("lakebed_lifecycle_watermark_lag_seconds", "gauge", "How far a cursor is behind its cutoff.", ("stream",)),
    Metric("lakebed_lifecycle_blocked_streams", "gauge", "Blockers that wait for an operator.", ("stream_kind",)),
    Metric("lakebed_lifecycle_pending_size", "gauge", "Exceptions that wait for their instant.", ("bucket", "action")),
    Metric("lakebed_lifecycle_action_mode", "gauge", "1 for the mode an action is in.", ("bucket", "action", "mode")),
    Metric(
        "lakebed_lifecycle_degraded", "gauge", "1 for the reason of a degraded action.", ("bucket", "action", "reason")
    ),
    Metric("lakebed_lifecycle_quarantined_total", "counter", "Delete decisions an operator gave up.", ("stream_kind",)),
    Metric("lakebed_lifecycle_lost_log_total", "counter", "Times the event log did not reach back to a cursor."),
    Metric("lakebed_build_info", "gauge", "1, labelled with the running version.", ("version",)),
)


class Metrics:
    """The metrics of one process. Counters and gauges are made on first use and kept."""

    def __init__(self, table: tuple[Metric, ...] = TABLE) -> None:
        self.registry = CollectorRegistry()
        self._specs = {metric.name: metric for metric in table}
        self._made: dict[str, Any] = {}

    def counter(self, name: str) -> Counter:
        made = self._get(name, "counter")
        assert isinstance(made, Counter)
        return made

    def gauge(self, name: str) -> Gauge:
        made = self._get(name, "gauge")
        assert isinstance(made, Gauge)
        return made

    def histogram(self, name: str) -> Histogram:
        made = self._get(name, "histogram")
        assert isinstance(made, Histogram)
        return made

    def value(self, name: str, **labels: str) -> float:
        """The current value of one sample, 0 when it was never touched."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def prometheus(self) -> bytes:
        return generate_latest(self.registry)

    def openmetrics(self) -> bytes:
        """OpenMetrics text, which can carry exemplars."""
        return bytes(generate_openmetrics(self.registry))  # type: ignore[no-untyped-call]

    def snapshot(self) -> dict[str, Any]:
        """Every sample as JSON: {name: value} without labels, {name: [{labels, value}]} with."""
        out: dict[str, Any] = {}
        for family in self.registry.collect():
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                if sample.labels:
                    out.setdefault(sample.name, []).append({"labels": sample.labels, "value": sample.value})
                else:
                    out[sample.name] = sample.value
        return out

    def _get(self, name: str, kind: str) -> Any:
        spec = self._specs[name]
        if spec.kind != kind:
            raise KeyError(f"{name} is a {spec.kind}, not a {kind}")
        if name not in self._made:
            made: Any
            if kind == "counter":
                made = Counter(name, spec.about, spec.labels, registry=self.registry)
            elif kind == "gauge":
                made = Gauge(name, spec.about, spec.labels, registry=self.registry)
            else:
                made = Histogram(name, spec.about, spec.labels, registry=self.registry, buckets=spec.buckets)
            self._made[name] = made
        return self._made[name]
