"""One kept HTTP/1.1 connection on the event loop that opened it, for small requests that are sent often.

It is for what costs more in an HTTP client than in the server that answers: the store's fast path and the notices
between brokers. Whatever fails (the connection, the response, its time) raises OSError, and the request may have been
executed; the connection is to be closed then.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import httptools

RESPONSE_BYTES_MAX = 64 * 1024  # of a response's body: an error in XML


class HttpResponse:
    """The response to one request, filled by the parser's callbacks."""

    def __init__(self) -> None:
        self.status = 0
        self.etag = ""
        self.body = b""


class HttpConnection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: Any = None
        self._waiting: asyncio.Future[HttpResponse] | None = None
        self._parser: Any = None
        self._answer = HttpResponse()
        self.is_closed = False
        self.keeps = True

    @classmethod
    async def open(cls, host: str, port: int, *, timeout_s: float, tls: ssl.SSLContext | None = None) -> HttpConnection:
        """Raises OSError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            _, connection = await loop.create_connection(lambda: cls(loop), host, port, ssl=tls)
        return connection

    async def send(self, head: bytes, data: bytes, timeout_s: float) -> HttpResponse:
        """Raises OSError when the connection breaks or the response is late: the request may have been executed."""
        self._parser, self._answer = httptools.HttpResponseParser(self), HttpResponse()
        self._waiting = waiting = self._loop.create_future()
        late = self._loop.call_later(timeout_s, self._fail, TimeoutError(f"no response within {timeout_s:g} s"))
        try:
            self._transport.writelines((head, data))
            answer: HttpResponse = await waiting
            return answer
        finally:
            late.cancel()
            self._waiting = None
            del waiting  # an error refers to this frame: a cycle would keep the caller until the garbage collector runs

    def close(self) -> None:
        self.is_closed = True
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._fail(exc or ConnectionResetError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        if self._waiting is None:
            return self.close()  # no request is open
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"this is no HTTP response: {error}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"etag":
            self._answer.etag = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        if len(self._answer.body) < RESPONSE_BYTES_MAX:
            self._answer.body += body

    def on_message_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()
        self.keeps = self._parser.should_keep_alive()
        if self._answer.status >= 200 and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(self._answer)

    def _fail(self, error: Exception) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
