from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import math
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import msgspec
import pytest
from google.protobuf.json_format import ParseDict
from google.rpc.status_pb2 import Status
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource

from lakebed.agent.batcher import Batcher, BatchLimits
from lakebed.agent.model import AppendResult, Frame, QueueFull
from lakebed.agent.sources import listen
from lakebed.agent.sources.listen import OtlpListener
from lakebed.agent.sources.otlp import OtlpSamples, decode_json, decode_proto, samples_of
from lakebed.batches.codec.frame import decode
from lakebed.batches.model import Kind, Sample
from lakebed.core.clock import SystemClock
from lakebed.core.errors import Invalid
from lakebed.core.metrics import Metrics
from lakebed.filer.protobuf import encode_field, encode_varint
from support.runtimes import runtime_of

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


def request_proto(request: dict[str, Any]) -> bytes:
    """The same request in protobuf, with a field that no version of OTLP has yet."""
    message = ParseDict(request, ExportMetricsServiceRequest(), ignore_unknown_fields=True)
    return message.SerializeToString() + encode_field(99, b"a field of the future")


def received_from(encoding: str) -> OtlpSamples:
    request = request_json()
    if encoding == "json":
        decoded = decode_json(msgspec.json.encode(request), points_max=100)
    else:
        decoded = decode_proto(request_proto(request), points_max=100)
    return samples_of(decoded, now_ns=NOW_NS)


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


def test_what_opentelemetrys_own_sdk_sends_is_taken() -> None:
    """A counter, a gauge and a histogram of a real client, with its resource and its exporter's encoding."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], Resource({"service.name": "shop"}), shutdown_on_exit=False)
    meter = provider.get_meter("lib")
    meter.create_counter("orders").add(2, {"room": "a"})
    meter.create_gauge("temp").set(21.5)
    meter.create_histogram("latency").record(3)
    data = reader.get_metrics_data()
    assert data is not None

    found = samples_of(decode_proto(encode_metrics(data).SerializeToString(), points_max=10), now_ns=NOW_NS)

    shared = {"service.name": "shop", "otel_scope_name": "lib"}
    assert [
        ("orders", 2.0, Kind.COUNTER, {**shared, "room": "a"}),
        ("temp", 21.5, Kind.GAUGE, shared),
        ("latency_count", 1.0, Kind.COUNTER, shared),
        ("latency_sum", 3.0, Kind.COUNTER, shared),
    ] == [(each.metric, each.value, each.kind, each.labels) for each in found.samples]


def test_numbers_may_come_as_text_and_not_as_nonsense() -> None:
    """JSON's 64-bit numbers are text; NaN and infinities have names; anything else is refused whole."""
    body = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [{"name": "m", "gauge": {"dataPoints": [{}]}}]}]}]}
    point = body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"][0]["gauge"]["dataPoints"][0]

    point["asDouble"] = "NaN"
    [sample] = samples_of(decode_json(msgspec.json.encode(body), points_max=1), now_ns=NOW_NS).samples
    assert math.isnan(sample.value)
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

    for decoded in (
        decode_json(msgspec.json.encode(request), points_max=100),
        decode_proto(request_proto(request), points_max=100),
    ):
        with pytest.raises(Invalid, match="nested"):
            samples_of(decoded, now_ns=NOW_NS)


def test_nesting_past_every_limit_is_refused() -> None:
    """A body that is nothing but opening brackets ends in Invalid, not in a full stack."""
    for depth in (200, 100_000):
        value = b'{"arrayValue":{"values":[' * depth + b"]}}" * depth
        body = b'{"resourceMetrics":[{"resource":{"attributes":[{"key":"k","value":' + value + b"}]}}]}"
        with pytest.raises(Invalid, match="not OTLP"):
            decode_json(body, points_max=100)


