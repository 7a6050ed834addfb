"""One HTTP app on one socket until told to stop: uvicorn, with our signals, our logs and a limit on silent clients.

SIGTERM and SIGINT drain: the socket closes, what is under way is finished within `drain_s`, the app's lifespan ends,
and the call returns. A second signal cuts the drain short.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from lakebed.errors import Invalid, Unavailable
from lakebed.gateway.direct import DirectCycle, DirectRoutes
from lakebed.gateway.door import CLOSE, NO_SNIFF, POLICY
from lakebed.gateway.large_body import LargeBody, large_body
from lakebed.gateway.limits import HeadTooLarge
from lakebed.gateway.problems import problem
from lakebed.gateway.settings import GatewaySettings
from lakebed.logs import logger

BACKLOG = 2048
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that it is they who close
CORKED_BYTES_MAX = 64 * 1024  # a larger answer is sent as it is written, so that a slow reader holds it back
HEAD_BYTES_MAX = 64 * 1024  # request line and headers; nginx takes 32 KiB, and browsers send all cookies of a host
HEAD_LINES_MAX = 100  # headers; as Apache httpd
LINGER_S, LINGER_BYTES_MAX = 2.0, 2 * 1024 * 1024  # a connection closed with unread bytes is reset, and the answer lost
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

log = logger("gateway")


def bind(host: str, port: int) -> socket.socket:
    """A listening address; port 0 is chosen free. Raises Unavailable when it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise Unavailable(
            f"cannot listen on {host}:{port}: {error.strerror}", hint="choose another port, or 0 for a free one"
        ) from error
    made.set_inheritable(True)
    return made


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def listen(
    app: FastAPI, bound: socket.socket, settings: GatewaySettings, *, ready: Callable[[], None] = lambda: None
) -> None:
    """Serves until a stop signal, then drains. Calls `ready` once requests are answered.

    Raises what the app's lifespan raised at start.
    """
    _forward_logs(logging.CRITICAL)  # what fails at start is raised, so it need not be logged too
    server = _Server(_config(app, settings, app.state.direct), ready)
    with _stopped_by_signals(server, app, settings.drain_s):
        try:
            await server.serve(sockets=[bound])
        except SystemExit as end:  # how uvicorn says that the lifespan failed
            raise app.state.failure or end from None


def _config(app: FastAPI, settings: GatewaySettings, routes: DirectRoutes | None = None) -> uvicorn.Config:
    class Protocol(_ImpatientProtocol):
        head_timeout_s = settings.head_timeout_s
        direct = routes

    return uvicorn.Config(
        app,
        http=Protocol,
        loop="none",  # already running
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        limit_concurrency=settings.connections_max,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(settings.drain_s),
    )


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


