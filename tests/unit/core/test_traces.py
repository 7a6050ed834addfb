"""Traces: where a span exists, what is sent of it, and that nothing is made while tracing is off."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from opentelemetry.trace import SpanKind

from lakebed.core import traces
from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.errors import Invalid, NotFound
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.core.traces import outgoing, span, traced
from lakebed.core.traces.start import GENERAL, OWN, check_sampler, endpoint, positive, tracing
from lakebed.gateway.app import build
from lakebed.store.memory import MemoryStore
from lakebed.wiring.parts import sections
from support.recorded_spans import Recorded, error, parent_id, recording, span_id, trace_id

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def ended() -> Iterator[Recorded]:
    with recording() as found:
        yield found


@pytest.mark.parametrize(
    ("header", "sent"),
    [
        (HEADER, "01"),
        (f"00-{TRACE}-{PARENT}-00", "00"),
        (f"01-{TRACE}-{PARENT}-01-from-the-future", "01"),
    ],
)
def test_the_header_goes_there_and_back(ended: Recorded, header: str, sent: str) -> None:
    """The W3C form is read and written, with its sampling flag."""
    with span("work", "server", parent=header) as made:
        (name,) = outgoing()
        version, trace, own, flags = outgoing()[name].split("-")

    assert made is not None
    assert ("traceparent", "00", TRACE, sent) == (name, version, trace, flags)
    assert f"{made.get_span_context().span_id:016x}" == own
    assert [PARENT] * int(sent) == [parent_id(each) for each in ended()]


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
        "0" * 10_000,
    ],
)
def test_a_wrong_header_begins_a_new_trace(ended: Recorded, wrong: str) -> None:
    """What a client sends is a parent or nothing, never an error."""
    with span("work", "server", parent=wrong):
        pass

    (made,) = ended()
    assert "" == parent_id(made)
    assert TRACE != trace_id(made)


def test_spans_stand_inside_each_other(ended: Recorded) -> None:
    """A span's parent is the one open around it; siblings share it, and the outermost has none."""
    with span("outer"):
        with span("first", "client", key="k"):
            header = outgoing()["traceparent"]
        with span("second"):
            pass

    first, second, last = ended()
    assert ["first", "second", "outer"] == [each.name for each in ended()]
    assert [span_id(last)] * 2 == [parent_id(first), parent_id(second)]
    assert "" == parent_id(last)
    assert {trace_id(last)} == {trace_id(each) for each in ended()}
    assert header.startswith(f"00-{trace_id(first)}-{span_id(first)}-")
    assert (SpanKind.CLIENT, {"key": "k"}) == (first.kind, first.attributes)
    assert {} == outgoing()


async def test_tasks_keep_their_own_place(ended: Recorded) -> None:
    """Two requests at once do not become each other's children."""

    @traced("work")
    async def work(parent: str) -> None:
        await asyncio.sleep(0)

    async def request(trace: str) -> None:
        with span("request", "server", parent=f"00-{trace}-{PARENT}-01"):
            await work(trace)

    await asyncio.gather(request("a" * 32), request("b" * 32))

    by_trace = {trace_id(each): each for each in ended() if each.name == "request"}
    works = [each for each in ended() if each.name == "work"]
    assert [("a" * 32), ("b" * 32)] == sorted(by_trace)
    assert 2 == len(works)
    for each in works:
        assert span_id(by_trace[trace_id(each)]) == parent_id(each)


def test_an_error_is_on_its_span_and_goes_on(ended: Recorded) -> None:
    """A failure keeps its own kind; the span carries its code, and neither its text nor its traceback."""

    @traced("job")
    def job() -> None:
        raise NotFound("gone")

    with pytest.raises(NotFound):
        job()

    (made,) = ended()
    assert ("not_found", ()) == (error(made), tuple(made.events))


def test_a_caller_that_does_not_record_is_followed(ended: Recorded) -> None:
    """What is not sampled is not sent, and reports it to the next process."""
    with span("quiet", parent=f"00-{TRACE}-{PARENT}-00"), span("inside"):
        assert outgoing()["traceparent"].endswith("-00")

    assert [] == ended()


def test_nothing_is_made_while_tracing_is_off() -> None:
    """Off: one shared object, no header, and the function itself runs."""
    assert span("a") is span("b", key="k")
    assert {} == outgoing()
    with span("a") as nothing:
        assert nothing is None
    assert 3 == traced("t")(lambda: 3)()


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
    for sampler, share in (("traceidratio", "2"), ("traceidratio", "half"), ("sometimes", "1")):
        with pytest.raises(Invalid, match="OTEL_TRACES_SAMPLER"):
            check_sampler({"OTEL_TRACES_SAMPLER": sampler, "OTEL_TRACES_SAMPLER_ARG": share})
    for known in ({}, {"OTEL_TRACES_SAMPLER": "always_off"}, {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}):
        check_sampler(known)
    for wrong in ("0", "-1", "1s"):
        with pytest.raises(Invalid, match="OTEL_EXPORTER_OTLP_TIMEOUT"):
            positive({"OTEL_EXPORTER_OTLP_TIMEOUT": wrong}, "OTEL_EXPORTER_OTLP_TIMEOUT", 1)


def test_without_a_receiver_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that names none leaves tracing off."""
    for name in (GENERAL, OWN):
        monkeypatch.delenv(name, raising=False)
    with tracing("x", "n", metrics=Metrics()):
        assert not traces.installed()


def test_a_receiver_without_the_packages_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is set but cannot be followed stops the start, with what to install."""
    monkeypatch.setenv(GENERAL, "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "lakebed.core.traces.export", raising=False)

    with pytest.raises(Invalid, match=GENERAL) as refused, tracing("x", "n", metrics=Metrics()):
        pass

    assert "lakebed[traces]" in refused.value.hint
    assert not traces.installed()


async def test_a_request_is_a_span_of_its_caller(ended: Recorded) -> None:
    """The gateway's span has the caller's trace, its route's template and its status."""
    clock = SystemClock()
    context = Context(
        node="n", settings=load(sections()), store=MemoryStore(clock=clock), clock=clock, ids=Ids(), metrics=Metrics()
    )
    app = build(context, [])

    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://127.0.0.1") as client:
        await client.get("/metrics", headers={"traceparent": HEADER})
        await client.get("/nowhere")

    known, unknown = ended()
    assert ("GET /metrics", SpanKind.SERVER, TRACE, PARENT) == (
        known.name,
        known.kind,
        trace_id(known),
        parent_id(known),
    )
    wanted: dict[str, Any] = {"http.request.method": "GET", "http.route": "/metrics", "http.response.status_code": 200}
    assert wanted == known.attributes
    assert unknown.attributes is not None
    assert ("GET (none)", 404, "") == (
        unknown.name,
        unknown.attributes["http.response.status_code"],
        parent_id(unknown),
    )
