"""One kept connection: what it makes of responses, of their absence, and of connections that end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lakebed.core.clock import settle
from lakebed.core.http_connection import HttpConnection
from support.references import is_freed_after


class Timers:
    """The loop of a connection, with the timers that it was given."""

    def __init__(self) -> None:
        self._loop, self.made = asyncio.get_running_loop(), list[asyncio.TimerHandle]()

    def create_future(self) -> asyncio.Future[Any]:
        return self._loop.create_future()

    def call_later(self, delay_s: float, call: Any, *args: Any) -> asyncio.TimerHandle:
        self.made.append(self._loop.call_later(delay_s, call, *args))
        return self.made[-1]


class Answering(asyncio.Transport):
    """Answers each request at once."""

    def __init__(self, connection: HttpConnection) -> None:
        super().__init__()
        self._connection = connection

    def writelines(self, data: Any) -> None:
        answer = b'HTTP/1.1 200 OK\r\netag: "v"\r\ncontent-length: 0\r\n\r\n'
        asyncio.get_running_loop().call_soon(self._connection.data_received, answer)


async def test_the_timer_of_an_answered_request_does_not_fail_a_later_one() -> None:
    """A connection is used again: each request has its whole time."""
    timers = Timers()
    connection = HttpConnection(timers)  # type: ignore[arg-type]
    connection.connection_made(Answering(connection))

    answers = [await connection.send(b"head", b"data", 30.0) for _ in range(2)]

    assert [(200, '"v"')] * 2 == [(answer.status, answer.etag) for answer in answers]
    assert [True, True] == [timer.cancelled() for timer in timers.made]


class Silent:
    """A transport that keeps what was written."""

    def writelines(self, parts: Any) -> None:
        self.written = b"".join(parts)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("head", "keeps"),
    [
        (b"HTTP/1.1 200 OK\r\netag: e\r\n", True),
        (b"HTTP/1.1 200 OK\r\netag: e\r\nConnection: close\r\n", False),
        (b"HTTP/1.0 200 OK\r\netag: e\r\n", False),
    ],
)
async def test_a_connection_that_the_server_will_close_is_not_kept(head: bytes, keeps: bool) -> None:
    """What its response says counts, before the connection ends: a request sent into it meanwhile would be lost."""
    connection = HttpConnection(asyncio.get_running_loop())
    connection.connection_made(Silent())  # type: ignore[arg-type]
    sending = asyncio.ensure_future(connection.send(b"head", b"data", 60.0))
    await settle()

    connection.data_received(head + b"content-length: 0\r\n\r\n")
    response = await sending

    assert (200, "e", keeps, False) == (response.status, response.etag, connection.keeps, connection.is_closed)


@pytest.mark.parametrize(
    ("ends", "raised"),
    [
        (lambda one: one.data_received(b"SSH-2.0\r\n\r\n"), ConnectionError),
        (lambda one: one.connection_lost(None), ConnectionResetError),
        (lambda one: one.connection_lost(BrokenPipeError()), BrokenPipeError),
        (lambda one: None, TimeoutError),
    ],
)
async def test_whatever_ends_a_request_without_a_response_is_an_os_error(ends: Any, raised: type[Exception]) -> None:
    """Callers catch one kind: what is no HTTP, a connection that ends, and time that is over."""
    connection = HttpConnection(asyncio.get_running_loop())
    connection.connection_made(Silent())  # type: ignore[arg-type]
    sending = asyncio.ensure_future(connection.send(b"head", b"data", 60.0 if raised is not TimeoutError else 0.0))
    await settle()

    ends(connection)

    with pytest.raises(raised) as error:
        await sending
    assert isinstance(error.value, OSError)


async def test_a_request_without_a_response_does_not_keep_its_caller() -> None:
    """What it sends may be large, and a store that is away fails thousands of requests."""
    connection = HttpConnection(asyncio.get_running_loop())
    connection.connection_made(Silent())  # type: ignore[arg-type]

    assert await is_freed_after(lambda: connection.send(b"head", b"data", 0.0), TimeoutError)
