"""A process that was started while its store is away: it waits, says so, and goes on by itself once the store answers.

Meanwhile its address answers every request with 503 and Retry-After, and `/healthz` says what it waits for, so a load
balancer sends requests elsewhere and nobody restarts the process for nothing. A stop signal ends the wait at once.
What waiting cannot change (wrong credentials, no such bucket, a store that ignores conditions) is raised at once.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import msgspec
import uvicorn
from starlette.types import Receive, Scope, Send

from lakebed import __version__
from lakebed.clock import now_ms
from lakebed.context import Context, Health
from lakebed.errors import Unavailable
from lakebed.gateway.boot import boot
from lakebed.gateway.health import Report
from lakebed.gateway.listen import BACKLOG, STOP_SIGNALS
from lakebed.gateway.problems import problem
from lakebed.logs import logger
from lakebed.store.authority import Authority

QUIET_S = 1.0  # a start that takes longer is answered for meanwhile
RETRY_BASE_S = 0.5
RETRY_CAP_S = 5.0  # a store that is back is found within this
TOLD_EVERY_S = 10.0
HEALTH_PATHS = ("/healthz", "/health")
CONNECTIONS_MAX = 1024
STOP_S = 1  # for answers under way when the wait ends

log = logger("gateway")


async def boot_when_ready(context: Context, parts: Sequence[str], bound: socket.socket) -> Authority | None:
    """What `boot` gives, once the store answers; None when a stop signal came first.

    Raises what `boot` raises, except Unavailable: that is waited out.
    """
    waiting = Waiting(context)
    booting = asyncio.create_task(_boot(context, parts, waiting))
    with _cancelled_by_signals(booting):
        await asyncio.wait([booting], timeout=QUIET_S)
        if not booting.done():
            async with _answering(waiting, bound):
                await asyncio.wait([booting])
    if booting.cancelled():
        log.info("stopped before the store answered")
        return None
    return booting.result()


async def _boot(context: Context, parts: Sequence[str], waiting: Waiting) -> Authority:
    attempt, told_s, since_s = 0, 0.0, context.clock.monotonic_s()
    while True:
        try:
            return await boot(context, parts)
        except Unavailable as error:
            now_s = context.clock.monotonic_s()
            if not attempt or now_s - told_s >= TOLD_EVERY_S:
                log.warning("waiting for the store", waited_s=round(now_s - since_s, 1), error=error.message)
                told_s = now_s
            waiting.reason, attempt = error.message, attempt + 1
        await context.clock.sleep(context.ids.jitter_s(attempt, base_s=RETRY_BASE_S, cap_s=RETRY_CAP_S) + RETRY_BASE_S)


class Waiting:
    """The app of a process that waits: 503 to everybody."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._started_at_ms = now_ms(context.clock)
        self.reason = "it has not answered yet"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = f"waiting for the store: {self.reason}"
        answer = problem(Unavailable(told, retry_after_s=RETRY_CAP_S), self._context.ids.token(), scope)
        headers, body = answer.headers, answer.body
        if scope["path"] in HEALTH_PATHS:
            body = msgspec.json.encode(self._report(told))
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"cache-control", b"no-store"),
            ]
        headers = [*headers, (b"connection", b"close")]  # the next request finds the process as it is then
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _report(self, told: str) -> Report:
        return Report(
            status="down",
            node=self._context.node,
            version=__version__,
            authority="",
            started_at_ms=self._started_at_ms,
            components={"store": Health("down", told)},
        )


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # whoever waits handles them


@asynccontextmanager
async def _answering(app: Waiting, bound: socket.socket) -> AsyncIterator[None]:
    """Serves the app while the block runs, on a copy of the socket: the one given stays open and keeps its backlog."""
    config = uvicorn.Config(
        app,
        http="httptools",
        loop="none",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        limit_concurrency=CONNECTIONS_MAX,
        timeout_graceful_shutdown=STOP_S,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[bound.dup()]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving


@contextmanager
def _cancelled_by_signals(task: asyncio.Task[Authority]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
