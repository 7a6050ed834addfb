"""The gateway's HTTP app: components' routes behind one door.

Hot routes are plain Starlette routes beside FastAPI's, and the door is the only layer in front of them: FastAPI's own
middleware stack is left out, because its error handling would only repeat the door's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import structlog
from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from lakebed import __version__
from lakebed.clock import Clock
from lakebed.context import Component, Context
from lakebed.errors import Invalid
from lakebed.gateway import docs, health, numbers, openapi
from lakebed.gateway.auth import Keyring
from lakebed.gateway.direct import DirectRoutes
from lakebed.gateway.door import Door
from lakebed.gateway.health import Check, Examiner
from lakebed.gateway.limits import Limits
from lakebed.gateway.settings import GatewaySettings
from lakebed.gateway.switchboard import Switchboard
from lakebed.logs import logger
from lakebed.wire import json_answer

DRAIN_LEAST_S = 3.0  # for the components, when requests have used up the drain's time
DRAIN_EACH_S = 0.5  # for a component, when another has used up the components' time

log = logger("gateway")


class Gateway(FastAPI):
    """FastAPI's routes and description, without what its own entry looks up again for every request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        assert self.middleware_stack is not None
        await self.middleware_stack(scope, receive, send)


def build(
    context: Context,
    components: Sequence[Component],
    *,
    authority: str = "",
    checks: Mapping[str, Check] | None = None,
) -> Gateway:
    """The app of these components. Its lifespan starts them in order and drains them in reverse.

    `checks` are further things to ask for their health. Raises Invalid for keys that cannot be used and for two
    components that answer the same method and path.
    """
    settings = context.settings.of(GatewaySettings)
    context.metrics.gauge("lakebed_build_info").labels(version=__version__).set(1)
    asked = {component.name: component.health for component in components} | dict(checks or {})
    examiner = Examiner(context, asked, authority=authority, timeout_s=settings.health_timeout_s)
    app = Gateway(
        title="Lakebed",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=lambda app: _run(app, components),
    )
    app.router.redirect_slashes = False  # a redirected write would be sent twice, or lost
    app.state.examiner, app.state.context, app.state.failure = examiner, context, None
    app.state.stopping, app.state.drain_until_s = asyncio.Event(), None  # set by whoever stops the server
    limits = Limits(settings, context.clock, context.metrics)
    _register(app, _served(components, settings), limits)
    _register(app, [*health.routes(examiner), *numbers.routes(context.metrics), *docs.routes(), _description()], limits)
    keyring = app.state.keyring = Keyring.of(settings, context.clock)
    keyring.register(app.routes)
    door = app.middleware_stack = Door(
        Switchboard(app.routes, AsyncExitStackMiddleware(app.router)),
        keyring=keyring,
        limits=limits,
        metrics=context.metrics,
        clock=context.clock,
        ids=context.ids,
        verbose=structlog.is_configured() and structlog.get_logger().is_enabled_for(logging.DEBUG),
    )
    app.state.direct = DirectRoutes(app.routes, door, limits)
    return app


def _served(components: Sequence[Component], settings: GatewaySettings) -> list[BaseRoute]:
    served: list[BaseRoute] = []
    for component in components:
        served += component.reads
        if not settings.read_only:
            served += component.writes
    return served


def _register(app: FastAPI, routes: Sequence[BaseRoute], limits: Limits) -> None:
    taken = {pair for route in app.routes for pair in _answered(route)}
    for route in routes:
        for path, method in _answered(route):
            if (path, method) in taken:
                raise Invalid(f"two components answer {method} {path}", hint="serve one of them: --parts")
            taken.add((path, method))
    app.router.routes.extend(routes)
    limits.register(routes)


def _answered(route: BaseRoute) -> list[tuple[str, str]]:
    return [(route.path, method) for method in sorted(route.methods or ())] if isinstance(route, Route) else []


def _description() -> Route:
    async def description(request: Request) -> Response:
        return json_answer(openapi.describe(request.app))

    return Route("/openapi.json", description, include_in_schema=False)


@asynccontextmanager
async def _run(app: FastAPI, components: Sequence[Component]) -> AsyncIterator[None]:
    started: list[Component] = []
    try:
        for component in components:
            await component.start()
            started.append(component)
        yield
    except BaseException as error:
        app.state.failure = error  # the server only logs it; whoever runs the server raises it
        raise
    finally:
        clock: Clock = app.state.context.clock
        settings = app.state.context.settings.of(GatewaySettings)
        until_s = app.state.drain_until_s or clock.monotonic_s() + settings.drain_s
        await _drain(started, clock, max(until_s, clock.monotonic_s() + DRAIN_LEAST_S))


async def _drain(components: Sequence[Component], clock: Clock, until_s: float) -> None:
    """Stops all of them, in reverse, whatever the others do, within one deadline."""
    for component in reversed(components):
        try:
            async with asyncio.timeout(max(DRAIN_EACH_S, until_s - clock.monotonic_s())):
                await component.stop()
        except Exception as error:
            log.error("component did not drain", component=component.name, exc_info=error)
