"""Spans as the JSON of OTLP/HTTP: an ExportTraceServiceRequest. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lakebed import __version__
from lakebed.traces.model import Span, Value

KINDS = {"internal": 1, "server": 2, "client": 3}
ERROR = 2
TEXT_MAX = 500


def encode(spans: Sequence[Span], resource: Mapping[str, Value]) -> bytes:
    scope = {"scope": {"name": "lakebed", "version": __version__}, "spans": [_span(span) for span in spans]}
    return msgspec.json.encode(
        {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}]}
    )


def _span(span: Span) -> dict[str, Any]:
    out: dict[str, Any] = {
        "traceId": span.place.trace_id,
        "spanId": span.place.span_id,
        "name": span.name,
        "kind": KINDS[span.kind],
        "startTimeUnixNano": str(span.start_ns),  # 64-bit integers are text in protobuf's JSON
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
    }
    if span.parent_id:
        out["parentSpanId"] = span.parent_id
    if span.error:
        out["status"] = {"code": ERROR, "message": span.error[:TEXT_MAX]}
    return out


def _attributes(values: Mapping[str, Value]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": value[:TEXT_MAX]}
