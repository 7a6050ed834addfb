"""Windows of samples: exact sums, sketches within their error, and results that no order or grouping can change."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lakebed.core.errors import Invalid
from lakebed.rollups.aggregate import check_windows
from lakebed.rollups.codec.statistics import (
    BEYOND,
    BUCKET_MAX,
    buckets_of,
    check_quantiles,
    exact_sums,
    middle,
    quantile,
)
from lakebed.rollups.codec.windows import WindowRows, joined, merged, rows_of

summable = st.floats(allow_nan=False, allow_infinity=False, max_value=1e280, min_value=-1e280)
groups = st.lists(st.lists(summable | st.integers(-100, 100).map(float), min_size=1, max_size=12), max_size=6)


def flat(lists: list[list[float]]) -> tuple[Any, Any]:
    return (
        np.array([value for held in lists for value in held], np.float64),
        np.array([at for at, held in enumerate(lists) for _ in held], np.int64),
    )


@given(lists=groups)
@example(lists=[[1.0, -1.0]])  # nothing is left at all
@example(lists=[[1.0, -1.0], [1e-300, -1e-300, 0.0], [3.0, 4.0]])
@example(lists=[[0.0, 0.0]])
@settings(max_examples=120, deadline=None)
def test_sums_are_exact_and_rounded_once(lists: list[list[float]]) -> None:
    """A sum is the exact sum rounded to the nearest double, and its parts are the exact sum itself."""
    values, of = flat(lists)

    sums, offsets, rests = exact_sums(values, of, len(lists))

    for at, held in enumerate(lists):
        assert math.fsum(held) == sums[at]
        parts = [sums[at], *rests[offsets[at] : offsets[at + 1]].tolist()]
        assert sum(map(Fraction, held)) == sum(map(Fraction, parts))


@given(lists=st.lists(st.lists(summable, min_size=1, max_size=6), min_size=1, max_size=5))
@settings(max_examples=80, deadline=None)
def test_parts_of_sums_add_up_to_the_same_parts(lists: list[list[float]]) -> None:
    """Summing in one go and summing parts of sums give the same doubles, bit for bit."""
    values, of = flat(lists)
    sums, offsets, rests = exact_sums(values, of, len(lists))
    parts = np.concatenate([sums, rests])

    again = exact_sums(parts, np.zeros(len(parts), np.int64), 1)
    at_once = exact_sums(values, np.zeros(len(values), np.int64), 1)

    assert [part.tolist() for part in at_once] == [part.tolist() for part in again]
    assert len(offsets) == len(lists) + 1


def test_infinities_add_up_as_they_should() -> None:
    """One sign gives that infinity, both give NaN, and what is beyond 2^960 counts as infinite."""
    cases = {(math.inf, 1.0): math.inf, (-BEYOND, 5.0): -math.inf, (BEYOND / 2, BEYOND / 4): BEYOND * 0.75}

    for values, wanted in cases.items():
        assert wanted == exact_sums(np.array(values), np.zeros(2, np.int64), 1)[0][0]
    assert np.isnan(exact_sums(np.array([BEYOND, -math.inf]), np.zeros(2, np.int64), 1)[0][0])


@given(value=st.floats(allow_nan=False))
@settings(max_examples=200, deadline=None)
def test_a_bucket_stands_for_its_values_within_one_percent(value: float) -> None:
    """The middle of a value's bucket is within 0.8 % of it, down to where doubles lose their own precision."""
    (bucket,) = buckets_of(np.array([value])).tolist()

    if math.isinf(value):
        assert (BUCKET_MAX if value > 0 else -BUCKET_MAX, value) == (bucket, middle(bucket))
    elif abs(value) >= 2.0**-1021:
        assert abs(middle(bucket) - value) <= abs(value) / 100
    else:
        assert abs(middle(bucket) - value) <= 2.0**-1021


@given(values=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=200), q=st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_a_quantile_is_within_one_percent_of_the_sample_of_its_rank(values: list[float], q: float) -> None:
    """What a sketch reports of a rank is the sample of that rank, within one percent."""
    row = merged(rows_of(np.zeros(len(values)), np.zeros(len(values), np.int64), values), 10)
    exact = sorted(values)[max(1, math.ceil(q * len(values))) - 1]

    reported = quantile(q, row.buckets, row.sketch_counts, row.leasts[0], row.greatests[0])

    assert abs(reported - exact) <= abs(exact) / 100 + 2.0**-1021


samples = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 500), st.sampled_from([-0.0, 0.5, math.nan, math.inf]) | st.floats()),
    min_size=1,
    max_size=60,
)


def rows(given: list[tuple[int, int, float]]) -> WindowRows:
    return rows_of(*(np.array(column) for column in zip(*given, strict=True)))


@given(given=samples, cuts=st.lists(st.integers(0, 60), max_size=4), shuffle=st.randoms())
@settings(max_examples=100, deadline=None)
def test_no_order_and_no_grouping_changes_a_window(
    given: list[tuple[int, int, float]], cuts: list[int], shuffle: Any
) -> None:
    """Rolled at once, or in any order, in any parts and through a smaller window: the same rows, bit for bit."""
    at_once = merged(rows(given), 100)

    mixed = list(given)
    shuffle.shuffle(mixed)
    edges = sorted({0, *(cut for cut in cuts if cut < len(mixed)), len(mixed)})
    parts = [merged(rows(mixed[a:b]), 20) for a, b in pairwise(edges)]
    in_steps = merged(joined(parts), 100)

    for name in WindowRows.__struct_fields__:
        expected, found = getattr(at_once, name), getattr(in_steps, name)
        assert np.array_equal(expected, found, equal_nan=expected.dtype == np.float64), name
        assert expected.tobytes() == found.tobytes() or np.isnan(expected).any(), name


def test_nan_is_counted_and_nothing_else() -> None:
    """NaN is in the counts and in nothing else; a window of NaN alone has no least, greatest or last."""
    row = merged(rows_of(np.zeros(3), np.array([1, 2, 3]), np.array([2.0, math.nan, 1.0])), 10)
    alone = merged(rows_of(np.zeros(1), np.array([5]), np.array([math.nan])), 10)

    assert (3, 1, 3.0, 1.0, 2.0, 3, 1.0) == tuple(
        column[0] for column in (row.counts, row.nans, row.sums, row.leasts, row.greatests, row.lasts_ns, row.lasts)
    )
    assert (1, 1, 0.0, -1) == tuple(column[0] for column in (alone.counts, alone.nans, alone.sums, alone.lasts_ns))
    assert np.isnan([alone.leasts[0], alone.greatests[0], alone.lasts[0]]).all()


def test_of_samples_with_one_time_the_greater_is_the_last() -> None:
    """A tie in time is broken by value, so that no order of arrival decides."""
    for values in ([1.0, 9.0, 4.0], [9.0, 4.0, 1.0], [4.0, 1.0, 9.0]):
        assert 9.0 == merged(rows_of(np.zeros(3), np.full(3, 7), np.array(values)), 10).lasts[0]


def test_windows_must_nest() -> None:
    """Windows that are not made of whole smaller ones, or do not fit an hour, are refused; so are odd quantiles."""
    assert (60, 300, 3600) == check_windows((3600, 60, 300))
    for wrong in ((), (7,), (60, 90), (0, 60), (3600, 5400)):
        with pytest.raises(Invalid):
            check_windows(wrong)
    for odd in ([1.5], [math.nan], [0.5] * 17):
        with pytest.raises(Invalid):
            check_quantiles(odd)
