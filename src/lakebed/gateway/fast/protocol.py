"""The protocol of a gateway with its fast path: small requests without ASGI, large bodies without copies.

It replaces uvicorn's `_start_asgi_task`, which is not public, and puts cycles of its own in the place of uvicorn's.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lakebed.gateway.fast.direct import DirectCycle, DirectRoutes
from lakebed.gateway.fast.large_body import LargeBody, large_body
from lakebed.gateway.protocol import GatewayProtocol

CORKED_BYTES_MAX = 64 * 1024  # a larger answer is sent as it is written, so that a slow reader holds it back


class CorkedTransport:
    """uvicorn writes the head and the body of an answer separately; here they leave together."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held: list[bytes] = []
        self._held_bytes = 0

    def write_whole(self, data: bytes) -> None:
        """A complete answer: it is sent at once, because nothing follows that it could wait for."""
        self._send()
        self._transport.write(data)

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self._send)
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > CORKED_BYTES_MAX:
            self._send()

    def write_eof(self) -> None:
        self._send()
        self._transport.write_eof()

    def close(self) -> None:
        self._send()
        self._transport.close()

    def _send(self) -> None:
        if self._held:
            held, self._held, self._held_bytes = self._held, [], 0
            self._transport.write(held[0] if len(held) == 1 else b"".join(held))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class FastProtocol(GatewayProtocol):
    direct: DirectRoutes | None = None
    _large: LargeBody | None = None
    _direct: DirectCycle | None = None
    _idle_timer: asyncio.TimerHandle | None = None
    _active_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = cast(asyncio.Transport, CorkedTransport(transport, self.loop))

    def connection_lost(self, exc: Exception | None) -> None:
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

    def data_received(self, data: bytes) -> None:
        self._active_s = self.loop.time()
        super().data_received(data)
        if self._large is not None and not self.transport.is_closing():
            self._large.take_over(self.transport)
            self._large = None
        if self._direct is not None:
            self._direct.expect_rest(self._leave_fast_path)

    def on_message_begin(self) -> None:
        """uvicorn's own work at a request's first line is put off until it is known to be needed."""
        self._in_head = True
        self.url, self.headers, self.expect_100_continue = b"", [], False

    def on_headers_complete(self) -> None:
        self.accept_head()
        self._direct = self.direct.cycle(self, self._rest) if self.direct is not None else None
        if self._direct is not None:
            self.cycle = cast(RequestResponseCycle, self._direct)
            return
        self._start_asgi()
        self._large = large_body(self)

    def on_body(self, body: bytes) -> None:
        if self._direct is not None:
            self._fed = 0
            self._direct.parts.append(body)
        elif self._large is not None:
            self._fed = 0
            self._large.take(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._direct is not None:
            self._fed = 0
            self._start_direct(self._direct)
            self._direct = None
            return
        super().on_message_complete()
        self._large = None

    def shutdown(self) -> None:
        super().shutdown()
        cycle: Any = self.cycle
        if isinstance(cycle, DirectCycle) and not cycle.response_complete:
            cycle.stop_within(self.config.timeout_graceful_shutdown or 0)

    def on_response_complete(self) -> None:
        self._active_s = self.loop.time()
        super().on_response_complete()

    def _rest(self) -> None:
        """After a direct answer. The timer of an idle connection is not set anew for each of them: when it fires, it
        checks how long the connection has been idle."""
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

    def _start_asgi(self) -> None:
        """Starts the request through ASGI: first what `on_message_begin` put off, then uvicorn's own callback."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        HttpToolsProtocol.on_message_begin(self)
        self.headers += headers
        self.url, self.expect_100_continue = url, expects
        self.mark()
        HttpToolsProtocol.on_headers_complete(self)

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

    def _leave_fast_path(self) -> None:
        if self._direct is not None:
            direct, self._direct = self._direct, None
            direct.share.give_back()
            self.cycle = cast(RequestResponseCycle, direct.before)
            self._start_asgi()
            for part in direct.parts:
                super().on_body(part)
