"""uvicorn's HTTP/1.1 protocol with limits on the head of a request: its time, its bytes and its lines.

This is all that a gateway without its fast path changes in uvicorn. It overrides the callbacks of asyncio and of the
parser and `send_400_response`, so that a head that is refused is answered with a problem document.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from lakebed.core.errors import Invalid
from lakebed.gateway.auth import CERTIFICATE
from lakebed.gateway.body_limits import HeadTooLarge
from lakebed.gateway.middleware import CLOSE, FULL, NO_SNIFF, POLICY
from lakebed.gateway.problems import Problem, problem
from lakebed.gateway.tls import certificate_names

HEAD_BYTES_MAX = 64 * 1024  # request line and headers; nginx takes 32 KiB, and browsers send all cookies of a host
HEAD_LINES_MAX = 100  # headers; as Apache httpd
LINGER_S, LINGER_BYTES_MAX = 2.0, 2 * 1024 * 1024  # a connection closed with unread bytes is reset, and the answer lost


class HeadRefused(Exception):
    """Raised in a callback of the parser, to stop it in the middle of its input."""


class GatewayProtocol(HttpToolsProtocol):
    """Closes a connection that does not finish the head of its next request in time, or within its limits.

    The parser keeps what belongs to a head (and to the trailers of a chunked body) until it is complete, so bytes are
    counted as they are fed: at most HEAD_BYTES_MAX, and one read, without a head's end or bytes of a body.
    """

    head_timeout_s: float
    unread: Callable[[Exception], Problem] = staticmethod(lambda error: problem(error, ""))  # its answer
    certificate: tuple[str, ...] = ()  # the names in the client's certificate
    connections_max = 1 << 30
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None
    _fed = 0  # bytes since the last head was complete, or since the last bytes of a body
    _refusal: HeadTooLarge | None = None
    _refused = False  # the answer is sent: further input is dropped, for a moment

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.certificate = certificate_names(transport)
        self._head_timer = self.loop.call_later(self.head_timeout_s, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._fed += len(data)
        if self._refused:
            if self._fed > LINGER_BYTES_MAX:
                self.transport.close()
            return
        super().data_received(data)
        if self._fed > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._refuse(_head_too_large(f"more than {HEAD_BYTES_MAX} bytes"))
        if not self._in_head:
            self._cancel_head_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self.accept_head()
        self.mark()
        super().on_headers_complete()

    @property
    def full(self) -> bool:
        """Whether this connection is one too many."""
        return len(self.connections) >= self.connections_max

    def mark(self) -> None:
        """What the middleware has to know of the connection."""
        scope: Any = self.scope
        scope[CERTIFICATE] = self.certificate
        if self.full:
            scope[FULL] = True

    def accept_head(self) -> None:
        """The head is complete. Raises HeadRefused when it is over a limit."""
        if self._fed > HEAD_BYTES_MAX and _head_bytes(self) > HEAD_BYTES_MAX:
            self._refusal = _head_too_large(f"more than {HEAD_BYTES_MAX} bytes")
        elif len(self.headers) > HEAD_LINES_MAX:
            self._refusal = _head_too_large(f"{len(self.headers)} headers, the limit is {HEAD_LINES_MAX}")
        if self._refusal is not None:
            raise HeadRefused
        self._fed = 0
        self._in_head = False

    def on_body(self, body: bytes) -> None:
        self._fed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._fed = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        refusal, self._refusal = self._refusal, None
        self._refuse(refusal or Invalid("the request is not valid HTTP/1.1", hint="check the client or its proxy"))

    def _refuse(self, error: Invalid) -> None:
        """Responds to input that the parser refused, and closes the connection."""
        cycle: Any = self.cycle
        under_way = cycle is not None and not cycle.response_complete
        if under_way and (self._in_head or getattr(cycle, "response_started", False)):
            self.transport.close()  # an answer now would be taken for that of an earlier request
            return
        if under_way:
            cycle.disconnected = True  # the answer of its handler is dropped
            cycle.message_event.set()
        answer = self.unread(error)
        packet = [STATUS_LINE[answer.status]]
        for name, value in (*self.server_state.default_headers, *answer.headers, NO_SNIFF, POLICY, CLOSE):
            packet += (name, b": ", value, b"\r\n")
        self.transport.write(b"".join([*packet, b"\r\n", answer.body]))
        self._refused, self._fed = True, 0
        self._cancel_head_timer()
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _head_bytes(http: HttpToolsProtocol) -> int:
    return len(http.url) + sum(len(name) + len(value) + 4 for name, value in http.headers)


def _head_too_large(how: str) -> HeadTooLarge:
    return HeadTooLarge(f"the head of the request has {how}", hint="send fewer and shorter headers")
