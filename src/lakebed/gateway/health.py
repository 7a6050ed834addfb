"""Health: every component is checked, each with a timeout, and the store with one cheap request.

Where there are keys, callers without one get the status of a check that runs on a timer: they cause none themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakebed import __version__
from lakebed.core.auth import NOBODY
from lakebed.core.clock import Clock, now_ms
from lakebed.core.context import Context, Health
from lakebed.core.errors import LakebedError, NotFound
from lakebed.core.http import json_response
from lakebed.store.authority import AUTHORITY_KEY
from lakebed.store.protocol import Store

CACHE_S = 1.0  # each report checks every component, most of them with a store request
EVERY_S = 5.0  # between the checks for callers without a key: as often as a load balancer asks
RANK = {"ok": 0, "degraded": 1, "down": 2}

HealthCheck = Callable[[], Awaitable[Health]]


class HealthReport(msgspec.Struct, frozen=True):
    """The response of `/healthz`. `status` is the worst of its components; the last three are for log clients."""

    status: str
    node: str
    version: str
    authority: str
    started_at_ms: int
    components: dict[str, Health]
    broker_id: str = ""
    host: str = ""
    port: int = 0


class HealthStatus(msgspec.Struct, frozen=True):
    """The response of `/healthz` to a caller without a key, where there are keys."""

    status: str


class HealthChecker:
    """Runs all health checks. One that fails or does not respond in time is down; the others still run."""

    def __init__(
        self, context: Context, checks: Mapping[str, HealthCheck], *, authority: str, timeout_s: float
    ) -> None:
        self._context = context
        self._checks: dict[str, HealthCheck] = {"store": StoreCheck(context.store, context.clock), **checks}
        self._authority = authority
        self._timeout_s = timeout_s
        self._started_at_ms = now_ms(context.clock)
        self._known: HealthReport | None = None
        self._known_at_s = 0.0
        self._running: asyncio.Task[HealthReport] | None = None
        self._watching: asyncio.Task[None] | None = None

    def start(self, wanted: Callable[[], bool]) -> None:
        """Checks every EVERY_S while `wanted`: while there are callers who may not cause a check."""
        self._watching = asyncio.create_task(self._watch(wanted), name="health")

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self, wanted: Callable[[], bool]) -> None:
        while True:
            if wanted():
                await self.report()
            await self._context.clock.sleep(EVERY_S)

    async def status(self) -> str:
        """For callers without a key: as of the last check. Before the first one they wait for it."""
        return (self._known or await self.report()).status

    async def report(self) -> HealthReport:
        """At most CACHE_S old; concurrent callers share one run."""
        if self._known is not None and self._context.clock.monotonic_s() - self._known_at_s < CACHE_S:
            return self._known
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._check_all())
        return await asyncio.shield(self._running)

    async def _check_all(self) -> HealthReport:
        found = await asyncio.gather(*(self._check(check) for check in self._checks.values()))
        components = dict(zip(self._checks, found, strict=True))
        self._known = HealthReport(
            status=max((health.status for health in found), key=RANK.__getitem__),
            node=self._context.node,
            version=__version__,
            authority=self._authority,
            started_at_ms=self._started_at_ms,
            components=components,
        )
        self._known_at_s = self._context.clock.monotonic_s()
        return self._known

    async def _check(self, check: HealthCheck) -> Health:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await check()
        except TimeoutError:
            return Health("down", f"no answer within {self._timeout_s:g} s")
        except LakebedError as error:
            return Health("down", error.message)
        except Exception as error:
            return Health("down", f"failed: {type(error).__name__}")


class StoreCheck:
    """At most one HEAD request per second; concurrent callers share it."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._known: Health | None = None
        self._known_at_s = 0.0
        self._running: asyncio.Task[Health] | None = None

    async def __call__(self) -> Health:
        if self._known is not None and self._clock.monotonic_s() - self._known_at_s < CACHE_S:
            return self._known
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._head())
        return await asyncio.shield(self._running)

    async def _head(self) -> Health:
        try:
            await self._store.head(AUTHORITY_KEY)
            health = Health("ok")
        except NotFound:
            health = Health("down", f"{AUTHORITY_KEY} is missing: this is not the bucket of the start")
        except LakebedError as error:
            health = Health("down", error.message)
        self._known, self._known_at_s = health, self._clock.monotonic_s()
        return health


def routes(health_checker: HealthChecker) -> list[BaseRoute]:
    async def health(request: Request) -> Response:
        """Checks every component: 200 when none is down, 503 when one is."""
        if request.state.principal == NOBODY:  # a load balancer, or a stranger: what runs here is not theirs to know
            status = await health_checker.status()
            return json_response(HealthStatus(status), 503 if status == "down" else 200, {"cache-control": "no-store"})
        report = await health_checker.report()
        host, port = request.scope.get("server") or ("", 0)
        report = msgspec.structs.replace(report, broker_id=report.node, host=host, port=port or 0)
        return json_response(report, 503 if report.status == "down" else 200, {"cache-control": "no-store"})

    return [Route("/healthz", health), Route("/health", health)]
