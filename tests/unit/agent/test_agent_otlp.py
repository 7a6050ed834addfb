from __future__ import annotations

import asyncio
import contextlib
import gzip
import math
import struct
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakebed.agent.batcher import Batcher, BatchLimits
from lakebed.agent.model import Frame, QueueFull, Stored
from lakebed.agent.sources.listen import Listener
from lakebed.agent.sources.otlp import Received, samples_of
from lakebed.agent.sources.otlp_json import decode_json
from lakebed.agent.sources.otlp_proto import decode_proto
from lakebed.clock import SystemClock
from lakebed.errors import Invalid
from lakebed.frame.codec import decode
from lakebed.frame.model import Kind, Sample
from lakebed.metrics import Metrics
from lakebed.protobuf import encode_field, encode_varint, fields

NOW_NS = 1_760_000_000_000_000_000
TIME_NS = 1_750_000_000_123_456_789


def attribute(key: str, **value: Any) -> dict[str, Any]:
    return {"key": key, "value": value}


def request_json() -> dict[str, Any]:
    """One request with every shape, as the JSON encoding writes it."""
    point = {"timeUnixNano": str(TIME_NS), "attributes": [attribute("room", stringValue="a")]}
    metrics = [
        {"name": "temp", "unit": "C", "gauge": {"dataPoints": [{**point, "asDouble": 21.5}, {**point, "asInt": "-4"}]}},
        {
            "name": "requests",
            "sum": {"dataPoints": [{**point, "asInt": "7"}], "aggregationTemporality": 2, "isMonotonic": True},
        },
        {"name": "inflight", "sum": {"dataPoints": [{**point, "asInt": 3}], "aggregationTemporality": 2}},
        {"name": "added", "sum": {"dataPoints": [{**point, "asDouble": 0.5}], "aggregationTemporality": 1}},
        {
            "name": "latency",
            "histogram": {
                "dataPoints": [{**point, "count": "12", "sum": 3.25, "bucketCounts": ["5", "7"]}],
                "aggregationTemporality": 2,
            },
        },
        {"name": "no_sum", "histogram": {"dataPoints": [{**point, "count": "2"}], "aggregationTemporality": 1}},
        {"name": "missing", "gauge": {"dataPoints": [{**point, "flags": 1}]}},
        {"name": "odd", "summary": {"dataPoints": [point]}},
        {"name": "untimed", "gauge": {"dataPoints": [{"asDouble": 1.0}]}},
    ]
    scope = {"scope": {"name": "lib", "version": "1.2"}, "metrics": metrics}
    resource = {
        "attributes": [
            attribute("service.name", stringValue="shop"),
            attribute("n", intValue="5"),
            attribute("yes", boolValue=True),
            attribute("list", arrayValue={"values": [{"stringValue": "x"}, {"intValue": "1"}]}),
        ]
    }
    return {"resourceMetrics": [{"resource": resource, "scopeMetrics": [scope]}], "future": 1}


def fixed(number: int, fmt: str, value: float) -> bytes:
    return encode_varint(number << 3 | 1) + struct.pack("<" + fmt, value)


def any_value(value: dict[str, Any]) -> bytes:
    [(kind, said)] = value.items()
    if kind == "stringValue":
        return encode_field(1, said.encode())
    if kind == "boolValue":
        return encode_field(2, int(said))
    if kind == "intValue":
        return encode_field(3, int(said) % 2**64)
    items = b"".join(encode_field(1, any_value(item)) for item in said["values"])
    return encode_field(5, items)


def key_value(pair: dict[str, Any]) -> bytes:
    return encode_field(1, pair["key"].encode()) + encode_field(2, any_value(pair["value"]))


def proto_point(point: dict[str, Any], *, histogram: bool) -> bytes:
    out = b""
    if "timeUnixNano" in point:
        out += fixed(3, "Q", int(point["timeUnixNano"]))
    if "asDouble" in point:
        out += fixed(4, "d", point["asDouble"])
    if "asInt" in point:
        out += fixed(6, "q", int(point["asInt"]))
    if "count" in point:
        out += fixed(4, "Q", int(point["count"]))
    if "sum" in point:
        out += fixed(5, "d", point["sum"])
    for count in point.get("bucketCounts", ()):
        out += fixed(6, "Q", int(count))
    for pair in point.get("attributes", ()):
        out += encode_field(9 if histogram else 7, key_value(pair))
    if "flags" in point:
        out += encode_field(10 if histogram else 8, point["flags"])
    return out


