"""The documentation page works where there is no other host."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from lakebed.gateway.app import Gateway
from lakebed.gateway.docs import ASSETS, SWAGGER_VERSION, VENDOR

Make = Callable[..., Gateway]
Ask = Callable[..., Any]

ELSEWHERE = re.compile(r"""(?:https?:)?//[a-z0-9.-]+\.[a-z]+|url\(\s*(?!['"]?(?:data:|#))""", re.I)


CONSOLE = [f"/console/assets/any/{name}" for name in ("console.css", "console.js", "theme.js", "uplot.css")]


@pytest.mark.parametrize(
    "path", ["/docs", "/docs/start.js", f"/docs/{SWAGGER_VERSION}/swagger-ui.css", "/", "/log", *CONSOLE]
)
async def test_no_page_refers_to_another_host(make: Make, ask: Ask, path: str) -> None:
    """Pages, scripts and styles of ours name no host and load nothing by address."""
    from lakebed.console.routes import component

    app = make()
    app = make([component(app.state.context)])

    answer = await ask(app, "GET", path)

    named = [found for found in ELSEWHERE.findall(answer.text) if "w3.org" not in found]
    assert answer.status_code == 200
    assert named == []


async def test_every_address_in_the_page_is_served_here(make: Make, ask: Ask) -> None:
    """What the page loads exists, with a type a browser accepts and for as long as the version stands."""
    app = make()
    page = (await ask(app, "GET", "/docs")).text

    loaded = re.findall(r'(?:src|href)="(/[^"]+)"', page)
    answers = {address: await ask(app, "GET", address) for address in loaded}

    types = {address.rsplit("/", 1)[1]: answer.headers["content-type"] for address, answer in answers.items()}
    assert types == {
        "swagger-ui.css": "text/css; charset=utf-8",
        "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
        "start.js": "text/javascript; charset=utf-8",
    }
    assert all(
        "immutable" in answer.headers["cache-control"]
        for address, answer in answers.items()
        if SWAGGER_VERSION in address
    )


async def test_the_policy_lets_nothing_else_in(make: Make, ask: Ask) -> None:
    """Whatever the bundle contains, the browser may only talk to this gateway."""
    policy = (await ask(make(), "GET", "/docs")).headers["content-security-policy"]

    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["connect-src"] == "'self'"
    assert "http" not in policy


async def test_only_the_assets_are_served(make: Make, ask: Ask) -> None:
    """The folder is not a file server."""
    app = make()

    for name in ("LICENSE", "..%2Fdocs.py", "../docs.py", "nope.js"):
        assert (await ask(app, "GET", f"/docs/{SWAGGER_VERSION}/{name}")).status_code == 404


def test_the_licence_stands_beside_the_assets() -> None:
    """What is not ours says whose it is, and which version it is."""
    assert all((VENDOR / name).stat().st_size > 1000 for name in ASSETS)
    assert "Apache License" in (VENDOR / "LICENSE").read_text()
    assert SWAGGER_VERSION in (VENDOR.parent / "README.md").read_text()
    assert SWAGGER_VERSION.encode() in (VENDOR / "swagger-ui-bundle.js").read_bytes()
