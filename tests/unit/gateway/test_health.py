"""Health queries everything and waits for nothing; metrics uses the form that was requested."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from prometheus_client import parser as text_parser
from prometheus_client.openmetrics import parser as openmetrics_parser

from lakebed import __version__
from lakebed.core.clock import ManualClock
from lakebed.core.context import Health
from lakebed.core.errors import Unavailable
from lakebed.core.metrics import TABLE, Metrics
from lakebed.gateway.app import Gateway
from lakebed.gateway.health import HealthChecker, StoreCheck
from lakebed.gateway.metrics import RIGHT, THINGS, preferred
from lakebed.gateway.state import state_of
from lakebed.store.authority import AUTHORITY_KEY, claim
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo
from support.gateway_fixtures import Sample, context_with

Make = Callable[..., Gateway]
Ask = Callable[..., Any]


async def claimed(app: Gateway) -> Gateway:
    context = state_of(app).context
    await claim(context, expected="")
    return app


async def test_all_well_is_200_with_who_and_since_when(make: Make, ask: Ask) -> None:
    """The report names node, version, authority, start and every component."""
    answer = await ask(await claimed(make()), "GET", "/healthz")

    report = answer.json()
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    assert (report["status"], report["node"], report["version"]) == ("ok", "node-1", __version__)
    assert report["authority"] == "authority-1"
    assert report["started_at_ms"] > 0
    assert report["components"] == {
        "store": {"status": "ok", "detail": ""},
        "gateway": {"status": "ok", "detail": ""},
        "sample": {"status": "ok", "detail": ""},
    }


async def test_health_and_healthz_are_one(make: Make, ask: Ask) -> None:
    """Both names give the same answer."""
    app = await claimed(make())

    assert (await ask(app, "GET", "/health")).json() == (await ask(app, "GET", "/healthz")).json()


@pytest.mark.parametrize(
    ("reported", "status", "code", "detail"),
    [
        (Health("degraded", "one replica behind"), "degraded", 200, "one replica behind"),
        (Health("down", "no disk"), "down", 503, "no disk"),
        (Unavailable("the queue is gone"), "down", 503, "the queue is gone"),
        (ValueError("hunter2"), "down", 503, "failed: ValueError"),
    ],
)
async def test_the_worst_component_decides(
    make: Make, ask: Ask, part: Sample, reported: Any, status: str, code: int, detail: str
) -> None:
    """Degraded still serves, down does not; a component that fails to answer is down, without its text."""
    part.told = reported

    answer = await ask(await claimed(make()), "GET", "/healthz")

    assert (answer.status_code, answer.json()["status"]) == (code, status)
    assert answer.json()["components"]["sample"] == {"status": status, "detail": detail}
    assert answer.json()["components"]["store"]["status"] == "ok"


async def test_a_component_that_hangs_is_down_after_its_timeout(make: Make, ask: Ask) -> None:
    """One silent component costs its own timeout, not everybody's."""

    class Silent(Sample):
        async def health(self) -> Health:
            await asyncio.Event().wait()
            raise AssertionError

    answer = await ask(await claimed(make([Silent()], health_timeout_s=0.02)), "GET", "/healthz")

    assert answer.status_code == 503
    assert "no answer within 0.02 s" in answer.json()["components"]["sample"]["detail"]


async def test_a_bucket_that_lost_its_authority_is_down(make: Make, ask: Ask) -> None:
    """A bucket that was emptied or swapped underneath is noticed."""
    answer = await ask(make(), "GET", "/healthz")

    assert answer.status_code == 503
    assert AUTHORITY_KEY in answer.json()["components"]["store"]["detail"]


async def test_the_store_is_asked_once_a_second_however_many_ask() -> None:
    """Health checks never become a load on the store."""
    clock = ManualClock()

    class Counted(MemoryStore):
        requests = 0

        async def head(self, key: str) -> ObjectInfo:
            self.requests += 1
            await asyncio.sleep(0)
            return await super().head(key)

    store = Counted(clock=clock)
    await store.create(AUTHORITY_KEY, b"{}")
    check = StoreCheck(store, clock)

    await asyncio.gather(*(check() for _ in range(20)))
    await check()
    first = store.requests
    await clock.advance(1.1)
    await check()
    await check()

    assert (first, store.requests) == (1, 2)


