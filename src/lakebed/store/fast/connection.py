"""One keep-alive connection to the store, on the event loop that opened it."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools

from lakebed.core import errors

RESPONSE_BYTES_MAX = 64 * 1024  # of a response's body: an error in XML


class PutResponse:
    """The response to one PUT, filled by the parser's callbacks."""

    def __init__(self) -> None:
        self.status = 0
        self.etag = ""
        self.body = b""

    def error(self, key: str) -> errors.LakebedError:
        text = self.body.decode("utf-8", "replace")
        code = text.partition("<Code>")[2].partition("</Code>")[0] or text[:200]
        message = f"put {key!r}: {self.status} {code}".rstrip()
        if self.status in (409, 412) or (self.status == 404 and code == "NoSuchKey"):  # 404: If-Match on a missing key
            return errors.Conflict(message)
        if self.status == 404:
            return errors.NotFound(message)
        if self.status in (401, 403):
            return errors.Denied(message)
        return errors.Unavailable(message)


class PutConnection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: Any = None
        self._waiting: asyncio.Future[PutResponse] | None = None
        self._parser: Any = None
        self._answer = PutResponse()
        self.is_closed = False
        self.keeps = True

    async def send(self, head: bytes, data: bytes, timeout_s: float) -> PutResponse:
        """Raises OSError when the connection breaks or the response is late: the request may have been executed."""
        self._parser, self._answer = httptools.HttpResponseParser(self), PutResponse()
        self._waiting = waiting = self._loop.create_future()
        late = self._loop.call_later(timeout_s, self._fail, TimeoutError(f"no response within {timeout_s:g} s"))
        try:
            self._transport.writelines((head, data))
            answer: PutResponse = await waiting
            return answer
        finally:
            late.cancel()
            self._waiting = None

    def close(self) -> None:
        self.is_closed = True
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._fail(exc or ConnectionResetError("the store closed the connection"))

    def data_received(self, data: bytes) -> None:
        if self._waiting is None:
            return self.close()  # no request is open
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(error)

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
