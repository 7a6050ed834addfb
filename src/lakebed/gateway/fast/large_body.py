"""A large body goes from the socket straight into the one buffer in which it stays.

Through uvicorn and Starlette a body is copied four times (loop, parser, cycle, request), which for large ones costs
more than all else a gateway does. One that declares its length is read into a buffer of that length instead: behind its
head the connection is handed over to `LargeBody`, which gives it back at the body's end. `receive` gives views on the
buffer, so the whole body needs no copy (`core.http.whole_body`).

The buffer is freed with the response: the cycle refers to the body, so the body refers to the cycle only weakly (two
that refer to each other wait for the garbage collector, megabytes each), and a finished cycle that waits for the next
request of its connection no longer refers to it.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

LARGE_BYTES = 64 * 1024  # below it a packet or two bring everything
LARGE_BYTES_MAX = 16 * 1024 * 1024  # a body beyond this is read as a stream
UNREAD_BYTES_MAX = 1024 * 1024  # what the app has not read yet; then the client waits


class LargeBody(asyncio.BufferedProtocol):
    """One request's body. Bytes that come with the head are handed in by `take`, all others come from the loop.

    The buffer is allocated when the app first reads the body: after authentication and the check of the size.
    """

    def __init__(self, http: HttpToolsProtocol, length: int) -> None:
        self._http, self._cycle, self._flow = http, weakref.ref(http.cycle), http.flow
        self._length = length
        self._early = b""
        self._buffer: bytearray | None = None
        self._filled = self._given = 0
        http.cycle.receive = self.receive  # type: ignore[method-assign, assignment]
        http.cycle.on_response = self._answered

    def take(self, data: bytes) -> None:
        if self._buffer is None:
            self._early += data
        else:
            self._buffer[self._filled : self._filled + len(data)] = data
        self.buffer_updated(len(data))

    def take_over(self, transport: asyncio.Transport) -> None:
        """From here on the loop reads into the buffer, once the app reads the body."""
        if self._buffer is None:
            self._flow.pause_reading()
        _set_protocol(transport, self, paused=self._flow.read_paused)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._buffer is None and self._waiting() is None:  # nothing reads it: the rest is dropped
            return memoryview(bytearray(min(LARGE_BYTES, self._length - self._filled)))
        return memoryview(self._made())[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        cycle = self._waiting()
        if cycle is not None:
            if self._filled == self._length:
                cycle.more_body = False
            elif self._filled - self._given > UNREAD_BYTES_MAX:
                self._flow.pause_reading()
            cycle.message_event.set()
        if self._filled == self._length and self._reads():
            self._http.parser = httptools.HttpRequestParser(self._http)  # the old one still waits for this body
            _set_protocol(self._http.transport, self._http, paused=self._flow.read_paused)

    async def receive(self) -> dict[str, Any]:
        """As the cycle's own, but what came is not copied."""
        cycle = self._waiting()
        if cycle is None:
            return {"type": "http.disconnect"}
        if cycle.waiting_for_100_continue and not cycle.transport.is_closing():
            cycle.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.waiting_for_100_continue = False
        self._made()
        if not cycle.disconnected:
            self._flow.resume_reading()
            await cycle.message_event.wait()
            cycle.message_event.clear()
        if cycle.disconnected or cycle.response_complete or self._buffer is None:
            return {"type": "http.disconnect"}
        part = memoryview(self._buffer).toreadonly()[self._given : self._filled]
        self._given = self._filled
        return {"type": "http.request", "body": part, "more_body": cycle.more_body}

    def _waiting(self) -> RequestResponseCycle | None:
        """The cycle, while it is there and not answered."""
        cycle = self._cycle()
        return None if cycle is None or cycle.response_complete else cycle

    def _answered(self) -> None:
        cycle = self._cycle()
        if cycle is not None:
            del cycle.receive
            cycle.on_response = self._http.on_response_complete
        self._buffer, self._early = None, b""
        self._http.on_response_complete()

    def _made(self) -> bytearray:
        if self._buffer is None:
            self._buffer = bytearray(self._length)
            self._buffer[: len(self._early)], self._early = self._early, b""
        return self._buffer

    def eof_received(self) -> None:
        self._http.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def _reads(self) -> bool:
        """Whether the connection is ours: a body that came with its head leaves it where it is."""
        transport = self._http.transport
        return not transport.is_closing() and transport.get_protocol() is self


def large_body(http: HttpToolsProtocol) -> LargeBody | None:
    """For the request whose head has just been read, when its body is one to be read this way."""
    length = 0
    for name, value in http.headers:
        if name == b"content-length" and value.isdigit() and len(value) < 12:
            length = int(value)
        elif name in (b"transfer-encoding", b"upgrade"):
            return None
    return LargeBody(http, length) if LARGE_BYTES <= length <= LARGE_BYTES_MAX else None


def _set_protocol(transport: Any, protocol: Any, *, paused: bool) -> None:
    """Gives the connection to another protocol. Reading starts anew: loops choose how to read when they start."""
    if not paused:
        transport.pause_reading()
    transport.set_protocol(cast(asyncio.BaseProtocol, protocol))
    if not paused:
        transport.resume_reading()
