"""The console's routes: pages with their JSON twins, a stream of live metrics, sign-in, and operator actions.

Pages are rendered here and contain no script of their own; data in them is escaped text. A browser reads with its
session; for an action it also sends the CSRF token of its page, from our own origin.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from lakebed.console import diagram, manual
from lakebed.console.data import PageData
from lakebed.console.history import RANGES, growth
from lakebed.console.live import VIEWERS_MAX, LiveSample, event
from lakebed.console.page import FIELD_CHARS_MAX, Action, Fields, PageQuery, PageRequest, PageSamples, PartPage
from lakebed.console.pages import ACTIONS, PAGES, ManualPage, getting_started
from lakebed.console.rendering import ROUTE, Assets, environment
from lakebed.console.requests import demand_origin, form_of, inside, is_secure
from lakebed.console.samples import shown_once
from lakebed.console.states import worst_of
from lakebed.core.auth import NOBODY, Principal
from lakebed.core.clock import now_ms
from lakebed.core.context import Context, Health
from lakebed.core.errors import Denied, Invalid, LakebedError, NotFound, OutcomeUnknown, Overloaded, Unauthenticated
from lakebed.core.http import body_limit, json_response, operation, own_keys, stopping
from lakebed.core.logs import logger
from lakebed.gateway import sessions
from lakebed.gateway.problems import status_of
from lakebed.gateway.settings import GatewaySettings
from lakebed.gateway.state import state_of

RIGHT = "console:read"
FIGURES = ("batches_samples", "log_in", "queue_in", "ticks_rows")  # the first numbers of the overview
ACT_S = 60.0  # longest wait for an action
FORM_BYTES_MAX = 64 * 1024
REASON_CHARS_MAX = 2000
PAGE_COOKIE = "lakebed_page"  # without sign-in: what the page's CSRF token belongs to
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
        self.data = PageData(context)
        self._templates = environment(self._assets)
        pages = [route for page in PAGES for route in (Route(page.path, self._page(page), include_in_schema=False),
                                                       Route(page.twin(), self._twin(page)))]  # fmt: skip
        exports = [Route(f"{page.path}/export", self._export(page)) for page in PAGES if page.exports]
        self.reads: Sequence[BaseRoute] = (
            *pages,
            *exports,
            Route("/live", self._live, include_in_schema=False),
            Route("/history.json", self._history),
            Route(ROUTE, self._assets.serve, include_in_schema=False),
            Route("/manual/{name:path}", self._manual, include_in_schema=False),
            Route("/login", self._sign_in_page, include_in_schema=False),
            Route("/login", self._sign_in, methods=["POST"], include_in_schema=False),
            Route("/logout", self._sign_out, methods=["POST"], include_in_schema=False),
            Route("/console/ask/{action}", self._confirm, include_in_schema=False),
        )
        self.writes: Sequence[BaseRoute] = (
            Route("/console/do/{action}", self._do, methods=["POST"], include_in_schema=False),
        )

    async def start(self) -> None:
        self.data.sampler.start()

    async def stop(self) -> None:
        await self.data.stop()

    async def health(self) -> Health:
        return Health("ok", f"live viewers: {self.data.live.viewers}")

    def _page(self, page: type[PartPage]) -> Callable[[Request], Awaitable[Response]]:
        @own_keys
        async def show(request: Request) -> Response:
            principal = request.state.principal
            if principal == NOBODY:
                where = request.url.path + (f"?{request.url.query}" if request.url.query else "")
                return RedirectResponse(f"/login?next={quote(where, safe='')}", 303, HEADERS)
            try:
                principal.demand_list(RIGHT)
                data, chosen = await self.data.pages[page].load(self._page_request(request))
            except LakebedError as error:
                return self._html(request, "error.html", status_of(type(error)), page=page, error=error)
            more = self._diagrams(data, principal) if page.path == "/" else {}
            return self._html(request, f"{page.name}.html", page=page, data=shown_once(data), chosen=chosen, **more)

        return show

    def _twin(self, page: type[PartPage]) -> Callable[[Request], Awaitable[Response]]:
        @own_keys
        @operation(f"{page.title}, as JSON: what the page at {page.path} shows.", right=RIGHT)
        async def show(request: Request) -> Response:
            if request.state.principal == NOBODY:
                raise Unauthenticated("no key was sent", hint="send Authorization: Bearer <key>, or X-Api-Key: <key>")
            request.state.principal.demand_list(RIGHT)
            samples, _ = await self.data.pages[page].load(self._page_request(request, patient=True))
            found: dict[str, Any] = {name: one.value for name, one in samples.items()}
            if page.path == "/" and not request.state.principal.tenant:
                found |= self._overview()
            errors = {name: one.error for name, one in samples.items() if one.error is not None}
            if errors:
                found["troubles"] = errors
            return json_response(found, _twin_status(samples), {"cache-control": "no-store"})

        return show

    def _export(self, page: type[PartPage]) -> Callable[[Request], Awaitable[Response]]:
        @own_keys
        @operation(f"What {page.path} shows for these parameters, as a file: format is csv or parquet.", right=RIGHT)
        async def send(request: Request) -> Response:
            if request.state.principal == NOBODY:
                raise Unauthenticated("no key was sent", hint="sign in")
            request.state.principal.demand(RIGHT)
            async with asyncio.timeout(ACT_S):
                found = await self.data.pages[page].export(self._page_request(request))
            named = {"content-disposition": f'attachment; filename="{found.name}"', "cache-control": "no-store"}
            return Response(found.data, headers={**HEADERS, **named}, media_type=found.media_type)

        return send

    def _page_request(self, request: Request, *, patient: bool = False) -> PageRequest:
        self.data.status.health_checker = state_of(request.app).health_checker
        return self.data.request(request.state.principal, PageQuery(request.query_params), patient=patient)

    def _diagrams(self, samples: PageSamples, principal: Principal) -> dict[str, Any]:
        now = self.data.live.now()
        known = self.data.known_levels()
        figures = self._figures()
        if principal.tenant:  # these numbers are of all tenants together
            now, known = msgspec.structs.replace(now, rates={}, lake={}), dict.fromkeys(known)
            figures = dict.fromkeys(figures)
        report = samples["health"].value
        found = diagram.states(report.components if report else None, known)
        numbers: dict[str, float | None] = {f"rate.{name}": value for name, value in now.rates.items()}
        numbers |= {f"level.{name}": value for name, value in known.items()}
        numbers |= {f"lake.{name}": value for name, value in now.lake.items()}
        problems = [(box, found[box.name]) for box in diagram.BOXES if found[box.name].state in ("degraded", "down")]
        return {
            "diagrams": diagram.diagrams(found),
            "numbers": numbers,
            "problems": problems,
            "overall": worst_of(found),
            "started": getting_started(known),
            "figures": figures,
        }

    def _figures(self) -> dict[str, tuple[float, float] | None]:
        """What came into the lake in the last hour: how much, and over how many seconds it is known."""
        points = self.data.sampler.points("1h")
        return {name: growth(points, f"lake.{name}") for name in FIGURES}

    def _overview(self) -> dict[str, Any]:
        now = self.data.live.now()
        hour = {name: found and {"count": found[0], "over_s": found[1]} for name, found in self._figures().items()}
        found = {"rates": now.rates, "lake": now.lake, "totals": now.totals, "last_hour": hour}
        return {**found, "levels": self.data.known_levels()}

    def _html(self, request: Request, template: str, status: int = 200, **values: Any) -> Response:
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
            **values,
        )
        response = Response(html, status, HEADERS, media_type="text/html")
        if fresh:
            response.set_cookie(PAGE_COOKIE, value, httponly=True, samesite="strict", secure=is_secure(request))
        return response

    @own_keys
    async def _manual(self, request: Request) -> Response:
        """A page or a picture of the documentation, which holds no data of this lake."""
        if request.state.principal == NOBODY:
            return RedirectResponse(f"/login?next={quote(request.url.path, safe='')}", 303, HEADERS)
        name = request.path_params["name"]
        try:
            file = await asyncio.to_thread(manual.found, name)
        except NotFound as error:
            return self._html(request, "error.html", 404, page=ManualPage, error=error)
        if file.suffix == ".png":
            return Response(file.read_bytes(), headers=HEADERS, media_type="image/png")
        html = await asyncio.to_thread(manual.rendered, file)
        return self._html(request, "manual.html", page=ManualPage, html=html)

    # Live metrics.

    @own_keys
    async def _live(self, request: Request) -> Response:
        """Server-sent events: the last sample, then each new one."""
        if request.state.principal == NOBODY:
            raise Unauthenticated("no key was sent", hint="sign in")
        request.state.principal.demand(RIGHT)
        if self.data.live.viewers >= VIEWERS_MAX:
            raise Overloaded(f"{VIEWERS_MAX} pages are already live", retry_after_s=10.0)
        stop = stopping(request)

        async def stream() -> AsyncIterator[bytes]:
            async with self.data.live.watch() as coming:
                while not stop.is_set():
                    sample = await _next(coming, stop)
                    if sample is not None:
                        yield event("sample", sample)

        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(stream(), headers=headers, media_type="text/event-stream")

    @own_keys
    @operation("Numbers of the lake and of this gateway over time; range is 15m, 1h, 6h or 24h.", right=RIGHT)
    async def _history(self, request: Request) -> Response:
        if request.state.principal == NOBODY:
            raise Unauthenticated("no key was sent", hint="sign in")
        request.state.principal.demand(RIGHT)
        chosen = request.query_params.get("range", "1h")
        if chosen not in RANGES:
            raise Invalid(f"range {chosen[:40]!r} does not exist", hint=f"one of {', '.join(RANGES)}")
        lake, gateway = self.data.sampler.series(chosen)
        return json_response({"lake": lake, "gateway": gateway}, headers={"cache-control": "no-store"})

    @own_keys
    async def _sign_in_page(self, request: Request) -> Response:
        return self._login(request, inside(request.query_params.get("next", "/")))

    @own_keys
    @body_limit(FORM_BYTES_MAX)
    async def _sign_in(self, request: Request) -> Response:
        """Exchanges a key for a session. The key is never stored, shown or logged."""
        demand_origin(request)
        form = await form_of(request)
        where = inside(form.get("next", "/"))
        state = state_of(request.app)
        try:
            session = state.keyring.sign_in(form.get("key", ""), self._context.ids.secret())
        except Unauthenticated as error:
            return self._login(request, where, error.message, 401)
        await state.key_watch.opened(session)
        response = RedirectResponse(where, 303, HEADERS)
        response.set_cookie(
            sessions.COOKIE,
            session,
            max_age=sessions.SESSION_S,
            httponly=True,
            samesite="strict",
            secure=is_secure(request),
        )
        return response

    @own_keys
    async def _sign_out(self, request: Request) -> Response:
        """Ends the session on every gateway, whoever still has its cookie."""
        demand_origin(request)
        await state_of(request.app).key_watch.ended(request.cookies.get(sessions.COOKIE, ""))
        response = RedirectResponse("/login", 303, HEADERS)
        response.delete_cookie(sessions.COOKIE)
        return response

    def _login(self, request: Request, where: str, problem: str = "", status: int = 200) -> Response:
        open_to_all = not state_of(request.app).keyring.required
        if open_to_all:
            return RedirectResponse(where, 303, HEADERS)
        return self._html(request, "login.html", status, next=where, problem=problem)

    # Operator actions.

    async def _confirm(self, request: Request) -> Response:
        """The dialog: what will happen, to what, and a field for the reason."""
        name, action = _action(request)
        fields = {field: request.query_params.get(field, "")[:FIELD_CHARS_MAX] for field in action.fields}
        return self._dialog(request, name, action, fields)

    @body_limit(FORM_BYTES_MAX)
    async def _do(self, request: Request) -> Response:
        """Checks the CSRF token, the right and the reason; records the action in the trail; runs it."""
        name, action = _action(request)
        self._demand_token(request)
        form = await form_of(request)
        fields, reason = dict.fromkeys(action.fields, ""), form.get("reason", "").strip()
        try:
            fields = action.checked(form)
            detail = await self._act(request.state.principal, name, action, fields, reason)
        except LakebedError as error:
            return self._dialog(request, name, action, fields, reason, error)
        self.data.samples.forget()
        response = self._html(request, "done.html", action=action, detail=detail)
        response.headers["hx-trigger"] = "lakebed-changed"
        return response

    async def _act(self, principal: Principal, name: str, action: Action, fields: Fields, reason: str) -> str:
        for right in action.rights(fields):
            principal.demand(right)
        if action.needs_reason and not reason:
            raise Invalid("a reason is required", hint="enter why; the audit trail keeps it")
        if len(reason) > REASON_CHARS_MAX:
            raise Invalid(f"a reason has at most {REASON_CHARS_MAX} characters")
        try:
            async with asyncio.timeout(ACT_S), self.data.trail.record(principal.name, name, fields, reason) as entry:
                entry.detail = await action.do(self.data.page_of(name), fields, principal.name, reason)
        except TimeoutError:
            raise OutcomeUnknown(
                f"no answer within {ACT_S:g} s", hint="check whether it took effect before you retry"
            ) from None
        log.info("operator action", who=principal.name, what=name, subject=fields, reason=reason, detail=entry.detail)
        return entry.detail

    def _dialog(
        self,
        request: Request,
        name: str,
        action: Action,
        fields: Fields,
        reason: str = "",
        error: LakebedError | None = None,
    ) -> Response:
        rights = action.rights(fields)
        missing = [right for right in rights if not request.state.principal.may(right)]
        allowed = not missing and not self._read_only
        status = 200 if error is None else status_of(type(error))
        values = {"right": (missing or rights)[0], "allowed": allowed, "reason": reason, "error": error}
        return self._html(request, "ask.html", status, name=name, action=action, fields=fields, **values)

    def _page_value(self, request: Request) -> tuple[str, bool]:
        """What this browser's CSRF token belongs to: its session, or a page cookie; True when that one is new."""
        kept = request.cookies.get(sessions.COOKIE) or request.cookies.get(PAGE_COOKIE)
        return (kept, False) if kept else (self._context.ids.secret(), True)

    def _demand_token(self, request: Request) -> None:
        """Raises Denied unless the request carries the CSRF token of its page and comes from our own origin."""
        demand_origin(request)
        value, fresh = self._page_value(request)
        given = request.headers.get(sessions.TOKEN_HEADER, "")
        if fresh or not sessions.is_token_of(value, given):
            raise Denied("the CSRF token of the page is missing or old", hint="reload the page, then retry")


def component(context: Context) -> Console:
    return Console(context)


def _action(request: Request) -> tuple[str, Action]:
    name = request.path_params["action"]
    if name not in ACTIONS:
        raise NotFound(f"action {name[:80]!r} does not exist")
    return name, ACTIONS[name]


def _twin_status(samples: PageSamples) -> int:
    """200 while anything can be shown; 403 when all of it was refused, which a retry does not change; else 503."""
    errors = [one.error for one in samples.values() if one.error is not None]
    if not errors or len(errors) < len(samples):
        return 200
    return 403 if all(error.code == Denied.code for error in errors) else 503


async def _next(coming: asyncio.Queue[LiveSample], stop: asyncio.Event) -> LiveSample | None:
    """The next sample; None when the gateway stops first."""
    getting, ending = asyncio.ensure_future(coming.get()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({getting, ending}, return_when=asyncio.FIRST_COMPLETED)
        return getting.result() if getting.done() else None
    finally:
        getting.cancel()
        ending.cancel()