async def test_a_store_that_went_away_is_not_called_well_by_an_earlier_answer() -> None:
    """It was well a moment ago and does not answer now: everybody within the next second hears that, and why."""
    clock = ManualClock()

    class Away(MemoryStore):
        away = False

        async def head(self, key: str) -> ObjectInfo:
            if self.away:
                raise Unavailable("no route to the store")
            return await super().head(key)

    store = Away(clock=clock)
    await store.create(AUTHORITY_KEY, b"{}")
    check = StoreCheck(store, clock)
    before = await check()
    await clock.advance(1.1)
    store.away = True

    first = await check()
    await clock.advance(0.5)
    second = await check()
    store.away = False
    await clock.advance(0.6)

    assert ("ok", "down", "down") == (before.status, first.status, second.status)
    assert "no route to the store" == second.detail
    assert "ok" == (await check()).status


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", "prometheus"),
        ("*/*", "prometheus"),
        ("application/json", "json"),
        ("application/json; charset=utf-8", "json"),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", "prometheus"),
        ("application/json;q=0.5, text/plain", "prometheus"),
        ("text/plain;q=0.5, application/json", "json"),
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", "openmetrics"),
        ("application/json;q=0", "prometheus"),
        ("application/json;q=nonsense", "prometheus"),
        (",;,=;q", "prometheus"),
    ],
)
def test_the_form_of_metrics_is_chosen_by_weight(accept: str, form: str) -> None:
    """JSON and OpenMetrics only to those who prefer them; Prometheus text to all others."""
    assert form == preferred(accept)


async def test_metrics_in_each_form(make: Make, ask: Ask) -> None:
    """One registry, three forms, one of them always the same."""
    app = make()
    await ask(app, "GET", "/sample")

    text = await ask(app, "GET", "/metrics")
    json = await ask(app, "GET", "/metrics", headers={"accept": "application/json"})
    openmetrics = await ask(app, "GET", "/metrics", headers={"accept": "application/openmetrics-text"})
    always = await ask(app, "GET", "/metrics/prometheus", headers={"accept": "application/json"})

    assert 'lakebed_http_requests_total{method="GET",route="/sample",status="200"} 1.0' in text.text
    assert text.headers["content-type"].startswith("text/plain")
    assert json.json()["lakebed_build_info"] == [{"labels": {"version": __version__}, "value": 1.0}]
    assert openmetrics.text.endswith("# EOF\n")
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert always.headers["content-type"].startswith("text/plain")


async def test_metrics_need_a_right(make: Make, ask: Ask) -> None:
    """A key for data alone does not read the numbers."""
    keys = [
        {"name": "agent", "secret": "0123456789abcdef-agent", "rights": ["sample:*"]},
        {"name": "scraper", "secret": "0123456789abcdef-scraper", "rights": ["gateway:read:metrics"]},
    ]
    app = make(keys=keys)

    assert (await ask(app, "GET", "/metrics", headers={"x-api-key": "0123456789abcdef-agent"})).status_code == 403
    assert (await ask(app, "GET", "/metrics", headers={"x-api-key": "0123456789abcdef-scraper"})).status_code == 200


def fill(metrics: Metrics) -> None:
    """A series of each of two tenants in every metric, where its labels name a thing; else one of the whole lake."""
    for metric in TABLE:
        made = getattr(metrics, metric.kind)(metric.name)
        for tenant in ("acme", "rival"):
            labels = {name: f"{tenant}-1" if name in THINGS else "x" for name in metric.labels}
            series = made.labels(**labels) if labels else made
            (series.observe if metric.kind == "histogram" else series.inc)(1)


async def test_a_tenants_key_reads_the_series_of_its_own_things_and_no_others(make: Make, ask: Ask) -> None:
    """In every form: not those of another tenant, and none that names no thing, because it counts the whole lake."""
    secret = "0123456789abcdef-tenant"
    app = make(keys=[{"name": "acme", "secret": secret, "rights": [RIGHT], "tenant": "acme"}])
    fill(state_of(app).context.metrics)
    forms = ("application/json", "application/openmetrics-text", "text/plain")

    answers = [await ask(app, "GET", "/metrics", headers={"x-api-key": secret, "accept": form}) for form in forms]
    answers.append(await ask(app, "GET", "/metrics/prometheus", headers={"x-api-key": secret}))

    samples = [list(parsed(answer)) for answer in answers]
    named = {metric.name for metric in TABLE if THINGS.intersection(metric.labels)}
    for found in samples:
        assert named == {next(one for one in (name, name.rpartition("_")[0]) if one in named) for name, _ in found}
        assert {"acme-1"} == {value for _, labels in found for label, value in labels.items() if label in THINGS}
        assert all(THINGS.intersection(labels) for _, labels in found)


