"""The console inside a gateway: nine pages with their JSON twins, one stream of live numbers, one way to act.

Pages are rendered here and hold no script of their own; what objects, payloads and people say in them is text. A
browser reads with its session; to act it also sends the token of its page, from our own origin.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import parse_qs, quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from lakebed import __version__
from lakebed.auth import Principal
from lakebed.clock import now_ms
from lakebed.console import drawing, flow, text
from lakebed.console.actions import ACTIONS, FIELD_CHARS_MAX, Action, Fields
from lakebed.console.assets import HERE, ROUTE, Assets
from lakebed.console.live import KEPT, VIEWERS_MAX, Sample, event
from lakebed.console.looker import Looker, levels
from lakebed.console.pages import PAGES, Page, Query, Things, Visit
from lakebed.context import Context, Health
from lakebed.errors import Denied, Invalid, LakebedError, NotFound, OutcomeUnknown, Overloaded, Unauthenticated
from lakebed.gateway import sessions
from lakebed.gateway.auth import NOBODY
from lakebed.gateway.problems import status_of
from lakebed.gateway.settings import GatewaySettings
from lakebed.logs import logger
from lakebed.wire import body_limit, json_answer, own_keys, stopping

RIGHT = "console:read"
REFRESH_S = 4
ACT_S = 60.0  # longest wait for an action
FORM_BYTES_MAX = 64 * 1024
REASON_CHARS_MAX = 2000
PAGE_COOKIE = "lakebed_page"  # where nobody signs in: what the page's token belongs to
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}

log = logger("console")


class Console:
    name = "console"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._read_only = context.settings.of(GatewaySettings).read_only
        self._assets = Assets()
        self.look = Looker(context)
        self._templates = Environment(
            loader=FileSystemLoader(HERE / "pages"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= text.FILTERS
        self._templates.globals |= {
            "asset": self._assets.url,
            "pages": PAGES,
            "version": __version__,
            "refresh_s": REFRESH_S,
            "bars": drawing.bars,
            "steps": drawing.steps,
            "layers": drawing.layers,
        }
        pages = [route for page in PAGES for route in (Route(page.path, self._page(page), include_in_schema=False),
                                                       Route(page.twin, self._twin(page)))]  # fmt: skip
        self.reads: Sequence[BaseRoute] = (
            *pages,
            Route("/live", self._live, include_in_schema=False),
            Route(ROUTE, self._assets.serve, include_in_schema=False),
            Route("/login", self._ask_key, include_in_schema=False),
            Route("/login", self._sign_in, methods=["POST"], include_in_schema=False),
            Route("/logout", self._sign_out, methods=["POST"], include_in_schema=False),
            Route("/console/ask/{action}", self._ask, include_in_schema=False),
        )
        self.writes: Sequence[BaseRoute] = (
            Route("/console/do/{action}", self._do, methods=["POST"], include_in_schema=False),
        )

    async def start(self) -> None:
        return None

    async def stop(self) -> None:
        await self.look.stop()

    async def health(self) -> Health:
        return Health("ok", f"live viewers: {self.look.live.viewers}")

    # Pages.

    def _page(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        @own_keys
        async def show(request: Request) -> Response:
            principal = request.state.principal
            if principal == NOBODY:
                where = request.url.path + (f"?{request.url.query}" if request.url.query else "")
                return RedirectResponse(f"/login?next={quote(where, safe='')}", 303, HEADERS)
            try:
                principal.demand(RIGHT)
                seen, chosen = await page.make(self._visit(request))
            except LakebedError as error:
                told = {"page": page, "error": error}
                return self._html(request, "error.html", status_of(type(error)), **told)
            more = self._picture(seen) if page.path == "/" else {}
            return self._html(request, f"{page.name}.html", page=page, seen=seen, chosen=chosen, **more)

        return show

    def _twin(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        @own_keys
        async def tell(request: Request) -> Response:
            if request.state.principal == NOBODY:
                raise Unauthenticated("no key was sent", hint="send Authorization: Bearer <key>, or X-Api-Key: <key>")
            request.state.principal.demand(RIGHT)
            seen, _ = await page.make(self._visit(request, patient=True))
            told: dict[str, Any] = {name: one.value for name, one in seen.items()}
            if page.path == "/":
                told |= self._overview(seen)
            troubles = {name: one.trouble for name, one in seen.items() if one.trouble is not None}
            if troubles:
                told["troubles"] = troubles
            status = 503 if troubles and len(troubles) == len(seen) else 200
            return json_answer(told, status, {"cache-control": "no-store"})

        tell.__doc__ = f"{page.title}, as JSON: what the page at {page.path} shows."
        return tell

    def _visit(self, request: Request, *, patient: bool = False) -> Visit:
        self.look.examiner = request.app.state.examiner
        return Visit(self.look, request.state.principal, Query(request.query_params), patient=patient)

    def _picture(self, seen: Things) -> dict[str, Any]:
        now = self.look.live.now()
        known = levels(lambda key: self.look.samples.last(key).value)
        report = seen["health"].value
        parts = {name: health.status for name, health in report.components.items()} if report else {}
        numbers: dict[str, float | None] = {f"rate.{name}": value for name, value in now.rates.items()}
        numbers |= {f"level.{name}": value for name, value in known.items()}
        return {"pictures": flow.pictures(parts, known), "numbers": numbers, "totals": now.totals}

    def _overview(self, seen: Things) -> dict[str, Any]:
        now = self.look.live.now()
        known = levels(lambda key: self.look.samples.last(key).value)
        return {"rates": now.rates, "levels": known, "totals": now.totals}

    def _html(self, request: Request, template: str, status: int = 200, **told: Any) -> Response:
        principal: Principal = request.state.principal
        value, fresh = self._page_value(request)
        html = self._templates.get_template(template).render(
            principal=principal,
            signed_in=bool(request.cookies.get(sessions.COOKIE)) and principal.name != "anybody",
            may=principal.may,
            token=sessions.token_of(value),
            read_only=self._read_only,
            now_ms=now_ms(self._context.clock),
            now_ns=self._context.clock.now_ns(),
            query=urlencode,
            **told,
        )
        answer = Response(html, status, HEADERS, media_type="text/html")
        if fresh:
            answer.set_cookie(PAGE_COOKIE, value, httponly=True, samesite="strict", secure=_is_secure(request))
        return answer

    # Live numbers.

    @own_keys
    async def _live(self, request: Request) -> Response:
        """Server-sent events: what was kept, then each sample as it is taken."""
        if request.state.principal == NOBODY:
            raise Unauthenticated("no key was sent", hint="sign in")
        request.state.principal.demand(RIGHT)
        if self.look.live.viewers >= VIEWERS_MAX:
            raise Overloaded(f"{VIEWERS_MAX} pages are already live", retry_after_s=10.0)
        stop = stopping(request)

        async def stream() -> AsyncIterator[bytes]:
            async with self.look.live.watch() as (kept, coming):
                yield event("history", kept[-KEPT:])
                while not stop.is_set():
                    sample = await _next(coming, stop)
                    if sample is not None:
                        yield event("sample", sample)

        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(stream(), headers=headers, media_type="text/event-stream")

    # Signing in and out.

    @own_keys
    async def _ask_key(self, request: Request) -> Response:
        return self._login(request, _inside(request.query_params.get("next", "/")))

    @own_keys
    @body_limit(FORM_BYTES_MAX)
    async def _sign_in(self, request: Request) -> Response:
        """A key for a session. The key is never kept, shown or logged."""
        _demand_origin(request)
        form = await _form(request)
        where = _inside(form.get("next", "/"))
        try:
            session = request.app.state.keyring.sign_in(form.get("key", ""), self._context.ids.secret())
        except Unauthenticated as error:
            return self._login(request, where, error.message, 401)
        answer = RedirectResponse(where, 303, HEADERS)
        answer.set_cookie(
            sessions.COOKIE,
            session,
            max_age=sessions.SESSION_S,
            httponly=True,
            samesite="strict",
            secure=_is_secure(request),
        )
        return answer

    @own_keys
    async def _sign_out(self, request: Request) -> Response:
        _demand_origin(request)
        answer = RedirectResponse("/login", 303, HEADERS)
        answer.delete_cookie(sessions.COOKIE)
        return answer

    def _login(self, request: Request, where: str, problem: str = "", status: int = 200) -> Response:
        open_to_all = not len(request.app.state.keyring)
        if open_to_all:
            return RedirectResponse(where, 303, HEADERS)
        return self._html(request, "login.html", status, next=where, problem=problem)

    # Acting.

    async def _ask(self, request: Request) -> Response:
        """The dialog: what will happen, to what, and the question why."""
        name, action = _action(request)
        fields = {field: request.query_params.get(field, "")[:FIELD_CHARS_MAX] for field in action.fields}
        return self._dialog(request, name, action, fields)

    @body_limit(FORM_BYTES_MAX)
    async def _do(self, request: Request) -> Response:
        """Checks the page's token, the right and the reason; writes the trail; acts."""
        name, action = _action(request)
        self._demand_token(request)
        form = await _form(request)
        fields = {field: form.get(field, "")[:FIELD_CHARS_MAX] for field in action.fields}
        reason = form.get("reason", "").strip()
        try:
            detail = await self._act(request.state.principal, name, action, fields, reason)
        except LakebedError as error:
            return self._dialog(request, name, action, fields, reason, error)
        self.look.samples.forget()
        answer = self._html(request, "done.html", action=action, detail=detail)
        answer.headers["hx-trigger"] = "lakebed-changed"
        return answer

    async def _act(self, principal: Principal, name: str, action: Action, fields: Fields, reason: str) -> str:
        principal.demand(action.right(fields))
        if action.needs_reason and not reason:
            raise Invalid("a reason is needed", hint="say why, for whoever asks later")
        if len(reason) > REASON_CHARS_MAX:
            raise Invalid(f"a reason has at most {REASON_CHARS_MAX} characters")
        try:
            async with asyncio.timeout(ACT_S), self.look.trail.record(principal.name, name, fields, reason) as told:
                told.detail = await action.do(self.look, fields, principal.name, reason)
        except TimeoutError:
            raise OutcomeUnknown(f"no answer within {ACT_S:g} s", hint="look whether it happened") from None
        log.info("acted", who=principal.name, what=name, subject=fields, reason=reason, detail=told.detail)
        return told.detail

    def _dialog(
        self,
        request: Request,
        name: str,
        action: Action,
        fields: Fields,
        reason: str = "",
        error: LakebedError | None = None,
    ) -> Response:
        allowed = request.state.principal.may(action.right(fields)) and not self._read_only
        status = 200 if error is None else status_of(type(error))
        told = {"right": action.right(fields), "allowed": allowed, "reason": reason, "error": error}
        return self._html(request, "ask.html", status, name=name, action=action, fields=fields, **told)

    def _page_value(self, request: Request) -> tuple[str, bool]:
        """What this browser's token belongs to: its session, or a cookie of its own; True when that one is new."""
        kept = request.cookies.get(sessions.COOKIE) or request.cookies.get(PAGE_COOKIE)
        return (kept, False) if kept else (self._context.ids.secret(), True)

    def _demand_token(self, request: Request) -> None:
        """Raises Denied unless the request carries its own page's token and comes from our own origin."""
        _demand_origin(request)
        value, fresh = self._page_value(request)
        given = request.headers.get(sessions.TOKEN_HEADER, "")
        if fresh or not hmac.compare_digest(given.encode(), sessions.token_of(value).encode()):
            raise Denied("the page's token is missing or old", hint="reload the page, then try again")


