"""How pages are rendered: templates, the filters for numbers, times and sizes, and the files that pages load.

Style, script and vendored files are served by this gateway, at URLs that change with their content.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import ChoiceLoader, DictLoader, Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import Response

from lakebed import __version__
from lakebed.console.pages import PAGES, PART_PAGES, template_of
from lakebed.console.report import UPLOT
from lakebed.core.errors import NotFound
from lakebed.core.http import own_keys

SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
NONE = "–"
HERE = Path(__file__).parent
JAVASCRIPT, CSS, SVG = "text/javascript; charset=utf-8", "text/css; charset=utf-8", "image/svg+xml"
FILES = {
    "console.css": (HERE / "static/console.css", CSS),
    "console.js": (HERE / "static/console.js", JAVASCRIPT),
    "theme.js": (HERE / "static/theme.js", JAVASCRIPT),
    "mark.svg": (HERE / "static/mark.svg", SVG),
    "htmx.js": (HERE / "vendor/htmx/htmx.min.js", JAVASCRIPT),
    "idiomorph.js": (HERE / "vendor/idiomorph/idiomorph-ext.min.js", JAVASCRIPT),
    "uplot.js": (UPLOT / "uPlot.iife.min.js", JAVASCRIPT),
    "uplot.css": (UPLOT / "uPlot.min.css", CSS),
}
ROUTE = "/console/assets/{stamp}/{name}"
REFRESH_S = 4
STATE_WORDS = {"ok": "ok", "degraded": "warning", "down": "problem", "quiet": "unknown"}


class Assets:
    """The files that pages load: about 150 KB, read once at the start."""

    def __init__(self) -> None:
        self._bytes = {name: file.read_bytes() for name, (file, _) in FILES.items()}
        self._stamps = {name: hashlib.sha256(data).hexdigest()[:12] for name, data in self._bytes.items()}

    def url(self, name: str) -> str:
        return ROUTE.format(stamp=self._stamps[name], name=name)

    @own_keys
    async def serve(self, request: Request) -> Response:
        """Needs no key: the files contain no data of this lake."""
        name = request.path_params["name"]
        if name not in FILES:
            raise NotFound(f"console file {name[:80]!r} does not exist")
        kept = "public, max-age=31536000, immutable"
        current = request.path_params["stamp"] == self._stamps[name]
        headers = {
            "cache-control": kept if current else "no-cache",
            "x-content-type-options": "nosniff",
            "content-type": FILES[name][1],
        }
        return Response(self._bytes[name], headers=headers)


def number(value: Any) -> str:
    """1,234; fractions with one digit."""
    if value is None:
        return NONE
    return f"{value:,.1f}" if isinstance(value, float) and not value.is_integer() else f"{int(value):,}"


def short(value: Any) -> str:
    """1.2k, 3.4M: for numbers that change often."""
    if value is None:
        return NONE
    size = abs(float(value))
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.1f}{unit}"
    return number(round(float(value), 1))


def size(value: Any) -> str:
    if value is None:
        return NONE
    left = float(value)
    for unit in SIZES:
        if left < 1024 or unit == SIZES[-1]:
            return f"{left:.0f} {unit}" if unit == "B" else f"{left:.1f} {unit}"
        left /= 1024
    raise AssertionError("the last unit has no limit")


def age(seconds: Any) -> str:
    """3.2 s, 5 min, 2 h, 4 d."""
    if seconds is None:
        return NONE
    left = max(0.0, float(seconds))
    if left == 0:
        return "0 s"
    if left < 1:
        return f"{left * 1000:.0f} ms"
    if left < 10:
        return f"{left:.1f} s"
    for limit, unit_s, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if left < limit:
            return f"{left / unit_s:.0f} {unit}"
    return f"{left / 86_400:.0f} d"


def time_ms(at_ms: Any) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S") if at_ms else NONE


def clock_ms(at_ms: Any) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%H:%M:%S") if at_ms else NONE


def time_ns(at_ns: Any) -> str:
    return time_ms(at_ns / 1e6) if at_ns else NONE


def dollars(value: Any) -> str:
    if value is None:
        return NONE
    return f"${value:,.2f}" if value >= 0.01 or not value else f"${value:.6f}"


def brief(text: Any, length: int = 24) -> str:
    """The ends of a long name."""
    text = str(text)
    keep = (length - 1) // 2
    return text if len(text) <= length else f"{text[:keep]}…{text[-keep:]}"


def as_json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode()


def compact_json(value: Any) -> str:
    """For an attribute that the page's script reads; the template escapes it."""
    return msgspec.json.encode(value, enc_hook=str).decode()


FILTERS = {
    "compact_json": compact_json,
    "number": number,
    "short": short,
    "size": size,
    "age": age,
    "time_ms": time_ms,
    "clock_ms": clock_ms,
    "time_ns": time_ns,
    "dollars": dollars,
    "brief": brief,
    "as_json": as_json,
}


def environment(assets: Assets) -> Environment:
    """The templates of the console and of every part's page."""
    made = Environment(
        loader=ChoiceLoader(
            [
                FileSystemLoader(HERE / "templates"),
                DictLoader({f"{page.name}.html": template_of(page) for page in PART_PAGES}),
            ]
        ),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= FILTERS
    made.globals |= {"asset": assets.url, "pages": PAGES, "version": __version__, "refresh_s": REFRESH_S}
    made.globals |= {"STATE_WORDS": STATE_WORDS}
    for page in PART_PAGES:
        made.globals |= page.helpers
    return made
