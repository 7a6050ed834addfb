"""Traces reach a real receiver from real processes, and one that is away costs nothing but spans."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from lakebed.core.errors import NotFound
from lakebed.core.metrics import Metrics
from lakebed.core.settings import env_name
from lakebed.core.traces import installed, span
from lakebed.core.traces.export import TraceSender
from lakebed.core.traces.start import tracing
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from support.agent_process import gateway, lines, run_agent

DEADLINE_S = 150.0


class Receiver:
    """An OTLP/HTTP receiver: every span with the service that sent it."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.stuck: threading.Event | None = None
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if receiver.stuck is not None:
                    receiver.stuck.wait(DEADLINE_S)
                receiver.requests.append((self.path, dict(self.headers.items())))
                for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
                    resource = {one.key: one.value.string_value for one in sent.resource.attributes}
                    for scope in sent.scope_spans:
                        receiver.spans += [_read(one, resource) for one in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


def _read(span: Span, resource: dict[str, str]) -> dict[str, Any]:
    found = {
        "name": span.name,
        "traceId": span.trace_id.hex(),
        "spanId": span.span_id.hex(),
        "kind": span.kind,
        "status": (span.status.code, span.status.message),
        "attributes": {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes},
        "service": resource["service.name"],
        "resource": resource,
    }
    return found | ({"parentSpanId": span.parent_span_id.hex()} if span.parent_span_id else {})


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = threading.Thread(target=receiver.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.server.shutdown()
        receiver.server.server_close()


async def until(holds: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.05)


def sending(url: str, metrics: Metrics, *, timeout_s: float, queue_max: int = 4096) -> TraceSender:
    return TraceSender(url, "x", "n", timeout_s=timeout_s, queue_max=queue_max, every_ms=1000, metrics=metrics)


@pytest.mark.full
async def test_one_trace_from_the_agent_through_the_gateway_to_the_store(
    bucket: Store, bucket_settings: StoreSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's send, the gateway's request and its calls to the bucket are one trace, each inside the other."""
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        async with gateway(bucket_settings) as (_, url):
            assert 0 == await run_agent(tmp_path / "queue", [url], lines(0, 40))
            await until(lambda: any(one["name"] == "POST /v1/batches" for one in receiver.spans))

        by_id = {one["spanId"]: one for one in receiver.spans}
        served = next(one for one in receiver.spans if one["name"] == "POST /v1/batches")
        sent = by_id[served["parentSpanId"]]
        stored = [one["name"] for one in receiver.spans if one.get("parentSpanId") == served["spanId"]]

        assert ("lakebed-agent", "agent send") == (sent["service"], sent["name"])
        assert "lakebed-gateway" == served["service"]
        assert sent["traceId"] == served["traceId"]
        assert "store create" in stored


@pytest.mark.full
async def test_the_passes_of_workers_are_traces_of_their_own(
    bucket: Store, bucket_settings: StoreSettings, tmp_path: Path
) -> None:
    """A worker's process sends each pass of each part as one trace, with its calls to the bucket inside."""
    with receiving() as receiver:
        env = {env_name(key): str(value) for key, value in bucket_settings.as_layer().items()}
        env |= {**os.environ, **env, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "LAKEBED_TICKS_PIPELINE": "twin"}
        arguments = ("work", "--port", "0", "--parts", "log,ticks,silver,batches", "--log", "error")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "lakebed", *arguments, env=env, stdout=PIPE, cwd=tmp_path
        )
        try:
            wanted = {"log compaction pass", "ticks dispatch", "ticks sweep"}
            await until(lambda: wanted <= {one["name"] for one in receiver.spans})
        finally:
            process.terminate()
            await asyncio.wait_for(process.wait(), DEADLINE_S)

    passes = {one["spanId"]: one for one in receiver.spans if one["name"] in wanted}
    inside = [one for one in receiver.spans if one.get("parentSpanId") in passes]
    assert {"lakebed-work"} == {one["service"] for one in receiver.spans}
    assert not any("parentSpanId" in one for one in passes.values())
    assert any(one["name"].startswith("store ") for one in inside)
    assert all(one["traceId"] == passes[one["parentSpanId"]]["traceId"] for one in inside)


def test_a_span_is_otlp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kind, parent, attributes and error reach the receiver, with the process that the standard variables describe."""
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=a%20b")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "150000")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "zone=z1")
        metrics = Metrics()
        with tracing("gateway", "node-1", metrics=metrics):
            with pytest.raises(NotFound), span("GET /x", "server", parent=f"00-{'a' * 32}-{'c' * 16}-01", n=1, b=True):
                raise NotFound("gone")
            assert installed()
        assert not installed()

    ((path, headers),) = receiver.requests
    (sent,) = receiver.spans
    resource = sent["resource"]
    assert ("/v1/traces", "a b") == (path, headers["x-tenant"])
    assert ("a" * 32, "c" * 16) == (sent["traceId"], sent["parentSpanId"])
    assert (2, {"n": 1, "b": True}) == (sent["kind"], sent["attributes"])
    assert (2, "not_found") == sent["status"]
    assert ("lakebed-gateway", "node-1", "z1") == (
        resource["service.name"],
        resource["service.instance.id"],
        resource["zone"],
    )
    assert 1 == metrics.value("lakebed_trace_spans_total", outcome="sent")


def test_a_receiver_that_hangs_blocks_nobody_and_drops_are_counted() -> None:
    """Ending spans takes no time whatever the receiver does; what does not fit is counted as dropped."""
    metrics = Metrics()
    with receiving() as receiver:
        receiver.stuck = threading.Event()
        made = sending(receiver.url, metrics, timeout_s=DEADLINE_S, queue_max=600)
        for _ in range(5000):
            made.tracer.start_span("work").end()
        dropped = metrics.value("lakebed_trace_spans_total", outcome="dropped")
        receiver.stuck.set()
        made.close(DEADLINE_S)

    sent = metrics.value("lakebed_trace_spans_total", outcome="sent")
    assert dropped > 0
    assert 5000 == sent + dropped
    assert sent == len(receiver.spans)


def test_an_exit_does_not_wait_for_a_receiver_that_hangs() -> None:
    """`close` returns while the receiver still holds the request: its timeout is not the exit's."""
    with receiving() as receiver:
        receiver.stuck = threading.Event()
        made = sending(receiver.url, Metrics(), timeout_s=DEADLINE_S)
        made.tracer.start_span("work").end()

        made.close(0.1)

        assert [] == receiver.requests
        receiver.stuck.set()


def test_a_receiver_that_is_away_costs_spans_and_no_exit() -> None:
    """Every span is counted as failed, and closing does not wait until the exporter has given up by itself."""
    metrics = Metrics()
    made = sending("http://127.0.0.1:9/v1/traces", metrics, timeout_s=DEADLINE_S)
    for _ in range(10):
        made.tracer.start_span("work").end()

    made.close()

    assert 10 == metrics.value("lakebed_trace_spans_total", outcome="failed")