def test_exemplars_with_their_ids_in_hex_are_no_reason_to_refuse() -> None:
    """OTLP/JSON writes trace and span ids in hex, and a client that records exemplars sends them with each point."""
    point = {
        "asInt": "3",
        "exemplars": [{"traceId": "5b8efff798038103d269b633813fc60c", "spanId": "eee19b7ec3c1b174", "asDouble": 1.5}],
    }
    data = {"dataPoints": [point], "aggregationTemporality": "AGGREGATION_TEMPORALITY_DELTA"}
    body = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [{"name": "m", "sum": data}]}]}]}

    found = samples_of(decode_json(msgspec.json.encode(body), points_max=1), now_ns=NOW_NS)

    assert (Sample("m", NOW_NS, 3.0, Kind.DELTA, {}),) == found.samples


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_break_the_protobuf_reader(data: bytes) -> None:
    """Noise gives Invalid or nothing, never another error."""
    with contextlib.suppress(Invalid):
        decode_proto(data, points_max=10)


names = st.sampled_from(["resourceMetrics", "scopeMetrics", "metrics", "name", "gauge", "dataPoints", "asInt", "x"])
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
trees = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3))


@settings(max_examples=300, deadline=None)
@given(trees | st.dictionaries(names, trees))
def test_no_tree_breaks_the_json_reader(tree: Any) -> None:
    """Whatever is in the places of OTLP's fields gives Invalid or a request, never another error."""
    with contextlib.suppress(Invalid):
        samples_of(decode_json(msgspec.json.encode(tree), points_max=10), now_ns=NOW_NS)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 255), st.booleans())
def test_a_damaged_request_is_read_or_refused(at: int, byte: int, cut: bool) -> None:
    """Bit flips and cuts anywhere in a real request give Invalid or samples that pass every check."""
    data = bytearray(request_proto(request_json()))
    at %= len(data)
    data[at] = byte
    try:
        samples_of(decode_proto(bytes(data[:at] if cut else data), points_max=100), now_ns=NOW_NS)
    except Invalid:
        return


def test_lying_lengths_are_refused() -> None:
    """A field that claims more bytes than there are is Invalid, and reports that the body is no OTLP."""
    for data in (encode_varint(1 << 3 | 2) + encode_varint(2**40) + b"x", b"\xff" * 11):
        with pytest.raises(Invalid, match="is not OTLP"):
            decode_proto(data, points_max=100)


class Shelf:
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.full = False

    async def __call__(self, frames: Any) -> AppendResult:
        if self.full:
            raise QueueFull("full")
        self.frames += frames
        return AppendResult(())


@pytest.fixture
async def served() -> AsyncIterator[tuple[httpx2.AsyncClient, Shelf, Batcher]]:
    disk_queue, metrics = Shelf(), Metrics()
    batcher = Batcher(runtime_of(SystemClock(), metrics=metrics), "a", "b", BatchLimits(2000, 1000, 30.0), disk_queue)
    listener = OtlpListener(
        runtime_of(SystemClock(), metrics=metrics),
        batcher,
        linger_s=0.0,
        bytes_max=20_000,
        points_max=100,
        health=lambda: {"status": "ok"},
    )
    running = asyncio.ensure_future(batcher.run())
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(listener.app), base_url="http://127.0.0.1:4318"
    ) as client:
        yield client, disk_queue, batcher
    running.cancel()


PROTO = {"content-type": "application/x-protobuf"}
JSON = {"content-type": "application/json"}


async def test_a_200_means_the_samples_are_on_disk(served: Any) -> None:
    """OTLP is acknowledged after the fsync, and a rejected point is reported as partial success."""
    client, disk_queue, _ = served

    answer = await client.post("/v1/metrics", json=request_json())
    stored = sum(len(decode(frame.data).columns.rows()) for frame in disk_queue.frames)

    assert answer.status_code == 200
    assert answer.json()["partialSuccess"]["rejectedDataPoints"] == "1"
    assert stored == 9


