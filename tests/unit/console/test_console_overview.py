"""The first page: what it shows, to whom, and its JSON twin."""

from __future__ import annotations

from typing import Any

import httpx2
import msgspec
import pytest

from lakebed.clock import SystemClock
from lakebed.console.overview import overview
from lakebed.console.routes import component
from lakebed.context import Context, Health
from lakebed.gateway.app import Gateway, build
from lakebed.gateway.health import Report
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.parts import sections
from lakebed.settings import load
from lakebed.store.authority import claim
from lakebed.store.memory import MemoryStore

SECRET = "0123456789abcdef-operator"


async def console(**gateway: Any) -> Gateway:
    clock = SystemClock()
    settings = load(sections(), flags={f"gateway.{name}": value for name, value in gateway.items()})
    context = Context("node-1", settings, MemoryStore(clock=clock), clock, Ids(), Metrics())
    await claim(context.store, expected="", clock=clock, ids=context.ids)
    return build(context, [component(context)], authority="authority-1")


async def get(app: Gateway, path: str, **headers: str) -> httpx2.Response:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://127.0.0.1") as client:
        return await client.get(path, headers=headers)


def report(**components: Health) -> Report:
    return Report("ok", "node-1", "1.2.3", "authority-1", 1_760_000_000_000, components)


def test_the_numbers_come_from_the_registry() -> None:
    """Store requests by verb and answered requests are what was counted, nothing else."""
    metrics = Metrics()
    metrics.counter("lakebed_store_requests_total").labels(verb="get").inc(3)
    metrics.counter("lakebed_store_requests_total").labels(verb="create").inc(2)
    metrics.counter("lakebed_http_requests_total").labels(route="/", method="GET", status="200").inc(4)
    metrics.counter("lakebed_http_requests_total").labels(route="/", method="GET", status="404").inc(1)

    seen = overview(report(queue=Health("down", "no disk")), metrics)

    assert [(row.verb, row.requests) for row in seen.store_requests] == [("create", 2), ("get", 3)]
    assert seen.http_requests == 5
    assert [(row.name, row.status, row.detail) for row in seen.parts] == [("queue", "down", "no disk")]


async def test_the_page_and_its_twin_say_the_same() -> None:
    """What a person reads, a program can read too."""
    app = await console()

    page, twin = await get(app, "/"), (await get(app, "/overview.json")).json()

    assert page.headers["content-type"].startswith("text/html")
    for fact in (twin["version"], twin["node"], twin["authority"], *(part["name"] for part in twin["parts"])):
        assert fact in page.text
    assert 'http-equiv="refresh"' in page.text
    for link in ("/docs", "/metrics", "/healthz", "/overview.json"):
        assert f'href="{link}"' in page.text
        assert (await get(app, link)).status_code == 200


async def test_a_stranger_learns_little() -> None:
    """Without a key the page says whether all is well, and no more; the twin is closed."""
    app = await console(keys=[{"name": "operator", "secret": SECRET, "rights": ["console:*"]}])

    stranger, known = await get(app, "/"), await get(app, "/", **{"x-api-key": SECRET})

    assert (stranger.status_code, known.status_code) == (200, 200)
    assert "authority-1" not in stranger.text
    assert "node-1" not in stranger.text
    assert "authority-1" in known.text
    assert (await get(app, "/overview.json")).status_code == 401
    assert (await get(app, "/console.css")).status_code == 200


async def test_hostile_text_is_inert() -> None:
    """What a component says of itself never becomes markup."""

    class Hostile:
        name = "<script>alert(1)</script>"
        reads = writes = ()

        async def start(self) -> None: ...

        async def stop(self) -> None: ...

        async def health(self) -> Health:
            return Health("degraded", '"><img src=x onerror=alert(1)>')

    app = await console()
    context = app.state.context
    page = await get(build(context, [component(context), Hostile()]), "/")

    assert "<script>" not in page.text
    assert "<img" not in page.text


@pytest.mark.parametrize("path", ["/", "/console.css"])
async def test_nothing_is_fetched_from_elsewhere(path: str) -> None:
    """Pages load only what this gateway serves, and the policy holds the browser to it."""
    answer = await get(await console(), path)

    assert "//" not in answer.text.replace("<!doctype", "")
    if path == "/":
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")


def test_the_report_is_plain_data() -> None:
    """A report survives JSON."""
    seen = overview(report(), Metrics())

    assert msgspec.json.decode(msgspec.json.encode(seen), type=type(seen)) == seen
