"""Style, script and vendored files: served by this gateway alone, under addresses that change with their content."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from lakebed.errors import NotFound
from lakebed.wire import own_keys

HERE = Path(__file__).parent
HTMX_VERSION, IDIOMORPH_VERSION, UPLOT_VERSION = "2.0.11", "0.8.0", "1.6.32"
JAVASCRIPT, CSS, SVG = "text/javascript; charset=utf-8", "text/css; charset=utf-8", "image/svg+xml"
FILES = {
    "console.css": (HERE / "static/console.css", CSS),
    "console.js": (HERE / "static/console.js", JAVASCRIPT),
    "theme.js": (HERE / "static/theme.js", JAVASCRIPT),
    "mark.svg": (HERE / "static/mark.svg", SVG),
    "htmx.js": (HERE / "vendor/htmx/htmx.min.js", JAVASCRIPT),
    "idiomorph.js": (HERE / "vendor/idiomorph/idiomorph-ext.min.js", JAVASCRIPT),
    "uplot.js": (HERE / "vendor/uplot/uPlot.iife.min.js", JAVASCRIPT),
    "uplot.css": (HERE / "vendor/uplot/uPlot.min.css", CSS),
}
ROUTE = "/console/assets/{stamp}/{name}"


class Assets:
    """Read once at the start, about 150 KB in all."""

    def __init__(self) -> None:
        self._bytes = {name: file.read_bytes() for name, (file, _) in FILES.items()}
        self._stamps = {name: hashlib.sha256(data).hexdigest()[:12] for name, data in self._bytes.items()}

    def url(self, name: str) -> str:
        return ROUTE.format(stamp=self._stamps[name], name=name)

    @own_keys
    async def serve(self, request: Request) -> Response:
        """Anybody may have them: they say nothing about this lake."""
        name = request.path_params["name"]
        if name not in FILES:
            raise NotFound(f"the console has no file {name[:80]!r}")
        kept = "public, max-age=31536000, immutable"
        current = request.path_params["stamp"] == self._stamps[name]
        headers = {
            "cache-control": kept if current else "no-cache",
            "x-content-type-options": "nosniff",
            "content-type": FILES[name][1],
        }
        return Response(self._bytes[name], headers=headers)
