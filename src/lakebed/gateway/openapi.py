"""`/openapi.json`, made from the marks of Starlette routes, and `/docs`, the same as one HTML page.

The page has no script and its policy allows none. It loads one style sheet, from this gateway, and nothing else.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakebed import __version__
from lakebed.core.http import OPERATION_MARK, AliasRoute, Operation, json_response

REFERENCE = "#/components/schemas/{name}"
RIGHT = "x-lakebed-right"  # the right that the caller needs; names in braces come from the request
PARAMETER = re.compile(r"{(\w+)(:\w+)?}")
PAGES = Path(__file__).parent / "pages"
STYLE = (PAGES / "docs.css").read_bytes()
STYLE_URL = f"/docs/{hashlib.sha256(STYLE).hexdigest()[:12]}/docs.css"  # changes with the content: cached for good
POLICY = (
    "default-src 'none'; style-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
METHODS = ("get", "head", "post", "put", "patch", "delete")
_templates = Environment(
    loader=FileSystemLoader(PAGES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


def describe(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """The whole document. Routes marked `include_in_schema=False` and mounts are left out."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for route in routes:
        if not isinstance(route, Route) or not route.include_in_schema:
            continue
        item = paths.setdefault(_path(route.path), {})
        for method in sorted(route.methods or ()):
            if method != "HEAD":
                item.setdefault(method.lower(), _operation(route, schemas))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Lakebed", "version": __version__},
        "paths": paths,
        "security": [{"key": []}],
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}, "schemas": schemas},
    }


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    operation = getattr(route.endpoint, OPERATION_MARK, Operation())
    answer: dict[str, Any] = {"description": "done"}
    if operation.answer is not None:
        answer["content"] = {"application/json": {"schema": _schema(operation.answer, schemas)}}
    out: dict[str, Any] = {
        "summary": f"Same as {_path(route.of)}"
        if isinstance(route, AliasRoute)
        else _summary(route.endpoint, operation),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name, _ in PARAMETER.findall(route.path)
        ],
        "responses": {"200": answer, "default": {"description": "a problem (application/problem+json)"}},
    }
    out["tags"] = [part_of(route.endpoint)]
    if operation.right:
        out[RIGHT] = operation.right
    if operation.body is not None:
        schema = (
            _schema(operation.body, schemas) if operation.body is not bytes else {"type": "string", "format": "binary"}
        )
        out["requestBody"] = {"required": True, "content": {operation.media_type: {"schema": schema}}}
    return out


def part_of(endpoint: Any) -> str:
    """The part whose code answers: the package of its module."""
    _, *names = str(getattr(endpoint, "__module__", "") or "").split(".")
    inner = 1 if names[:1] in (["pipeline"], ["wiring"]) and len(names) > 1 else 0
    return names[inner] if names else "other"


def _path(template: str) -> str:
    """A path of OpenAPI: parameters without their types."""
    return PARAMETER.sub(r"{\1}", template)


def _summary(endpoint: Any, operation: Operation) -> str:
    return operation.summary or (inspect.getdoc(endpoint) or "").split("\n", 1)[0]


def _schema(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    (schema,), found = msgspec.json.schema_components([kind], ref_template=REFERENCE)
    schemas.update(found)
    return schema


class ResponseRow(msgspec.Struct, frozen=True):
    status: str
    description: str
    media_type: str
    schema: str


class Endpoint(msgspec.Struct, frozen=True):
    """One method of one path, as the page shows it. `anchor` is its place in the page."""

    method: str
    path: str
    anchor: str
    summary: str
    right: str
    part: str
    parameters: tuple[dict[str, Any], ...]
    body: tuple[tuple[str, str], ...]
    responses: tuple[ResponseRow, ...]


def routes() -> list[BaseRoute]:
    return [
        Route("/openapi.json", _document, include_in_schema=False),
        Route("/docs", _page, include_in_schema=False),
        Route(STYLE_URL, _style, include_in_schema=False),
    ]


def endpoints(tree: dict[str, Any]) -> list[Endpoint]:
    """Every operation of an OpenAPI document, by part, path and method."""
    found = [
        _endpoint(method, path, item[method])
        for path, item in sorted(tree["paths"].items())
        for method in METHODS
        if method in item
    ]
    return sorted(found, key=lambda one: one.part)


def render(tree: dict[str, Any]) -> str:
    schemas = {
        name: msgspec.json.format(msgspec.json.encode(schema)).decode()
        for name, schema in sorted(tree["components"]["schemas"].items())
    }
    page = _templates.get_template("docs.html")
    return page.render(info=tree["info"], endpoints=endpoints(tree), schemas=schemas, style=STYLE_URL)


def _endpoint(method: str, path: str, operation: dict[str, Any]) -> Endpoint:
    return Endpoint(
        method=method.upper(),
        path=path,
        anchor=f"{method}-{path}",
        summary=operation["summary"],
        right=operation.get(RIGHT, ""),
        part=next(iter(operation.get("tags", ())), "other"),
        parameters=tuple(operation["parameters"]),
        body=tuple(_contents(operation.get("requestBody", {}))),
        responses=tuple(
            ResponseRow(status, response["description"], *(next(iter(_contents(response)), ("", ""))))
            for status, response in operation["responses"].items()
        ),
    )


def _contents(described: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """(media type, name of the schema) of a body; a schema without a name is shown by its type."""
    for media_type, content in described.get("content", {}).items():
        yield media_type, _schema_name(content["schema"])


def _schema_name(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[-1])
    if schema.get("type") == "array":
        return f"{_schema_name(schema.get('items', {}))}[]"
    return str(schema.get("format") or schema.get("type") or "any")


async def _document(request: Request) -> Response:
    return json_response(describe(request.app.routes))


async def _page(request: Request) -> Response:
    tree = describe(request.app.routes)
    return Response(render(tree), headers=PAGE_HEADERS, media_type="text/html")


async def _style(request: Request) -> Response:
    headers = {"cache-control": "public, max-age=31536000, immutable", "x-content-type-options": "nosniff"}
    return Response(STYLE, headers=headers, media_type="text/css")
