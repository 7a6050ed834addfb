"""OTLP metrics as samples. Pure: both encodings give the same `Metric` values, and `samples_of` makes samples of them.

    gauge                              gauge
    sum, cumulative and monotonic      counter (not monotonic: gauge)
    sum, delta                         delta
    histogram                          <name>_count and <name>_sum, counter or delta

Attributes of resource, scope and point become labels, the nearer one winning. Other shapes and bad points are rejected
one by one, which OTLP calls partial success.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from lakebed.agent.intake import checked
from lakebed.errors import Invalid
from lakebed.frame.model import LIMITS, Kind, Sample

NO_VALUE_FLAG = 1
UNSPECIFIED, DELTA, CUMULATIVE = 0, 1, 2
ATTRIBUTE_DEPTH_MAX = 8
REASONS_MAX = 10

Shape = Literal["gauge", "sum", "histogram", "other"]


class Point(msgspec.Struct, frozen=True):
    attributes: Mapping[str, Any] = {}
    time_ns: int = 0
    flags: int = 0
    value: float | None = None
    count: int | None = None
    sum: float | None = None


class Metric(msgspec.Struct, frozen=True):
    name: str
    shape: Shape
    points: tuple[Point, ...]
    shared: Mapping[str, Any] = {}  # attributes of the resource and the scope
    temporality: int = UNSPECIFIED
    monotonic: bool = False


class Received(msgspec.Struct, frozen=True):
    samples: tuple[Sample, ...]
    rejected: int
    reasons: tuple[str, ...]


def samples_of(metrics: Iterable[Metric], *, now_ns: int) -> Received:
    samples: list[Sample] = []
    rejected = 0
    reasons: list[str] = []
    for metric in metrics:
        for point in metric.points:
            try:
                samples += _point(metric, point, now_ns)
            except Invalid as error:
                rejected += 1
                if len(reasons) < REASONS_MAX:
                    reasons.append(f"{metric.name[:80]}: {error.message}")
    return Received(tuple(samples), rejected, tuple(reasons))


def _point(metric: Metric, point: Point, now_ns: int) -> list[Sample]:
    if point.flags & NO_VALUE_FLAG:
        return []
    labels = {name: _text(value) for name, value in {**metric.shared, **point.attributes}.items()}
    time_ns = point.time_ns or now_ns
    if metric.shape == "other":
        raise Invalid("only gauges, sums and histograms are taken")
    kind = _kind(metric)
    if metric.shape != "histogram":
        if point.value is None:
            raise Invalid("a point has no value")
        return [checked(metric.name, time_ns, point.value, kind, labels)]
    if point.count is None:
        raise Invalid("a histogram point has no count")
    both = [("_count", float(point.count))] + ([("_sum", point.sum)] if point.sum is not None else [])
    return [checked(metric.name + suffix, time_ns, value, kind, labels) for suffix, value in both]


def _kind(metric: Metric) -> Kind:
    if metric.shape == "gauge":
        return Kind.GAUGE
    if metric.temporality == DELTA:
        return Kind.DELTA
    if metric.temporality != CUMULATIVE:
        raise Invalid(f"aggregation temporality {metric.temporality} is not known")
    return Kind.COUNTER if metric.monotonic or metric.shape == "histogram" else Kind.GAUGE


def _text(value: Any) -> str:
    """An attribute as a label's value; one that is too long is cut rather than costing its point."""
    if isinstance(value, bool):
        value = "true" if value else "false"
    elif not isinstance(value, str):
        value = msgspec.json.encode(value).decode()
    if len(value) * 4 > LIMITS.label_value_bytes:
        value = value.encode(errors="replace")[: LIMITS.label_value_bytes].decode(errors="ignore")
    return str(value)
