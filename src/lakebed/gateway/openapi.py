"""`/openapi.json`: FastAPI's own description, plus the plain Starlette routes that stand beside it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Route

from lakebed.wire import OPERATION_MARK, Operation

REFERENCE = "#/components/schemas/{name}"
PARAMETER = re.compile(r"{(\w+)(:\w+)?}")


def describe(app: FastAPI) -> dict[str, Any]:
    """The whole document. Routes marked `include_in_schema=False` are left out."""
    tree = app.openapi()
    tree["security"] = [{"key": []}]
    tree.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    paths = tree.setdefault("paths", {})
    schemas = tree.setdefault("components", {}).setdefault("schemas", {})
    for route in plain(app.routes):
        item = paths.setdefault(PARAMETER.sub(r"{\1}", route.path), {})
        for method in sorted(route.methods or ()):
            if method != "HEAD":
                item.setdefault(method.lower(), _operation(route, schemas))
    return tree


def plain(routes: Iterable[BaseRoute]) -> list[Route]:
    return [
        route
        for route in routes
        if isinstance(route, Route) and not isinstance(route, APIRoute) and route.include_in_schema
    ]


def _operation(route: Route, schemas: dict[str, Any]) -> dict[str, Any]:
    said = getattr(route.endpoint, OPERATION_MARK, Operation())
    about = inspect.getdoc(route.endpoint) or ""
    answer: dict[str, Any] = {"description": "done"}
    if said.answer is not None:
        answer["content"] = {"application/json": {"schema": _schema(said.answer, schemas)}}
    out: dict[str, Any] = {
        "summary": said.summary or about.split("\n", 1)[0],
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name, _ in PARAMETER.findall(route.path)
        ],
        "responses": {"200": answer, "default": {"description": "a problem (application/problem+json)"}},
    }
    if said.body is not None:
        schema = _schema(said.body, schemas) if said.body is not bytes else {"type": "string", "format": "binary"}
        out["requestBody"] = {"required": True, "content": {said.media_type: {"schema": schema}}}
    return out


def _schema(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    (schema,), found = msgspec.json.schema_components([kind], ref_template=REFERENCE)
    schemas.update(found)
    return schema