def component(context: Context) -> Console:
    return Console(context)


def _action(request: Request) -> tuple[str, Action]:
    name = request.path_params["action"]
    if name not in ACTIONS:
        raise NotFound(f"there is no action {name[:80]!r}")
    return name, ACTIONS[name]


async def _form(request: Request) -> Fields:
    try:
        found = parse_qs((await request.body()).decode(), keep_blank_values=True, max_num_fields=32)
    except ValueError as error:
        raise Invalid("the form does not decode") from error
    return {name: values[-1] for name, values in found.items()}


async def _next(coming: asyncio.Queue[Sample], stop: asyncio.Event) -> Sample | None:
    """The next sample; None when the gateway stops first."""
    getting, ending = asyncio.ensure_future(coming.get()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({getting, ending}, return_when=asyncio.FIRST_COMPLETED)
        return getting.result() if getting.done() else None
    finally:
        getting.cancel()
        ending.cancel()


def _demand_origin(request: Request) -> None:
    """A browser names the origin of every form and script; ours is the name it reached us by."""
    origin = request.headers.get("origin", "").partition("://")[2]
    if not origin or origin != request.headers.get("host", ""):
        raise Denied("a page of another site may not ask here", hint="open the console itself")


def _inside(where: str) -> str:
    """A place of ours to go to: never another site, whatever the address says."""
    plain = where.startswith("/") and not where.startswith(("//", "/\\")) and where.isprintable()
    return where if plain else "/"


def _is_secure(request: Request) -> bool:
    return "https" in (request.url.scheme, request.headers.get("x-forwarded-proto", ""))
