"""OTLP's JSON encoding. Unknown fields are ignored, as OTLP asks; 64-bit numbers may come as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lakebed.agent.sources.otlp import ATTRIBUTE_DEPTH_MAX, Metric, Point, Shape
from lakebed.errors import Invalid

Number = int | float | str


class _Camel(msgspec.Struct, frozen=True, rename="camel"):
    pass


class _Any(_Camel, frozen=True):
    string_value: str | None = None
    bool_value: bool | None = None
    int_value: Number | None = None
    double_value: Number | None = None
    bytes_value: str | None = None
    array_value: dict[str, Any] | None = None
    kvlist_value: dict[str, Any] | None = None


class _KeyValue(_Camel, frozen=True):
    key: str
    value: _Any = _Any()


class _Attributed(_Camel, frozen=True):
    attributes: tuple[_KeyValue, ...] = ()
    name: str = ""
    version: str = ""


class _DataPoint(_Camel, frozen=True):
    attributes: tuple[_KeyValue, ...] = ()
    time_unix_nano: Number = 0
    flags: int = 0
    as_double: Number | None = None
    as_int: Number | None = None
    count: Number | None = None
    sum: Number | None = None


class _Data(_Camel, frozen=True):
    data_points: tuple[_DataPoint, ...] = ()
    aggregation_temporality: int | str = 0
    is_monotonic: bool = False


class _Metric(_Camel, frozen=True):
    name: str = ""
    gauge: _Data | None = None
    sum: _Data | None = None
    histogram: _Data | None = None
    exponential_histogram: _Data | None = None
    summary: _Data | None = None


class _ScopeMetrics(_Camel, frozen=True):
    scope: _Attributed = _Attributed()
    metrics: tuple[_Metric, ...] = ()


class _ResourceMetrics(_Camel, frozen=True):
    resource: _Attributed = _Attributed()
    scope_metrics: tuple[_ScopeMetrics, ...] = ()


class _Request(_Camel, frozen=True):
    resource_metrics: tuple[_ResourceMetrics, ...] = ()


_DECODER = msgspec.json.Decoder(_Request)
_TEMPORALITY = {"AGGREGATION_TEMPORALITY_DELTA": 1, "AGGREGATION_TEMPORALITY_CUMULATIVE": 2}


def decode_json(body: bytes, *, points_max: int) -> list[Metric]:
    """The request's metrics. Raises Invalid when it is not OTLP, or has more than `points_max` points."""
    try:
        request = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"not OTLP metrics: {error}") from error
    found: list[Metric] = []
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            shared = {
                **_attributes(resource.resource.attributes),
                **scope_labels(scope.scope.name, scope.scope.version),
            }
            shared |= _attributes(scope.scope.attributes)
            found += [_metric(metric, shared) for metric in scope.metrics]
    if (points := sum(len(metric.points) for metric in found)) > points_max:
        raise Invalid(f"{points} data points are over the limit of {points_max}")
    return found


def scope_labels(name: str, version: str) -> dict[str, str]:
    pairs = (("otel_scope_name", name), ("otel_scope_version", version))
    return {label: value for label, value in pairs if value}


def _metric(metric: _Metric, shared: Mapping[str, Any]) -> Metric:
    shapes: Sequence[tuple[Shape, _Data | None]] = (
        ("gauge", metric.gauge),
        ("sum", metric.sum),
        ("histogram", metric.histogram),
        ("other", metric.exponential_histogram or metric.summary),
    )
    none: tuple[Shape, _Data] = ("other", _Data())
    shape, data = next(((shape, data) for shape, data in shapes if data is not None), none)
    temporality = data.aggregation_temporality
    return Metric(
        name=metric.name,
        shape=shape,
        points=tuple(map(_point, data.data_points)),
        shared=shared,
        temporality=_TEMPORALITY.get(temporality, 0) if isinstance(temporality, str) else temporality,
        monotonic=data.is_monotonic,
    )


def _point(point: _DataPoint) -> Point:
    value = point.as_double if point.as_double is not None else point.as_int
    return Point(
        attributes=_attributes(point.attributes),
        time_ns=_integer(point.time_unix_nano),
        flags=point.flags,
        value=None if value is None else _float(value),
        count=None if point.count is None else _integer(point.count),
        sum=None if point.sum is None else _float(point.sum),
    )


def _attributes(pairs: Sequence[_KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value, 0) for pair in pairs}


def _value(said: _Any, depth: int) -> Any:
    if depth > ATTRIBUTE_DEPTH_MAX:
        raise Invalid(f"attributes are nested deeper than {ATTRIBUTE_DEPTH_MAX}")
    if said.int_value is not None:
        return _integer(said.int_value)
    if said.double_value is not None:
        return _float(said.double_value)
    if said.array_value is not None:
        return [_value(_nested(_Any, item), depth + 1) for item in said.array_value.get("values") or ()]
    if said.kvlist_value is not None:
        pairs = [_nested(_KeyValue, item) for item in said.kvlist_value.get("values") or ()]
        return {pair.key: _value(pair.value, depth + 1) for pair in pairs}
    plain = (said.string_value, said.bool_value, said.bytes_value)
    return next((value for value in plain if value is not None), "")


def _nested(kind: type[Any], item: Any) -> Any:
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as error:
        raise Invalid(f"not an attribute: {error}") from error


def _integer(number: Number) -> int:
    try:
        return int(number)
    except (ValueError, OverflowError) as error:
        raise Invalid(f"not a whole number: {str(number)[:40]!r}") from error


def _float(number: Number) -> float:
    try:
        return float(number)
    except (ValueError, OverflowError) as error:
        raise Invalid(f"not a number: {str(number)[:40]!r}") from error
