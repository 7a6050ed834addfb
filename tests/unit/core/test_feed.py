"""Feeds: limits of a step, bounds on columns, and reading ahead in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from lakebed.core.clock import settle
from lakebed.core.errors import Corrupt, Invalid, NotFound, Unavailable
from lakebed.core.feed import READ_AHEAD, FeedFilter, FeedSlice, Limit, ahead, read_all, within


def pieces(*sizes: tuple[int, int]) -> list[FeedSlice]:
    return [FeedSlice(f"k{n}", rows=rows, size_bytes=size) for n, (rows, size) in enumerate(sizes)]


@pytest.mark.parametrize(
    ("limit", "taken"),
    [
        (Limit(), 4),
        (Limit(objects=2), 2),
        (Limit(objects=9), 4),
        (Limit(rows=30), 3),
        (Limit(rows=29), 2),
        (Limit(rows=1), 1),
        (Limit(size_bytes=200), 2),
        (Limit(size_bytes=199), 1),
        (Limit(objects=3, rows=20), 2),
    ],
)
def test_a_step_takes_as_much_as_its_limit_and_at_least_one(limit: Limit, taken: int) -> None:
    """The limit itself is still within; zero is no limit."""
    found = within(pieces((10, 100), (10, 100), (10, 100), (10, 100)), limit)

    assert [f"k{n}" for n in range(taken)] == [piece.key for piece in found]
    assert [] == within([], limit)


def test_a_limit_knows_whether_it_needs_contents() -> None:
    """A count of objects does not."""
    assert (False, True, True, True) == tuple(map(bool, (Limit(), Limit(1), Limit(rows=1), Limit(size_bytes=1))))
    assert (False, False, True, True) == tuple(
        each.by_content for each in (Limit(), Limit(1), Limit(rows=1), Limit(size_bytes=1))
    )


@pytest.mark.parametrize(
    ("low", "high", "may"),
    [(0, 9, False), (0, 10, True), (10, 10, True), (20, 30, True), (21, 30, False), (5, 25, True)],
)
def test_bounds_are_inclusive(low: int, high: int, may: bool) -> None:
    """A column without bounds may hold anything."""
    wanted = FeedFilter(low={"a": 10}, high={"a": 20})

    assert may == wanted.may_hold("a", low, high)
    assert wanted.may_hold("b", low, high)


def test_wanted_values_lie_within_what_is_held() -> None:
    """One of them is enough; none is never."""
    wanted = FeedFilter(among={"a": frozenset({5, 50}), "none": frozenset()})

    assert [True, True, False, True] == [wanted.may_hold("a", *each) for each in ((5, 9), (0, 5), (6, 49), (50, 50))]
    assert (True, False, False) == (wanted.takes("a", 50), wanted.takes("a", 51), wanted.takes("none", 1))


class FakeFeed:
    """Loads by script: an exception is raised, anything else are the rows."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, tuple[str, ...], FeedFilter]] = []

    async def load(self, piece: FeedSlice, columns: Sequence[str], wanted: FeedFilter) -> Any:
        self.asked.append((piece.key, tuple(columns), wanted))
        answer = self.answers[piece.key]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_what_cannot_be_read_says_why_and_an_absent_store_raises() -> None:
    """In the order of the pieces, with the columns and bounds that were requested."""
    answers = {"a": "rows", "b": NotFound("gone"), "c": Corrupt("broken"), "d": Invalid("later format"), "e": None}
    feed: Any = FakeFeed(answers)
    wanted = FeedFilter(low={"x": 1})

    found = [read async for read in read_all(feed, [FeedSlice(key) for key in answers], ["x"], wanted)]

    assert [
        ("a", "rows", ""), ("b", None, "not_found: gone"), ("c", None, "corrupt: broken"),
        ("d", None, "invalid: later format"), ("e", None, ""),
    ] == [(read.piece.key, read.rows, read.problem) for read in found]  # fmt: skip
    assert {(("x",), 1)} == {(columns, each.low["x"]) for _, columns, each in feed.asked}
    down: Any = FakeFeed({"a": Unavailable("no store")})
    with pytest.raises(Unavailable):
        [read async for read in read_all(down, [FeedSlice("a")], [], FeedFilter())]


async def test_work_is_done_ahead_within_a_bound_and_given_in_order() -> None:
    """Never more than so many under way; those of a reader who leaves are cancelled."""
    running, most, gates = 0, 0, [asyncio.Event() for _ in range(6)]
    cancelled: list[int] = []

    async def work(number: int) -> int:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        try:
            await gates[number].wait()
            return number * 10
        except asyncio.CancelledError:
            cancelled.append(number)
            raise
        finally:
            running -= 1

    found = ahead(range(6), work, 3)
    first = asyncio.ensure_future(anext(found))
    await settle()
    under_way = running
    gates[1].set()
    gates[0].set()
    given = [await first, await anext(found)]
    await found.aclose()  # type: ignore[attr-defined]
    await settle()

    assert (3, [0, 10], 16) == (under_way, given, READ_AHEAD)
    assert most <= 3 and set(cancelled) <= {2, 3} and cancelled
