"""Traces: where a span stands, what is sent of it, and that nothing is made while tracing is off."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import pytest

from lakebed import traces
from lakebed.clock import ManualClock, SystemClock
from lakebed.context import Context
from lakebed.errors import Invalid, NotFound
from lakebed.gateway.app import build
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.parts import sections
from lakebed.settings import load
from lakebed.store.memory import MemoryStore
from lakebed.traces import Tracer, outgoing, span, traced
from lakebed.traces.model import Place, Span, parse, render
from lakebed.traces.otlp import encode
from lakebed.traces.start import endpoint, pairs, ratio, tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def ended() -> Iterator[list[Span]]:
    """Tracing on, with every ended span in the list."""
    found: list[Span] = []
    traces.install(Tracer(found.append, clock=ManualClock(), ids=Ids.seeded(1)))
    yield found
    traces.install(None)


def test_the_header_goes_there_and_back() -> None:
    """The W3C form is read and written, with its sampling flag."""
    assert Place(TRACE, PARENT, True) == parse(HEADER)
    assert HEADER == render(Place(TRACE, PARENT, True))
    assert Place(TRACE, PARENT, False) == parse(f"00-{TRACE}-{PARENT}-00")
    assert Place(TRACE, PARENT, True) == parse(f"01-{TRACE}-{PARENT}-01-from-the-future")


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "00",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE}-{PARENT}-1",
        "\x00" * 55,
    ],
)
def test_a_wrong_header_begins_a_new_trace(wrong: str) -> None:
    """What a stranger sends is a place or nothing, never an error."""
    assert parse(wrong) is None


def test_spans_stand_inside_each_other(ended: list[Span]) -> None:
    """A span's parent is the one open around it; siblings share it, and the outermost has none."""
    with span("outer") as outer:
        with span("first", "client", key="k"):
            header = outgoing()["traceparent"]
        with span("second"):
            pass
    assert outer is not None

    first, second, last = ended
    assert ["first", "second", "outer"] == [each.name for each in ended]
    assert [outer.place.span_id] * 2 == [first.parent_id, second.parent_id]
    assert "" == last.parent_id
    assert {outer.place.trace_id} == {each.place.trace_id for each in ended}
    assert parse(header) == first.place
    assert {"key": "k"} == first.attributes
    assert {} == outgoing()


async def test_tasks_keep_their_own_place(ended: list[Span]) -> None:
    """Two requests at once do not become each other's children."""

    @traced("work")
    async def work(parent: str) -> None:
        await asyncio.sleep(0)

    async def request(trace: str) -> None:
        with span("request", "server", parent=f"00-{trace}-{PARENT}-01"):
            await work(trace)

    await asyncio.gather(request("a" * 32), request("b" * 32))

    by_trace = {each.place.trace_id: each for each in ended if each.name == "request"}
    for each in ended:
        if each.name == "work":
            assert by_trace[each.place.trace_id].place.span_id == each.parent_id


def test_an_error_is_on_its_span_and_goes_on(ended: list[Span]) -> None:
    """A failure keeps its own kind; the span carries its code."""

    @traced("job")
    def job() -> None:
        raise NotFound("gone")

    with pytest.raises(NotFound):
        job()

    assert ["not_found"] == [each.error for each in ended]


def test_a_caller_that_does_not_record_is_followed(ended: list[Span]) -> None:
    """What is not sampled is not sent, and says so to the next process."""
    with span("quiet", parent=f"00-{TRACE}-{PARENT}-00"):
        assert outgoing()["traceparent"].endswith("-00")

    assert [] == ended


def test_nothing_is_made_while_tracing_is_off() -> None:
    """Off: one shared object, no header, and the function itself runs."""
    assert span("a") is span("b", key="k")
    assert {} == outgoing()
    with span("a") as nothing:
        assert nothing is None
    assert 3 == traced("t")(lambda: 3)()


def test_a_span_is_otlp() -> None:
    """Ids are hex, 64-bit numbers are text, kinds and statuses are the standard's numbers."""
    one = Span(Place(TRACE, PARENT), "GET /x", 10, "c" * 16, "server", 25, "unavailable", {"n": 1, "s": "x", "b": True})

    tree = msgspec.json.decode(encode([one], {"service.name": "lakebed-gateway"}))

    (told,) = tree["resourceSpans"]
    assert [{"key": "service.name", "value": {"stringValue": "lakebed-gateway"}}] == told["resource"]["attributes"]
    (sent,) = told["scopeSpans"][0]["spans"]
    assert {
        "traceId": TRACE,
        "spanId": PARENT,
        "parentSpanId": "c" * 16,
        "name": "GET /x",
        "kind": 2,
        "startTimeUnixNano": "10",
        "endTimeUnixNano": "25",
        "attributes": [
            {"key": "n", "value": {"intValue": "1"}},
            {"key": "s", "value": {"stringValue": "x"}},
            {"key": "b", "value": {"boolValue": True}},
        ],
        "status": {"code": 2, "message": "unavailable"},
    } == sent


@pytest.mark.parametrize(
    ("env", "url"),
    [
        ({}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"}, "http://c:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t/x"}, "http://t/x"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"}, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"}, ""),
    ],
)
def test_the_standard_variables_name_the_receiver(env: dict[str, str], url: str) -> None:
    """Only the variables of OpenTelemetry turn it on, and they turn it off too."""
    assert url == endpoint(env)


def test_wrong_variables_are_named() -> None:
    """An address that is none and a sampler that is unknown are refused before anything starts."""
    for env in ({"OTEL_EXPORTER_OTLP_ENDPOINT": "c:4317"}, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "grpc://c"}):
        with pytest.raises(Invalid, match="is not an http address"):
            endpoint(env)
    with pytest.raises(Invalid, match="OTEL_TRACES_SAMPLER"):
        ratio({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"})
    assert [1.0, 0.0, 0.25] == [
        ratio({}),
        ratio({"OTEL_TRACES_SAMPLER": "always_off"}),
        ratio({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"}),
    ]
    assert {"a": "1 2", "b": "x"} == pairs("a=1%202, b=x,nonsense")


def test_without_a_receiver_nothing_is_installed() -> None:
    """An environment that names none leaves tracing off."""
    with tracing("x", "n", {}, clock=ManualClock(), ids=Ids(), metrics=Metrics()):
        assert not traces.installed()


async def test_a_request_is_a_span_of_its_caller(ended: list[Span]) -> None:
    """The gateway's span has the caller's trace, its route's template and its status."""
    clock = SystemClock()
    context = Context("n", load(sections()), MemoryStore(clock=clock), clock, Ids(), Metrics())
    app = build(context, [])

    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://127.0.0.1") as client:
        await client.get("/metrics", headers={"traceparent": HEADER})
        await client.get("/nowhere")

    known, unknown = ended
    assert ("GET /metrics", "server", TRACE, PARENT) == (
        known.name,
        known.kind,
        known.place.trace_id,
        known.parent_id,
    )
    wanted: dict[str, Any] = {"http.request.method": "GET", "http.route": "/metrics", "http.response.status_code": 200}
    assert wanted == known.attributes
    assert ("GET (none)", 404, "") == (unknown.name, unknown.attributes["http.response.status_code"], unknown.parent_id)
