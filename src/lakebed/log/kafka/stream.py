"""The connection of a Kafka client: a large request is received in the buffer in which it stays.

Small requests share one buffer of the connection and are copied out of it. A request that is larger than that buffer
gets one of its own length: the event loop receives into it, and nothing copies it before its blob is written.
Reading pauses while the shared buffer is full, so a client is read no faster than its requests are taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

SHARED_BYTES = 16 * 1024  # of each connection, also of an idle one


class FrameStream(asyncio.BufferedProtocol):
    """Runs `serve` with itself, in a task, from the connection's begin. Reads for one task and writes for one."""

    def __init__(self, serve: Callable[[FrameStream], Coroutine[Any, Any, None]]) -> None:
        self._serve, self._loop = serve, asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._shared = memoryview(bytearray(SHARED_BYTES))
        self._begin = self._end = 0  # of what is in the shared buffer and not taken yet
        self._own: memoryview | None = None  # the buffer of a large request, until it is full
        self._filled = 0
        self._ended = self._lost = False
        self._reading_paused = False
        self._more: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._task: asyncio.Task[None] | None = None

    async def readexactly(self, size: int) -> bytes | memoryview:
        """The next bytes: a view where they have a buffer of their own. Raises IncompleteReadError at the end."""
        if size > SHARED_BYTES:
            return await self._read_own(size)
        data = await self.peek(size)
        self._begin += size
        return data

    async def peek(self, size: int) -> bytes:
        """The next few bytes, which the next read returns too. Raises IncompleteReadError at the end."""
        while self._end - self._begin < size:
            self._make_room()
            await self._wait_for_more(size)
        return bytes(self._shared[self._begin : self._begin + size])

    async def _read_own(self, size: int) -> memoryview:
        own = memoryview(bytearray(size))
        early = self._end - self._begin
        own[:early] = self._shared[self._begin : self._end]
        self._begin = self._end = 0
        self._own, self._filled = own, early
        self._resume_reading()
        while self._filled < size:
            await self._wait_for_more(size)
        return own.toreadonly()

    async def _wait_for_more(self, size: int) -> None:
        if self._ended:
            raise asyncio.IncompleteReadError(b"", size)
        self._more = self._loop.create_future()
        try:
            await self._more
        finally:
            self._more = None

    def _make_room(self) -> None:
        held = self._end - self._begin
        if self._begin:
            self._shared[:held] = bytes(self._shared[self._begin : self._end])
            self._begin, self._end = 0, held
        self._resume_reading()

    def _resume_reading(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    async def drain(self) -> None:
        """Waits until the client has taken most of what was written. Raises ConnectionResetError when it is gone."""
        if self._writable is not None:
            await asyncio.shield(self._writable)
        if self._lost:
            raise ConnectionResetError("the client is gone")

    def close(self) -> None:
        self._transport.close()

    async def wait_closed(self) -> None:
        await asyncio.shield(self._closed)

    def get_extra_info(self, name: str) -> Any:
        return self._transport.get_extra_info(name)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._task = self._loop.create_task(self._serve(self))

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._own is not None:
            return self._own[self._filled :]
        if self._begin == self._end:
            self._begin = self._end = 0
        return self._shared[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._own is not None:
            self._filled += nbytes
            if self._filled < len(self._own):
                return
            self._own = None
        else:
            self._end += nbytes
            if self._end == SHARED_BYTES and not self._transport.is_closing():
                self._reading_paused = True
                self._transport.pause_reading()
        self._wake(self._more)

    def eof_received(self) -> bool:
        """Answers to what was read are still sent, where the connection can be closed in one direction."""
        self._end_input()
        return self._transport.get_extra_info("sslcontext") is None

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._end_input()
        self._wake(self._writable)
        self._wake(self._closed)

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        waiting, self._writable = self._writable, None
        self._wake(waiting)

    def _end_input(self) -> None:
        self._ended = True
        self._own = None
        self._wake(self._more)

    def _wake(self, waiting: asyncio.Future[None] | None) -> None:
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
