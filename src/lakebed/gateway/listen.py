"""Serves one HTTP app on one socket until it is stopped: uvicorn, with our signals, our logs and head timeouts.

SIGTERM and SIGINT drain: the socket closes, running requests finish within `drain_s`, the app's lifespan ends, and the
call returns. A second signal ends the drain at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from lakebed.core.errors import Invalid, Unavailable
from lakebed.core.logs import logger
from lakebed.gateway.protocol import GatewayProtocol
from lakebed.gateway.settings import GatewaySettings
from lakebed.gateway.state import GatewayState, state_of
from lakebed.gateway.tls import ServerTls

BACKLOG = 2048
PORT_MAX = 65_535
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that clients close them
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = logger("gateway")


def bind(host: str, port: int) -> socket.socket:
    """A listening address; port 0 is chosen free. Raises Unavailable when it is taken, Invalid when the host is no
    address of this machine."""
    check_port(port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except OSError as error:
        made.close()
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise Invalid(
                f"cannot listen on host {host!r}: {error.strerror}",
                hint="--host must be an address of this machine, as 127.0.0.1, or 0.0.0.0 for all of them",
            ) from error
        raise Unavailable(
            f"cannot listen on {host}:{port}: {error.strerror}", hint="choose another port, or 0 for a free one"
        ) from error
    made.set_inheritable(True)
    return made


def check_port(port: int) -> None:
    """Raises Invalid for what is no port: some servers take its last 16 bits and listen elsewhere."""
    if not 0 <= port <= PORT_MAX:
        raise Invalid(f"{port} is not a port", hint=f"from 1 to {PORT_MAX}, or 0 for a free one")


def url_of(bound: socket.socket, settings: GatewaySettings) -> str:
    host, port = bound.getsockname()[:2]
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def listen(
    app: Starlette, bound: socket.socket, settings: GatewaySettings, *, ready: Callable[[], None] = lambda: None
) -> None:
    """Serves until a stop signal, then drains. Calls `ready` once it accepts requests.

    Raises what the app's lifespan raised at start.
    """
    _forward_logs(logging.CRITICAL)  # what fails at start is raised, so it need not be logged too
    state = state_of(app)
    server = _Server(with_tls(server_config(app, settings), state.key_watch.tls), ready)
    with _stopped_by_signals(server, state, settings.drain_s):
        try:
            await server.serve(sockets=[bound])
        except SystemExit as end:  # uvicorn raises it when the lifespan failed
            raise state.shutdown.failure or end from None


def server_config(app: ASGIApp, settings: GatewaySettings) -> uvicorn.Config:
    """uvicorn's configuration, with the protocol that `gateway.fast_path` chooses."""
    return plain_config(
        app,
        http=_protocol(app, settings),
        lifespan="on",
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(settings.drain_s),
    )


def plain_config(app: ASGIApp, **more: Any) -> uvicorn.Config:
    """What every server of ours has in common: no logs, no websockets and no loop of uvicorn's own."""
    plain: dict[str, Any] = {"loop": "none", "ws": "none", "log_config": None}  # the loop is already running
    plain |= {"access_log": False, "server_header": False, "backlog": BACKLOG}
    return uvicorn.Config(cast(Any, app), **plain, **more)


def with_tls(config: uvicorn.Config, tls: ServerTls | None) -> uvicorn.Config:
    """The configuration with our own context, whose certificate can be replaced while the server runs."""
    if tls is not None:
        config.load()
        config.ssl = tls.context
    return config


def _protocol(app: ASGIApp, settings: GatewaySettings) -> type[GatewayProtocol]:
    fields: dict[str, Any] = {"head_timeout_s": settings.head_timeout_s, "connections_max": settings.connections_max}
    if isinstance(app, Starlette):
        fields["unread"] = staticmethod(state_of(app).middleware.unread)
    if not settings.fast_path:
        return type("Protocol", (GatewayProtocol,), fields)
    # Loaded only here: without the fast path, nothing depends on private methods of uvicorn.
    from lakebed.gateway.fast.direct import DirectRoutes
    from lakebed.gateway.fast.protocol import FastProtocol

    if isinstance(app, Starlette):
        state = state_of(app)
        fields["direct"] = DirectRoutes(app.routes, state.middleware, state.limits)
    return type("Protocol", (FastProtocol,), fields)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        _forward_logs(logging.WARNING)
        self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # ours are set by `listen`; uvicorn's would raise the signal again after the drain


@contextmanager
def _stopped_by_signals(server: uvicorn.Server, state: GatewayState, drain_s: float) -> Iterator[None]:
    def stop(number: signal.Signals) -> None:
        log.info("stopping", signal=number.name, at_once=server.should_exit)
        state.stopping.set()
        state.shutdown.drain_until_s = state.context.clock.monotonic_s() + drain_s
        server.force_exit = server.should_exit
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


class _ForwardingHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        known: dict[str, Any] = {"exc_info": record.exc_info} if record.exc_info else {}
        log.log(record.levelno, record.getMessage(), **known)


def _forward_logs(level: int) -> None:
    """Sends uvicorn's log lines to our log."""
    theirs = logging.getLogger("uvicorn")
    theirs.handlers = [_ForwardingHandler()]
    theirs.setLevel(level)
    theirs.propagate = False