async def test_protobuf_is_answered_in_protobuf(served: Any) -> None:
    """The partial success comes back in the encoding that was queried in, gzip included."""
    client, disk_queue, _ = served

    body = gzip.compress(request_proto(request_json()))
    answer = await client.post("/v1/metrics", content=body, headers={**PROTO, "content-encoding": "gzip"})
    partial = ExportMetricsServiceResponse.FromString(answer.content).partial_success

    assert (200, PROTO["content-type"]) == (answer.status_code, answer.headers["content-type"])
    assert 1 == partial.rejected_data_points
    assert "odd" in partial.error_message
    assert sum(frame.identity.samples for frame in disk_queue.frames) == 9


async def test_a_refusal_in_protobuf_is_a_status(served: Any) -> None:
    """OTLP answers errors with google.rpc.Status."""
    client, _, _ = served

    answer = await client.post("/v1/metrics", content=b"\xff\xff", headers=PROTO)
    status = Status.FromString(answer.content)

    assert (400, 3) == (answer.status_code, status.code)
    assert "is not OTLP" in status.message


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"{", JSON, 400),
        (b"[]", JSON, 400),
        (b'"text"', JSON, 400),
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
    client, disk_queue, _ = served

    answer = await client.post("/v1/metrics", content=body, headers=headers)

    assert status == answer.status_code
    assert disk_queue.frames == []


async def test_json_is_decoded_aside_of_the_event_loop_and_one_body_at_a_time(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large body in JSON holds up neither the agent's other work nor more memory than one body needs."""
    client, _, _ = served
    begun, go_on = [], threading.Event()

    def slow(body: bytes, *, points_max: int) -> ExportMetricsServiceRequest:
        begun.append(go_on.is_set())
        go_on.wait(60)
        return decode_json(body, points_max=points_max)

    monkeypatch.setattr(listen, "decode_json", slow)
    posts = [asyncio.ensure_future(client.post("/v1/metrics", json=request_json())) for _ in range(2)]
    while not begun:
        await asyncio.sleep(0)
    health = await client.get("/health")
    go_on.set()

    assert 200 == health.status_code
    assert [200, 200] == [answer.status_code for answer in await asyncio.gather(*posts)]
    assert [False, True] == begun


async def test_a_full_queue_is_answered_with_503_and_retry_after(served: Any) -> None:
    """An exporter is instructed to keep its data, before anything is taken from it."""
    client, disk_queue, batcher = served
    disk_queue.full = True
    await batcher.put([Sample("m" * 200, 1, 1.0)] * 50)

    answer = await client.post("/v1/metrics", json=request_json())

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:4318"}, 200),
        ({"host": "[::1]:4318", "origin": "http://[::1]:4318", "sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "intranet"}, 403),
        ({"host": "[::1].evil.example"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
    ],
)
async def test_a_page_of_another_site_reaches_nothing(served: Any, headers: dict[str, str], status: int) -> None:
    """Neither under a name that resolves to this machine, dotless ones too, nor by a script, an image or a form."""
    client, disk_queue, _ = served

    answers = [
        await client.post("/v1/metrics", json=request_json(), headers=headers),
        await client.get("/metrics", headers=headers),
        await client.get("/health", headers=headers),
    ]

    assert {status} == {answer.status_code for answer in answers}
    assert (status == 200) == bool(disk_queue.frames)
    assert status == 200 or "lakebed" not in answers[1].text


async def test_the_agent_shows_its_own_metrics_and_health(served: Any) -> None:
    """Everything it counts can be scraped from it."""
    client, _, _ = served
    await client.post("/v1/metrics", json=request_json())

    assert "lakebed_agent_samples_total 9.0" in (await client.get("/metrics")).text
    assert (await client.get("/health")).json() == {"status": "ok"}


def test_an_agent_without_otlp_does_not_load_it() -> None:
    """The messages, protobuf and the web server are loaded when the listener is on, and not before."""
    code = "import json, sys, lakebed.agent.run; print(json.dumps(sorted(sys.modules)))"
    listed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout

    optional = {"opentelemetry.proto", "opentelemetry.sdk", "google.protobuf", "uvicorn"}
    assert set() == optional & set(json.loads(listed))
