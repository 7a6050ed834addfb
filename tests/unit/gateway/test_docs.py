"""The API page: it shows every route of the OpenAPI document, and works where there is no other host."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lakebed.core.http import operation
from lakebed.gateway.app import Gateway
from lakebed.gateway.openapi import STYLE_URL
from lakebed.gateway.state import state_of
from support.gateway_fixtures import Sample

Make = Callable[..., Gateway]
Ask = Callable[..., Any]

ELSEWHERE = re.compile(r"""(?:https?:)?//[a-z0-9.-]+\.[a-z]+|url\(\s*(?!['"]?(?:data:|#))""", re.I)


CONSOLE = [f"/console/assets/any/{name}" for name in ("console.css", "console.js", "theme.js", "uplot.css")]


class Thing(msgspec.Struct):
    size: int


@operation("Keep <a> thing & more", body=Thing, answer=list[Thing], right="things:write:{name}")
async def keep(request: Request) -> Response:
    return Response()


class Words(HTMLParser):
    """The text of a page, without its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.found.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.found).split())


@pytest.mark.parametrize("path", ["/docs", STYLE_URL, "/", "/log", *CONSOLE])
async def test_no_page_refers_to_another_host(make: Make, ask: Ask, path: str) -> None:
    """Pages, scripts and styles of ours name no host and load nothing by address."""
    from lakebed.console.routes import component

    app = make()
    app = make([component(state_of(app).context)])

    answer = await ask(app, "GET", path)

    named = [found for found in ELSEWHERE.findall(answer.text) if "w3.org" not in found]
    assert answer.status_code == 200
    assert named == []


async def test_every_address_in_the_page_is_served_here(make: Make, ask: Ask) -> None:
    """The page loads one style sheet and links to the document; both exist, with a type a browser accepts."""
    app = make()
    page = (await ask(app, "GET", "/docs")).text

    loaded = re.findall(r'(?:src|href)="(/[^"]+)"', page)
    answers = {address: await ask(app, "GET", address) for address in loaded}

    types = {address: answer.headers["content-type"] for address, answer in answers.items()}
    assert types == {STYLE_URL: "text/css; charset=utf-8", "/openapi.json": "application/json"}
    assert "immutable" in answers[STYLE_URL].headers["cache-control"]


async def test_the_policy_lets_nothing_else_in(make: Make, ask: Ask) -> None:
    """The browser runs no script of the page and loads only styles, from this gateway."""
    answer = await ask(make(), "GET", "/docs")

    policy = answer.headers["content-security-policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert (rules["default-src"], rules["style-src"]) == ("'none'", "'self'")
    assert not {"script-src", "connect-src"} & set(rules)
    assert "http" not in policy and "unsafe" not in policy
    assert not {"script", "style"} & Words(answer.text).tags


async def test_the_page_shows_all_that_the_document_says_of_a_route(make: Make, ask: Ask) -> None:
    """Method, path, summary, right, parameters, body and responses, escaped."""
    app = make([Sample(more=[Route("/things/{name:path}", keep, methods=["PUT"])])])

    page = (await ask(app, "GET", "/docs")).text

    section = page.partition('<section id="put-/things/{name}">')[2].partition("</section>")[0]
    assert Words(section).text == (
        "PUT /things/{name} Keep <a> thing & more Right things:write:{name} Parameters name in path, string, required "
        "Body application/json Thing Responses 200 done: application/json Thing[] "
        "default a problem (application/problem+json)"
    )
    assert '<details id="schema-Thing">' in page and '"size"' in Words(page).text
    assert 2 == section.count('href="#schema-Thing"')


async def test_the_page_lists_every_operation_of_the_document(make: Make, ask: Ask) -> None:
    """A route that is in the document is in the page, with a link to its section."""
    app = make([Sample(more=[Route("/things/{name:path}", keep, methods=["PUT"])])])
    tree = (await ask(app, "GET", "/openapi.json")).json()

    page = (await ask(app, "GET", "/docs")).text

    operations = {f"{method}-{path}" for path, item in tree["paths"].items() for method in item}
    assert len(operations) > 5
    assert (
        operations
        == set(re.findall(r'<section id="(\w+-/[^"]*)"', page))
        == set(re.findall(r'<a href="#(\w+-/[^"]*)"', page))
    )


async def test_only_the_style_sheet_is_served(make: Make, ask: Ask) -> None:
    """The folder is not a file server."""
    app = make()
    folder = STYLE_URL.rpartition("/")[0]

    for name in ("docs.html", "..%2Fdocs.py", "../docs.py", "nope.js"):
        assert (await ask(app, "GET", f"{folder}/{name}")).status_code == 404