def request_proto(request: dict[str, Any]) -> bytes:
    """The same request in protobuf, by the field numbers of the specification."""
    numbers = {"gauge": 5, "sum": 7, "histogram": 9, "summary": 11}
    out = b""
    for resource in request["resourceMetrics"]:
        attributes = b"".join(encode_field(1, key_value(pair)) for pair in resource["resource"]["attributes"])
        body = encode_field(1, attributes)
        for scope in resource["scopeMetrics"]:
            named = encode_field(1, scope["scope"]["name"].encode()) + encode_field(
                2, scope["scope"]["version"].encode()
            )
            held = encode_field(1, named)
            for metric in scope["metrics"]:
                [shape] = [name for name in numbers if name in metric]
                data = metric[shape]
                points = b"".join(
                    encode_field(1, proto_point(p, histogram=shape == "histogram")) for p in data["dataPoints"]
                )
                points += encode_field(2, data.get("aggregationTemporality", 0))
                points += encode_field(3, int(data.get("isMonotonic", False)))
                described = encode_field(1, metric["name"].encode()) + encode_field(3, b"unit")
                held += encode_field(2, described + encode_field(numbers[shape], points))
            body += encode_field(2, held)
        out += encode_field(1, body)
    return out + encode_field(99, b"a field of the future")


def received_from(encoding: str) -> Received:
    request = request_json()
    if encoding == "json":
        metrics = decode_json(msgspec.json.encode(request), points_max=100)
    else:
        metrics = decode_proto(request_proto(request), points_max=100)
    return samples_of(metrics, now_ns=NOW_NS)


@pytest.mark.parametrize("encoding", ["json", "protobuf"])
def test_every_shape_becomes_the_samples_it_means(encoding: str) -> None:
    """Both encodings of one request give the same samples, labels, kinds and times."""
    found = received_from(encoding)

    shared = {
        "service.name": "shop",
        "n": "5",
        "yes": "true",
        "list": '["x",1]',
        "otel_scope_name": "lib",
        "otel_scope_version": "1.2",
    }
    room = {**shared, "room": "a"}
    assert (
        Sample("temp", TIME_NS, 21.5, Kind.GAUGE, room),
        Sample("temp", TIME_NS, -4.0, Kind.GAUGE, room),
        Sample("requests", TIME_NS, 7.0, Kind.COUNTER, room),
        Sample("inflight", TIME_NS, 3.0, Kind.GAUGE, room),
        Sample("added", TIME_NS, 0.5, Kind.DELTA, room),
        Sample("latency_count", TIME_NS, 12.0, Kind.COUNTER, room),
        Sample("latency_sum", TIME_NS, 3.25, Kind.COUNTER, room),
        Sample("no_sum_count", TIME_NS, 2.0, Kind.DELTA, room),
        Sample("untimed", NOW_NS, 1.0, Kind.GAUGE, shared),
    ) == found.samples
    assert found.rejected == 1
    assert "odd" in found.reasons[0]


def test_numbers_may_come_as_text_and_not_as_nonsense() -> None:
    """JSON's 64-bit numbers are text; NaN and infinities have names; anything else is refused whole."""
    body = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [{"name": "m", "gauge": {"dataPoints": [{}]}}]}]}]}
    point = body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"][0]["gauge"]["dataPoints"][0]

    point["asDouble"] = "NaN"
    [metric] = decode_json(msgspec.json.encode(body), points_max=1)
    assert metric.points[0].value is not None
    assert math.isnan(metric.points[0].value)
    point["asDouble"] = "many"
    with pytest.raises(Invalid):
        decode_json(msgspec.json.encode(body), points_max=1)


def test_more_points_than_allowed_are_refused_in_both_encodings() -> None:
    """One request cannot fill the memory."""
    request = request_json()
    with pytest.raises(Invalid, match="over the limit"):
        decode_json(msgspec.json.encode(request), points_max=3)
    with pytest.raises(Invalid, match="over the limit"):
        decode_proto(request_proto(request), points_max=3)


def test_deep_attributes_are_refused() -> None:
    """Nesting is bounded in both encodings."""
    value: dict[str, Any] = {"stringValue": "x"}
    for _ in range(30):
        value = {"arrayValue": {"values": [value]}}
    request = request_json()
    request["resourceMetrics"][0]["resource"]["attributes"] = [{"key": "deep", "value": value}]

    with pytest.raises(Invalid, match="nested"):
        decode_json(msgspec.json.encode(request), points_max=100)
    with pytest.raises(Invalid, match="nested"):
        decode_proto(request_proto(request), points_max=100)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_break_the_protobuf_reader(data: bytes) -> None:
    """Noise gives Invalid or nothing, never another error."""
    with contextlib.suppress(Invalid):
        decode_proto(data, points_max=10)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 255), st.booleans())
