"""A PUT on connections of our own: what is tried again, for how long, and which connection is used again."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from lakebed.core import errors
from lakebed.core.clock import ManualClock
from lakebed.core.http_connection import HttpResponse
from lakebed.core.ids import Ids
from lakebed.core.settings import Secret
from lakebed.store.fast.puts import IDLE_MAX, RETRYABLE, PutClient
from lakebed.store.model import Version
from lakebed.store.settings import StoreSettings
from support.runtimes import runtime_of


class Ticking(ManualClock):
    """Sleeps no time at all, and counts how often."""

    pauses = 0

    async def sleep(self, seconds: float) -> None:
        self.pauses += 1
        await asyncio.sleep(0)


def answer(status: int, etag: str = "", body: bytes = b"") -> HttpResponse:
    made = HttpResponse()
    made.status, made.etag, made.body = status, etag, body
    return made


class Scripted(PutClient):
    def __init__(self, *reported: HttpResponse | Exception, retries: int = 3, step_s: float = 0.0, **more: Any) -> None:
        settings = StoreSettings(
            url="s3://lake", endpoint=more.pop("endpoint", "http://h:8333/base/"),
            access_key_id=Secret("id"), secret_access_key=Secret("s"), retries=retries, **more,
        )  # fmt: skip
        self.clock = Ticking()
        super().__init__(settings, runtime_of(self.clock, Ids.seeded(1)))
        self.told, self.heads, self._step_s = list(reported), [], step_s  # type: ignore[var-annotated]

    async def _send(self, head: bytes, data: bytes) -> HttpResponse:
        self.heads.append(head)
        if self._step_s:
            await self.clock.advance(self._step_s)
        reported = self.told.pop(0)
        if isinstance(reported, Exception):
            raise reported
        return reported


GOOD = answer(200, '"e"')


async def test_the_condition_is_that_of_the_write() -> None:
    puts = Scripted(GOOD, GOOD)
    await puts.put("a b", b"x", None)
    await puts.put("a b", b"x", Version('"old"'))

    assert all(head.startswith(b"PUT /base/lake/a%20b HTTP/1.1\r\n") for head in puts.heads)
    assert puts.heads[0].endswith(b"\r\nif-none-match: *\r\n\r\n")
    assert puts.heads[1].endswith(b'\r\nif-match: "old"\r\n\r\n')


@pytest.mark.parametrize("status", sorted(RETRYABLE))
async def test_later_is_tried_again_as_often_as_set(status: int) -> None:
    puts = Scripted(*[answer(status)] * 3, GOOD)
    assert await puts.put("k", b"x", None) == '"e"'
    assert puts.clock.pauses == 3

    tired = Scripted(*[answer(status)] * 4, GOOD)
    with pytest.raises(errors.Unavailable):
        await tired.put("k", b"x", None)
    assert len(tired.heads) == 4


async def test_a_broken_connection_is_tried_again_and_then_unavailable() -> None:
    assert await Scripted(ConnectionResetError(), TimeoutError("late"), GOOD).put("k", b"x", None) == '"e"'
    with pytest.raises(errors.Unavailable, match="late"):
        await Scripted(*[TimeoutError("late")] * 4).put("k", b"x", None)


@pytest.mark.parametrize(
    ("reported", "raised"),
    [
        (answer(412), errors.Conflict),
        (answer(409), errors.Conflict),
        (answer(403), errors.Denied),
        (answer(401), errors.Denied),
        (answer(404, body=b"<Code>NoSuchBucket</Code>"), errors.NotFound),
        (answer(404, body=b"<Code>NoSuchKey</Code>"), errors.Conflict),
        (answer(200), errors.Unavailable),
        (answer(301), errors.Unavailable),
    ],
)
async def test_an_answer_that_says_no_is_not_tried_again(reported: HttpResponse, raised: type[Exception]) -> None:
    puts = Scripted(reported, GOOD)
    with pytest.raises(raised):
        await puts.put("k", b"x", None)
    assert len(puts.heads) == 1


async def test_no_try_begins_after_the_time_for_all_but_one_last() -> None:
    puts = Scripted(*[answer(503)] * 9, retries=8, step_s=6.0, retry_timeout_s=10.0)
    with pytest.raises(errors.Unavailable):
        await puts.put("k", b"x", None)
    assert len(puts.heads) == 3  # at 0, 6 and 12 s; the last one began after the time, so it is the last


class Line:
    """A connection that answers, as long as it is open."""

    keeps = True

    def __init__(self) -> None:
        self.is_closed = False
        self.asked = 0

    async def send(self, head: bytes, data: bytes, timeout_s: float) -> HttpResponse:
        assert not self.is_closed, "written to a connection that is closed"
        self.asked += 1
        await asyncio.sleep(0)
        return GOOD

    def close(self) -> None:
        self.is_closed = True


class Opening(PutClient):
    def __init__(self) -> None:
        settings = StoreSettings(
            url="s3://lake", endpoint="http://h", access_key_id=Secret("id"), secret_access_key=Secret("s")
        )
        super().__init__(settings, runtime_of(Ticking(), Ids.seeded(1)))
        self.opened: list[Line] = []

    async def _open(self) -> Any:
        self.opened.append(Line())
        return self.opened[-1]


async def test_a_connection_is_used_again_unless_it_was_closed_or_says_that_it_closes() -> None:
    puts = Opening()
    assert (puts._host, puts._port) == ("h", 80)
    await puts.put("k", b"x", None)
    await puts.put("k", b"x", None)
    assert [line.asked for line in puts.opened] == [2]

    puts.opened[0].is_closed = True  # by the store, while it was idle
    await puts.put("k", b"x", None)
    assert [line.asked for line in puts.opened] == [2, 1]

    puts.opened[1].keeps = False
    await puts.put("k", b"x", None)
    await puts.put("k", b"x", None)
    assert [line.asked for line in puts.opened] == [2, 2, 1]
    assert puts.opened[1].is_closed


@pytest.mark.parametrize(
    "error", [ConnectionResetError(), TimeoutError(), ConnectionError("no HTTP"), asyncio.CancelledError()]
)
async def test_a_connection_on_which_a_put_failed_is_closed(error: BaseException) -> None:
    """However it failed, also where its caller gave up: the late answer would be taken for that of the next PUT."""

    async def failing(*_: Any) -> HttpResponse:
        raise error

    puts = Opening()
    await puts.put("k", b"x", None)
    puts.opened[0].send = failing  # type: ignore[method-assign]
    with suppress(asyncio.CancelledError):
        await puts.put("k", b"x", None)
    await puts.put("k", b"x", None)

    assert [True, False] == [line.is_closed for line in puts.opened]


async def test_no_more_connections_are_kept_than_the_limit() -> None:
    puts = Opening()
    await asyncio.gather(*(puts.put("k", b"x", None) for _ in range(IDLE_MAX + 3)))

    assert len(puts.opened) == IDLE_MAX + 3
    assert sum(not line.is_closed for line in puts.opened) == IDLE_MAX


@pytest.mark.parametrize(("before", "repeated"), [([], False), ([answer(503)], True), ([OSError("cut")], True)])
async def test_a_conflict_says_whether_an_earlier_attempt_may_have_caused_it(before: list[Any], repeated: bool) -> None:
    """Only the refusal of the very first request proves that our bytes were not stored."""
    with pytest.raises(errors.Conflict) as refused:
        await Scripted(*before, answer(412)).put("k", b"x", None)

    assert repeated is refused.value.repeated


@pytest.mark.parametrize("before", [answer(503), OSError("cut")])
@pytest.mark.parametrize("status", [403, 404])
async def test_a_refusal_of_a_repeated_request_does_not_say_that_nothing_was_written(before: Any, status: int) -> None:
    """A key that was revoked in between, a bucket that is gone: the first request may have been executed."""
    with pytest.raises(errors.Unavailable, match="then refused"):
        await Scripted(before, answer(status)).put("k", b"x", None)
