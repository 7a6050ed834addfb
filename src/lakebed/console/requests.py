"""What the console makes of a request: its form, its origin, where it may be sent next."""

from __future__ import annotations

from urllib.parse import parse_qs

from starlette.requests import Request

from lakebed.console.page import Fields
from lakebed.core.errors import Denied, Invalid


async def form_of(request: Request) -> Fields:
    try:
        found = parse_qs((await request.body()).decode(), keep_blank_values=True, max_num_fields=32)
    except ValueError as error:
        raise Invalid("the form does not decode") from error
    return {name: values[-1] for name, values in found.items()}


def demand_origin(request: Request) -> None:
    """Raises Denied for a request of another site: a browser sends the origin of every form and script."""
    origin = request.headers.get("origin", "").partition("://")[2]
    if not origin or origin != request.headers.get("host", ""):
        raise Denied("requests from pages of other sites are refused", hint="open the console directly")


def inside(where: str) -> str:
    """A path on this gateway: never another site, whatever the parameter says."""
    plain = where.startswith("/") and not where.startswith(("//", "/\\")) and where.isprintable()
    return where if plain else "/"


def is_secure(request: Request) -> bool:
    return "https" in (request.url.scheme, request.headers.get("x-forwarded-proto", ""))