def parsed(answer: httpx2.Response) -> Iterator[tuple[str, dict[str, str]]]:
    """The name and the labels of each sample."""
    if answer.headers["content-type"].startswith("application/json"):
        for name, rows in answer.json().items():
            yield from ((name, row["labels"]) for row in (rows if isinstance(rows, list) else [{"labels": {}}]))
        return
    parse = openmetrics_parser if "openmetrics" in answer.headers["content-type"] else text_parser
    for family in parse.text_string_to_metric_families(answer.text):
        yield from ((sample.name, sample.labels) for sample in family.samples if not sample.name.endswith("_created"))


async def test_strangers_who_ask_often_cost_one_report_a_second(make: Make, ask: Ask) -> None:
    """However many query, every component is queried once a second: those who come meanwhile share the answer."""
    clock = ManualClock()

    class Counted(Sample):
        requests = 0

        async def health(self) -> Health:
            self.requests += 1
            await asyncio.sleep(0)
            return self.told if isinstance(self.told, Health) else Health("down")

    part = Counted()
    app = await claimed(make([part], clock=clock))

    await asyncio.gather(*(ask(app, "GET", "/healthz") for _ in range(20)))
    await ask(app, "GET", "/health")
    first, part.told = part.requests, Health("degraded")
    await clock.advance(1.1)
    later = await ask(app, "GET", "/healthz")

    assert (first, part.requests) == (1, 2)
    assert later.json()["status"] == "degraded"


@pytest.mark.parametrize(
    ("reported", "status"),
    [
        (("ok", "ok"), "ok"),
        (("ok", "degraded"), "degraded"),
        (("degraded", "ok"), "degraded"),
        (("down", "degraded"), "down"),
        (("degraded", "down"), "down"),
    ],
)
async def test_of_several_components_the_worst_decides_wherever_it_stands(
    make: Make, ask: Ask, reported: tuple[Any, Any], status: str
) -> None:
    parts = [Sample("a"), Sample("b")]
    parts[1].reads = parts[1].writes = ()
    for part, one in zip(parts, reported, strict=True):
        part.told = Health(one)

    answer = await ask(await claimed(make(parts)), "GET", "/healthz")

    assert (status, 503 if status == "down" else 200) == (answer.json()["status"], answer.status_code)
    assert [*reported] == [answer.json()["components"][name]["status"] for name in ("a", "b")]


async def test_health_names_the_broker_and_where_it_was_reached(make: Make) -> None:
    """A log's client learns the node's name, host and port; without an address they are empty."""
    app = await claimed(make())
    for server, expected in ((("10.0.0.1", 9000), ("10.0.0.1", 9000)), (("/a/socket", None), ("/a/socket", 0))):
        transport = httpx2.ASGITransport(app=with_server(app, server))
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            report = (await client.get("/healthz")).json()
        assert ("node-1", *expected) == (report["broker_id"], report["host"], report["port"])


def with_server(app: Any, server: Any) -> Any:
    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "server": server}, receive, send)

    return wrapped


@pytest.mark.parametrize(("seconds", "requested"), [(0.99, 1), (1.0, 2)])
async def test_an_answer_is_kept_for_one_second(seconds: float, requested: int) -> None:
    """Of the store and of the whole report."""
    clock = ManualClock()
    context = context_with(clock)
    await claim(context, expected="")
    calls = 0

    async def check() -> Health:
        nonlocal calls
        calls += 1
        return Health("ok")

    health_checker = HealthChecker(context, {"part": check}, authority="a", timeout_s=1.0)
    first = await health_checker.report()
    await clock.advance(seconds)
    second = await health_checker.report()

    assert requested == calls
    await health_checker.report()
    assert requested == calls
    assert ["store", "part"] == list(first.components)
    assert (requested == 1) == (first is second)
    assert first.started_at_ms == second.started_at_ms


@pytest.mark.parametrize(("reported", "code"), [("ok", 200), ("degraded", 200), ("down", 503)])
async def test_a_load_balancer_without_a_key_is_told_by_the_status_alone(
    make: Make, ask: Ask, part: Sample, reported: Any, code: int
) -> None:
    """Where there are keys, a stranger gets the status and nothing else; a gateway that is down is taken out."""
    part.told = Health(reported, "why")
    keys = [{"name": "agent", "secret": "0123456789abcdef-agent", "rights": ["*"]}]

    answer = await ask(await claimed(make(keys=keys)), "GET", "/healthz")

    assert (code, {"status": reported}) == (answer.status_code, answer.json())
