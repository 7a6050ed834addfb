"""Is this process well: every component asked, each with a timeout, and the store with one cheap request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakebed import __version__
from lakebed.clock import Clock, now_ms
from lakebed.context import Context, Health
from lakebed.errors import LakebedError, NotFound
from lakebed.store.authority import AUTHORITY_KEY
from lakebed.store.protocol import Store
from lakebed.wire import json_answer

CACHE_S = 1.0  # anybody may ask, and each report asks every component, most of them the store
RANK = {"ok": 0, "degraded": 1, "down": 2}

Check = Callable[[], Awaitable[Health]]


class Report(msgspec.Struct, frozen=True):
    """What `/healthz` answers. `status` is the worst of its components; the last three are what a log's broker says."""

    status: str
    node: str
    version: str
    authority: str
    started_at_ms: int
    components: dict[str, Health]
    broker_id: str = ""
    host: str = ""
    port: int = 0


class Examiner:
    """Asks everything that has a health. One that fails or does not answer is down, and the others are still asked."""

    def __init__(self, context: Context, checks: Mapping[str, Check], *, authority: str, timeout_s: float) -> None:
        self._context = context
        self._checks: dict[str, Check] = {"store": StoreCheck(context.store, context.clock), **checks}
        self._authority = authority
        self._timeout_s = timeout_s
        self._started_at_ms = now_ms(context.clock)
        self._known: Report | None = None
        self._known_at_s = 0.0
        self._asking: asyncio.Task[Report] | None = None

    async def report(self) -> Report:
        """At most CACHE_S old; those who come while it is made share it."""
        if self._known is not None and self._context.clock.monotonic_s() - self._known_at_s < CACHE_S:
            return self._known
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._examine())
        return await asyncio.shield(self._asking)

    async def _examine(self) -> Report:
        found = await asyncio.gather(*(self._ask(check) for check in self._checks.values()))
        components = dict(zip(self._checks, found, strict=True))
        self._known = Report(
            status=max((health.status for health in found), key=RANK.__getitem__),
            node=self._context.node,
            version=__version__,
            authority=self._authority,
            started_at_ms=self._started_at_ms,
            components=components,
        )
        self._known_at_s = self._context.clock.monotonic_s()
        return self._known

    async def _ask(self, check: Check) -> Health:
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
    """One HEAD a second at most, however many ask: those who come while it is under way share its answer."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._known: Health | None = None
        self._known_at_s = 0.0
        self._asking: asyncio.Task[Health] | None = None

    async def __call__(self) -> Health:
        if self._known is not None and self._clock.monotonic_s() - self._known_at_s < CACHE_S:
            return self._known
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> Health:
        try:
            await self._store.head(AUTHORITY_KEY)
            health = Health("ok")
        except NotFound:
            health = Health("down", f"{AUTHORITY_KEY} is gone: this is not the bucket that was claimed at start")
        except LakebedError as error:
            health = Health("down", error.message)
        self._known, self._known_at_s = health, self._clock.monotonic_s()
        return health


def routes(examiner: Examiner) -> list[BaseRoute]:
    async def health(request: Request) -> Response:
        """Asks every component: 200 when all can work, 503 when one is down."""
        report = await examiner.report()
        host, port = request.scope.get("server") or ("", 0)
        report = msgspec.structs.replace(report, broker_id=report.node, host=host, port=port or 0)
        return json_answer(report, 503 if report.status == "down" else 200, {"cache-control": "no-store"})

    return [Route("/healthz", health), Route("/health", health)]
