"""`/docs`, without any other host: Swagger UI from `vendor/`, under a policy that lets nothing else in."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakebed.errors import NotFound

VENDOR = Path(__file__).parent / "vendor" / "swagger-ui"
SWAGGER_VERSION = "5.34.1"  # part of the assets' address, so that they can be cached for good
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
ASSETS = {
    "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "swagger-ui.css": "text/css; charset=utf-8",
}
PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Lakebed API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/docs/{SWAGGER_VERSION}/swagger-ui.css">
</head>
<body>
<div id="docs"></div>
<script src="/docs/{SWAGGER_VERSION}/swagger-ui-bundle.js"></script>
<script src="/docs/start.js"></script>
</body>
</html>
"""
START = """SwaggerUIBundle({url: "/openapi.json", dom_id: "#docs", validatorUrl: null, deepLinking: true});
"""


def routes() -> list[BaseRoute]:
    return [
        Route("/docs", _page, include_in_schema=False),
        Route("/docs/start.js", _start, include_in_schema=False),
        Route(f"/docs/{SWAGGER_VERSION}/{{name}}", _asset, include_in_schema=False),
    ]


async def _page(request: Request) -> Response:
    return Response(PAGE, headers=PAGE_HEADERS, media_type="text/html")


async def _start(request: Request) -> Response:
    return Response(START, headers={"x-content-type-options": "nosniff"}, media_type="text/javascript")


async def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in ASSETS:
        raise NotFound(f"the documentation has no file {name!r}")
    return Response(
        (VENDOR / name).read_bytes(),
        headers={
            "cache-control": "public, max-age=31536000, immutable",
            "x-content-type-options": "nosniff",
            "content-type": ASSETS[name],
        },
    )