class _Corked:
    """A transport that sends what is written in one turn of the loop together: an answer is one packet, not two."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held: list[bytes] = []
        self._held_bytes = 0

    def write_whole(self, data: bytes) -> None:
        """An answer in one piece: nothing is to follow that it could wait for."""
        self._send()
        self._transport.write(data)

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self._send)
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > CORKED_BYTES_MAX:
            self._send()

    def close(self) -> None:
        self._send()
        self._transport.close()

    def _send(self) -> None:
        if self._held:
            held, self._held, self._held_bytes = self._held, [], 0
            self._transport.write(held[0] if len(held) == 1 else b"".join(held))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _HeadRefused(Exception):
    """Stops the parser in the middle of what it was fed."""


class _ImpatientProtocol(HttpToolsProtocol):
    """Closes a connection that does not finish the head of its next request in time, or within its limits.

    The parser keeps what belongs to a head (and to the trailers of a chunked body) until it is whole, so bytes are
    counted as they are fed: at most HEAD_BYTES_MAX, and one read, without a head's end or bytes of a body.
    """

    head_timeout_s: float
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None
    direct: DirectRoutes | None = None
    _large: LargeBody | None = None
    _direct: DirectCycle | None = None
    _idle_timer: asyncio.TimerHandle | None = None
    _active_s = 0.0
    _fed = 0  # bytes since the last head was whole, or since the last bytes of a body
    _refusal: HeadTooLarge | None = None
    _refused = False  # the answer is sent: what still comes is dropped, for a moment

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = cast(asyncio.Transport, _Corked(transport, self.loop))
        self._head_timer = self.loop.call_later(self.head_timeout_s, transport.close)

    def data_received(self, data: bytes) -> None:
        self._active_s = self.loop.time()
        self._fed += len(data)
        if self._refused:
            if self._fed > LINGER_BYTES_MAX:
                self.transport.close()
            return
        super().data_received(data)
        if self._fed > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._refuse(_head_too_large(f"more than {HEAD_BYTES_MAX} bytes"))
        if self._large is not None and not self.transport.is_closing():
            self._large.take_over(self.transport)
            self._large = None
        if self._direct is not None:
            self._direct.expect_rest(self._go_the_usual_way)
        if not self._in_head:
            self._forget_head()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def on_message_begin(self) -> None:
        self._in_head = True
        self.url, self.headers, self.expect_100_continue = b"", [], False

    def on_headers_complete(self) -> None:
        if self._fed > HEAD_BYTES_MAX and _head_bytes(self) > HEAD_BYTES_MAX:
            self._refusal = _head_too_large(f"more than {HEAD_BYTES_MAX} bytes")
        elif len(self.headers) > HEAD_LINES_MAX:
            self._refusal = _head_too_large(f"{len(self.headers)} headers, the limit is {HEAD_LINES_MAX}")
        if self._refusal is not None:
            raise _HeadRefused
        self._fed = 0
        self._in_head = False
        self._direct = self.direct.cycle(self, self._rest) if self.direct is not None else None
        if self._direct is not None:
            self.cycle = cast(RequestResponseCycle, self._direct)
            return
        self._start_usual()
        self._large = large_body(self)

    def on_body(self, body: bytes) -> None:
        self._fed = 0
        if self._direct is not None:
            self._direct.parts.append(body)
        elif self._large is not None:
            self._large.take(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._fed = 0
        if self._direct is not None:
            self._start_direct(self._direct)
            self._direct = None
            return
        super().on_message_complete()
        self._large = None

    def send_400_response(self, msg: str) -> None:
        refusal, self._refusal = self._refusal, None
        self._refuse(refusal or Invalid("this is not HTTP/1.1", hint="send one request after the other, each whole"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        if self._direct is not None:  # its body never came
            self._direct.arrived()
            self._direct.share.give_back()
        waiting: Any
        for waiting, _ in self.pipeline:  # these are never started
            if isinstance(waiting, DirectCycle):
                waiting.share.give_back()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        super().shutdown()
        cycle: Any = self.cycle
        if isinstance(cycle, DirectCycle) and not cycle.response_complete:
            cycle.stop_within(self.config.timeout_graceful_shutdown or 0)

    def on_response_complete(self) -> None:
        self._active_s = self.loop.time()
        super().on_response_complete()

    def _rest(self) -> None:
        """After a direct answer. The timer of an idle connection is not wound up for each of them: when it rings, it
        looks how long nothing has happened."""
        if self.pipeline or self.flow.read_paused or self.transport.is_closing():
            self.on_response_complete()
            return
        self.server_state.total_requests += 1
        self._active_s = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._close_when_idle)

    def _close_when_idle(self) -> None:
        self._idle_timer = None
        left_s = self._active_s + self.timeout_keep_alive - self.loop.time()
        if self.cycle.response_complete and left_s <= 0:
            self.timeout_keep_alive_handler()
        else:
            self._idle_timer = self.loop.call_later(max(left_s, 1.0), self._close_when_idle)

    def _start_usual(self) -> None:
        """What the server makes of a head at its first line is made now, when it is known to be needed."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.headers += headers
        self.url, self.expect_100_continue = url, expects
        super().on_headers_complete()

    def _start_direct(self, cycle: DirectCycle) -> None:
        cycle.arrived()
        if cycle.before is None or cycle.before.response_complete:
            self._start_asgi_task(cast(RequestResponseCycle, cycle), self.app)
        else:  # a pipelined request waits for those before it
            self.flow.pause_reading()
            self.pipeline.appendleft((cast(RequestResponseCycle, cycle), self.app))

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if isinstance(cycle, DirectCycle) and not cycle.waits:
            self.loop.call_soon(cycle.run_promptly)  # not from inside the parser: it may be answered at once
        else:
            super()._start_asgi_task(cycle, app)

    def _go_the_usual_way(self) -> None:
        if self._direct is not None:
            direct, self._direct = self._direct, None
            direct.share.give_back()
            self.cycle = cast(RequestResponseCycle, direct.before)
            self._start_usual()
            for part in direct.parts:
                super().on_body(part)

    def _refuse(self, error: Invalid) -> None:
        """Answers what the parser could not, or may not, go on with, and closes."""
        cycle: Any = self.cycle
        under_way = cycle is not None and not cycle.response_complete
        if under_way and (self._in_head or getattr(cycle, "response_started", False)):
            self.transport.close()  # an answer now would be taken for that of an earlier request
            return
        if under_way:
            cycle.disconnected = True  # nobody hears what its handler still says
            cycle.message_event.set()
        told = self.direct.door.unread(error) if self.direct is not None else problem(error, "")
        packet = [STATUS_LINE[told.status]]
        for name, value in (*self.server_state.default_headers, *told.headers, NO_SNIFF, POLICY, CLOSE):
            packet += (name, b": ", value, b"\r\n")
        self.transport.write_whole(b"".join([*packet, b"\r\n", told.body]))  # type: ignore[attr-defined]
        self._refused, self._fed = True, 0
        self._forget_head()
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _head_bytes(http: HttpToolsProtocol) -> int:
    return len(http.url) + sum(len(name) + len(value) + 4 for name, value in http.headers)


def _head_too_large(how: str) -> HeadTooLarge:
    return HeadTooLarge(f"the head of the request has {how}", hint="send fewer and shorter headers")


@contextmanager
def _stopped_by_signals(server: uvicorn.Server, app: FastAPI, drain_s: float) -> Iterator[None]:
    def stop(number: signal.Signals) -> None:
        log.info("stopping", signal=number.name, at_once=server.should_exit)
        app.state.stopping.set()
        app.state.drain_until_s = app.state.context.clock.monotonic_s() + drain_s
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


class _Forwarded(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        known: dict[str, Any] = {"exc_info": record.exc_info} if record.exc_info else {}
        log.log(record.levelno, record.getMessage(), **known)


def _forward_logs(level: int) -> None:
    """What uvicorn has to say goes where everything goes."""
    theirs = logging.getLogger("uvicorn")
    theirs.handlers = [_Forwarded()]
    theirs.setLevel(level)
    theirs.propagate = False
