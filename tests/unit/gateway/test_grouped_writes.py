"""What is written in one turn of the loop goes out together, and nothing waits longer than that."""

from __future__ import annotations

import asyncio
from typing import Any

from lakebed.gateway.fast.protocol import CORKED_BYTES_MAX, CorkedTransport


class Wire:
    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def close(self) -> None:
        self.closed = True

    def write_eof(self) -> None:
        self.sent.append(b"eof")

    def is_closing(self) -> bool:
        return self.closed


def corked(wire: Wire) -> CorkedTransport:
    transport: Any = wire
    return CorkedTransport(transport, asyncio.get_running_loop())


async def test_head_and_body_are_one_write() -> None:
    """An answer whose head and body are written in one turn reaches the client in one packet."""
    wire = Wire()
    cork = corked(wire)

    cork.write(b"head ")
    cork.write(b"body")
    before = list(wire.sent)
    await asyncio.sleep(0)

    assert (before, wire.sent) == ([], [b"head body"])


async def test_a_large_answer_is_not_held() -> None:
    """A stream that never yields to the loop cannot fill the memory: the transport sees it and pushes back."""
    wire = Wire()
    cork = corked(wire)

    for _ in range(4):
        cork.write(b"x" * (CORKED_BYTES_MAX + 1))

    assert len(wire.sent) == 4


async def test_closing_sends_what_is_held_first() -> None:
    """The last answer of a connection is not lost when the connection is closed with it."""
    wire = Wire()
    cork = corked(wire)

    cork.write(b"bye")
    cork.close()
    await asyncio.sleep(0)

    assert (wire.sent, wire.closed, cork.is_closing()) == ([b"bye"], True, True)


async def test_the_end_of_a_connection_is_sent_behind_what_is_held() -> None:
    """A refusal is written and followed by the end of the stream: in this order."""
    wire = Wire()
    cork = corked(wire)

    cork.write(b"refused")
    cork.write_eof()
    await asyncio.sleep(0)

    assert wire.sent == [b"refused", b"eof"]