def test_a_damaged_request_is_read_or_refused(at: int, byte: int, cut: bool) -> None:
    """Bit flips and cuts anywhere in a real request give Invalid or samples that pass every check."""
    data = bytearray(request_proto(request_json()))
    at %= len(data)
    data[at] = byte
    try:
        metrics = decode_proto(bytes(data[:at] if cut else data), points_max=100)
    except Invalid:
        return
    samples_of(metrics, now_ns=NOW_NS)


def test_lying_lengths_are_refused() -> None:
    """A field that claims more bytes than there are is Invalid, and says that the body is no OTLP."""
    for data in (encode_varint(1 << 3 | 2) + encode_varint(2**40) + b"x", b"\xff" * 11):
        with pytest.raises(Invalid, match="is not OTLP"):
            decode_proto(data, points_max=100)


class Shelf:
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.full = False

    async def __call__(self, frames: Any) -> Stored:
        if self.full:
            raise QueueFull("full")
        self.frames += frames
        return Stored(())


@pytest.fixture
async def served() -> AsyncIterator[tuple[httpx2.AsyncClient, Shelf, Batcher]]:
    shelf, metrics = Shelf(), Metrics()
    batcher = Batcher("a", "b", BatchLimits(2000, 1000, 30.0), shelf, clock=SystemClock(), metrics=metrics)
    listener = Listener(
        batcher,
        linger_s=0.0,
        bytes_max=20_000,
        points_max=100,
        clock=SystemClock(),
        metrics=metrics,
        health=lambda: {"status": "ok"},
    )
    running = asyncio.ensure_future(batcher.run())
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(listener.app), base_url="http://agent") as client:
        yield client, shelf, batcher
    running.cancel()


PROTO = {"content-type": "application/x-protobuf"}
JSON = {"content-type": "application/json"}


async def test_a_200_means_the_samples_are_on_disk(served: Any) -> None:
    """OTLP is acknowledged after the fsync, and a rejected point is told as partial success."""
    client, shelf, _ = served

    answer = await client.post("/v1/metrics", json=request_json())
    stored = sum(len(decode(frame.data).columns.rows()) for frame in shelf.frames)

    assert answer.status_code == 200
    assert answer.json()["partialSuccess"]["rejectedDataPoints"] == "1"
    assert stored == 9


async def test_protobuf_is_answered_in_protobuf(served: Any) -> None:
    """The partial success comes back in the encoding that was asked in, gzip included."""
    client, shelf, _ = served

    body = gzip.compress(request_proto(request_json()))
    answer = await client.post("/v1/metrics", content=body, headers={**PROTO, "content-encoding": "gzip"})
    [(_, partial)] = fields(answer.content)

    assert (200, PROTO["content-type"]) == (answer.status_code, answer.headers["content-type"])
    assert isinstance(partial, bytes)
    assert next(fields(partial)) == (1, 1)
    assert sum(frame.identity.samples for frame in shelf.frames) == 9


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", JSON, 400),
        (b"\xff\xff", PROTO, 400),
        (b"hello", {"content-type": "text/plain"}, 415),
        (b"x", {**PROTO, "content-encoding": "br"}, 415),
        (b"not gzip", {**PROTO, "content-encoding": "gzip"}, 400),
        (gzip.compress(b"x", mtime=0)[:-3], {**PROTO, "content-encoding": "gzip"}, 400),
        (b"x" * 20_001, PROTO, 413),
        (gzip.compress(b"\0" * 50_000_000, mtime=0), {**PROTO, "content-encoding": "gzip"}, 413),
    ],
)
async def test_bad_requests_get_their_status_and_store_nothing(
    served: Any, body: bytes, headers: dict[str, str], status: int
) -> None:
    """Each kind of wrong has its own answer; a gzip bomb is never inflated."""
    client, shelf, _ = served

    answer = await client.post("/v1/metrics", content=body, headers=headers)

    assert status == answer.status_code
    assert shelf.frames == []


async def test_a_full_queue_is_answered_with_503_and_retry_after(served: Any) -> None:
    """An exporter is told to keep its data, before anything is taken from it."""
    client, shelf, batcher = served
    shelf.full = True
    await batcher.put([Sample("m" * 200, 1, 1.0)] * 50)

    answer = await client.post("/v1/metrics", json=request_json())

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_the_agent_shows_its_own_metrics_and_health(served: Any) -> None:
    """Everything it counts can be scraped from it."""
    client, _, _ = served
    await client.post("/v1/metrics", json=request_json())

    assert "lakebed_agent_samples_total 9.0" in (await client.get("/metrics")).text
    assert (await client.get("/health")).json() == {"status": "ok"}
