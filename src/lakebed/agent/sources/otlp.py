"""OTLP metrics as samples. Pure: both encodings become one protobuf message, and `samples_of` makes samples of it.

    gauge                              gauge
    sum, cumulative and monotonic      counter (not monotonic: gauge)
    sum, delta                         delta
    histogram                          <name>_count and <name>_sum, counter or delta

Attributes of resource, scope and point become labels, the nearer one winning. Other shapes and bad points are rejected
one by one, which OTLP calls partial success. Unknown fields are ignored. JSON writes the ids of exemplars in hex where
protobuf's JSON has base64; no sample needs them, so they are left as they are.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2 as pb

from lakebed.agent.batcher import checked
from lakebed.batches.model import LIMITS, Kind, Sample
from lakebed.core.errors import Invalid
from lakebed.filer.protobuf import encode_field

ATTRIBUTE_DEPTH_MAX = 8
REASONS_MAX = 10


class OtlpSamples(msgspec.Struct, frozen=True):
    samples: tuple[Sample, ...]
    rejected: int
    reasons: tuple[str, ...]


def decode_proto(body: bytes, *, points_max: int) -> ExportMetricsServiceRequest:
    """Raises Invalid when the body is not OTLP, or has more than `points_max` points."""
    try:
        request = ExportMetricsServiceRequest.FromString(body)
    except DecodeError as error:
        raise Invalid(f"the body is not OTLP metrics: {error}") from error
    return _bounded(request, points_max)


def decode_json(body: bytes, *, points_max: int) -> ExportMetricsServiceRequest:
    """The same for the JSON encoding."""
    try:
        tree = msgspec.json.decode(body, type=dict[str, Any])
        request = ParseDict(tree, ExportMetricsServiceRequest(), ignore_unknown_fields=True)
    except (msgspec.DecodeError, UnicodeError, RecursionError, ParseError) as error:
        raise Invalid(f"the body is not OTLP metrics: {error}") from error
    return _bounded(request, points_max)


def encode_answer(rejected: int, why: str) -> bytes:
    """An ExportMetricsServiceResponse; empty when nothing was rejected."""
    if not rejected:
        return b""
    partial = ExportMetricsPartialSuccess(rejected_data_points=rejected, error_message=why)
    return bytes(ExportMetricsServiceResponse(partial_success=partial).SerializeToString())


def encode_status(code: int, why: str) -> bytes:
    """A google.rpc.Status, OTLP's answer to a refused request. Two fields are no reason for another dependency."""
    return encode_field(1, code) + encode_field(2, why.encode())


def samples_of(request: ExportMetricsServiceRequest, *, now_ns: int) -> OtlpSamples:
    """Raises Invalid when the attributes of a resource or a scope are nested too deep."""
    samples: list[Sample] = []
    rejected = 0
    reasons: list[str] = []
    for metric, shared in _metrics(request):
        for point in _points(metric):
            try:
                samples += _samples(metric, point, shared, now_ns)
            except Invalid as error:
                rejected += 1
                if len(reasons) < REASONS_MAX:
                    reasons.append(f"{metric.name[:80]}: {error.message}")
    return OtlpSamples(tuple(samples), rejected, tuple(reasons))


def _bounded(request: ExportMetricsServiceRequest, points_max: int) -> ExportMetricsServiceRequest:
    scopes = (scope for resource in request.resource_metrics for scope in resource.scope_metrics)
    points = sum(len(_points(metric)) for scope in scopes for metric in scope.metrics)
    if points > points_max:
        raise Invalid(f"{points} data points are over the limit of {points_max}")
    return request


def _metrics(request: ExportMetricsServiceRequest) -> Iterator[tuple[pb.Metric, Mapping[str, str]]]:
    """Every metric with the labels of its resource and scope."""
    for resource in request.resource_metrics:
        outer = _labels(resource.resource.attributes)
        for held in resource.scope_metrics:
            scope = held.scope
            named = {"otel_scope_name": scope.name, "otel_scope_version": scope.version}
            shared = {**outer, **{label: text for label, text in named.items() if text}, **_labels(scope.attributes)}
            yield from ((metric, shared) for metric in held.metrics)


def _points(metric: pb.Metric) -> Sequence[Any]:
    shape = metric.WhichOneof("data")
    return getattr(metric, shape).data_points if shape else ()


def _samples(metric: pb.Metric, point: Any, shared: Mapping[str, str], now_ns: int) -> list[Sample]:
    if point.flags & pb.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK:
        return []
    shape = metric.WhichOneof("data")
    if shape not in ("gauge", "sum", "histogram"):
        raise Invalid("only gauges, sums and histograms are supported")
    kind = Kind.GAUGE if shape == "gauge" else _kind(getattr(metric, shape))
    labels = {**shared, **_labels(point.attributes)}
    time_ns = point.time_unix_nano or now_ns
    if shape == "histogram":
        both = [("_count", float(point.count))] + ([("_sum", point.sum)] if point.HasField("sum") else [])
        return [checked(metric.name + suffix, time_ns, value, kind, labels) for suffix, value in both]
    value = point.WhichOneof("value")
    if value is None:
        raise Invalid("a point has no value")
    return [checked(metric.name, time_ns, float(getattr(point, value)), kind, labels)]


def _kind(data: pb.Sum | pb.Histogram) -> Kind:
    if data.aggregation_temporality == pb.AGGREGATION_TEMPORALITY_DELTA:
        return Kind.DELTA
    if data.aggregation_temporality != pb.AGGREGATION_TEMPORALITY_CUMULATIVE:
        raise Invalid(f"aggregation temporality {data.aggregation_temporality} is not supported")
    return Kind.COUNTER if isinstance(data, pb.Histogram) or data.is_monotonic else Kind.GAUGE


def _labels(pairs: Iterable[KeyValue]) -> dict[str, str]:
    return {pair.key: _text(_value(pair.value, 0)) for pair in pairs}


def _value(value: AnyValue, depth: int) -> Any:
    if depth > ATTRIBUTE_DEPTH_MAX:
        raise Invalid(f"attributes are nested deeper than {ATTRIBUTE_DEPTH_MAX}")
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case "bytes_value":
            return base64.b64encode(value.bytes_value).decode()
        case "array_value":
            return [_value(item, depth + 1) for item in value.array_value.values]
        case "kvlist_value":
            return {pair.key: _value(pair.value, depth + 1) for pair in value.kvlist_value.values}
    return ""


def _text(value: Any) -> str:
    """An attribute as a label's value; one that is too long is cut rather than costing its point."""
    if isinstance(value, bool):
        value = "true" if value else "false"
    elif not isinstance(value, str):
        value = msgspec.json.encode(value).decode()
    if len(value) * 4 > LIMITS.label_value_bytes:
        value = value.encode(errors="replace")[: LIMITS.label_value_bytes].decode(errors="ignore")
    return str(value)
