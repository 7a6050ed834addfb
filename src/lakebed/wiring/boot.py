"""Starting a process: the checks before it serves, the wait for a store that is down, and the hourly path check.

Before a part is built: its name is known, conditional writes work on the path to the store, the bucket's authority is
the expected one and its store is verified. While the store is unreachable, the process answers every request with 503
and Retry-After, and `/healthz` gives the reason, so a load balancer sends requests elsewhere and no supervisor restarts
the process for nothing. What waiting cannot change (wrong credentials, no such bucket, a store that ignores conditions)
is raised at once.

A proxy or a load balancer may be put between at any time, so the path is checked again every hour. When a check fails,
the guard around the store refuses every write and health is down; checks then repeat more often until one passes. A
check that the store does not answer changes nothing.
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
from lakebed.core.clock import Clock, now_ms
from lakebed.core.context import Component, Context, Health
from lakebed.core.errors import Invalid, LakebedError, Unavailable
from lakebed.core.logs import logger
from lakebed.core.retry import RETRY_CAP_S, until_available
from lakebed.gateway.auth import configured_keys
from lakebed.gateway.health import HealthReport
from lakebed.gateway.listen import STOP_SIGNALS, plain_config, with_tls
from lakebed.gateway.middleware import CLOSE, NO_SNIFF, POLICY
from lakebed.gateway.problems import problem
from lakebed.gateway.settings import GatewaySettings
from lakebed.gateway.tls import ServerTls
from lakebed.store.authority import Authority, claim
from lakebed.store.connect import connect
from lakebed.store.guarded import GuardedStore
from lakebed.store.model import read_record
from lakebed.store.path_check import check_path
from lakebed.store.protocol import Store
from lakebed.store.prover import REPORTS, StoreProof, demand, prove
from lakebed.store.settings import StoreSettings
from lakebed.wiring.parts import PARTS, resolve

PROOF_CLIENTS = 4
PROOF_ROUNDS = 2
QUIET_S = 1.0  # a start that takes longer answers requests with 503 meanwhile
HEALTH_PATHS = ("/healthz", "/health")
CONNECTIONS_MAX = 1024
KEYS_AWAY = "the keys are in the store; set gateway.keys or gateway.keys_file to start without it"
STOP_S = 1  # for responses in progress when the wait ends
CHECK_EVERY_S = 3600.0  # some 20 requests and 1 MiB each time
AGAIN_S = 30.0  # after a check that failed or was not answered

log = logger("gateway")


async def boot(context: Context, parts: Sequence[str] = ()) -> Authority:
    """Runs every check that must pass before a part is built; returns the bucket's authority.

    Raises Invalid for an unknown part or a store without conditional writes, Conflict when the bucket carries another
    authority than `store.authority`, Unavailable when the store does not answer.
    """
    check_parts(parts)
    if writes(context, parts):
        await path_holds(context)
    store = context.settings.of(StoreSettings)
    authority = await claim(context, expected=store.authority, location=store.location, moved_from=store.moved_from)
    if context.settings.of(GatewaySettings).prove == "auto" and writes(context, parts):
        await proven(context)
    return authority


def writes(context: Context, parts: Sequence[str]) -> bool:
    """Whether this process makes conditional writes."""
    return needs_proof(parts) and not context.settings.of(GatewaySettings).read_only


async def path_holds(context: Context) -> None:
    """Checks conditional writes on this process's own path to the store; another process may use another path.

    Raises Invalid with what failed and what to do.
    """
    if isinstance(context.store, GuardedStore):
        demand(await context.store.check())
    else:
        demand(await check_path(context.store, context))


def check_parts(parts: Sequence[str]) -> None:
    known = [part.name for part in PARTS if part.component or part.workers]
    unknown = sorted(set(parts) - set(known))
    if unknown:
        raise Invalid(f"no part is named {', '.join(unknown)}", hint=f"parts: {', '.join(known) or 'none'}")


def needs_proof(parts: Sequence[str]) -> bool:
    return any(
        part.active_active and (part.component or part.workers) for part in PARTS if not parts or part.name in parts
    )


async def proven(context: Context) -> None:
    """Uses the stored verification of the store, or runs a new one. Raises Invalid with what failed and what to do."""
    proof = await _stored(context.store)
    if proof is None:
        proof = await prove(_rivals(context), context, rounds=PROOF_ROUNDS, keep_report=True)
        log.info("store verified" if proof.held else "store refused", clients=proof.clients, rounds=proof.rounds)
    demand(proof)


async def _stored(store: Store) -> StoreProof | None:
    """The newest report in the bucket, if it passed. A failed one is not reused: the store may be repaired by now."""
    newest = ""
    async for info in store.list(REPORTS):
        newest = max(newest, info.key)
    if not newest:
        return None
    proof = read_record(await store.get(newest), StoreProof)
    return proof if proof.held else None


def _rivals(context: Context) -> list[Store]:
    settings = context.settings.of(StoreSettings)
    if settings.url.startswith("memory:"):
        return [context.store] * PROOF_CLIENTS
    return [context.store, *(connect(settings, context) for _ in range(PROOF_CLIENTS - 1))]


def path_watch(context: Context, parts: Sequence[str]) -> list[Component]:
    """The hourly check of a process that writes; none for one that does not, or whose store has no guard."""
    if not isinstance(context.store, GuardedStore) or not writes(context, parts):
        return []
    return [PathWatch(context.store, context.clock)]


class PathWatch:
    """A component that checks every hour that the path to the store still honours conditions."""

    name = "store_path"
    reads = ()
    writes = ()

    def __init__(self, store: GuardedStore, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=self.name)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def health(self) -> Health:
        if self._store.refusal:
            return Health("down", f"writes are refused: {self._store.refusal}")
        if self._task is not None and self._task.done():
            return Health("down", "the path to the store is no longer checked")
        return Health("ok")

    async def _run(self) -> None:
        pause_s = CHECK_EVERY_S
        while True:
            await self._clock.sleep(pause_s)
            held = await self._once()
            pause_s = CHECK_EVERY_S if held else min(AGAIN_S, CHECK_EVERY_S)

    async def _once(self) -> bool:
        try:
            return (await self._store.check()).held
        except LakebedError as error:
            log.warning("store path check failed", code=error.code, error=error.message)
        except Exception as error:
            log.error("store path check failed", error=type(error).__name__, exc_info=error)
        return False


async def boot_when_ready(context: Context, parts: Sequence[str], bound: socket.socket) -> Authority | None:
    """The result of `boot`, once the store answers; None when a stop signal came first.

    Raises what `boot` raises, except Unavailable, which is retried.
    """
    waiting = WaitingApp(context)
    booting = asyncio.create_task(until_available(context, lambda: _booted(context, parts), waiting.waits))
    with _cancelled_by_signals(booting):
        await asyncio.wait([booting], timeout=QUIET_S)
        if not booting.done():
            tls = ServerTls.of(context.settings.of(GatewaySettings))
            async with _answering(waiting, bound, tls):
                await asyncio.wait([booting])
    if booting.cancelled():
        log.info("stopped before the store answered")
        return None
    return booting.result()


async def _booted(context: Context, parts: Sequence[str]) -> Authority:
    """The result of `boot`, or what a part knows that can start while the bucket is away.

    Not without keys in its configuration: those in the bucket cannot be read, and nobody else may be let in.
    """
    try:
        return await boot(context, parts)
    except Unavailable as error:
        if (known := offline_authority(context, parts)) is None:
            raise
        if not configured_keys(context.settings.of(GatewaySettings)):
            raise Unavailable(f"{KEYS_AWAY}: {error.message}") from error
        log.warning("started without the store", parts=parts, error=error.message)
        return known


def offline_authority(context: Context, parts: Sequence[str]) -> Authority | None:
    """The bucket that a part of this process knows from an earlier run; None when the process must wait for it.

    Only a part that is served alone starts without its bucket: other parts have nothing on this disk.
    """
    found = [part.offline for part in PARTS if part.name in parts]
    if len(found) != 1 or not found[0]:
        return None
    known: Authority | None = resolve(found[0])(context)
    return known


class WaitingApp:
    """The ASGI app of a process that waits for its store: 503 to every request."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._started_at_ms = now_ms(context.clock)
        self.reason = "no response yet"

    def waits(self, reason: str) -> None:
        self.reason = reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        detail = f"waiting for the store: {self.reason}"
        answer = problem(Unavailable(detail, retry_after_s=RETRY_CAP_S), self._context.ids.token(), scope)
        headers, body = answer.headers, answer.body
        if scope["path"] in HEALTH_PATHS:
            body = msgspec.json.encode(self._report(detail))
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"cache-control", b"no-store"),
            ]
        # The next request opens a new connection, perhaps to the started process.
        headers = [*headers, NO_SNIFF, POLICY, CLOSE]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _report(self, detail: str) -> HealthReport:
        return HealthReport(
            status="down",
            node=self._context.node,
            version=__version__,
            authority="",
            started_at_ms=self._started_at_ms,
            components={"store": Health("down", detail)},
        )


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # `boot_when_ready` handles the signals


@asynccontextmanager
async def _answering(app: WaitingApp, bound: socket.socket, tls: ServerTls | None) -> AsyncIterator[None]:
    """Serves the app while the block runs, on a copy of the socket: the original stays open and keeps its backlog."""
    config = plain_config(
        app, http="httptools", lifespan="off", limit_concurrency=CONNECTIONS_MAX, timeout_graceful_shutdown=STOP_S
    )
    server = _Server(with_tls(config, tls))
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
