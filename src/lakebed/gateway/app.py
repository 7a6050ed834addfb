"""The gateway's HTTP app: the components' routes behind the middleware.

All routes are plain Starlette routes, and `Middleware` is the only layer in front of them: Starlette's own middleware
stack is left out, because its error handling would only repeat ours.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import structlog
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from lakebed import __version__
from lakebed.core.clock import Clock
from lakebed.core.context import Component, Context
from lakebed.core.errors import Invalid
from lakebed.core.logs import logger
from lakebed.gateway import health, metrics, openapi
from lakebed.gateway.auth import Keyring
from lakebed.gateway.body_limits import BodyLimits
from lakebed.gateway.health import HealthCheck, HealthChecker
from lakebed.gateway.key_watch import KeyWatch
from lakebed.gateway.middleware import Middleware
from lakebed.gateway.router import Router
from lakebed.gateway.settings import GatewaySettings
from lakebed.gateway.state import GatewayState, PortOwner, Shutdown, state_of, store_state

DRAIN_LEAST_S = 3.0  # for the components, when requests have used up the drain's time
DRAIN_EACH_S = 0.5  # for a component, when another has used up the components' time

log = logger("gateway")


class Gateway(Starlette):
    """A Starlette app that calls its middleware without the checks that Starlette repeats for every request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        assert self.middleware_stack is not None
        await self.middleware_stack(scope, receive, send)


def build(
    context: Context,
    components: Sequence[Component],
    *,
    authority: str = "",
    checks: Mapping[str, HealthCheck] | None = None,
    watch_keys: bool = True,
) -> Gateway:
    """The app of these components. Its lifespan starts them in order and drains them in reverse.

    `checks` are further health checks. Without `watch_keys` the keys of the bucket are not read. Raises Invalid for
    keys that cannot be used and for two components that serve the same method and path.
    """
    settings = context.settings.of(GatewaySettings)
    context.metrics.gauge("lakebed_build_info").labels(version=__version__).set(1)
    keyring = Keyring.of(settings, context.clock)
    watch = KeyWatch(context, keyring, settings)
    checked: dict[str, HealthCheck] = {"gateway": watch.health}
    checked |= {component.name: component.health for component in components}
    checked |= dict(checks or {})
    health_checker = HealthChecker(context, checked, authority=authority, timeout_s=settings.health_timeout_s)
    app = Gateway(lifespan=lambda app: _run(app, components))
    app.router.redirect_slashes = False  # a redirected write would be sent twice, or lost
    limits = BodyLimits(settings, context)
    _register(app, _served(components, settings), limits)
    _register(app, [*health.routes(health_checker), *metrics.routes(context.metrics), *openapi.routes()], limits)
    keyring.register(app.routes)
    middleware = app.middleware_stack = Middleware(
        Router(app.routes, app.router),
        keyring=keyring,
        find_session=watch.find_session,
        limits=limits,
        runtime=context,
        verbose=structlog.is_configured() and structlog.get_logger().is_enabled_for(logging.DEBUG),
    )
    state = GatewayState(
        stopping=asyncio.Event(),
        context=context,
        health_checker=health_checker,
        keyring=keyring,
        key_watch=watch,
        watch_keys=watch_keys,
        middleware=middleware,
        limits=limits,
        shutdown=Shutdown(),
    )
    store_state(app, state)
    for component in components:
        if isinstance(component, PortOwner):
            component.admit_with(state.access)
    return app


def _served(components: Sequence[Component], settings: GatewaySettings) -> list[BaseRoute]:
    served: list[BaseRoute] = []
    for component in components:
        served += component.reads
        if not settings.read_only:
            served += component.writes
    return served


def _register(app: Starlette, routes: Sequence[BaseRoute], limits: BodyLimits) -> None:
    taken = {pair for route in app.routes for pair in _served_by(route)}
    for route in routes:
        for path, method in _served_by(route):
            if (path, method) in taken:
                raise Invalid(f"two components serve {method} {path}", hint="choose one of them with --parts")
            taken.add((path, method))
    app.router.routes.extend(routes)
    limits.register(routes)


def _served_by(route: BaseRoute) -> list[tuple[str, str]]:
    return [(route.path, method) for method in sorted(route.methods or ())] if isinstance(route, Route) else []


@asynccontextmanager
async def _run(app: Starlette, components: Sequence[Component]) -> AsyncIterator[None]:
    state, started = state_of(app), list[Component]()
    try:
        if state.watch_keys:
            await state.key_watch.start()
        for component in components:
            await component.start()
            started.append(component)
        state.health_checker.start(lambda: state.keyring.required)
        yield
    except BaseException as error:
        state.shutdown.failure = error  # the server only logs it; `listen` raises it
        raise
    finally:
        await state.health_checker.stop()
        clock, settings = state.context.clock, state.context.settings.of(GatewaySettings)
        until_s = state.shutdown.drain_until_s or clock.monotonic_s() + settings.drain_s
        await _drain(started, clock, max(until_s, clock.monotonic_s() + DRAIN_LEAST_S))
        await state.key_watch.stop()


async def _drain(components: Sequence[Component], clock: Clock, until_s: float) -> None:
    """Stops all of them in reverse order, within one deadline; one that fails does not stop the others."""
    for component in reversed(components):
        try:
            async with asyncio.timeout(max(DRAIN_EACH_S, until_s - clock.monotonic_s())):
                await component.stop()
        except Exception as error:
            log.error("component did not drain", component=component.name, error=type(error).__name__, exc_info=error)
