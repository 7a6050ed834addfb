"""The console inside a gateway: one page, its style, its JSON twin."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakebed.console.overview import Overview, overview
from lakebed.context import Context, Health
from lakebed.wire import json_answer

HERE = Path(__file__).parent
REFRESH_S = 5
RIGHT = "console:read"
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class Console:
    name = "console"
    writes: Sequence[BaseRoute] = ()

    def __init__(self, context: Context) -> None:
        self._metrics = context.metrics
        pages = Environment(
            loader=FileSystemLoader(HERE / "pages"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
        )
        self._page = pages.get_template("overview.html")
        self._style = (HERE / "console.css").read_bytes()
        self.reads: Sequence[BaseRoute] = (
            Route("/", self._show, include_in_schema=False),
            Route("/console.css", self._css, include_in_schema=False),
            Route("/overview.json", self._json),
        )

    async def start(self) -> None:
        return None

    async def stop(self) -> None:
        return None

    async def health(self) -> Health:
        return Health("ok")

    async def _show(self, request: Request) -> Response:
        """The page is public; what it tells a stranger is the version and whether all is well."""
        seen = await self._overview(request)
        html = self._page.render(
            seen=seen,
            trusted=request.state.principal.may(RIGHT),
            started=datetime.fromtimestamp(seen.started_at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            refresh_s=REFRESH_S,
        )
        return Response(html, headers=HEADERS, media_type="text/html")

    async def _json(self, request: Request) -> Response:
        """What the first page of the console shows, as JSON."""
        request.state.principal.demand(RIGHT)
        return json_answer(await self._overview(request), headers={"cache-control": "no-store"})

    async def _css(self, request: Request) -> Response:
        return Response(self._style, headers={"cache-control": "max-age=300"}, media_type="text/css")

    async def _overview(self, request: Request) -> Overview:
        return overview(await request.app.state.examiner.report(), self._metrics)


def component(context: Context) -> Console:
    return Console(context)
