"""Messages that a thread reads ahead: all of them once and in order, and never more than there is room for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from lakebed.filer.transport import AHEAD_BYTES, ENOUGH_BYTES, LINGER_S, MessageStream
from support.scripted_filer import Stream

PATIENT_S = 30.0


class Fed:
    """A call that gives what the test feeds it."""

    def __init__(self) -> None:
        self._fed: list[bytes] = []
        self._change = threading.Condition()
        self.taken, self.cancelled = 0, False

    def feed(self, message: bytes) -> None:
        with self._change:
            self._fed.append(message)
            self._change.notify_all()

    def cancel(self) -> None:
        with self._change:
            self.cancelled = True
            self._change.notify_all()

    def __iter__(self) -> Iterator[bytes]:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._fed or self.cancelled)
                if self.cancelled:
                    return
                message = self._fed.pop(0)
                self.taken += 1
            yield message


async def all_of(stream: MessageStream) -> list[bytes]:
    found: list[bytes] = []
    while not stream.ended:
        found += await stream.take(PATIENT_S)
    return found


@pytest.mark.parametrize("size", [1, 1000, ENOUGH_BYTES, AHEAD_BYTES + 1])
async def test_every_message_comes_once_and_in_order(size: int) -> None:
    """Also when the reader is ahead and has to wait for room, for each message anew."""
    sent = [b"%08d" % number + b"x" * size for number in range(20_000 if size == 1 else 12)]
    stream = MessageStream(Stream(sent))
    try:
        assert sent == await all_of(stream)
    finally:
        stream.cancel()


async def test_no_more_is_read_ahead_than_there_is_room_for() -> None:
    """A caller that works slowly does not fill the memory; when it takes, the reader goes on."""
    call = Fed()
    stream = MessageStream(call)
    for _ in range(4):
        call.feed(b"x" * (AHEAD_BYTES // 2 + 1))
    while call.taken < 2:
        await asyncio.sleep(LINGER_S)
    await asyncio.sleep(0.05)  # time in which a reader without a bound would take the others
    assert 2 == call.taken

    found = [*await stream.take(PATIENT_S)]
    while len(found) < 4:
        found += await stream.take(PATIENT_S)
    stream.cancel()
    assert 4 == call.taken


async def test_room_that_was_made_meanwhile_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller takes everything between the reader's count and its wait: the reader goes on all the same."""
    call, decided, taken = Fed(), threading.Event(), threading.Event()
    waits = MessageStream._wait_for_room

    def late(self: MessageStream) -> None:
        decided.set()
        taken.wait(PATIENT_S)
        waits(self)

    monkeypatch.setattr(MessageStream, "_wait_for_room", late)
    stream = MessageStream(call)
    call.feed(b"x" * (AHEAD_BYTES + 1))
    await asyncio.to_thread(decided.wait, PATIENT_S)
    first = await stream.take(PATIENT_S)
    taken.set()
    call.feed(b"next")

    assert (1, [b"next"]) == (len(first), await stream.take(PATIENT_S))
    stream.cancel()


async def test_a_quiet_stream_gives_nothing_and_stays_open() -> None:
    """The end of patience is not the end of the stream: what comes later is given."""
    call = Fed()
    stream = MessageStream(call)

    assert [] == await stream.take(0.01)
    assert not stream.ended
    call.feed(b"late")
    assert [b"late"] == await stream.take(PATIENT_S)
    assert [] == await stream.take(0.01)
    stream.cancel()
    assert [] == await stream.take(PATIENT_S)
    assert stream.ended


async def test_a_stream_that_breaks_at_the_end_of_patience_has_not_ended() -> None:
    """It breaks between the take that found nothing and the look at its end: the error is raised, not an end shown."""
    over = threading.Event()

    def breaks() -> Iterator[bytes]:
        over.wait(PATIENT_S)
        yield from ()
        raise ConnectionError("gone")

    before = set(threading.enumerate())
    stream = MessageStream(Stream(breaks()))
    (reader,) = set(threading.enumerate()) - before

    found = await stream.take(0.01)
    over.set()
    reader.join(PATIENT_S)  # here the loop stands still, as it does between two statements

    assert ([], False) == (found, stream.ended)
    with pytest.raises(ConnectionError, match="gone"):
        await stream.take(PATIENT_S)
    stream.cancel()


async def test_a_stream_that_is_given_up_frees_its_thread() -> None:
    """Also while it waits for room that nobody makes any more."""
    call = Fed()
    before = set(threading.enumerate())
    stream = MessageStream(call)
    (reader,) = set(threading.enumerate()) - before
    call.feed(b"x" * (AHEAD_BYTES + 1))
    while call.taken < 1:
        await asyncio.sleep(LINGER_S)

    stream.cancel()
    await asyncio.to_thread(reader.join, PATIENT_S)

    assert not reader.is_alive()
