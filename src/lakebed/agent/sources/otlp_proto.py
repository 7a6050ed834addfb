"""OTLP's protobuf encoding, read straight from the wire: the messages down to a data point, and no others.

Field numbers are those of opentelemetry/proto/metrics/v1. Unknown fields are skipped, as protobuf asks.
"""

from __future__ import annotations

import base64
from typing import Any

from lakebed.agent.sources.otlp import ATTRIBUTE_DEPTH_MAX, Metric, Point, Shape
from lakebed.agent.sources.otlp_json import scope_labels
from lakebed.errors import Corrupt, Invalid
from lakebed.protobuf import double, encode_field, fields, fixed64, message, number, sfixed64, signed, text

_SHAPES: dict[int, Shape] = {5: "gauge", 7: "sum", 9: "histogram", 10: "other", 11: "other"}


def decode_proto(body: bytes, *, points_max: int) -> list[Metric]:
    """The request's metrics. Raises Invalid when it is not OTLP, or has more than `points_max` points."""
    try:
        return _Reader(points_max).request(body)
    except Corrupt as error:
        raise Invalid(f"the body is not OTLP: {error.message}") from error


def encode_answer(rejected: int, why: str) -> bytes:
    """ExportMetricsServiceResponse; empty when nothing was rejected."""
    if not rejected:
        return b""
    return encode_field(1, encode_field(1, rejected) + encode_field(2, why.encode()))


def encode_status(code: int, why: str) -> bytes:
    """google.rpc.Status, which OTLP answers errors with."""
    return encode_field(1, code) + encode_field(2, why.encode())


class _Reader:
    def __init__(self, points_max: int) -> None:
        self._points_max = points_max
        self._points = 0

    def request(self, data: bytes) -> list[Metric]:
        return [metric for field, value in fields(data) if field == 1 for metric in self._resource(message(value))]

    def _resource(self, data: bytes) -> list[Metric]:
        shared: dict[str, Any] = {}
        scopes: list[bytes] = []
        for field, value in fields(data):
            if field == 1:
                shared |= dict(_pair(message(v), 0) for n, v in fields(message(value)) if n == 1)
            elif field == 2:
                scopes.append(message(value))
        return [metric for scope in scopes for metric in self._scope(scope, shared)]

    def _scope(self, data: bytes, resource: dict[str, Any]) -> list[Metric]:
        name = version = ""
        own: dict[str, Any] = {}
        metrics: list[bytes] = []
        for field, value in fields(data):
            if field == 1:
                for n, v in fields(message(value)):
                    if n == 1:
                        name = text(v)
                    elif n == 2:
                        version = text(v)
                    elif n == 3:
                        own |= dict([_pair(message(v), 0)])
            elif field == 2:
                metrics.append(message(value))
        shared = {**resource, **scope_labels(name, version), **own}
        return [self._metric(metric, shared) for metric in metrics]

    def _metric(self, data: bytes, shared: dict[str, Any]) -> Metric:
        name, shape, held = "", 0, b""
        for field, value in fields(data):
            if field == 1:
                name = text(value)
            elif field in _SHAPES:
                shape, held = field, message(value)
        kind = _SHAPES.get(shape, "other")
        points: list[Point] = []
        temporality, monotonic = 0, False
        for field, value in fields(held):
            if field == 1:
                self._points += 1
                if self._points > self._points_max:
                    raise Invalid(f"data points are over the limit of {self._points_max}")
                points.append(_point(message(value), kind))
            elif field == 2:
                temporality = number(value)
            elif field == 3 and kind == "sum":
                monotonic = bool(number(value))
        return Metric(name, kind, tuple(points), shared, temporality, monotonic)


def _point(data: bytes, shape: Shape) -> Point:
    if shape == "other":
        return Point()
    attributes: dict[str, Any] = {}
    time_ns = flags = 0
    value = count = total = None
    histogram = shape == "histogram"
    for field, said in fields(data):
        if field == 3:
            time_ns = fixed64(said)
        elif field == 4:
            if histogram:
                count = fixed64(said)
            else:
                value = double(said)
        elif field == 5 and histogram:
            total = double(said)
        elif field == 6 and not histogram:
            value = float(sfixed64(said))
        elif field == (9 if histogram else 7):
            attributes |= dict([_pair(message(said), 0)])
        elif field == (10 if histogram else 8):
            flags = number(said)
    return Point(attributes, time_ns, flags, value, count, total)


def _pair(data: bytes, depth: int) -> tuple[str, Any]:
    key, found = "", ""
    for field, value in fields(data):
        if field == 1:
            key = text(value)
        elif field == 2:
            found = _value(message(value), depth)
    return key, found


def _value(data: bytes, depth: int) -> Any:
    if depth > ATTRIBUTE_DEPTH_MAX:
        raise Invalid(f"attributes are nested deeper than {ATTRIBUTE_DEPTH_MAX}")
    found: Any = ""
    for field, value in fields(data):
        if field == 1:
            found = text(value)
        elif field == 2:
            found = bool(number(value))
        elif field == 3:
            found = signed(value)
        elif field == 4:
            found = double(value)
        elif field == 5:
            found = [_value(message(v), depth + 1) for n, v in fields(message(value)) if n == 1]
        elif field == 6:
            found = dict(_pair(message(v), depth + 1) for n, v in fields(message(value)) if n == 1)
        elif field == 7:
            found = base64.b64encode(message(value)).decode()
    return found
