"""What a step of bronze takes: pure, so every order of batches can be tried."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakebed.core.feed import FeedSlice, Limit
from lakebed.pipeline.bronze.numbering import StepNote, TakenNumbers, looked_back, note_of, plan
from lakebed.pipeline.settings import BronzeSettings

ranges = st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda at: (at[0], at[0] + at[1]))


def piece(number: int, first: int = 0, last: int = -1, series: str = "a") -> FeedSlice:
    return FeedSlice(
        f"key-{number}", last - first + 1, 100, id=f"{number:020d}-x", series=series, first=first, last=last
    )


def test_batches_that_are_there_are_left_out() -> None:
    """What a note remembers is not taken again, and what is listed twice is taken once."""
    known = [note_of({"through_ns": 2}, [piece(1, 0, 9), piece(2, 10, 19)])]

    step = plan([piece(2, 10, 19), piece(3, 20, 29), piece(3, 20, 29)], known, Limit())

    assert [piece(3, 20, 29)] == [work.piece for work in step.works]
    assert not step.cut


def test_a_batch_that_any_note_of_the_overlap_knows_is_left_out() -> None:
    """Not only the last step's: a listing begins so far back that it meets the batches of several."""
    known = [note_of({"through_ns": n}, [piece(n, n * 10, n * 10 + 9)]) for n in range(3)]

    step = plan([piece(n, n * 10, n * 10 + 9) for n in range(4)], known, Limit())

    assert [piece(3, 30, 39)] == [work.piece for work in step.works]


def test_a_limit_takes_the_first_and_says_that_more_waits() -> None:
    """Steps are bounded, and a run knows when to take another."""
    step = plan([piece(n) for n in range(5)], [], Limit(objects=2))

    assert (2, True) == (len(step.works), step.cut)


def test_one_step_takes_many_thousand_batches() -> None:
    """The usual limit is far above 2,000 objects, where one commit a minute falls behind 33 batches a second."""
    step = plan([piece(n) for n in range(15_000)], [], BronzeSettings().limit)

    assert (15_000, False) == (len(step.works), step.cut)


@given(st.lists(ranges, max_size=30), st.integers(0, 30))
def test_every_number_is_taken_once_however_batches_overlap(taken: list[tuple[int, int]], split: int) -> None:
    """A number that came in an earlier batch, of this step or of one before, counts as a duplicate: exactly."""
    pieces = [piece(n, first, last) for n, (first, last) in enumerate(taken)]
    known = [note_of({"through_ns": 0}, pieces[:split])]

    step = plan(pieces, known, Limit())

    seen = {n for first, last in taken[:split] for n in range(first, last + 1)}
    for work in step.works:
        mine = range(work.piece.first, work.piece.last + 1)
        doubled = [n for first, last in work.doubled for n in range(first, last + 1)]
        assert sorted(seen.intersection(mine)) == sorted(doubled)
        seen.update(mine)


def test_series_do_not_share_numbers() -> None:
    """The same numbers of another boot are other samples."""
    numbers = TakenNumbers([StepNote({}, ("a",), ())])

    assert () == numbers.take(piece(0, 0, 9, "a"))
    assert () == numbers.take(piece(1, 0, 9, "b"))
    assert ((5, 9),) == numbers.take(piece(2, 5, 14, "a"))


def test_listing_looks_back_over_the_overlap() -> None:
    """Not before the beginning of time."""
    assert {"through_ns": 10_000_000_000, "late_ms": 0} == looked_back({"through_ns": 20_000_000_000, "late_ms": 5}, 10)
    assert {"through_ns": -1, "late_ms": 0} == looked_back({"through_ns": -1, "late_ms": 0}, 900)
    late = {"through_ns": 10**18, "late_ms": 10**12}
    assert {"through_ns": 10**18 - 900 * 10**9, "late_ms": 10**12 - 900_000} == looked_back(late, 900)


@pytest.mark.parametrize(
    ("taken", "mine", "doubled"),
    [
        ((0, 5), (5, 9), ((5, 5),)),  # the last one came again as the first
        ((5, 9), (0, 5), ((5, 5),)),
        ((0, 5), (6, 9), ()),
        ((2, 3), (0, 9), ((2, 3),)),
    ],
)
def test_batches_that_share_a_number_at_their_ends_share_it(
    taken: tuple[int, int], mine: tuple[int, int], doubled: tuple[tuple[int, int], ...]
) -> None:
    numbers = TakenNumbers([note_of({"through_ns": 0}, [piece(1, *taken)])])

    assert doubled == numbers.take(piece(2, *mine))


def test_ranges_that_follow_each_other_are_held_as_one() -> None:
    """What is remembered of an agent does not grow with its batches."""
    numbers = TakenNumbers()
    for number in (0, 2, 1, 3):
        numbers.take(piece(number, number * 10, number * 10 + 9))

    assert {"a": [(0, 39)]} == numbers._ranges
