"""Traces reach a real receiver from real processes, and one that is away costs nothing but spans."""

from __future__ import annotations

import asyncio
import json
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
from test_agent_and_collectors import gateway, lines, run_agent

from lakebed.metrics import Metrics
from lakebed.settings import env_name
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from lakebed.traces.exporter import Exporter
from lakebed.traces.model import Place, Span

DEADLINE_S = 150.0


class Receiver:
    """An OTLP/HTTP receiver: every span with the service that sent it."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.stuck: threading.Event | None = None
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if receiver.stuck is not None:
                    receiver.stuck.wait(DEADLINE_S)
                for told in body["resourceSpans"]:
                    resource = {one["key"]: one["value"]["stringValue"] for one in told["resource"]["attributes"]}
                    for scope in told["scopeSpans"]:
                        receiver.spans += [{**one, "service": resource["service.name"]} for one in scope["spans"]]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


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


def make(number: int) -> Span:
    return Span(Place("a" * 32, f"{number:016x}"), "work", 1, end_ns=2)


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


async def test_the_passes_of_workers_are_traces_of_their_own(
    bucket: Store, bucket_settings: StoreSettings, tmp_path: Path
) -> None:
    """A worker's process sends each pass of each part as one trace, with its calls to the bucket inside."""
    with receiving() as receiver:
        env = {env_name(key): str(value) for key, value in bucket_settings.as_layer().items()}
        env |= {**os.environ, **env, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "LAKEBED_TICKS_PIPELINE": "twin"}
        arguments = ("work", "--port", "0", "--parts", "log,ticks,batches", "--log", "error")
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


def test_a_receiver_that_hangs_blocks_nobody_and_drops_are_counted() -> None:
    """Putting spans takes no time whatever the receiver does; what does not fit is counted as dropped."""
    metrics = Metrics()
    with receiving() as receiver:
        receiver.stuck = threading.Event()
        exporter = Exporter(
            receiver.url,
            resource={"service.name": "x"},
            headers={},
            timeout_s=DEADLINE_S,
            metrics=metrics,
            queue_max=600,
        )
        for number in range(5000):
            exporter.put(make(number))
        dropped = metrics.value("lakebed_trace_spans_total", outcome="dropped")
        receiver.stuck.set()
        exporter.close()

    sent = metrics.value("lakebed_trace_spans_total", outcome="sent")
    assert dropped > 0
    assert 5000 == sent + dropped
    assert sent == len(receiver.spans)


def test_a_receiver_that_is_away_costs_spans_and_no_exit() -> None:
    """Every span is counted as failed, and closing does not wait for a receiver that nobody answers for."""
    metrics = Metrics()
    exporter = Exporter("http://127.0.0.1:9/v1/traces", resource={}, headers={}, timeout_s=2.0, metrics=metrics)
    for number in range(10):
        exporter.put(make(number))

    exporter.close()

    assert 10 == metrics.value("lakebed_trace_spans_total", outcome="failed")
