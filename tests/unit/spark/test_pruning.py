"""Filters become bounds, pieces become tasks, steps never pass their target: all without Spark running."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import EqualTo, GreaterThan, In, IsNotNull, LessThanOrEqual, Not, StringContains
from pyspark.sql.types import StructType

from lakebed.core.feed import FeedFilter, FeedSlice, Limit, Offset, within
from lakebed.spark import sources
from lakebed.spark.pruning import capped, shared_out, wanted_by
from lakebed.spark.sources import SourceStreamReader, TopicSource


def test_filters_become_bounds_and_the_rest_is_left_to_spark() -> None:
    """Comparisons and sets bound a column; negations, nulls and parts of strings bound nothing."""
    found = wanted_by(
        [
            GreaterThan(("seq",), 3),
            GreaterThan(("seq",), 7),
            LessThanOrEqual(("seq",), 9),
            In(("agent_id",), ("b", "a")),
            EqualTo(("agent_id",), "a"),
            Not(EqualTo(("boot_id",), "x")),
            IsNotNull(("metric",)),
            StringContains(("metric",), "cpu"),
            EqualTo(("labels", "host"), "h"),
        ]
    )

    assert found == FeedFilter({"seq": 7, "agent_id": "a"}, {"seq": 9, "agent_id": "a"}, {"agent_id": frozenset({"a"})})
    assert found.takes("agent_id", "a")
    assert not found.takes("agent_id", "b")
    assert found.may_hold("seq", 0, 7)
    assert not found.may_hold("seq", 0, 6)


def test_a_set_bounds_its_column_by_its_least_and_its_greatest_value() -> None:
    """Whatever else holds, no value of the set that may be meant is left out; nulls are none."""
    found = wanted_by(
        [
            In(("seq",), (5, 1, None, 9)),
            In(("offset",), (1, 5, 9)),
            GreaterThan(("offset",), 3),
            LessThanOrEqual(("offset",), 7),
            In(("sequence",), (1, 5, 9)),
            In(("sequence",), (5, 9, 12)),
        ]
    )

    assert {"seq": 1, "offset": 3, "sequence": 5} == found.low
    assert {"seq": 9, "offset": 7, "sequence": 9} == found.high
    assert [1, 5, 9] == [seq for seq in range(20) if found.takes("seq", seq)]
    assert [5] == [offset for offset in range(20) if found.takes("offset", offset)]
    assert [5, 9] == [sequence for sequence in range(20) if found.takes("sequence", sequence)]


@given(st.lists(st.integers(0, 5000), max_size=300), st.integers(0, 40))
def test_every_piece_is_in_exactly_one_task_in_order(sizes: list[int], tasks: int) -> None:
    """Sharing out loses nothing, doubles nothing and keeps neighbours together; no task is empty."""
    pieces = [FeedSlice(str(n), size_bytes=size) for n, size in enumerate(sizes)]

    groups = shared_out(pieces, tasks)

    assert pieces == [piece for group in groups for piece in group]
    assert all(groups)
    assert len(groups) == min(len(pieces), tasks or len(groups))


def test_tasks_get_about_the_same_bytes() -> None:
    """One large object among small ones does not drag its neighbours along."""
    pieces = [FeedSlice(str(n), size_bytes=100 if n == 0 else 10) for n in range(21)]

    groups = shared_out(pieces, 3)

    assert [1, 10, 10] == [len(group) for group in groups]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=50), st.integers(0, 20), st.integers(0, 300))
def test_a_limit_takes_as_much_as_fits_and_at_least_one(rows: list[int], objects: int, most: int) -> None:
    """Nothing beyond the limit is taken, and nothing that would fit is left, except that one object always is taken."""
    pieces = [FeedSlice(str(n), rows=count) for n, count in enumerate(rows)]

    taken = within(pieces, Limit(objects=objects, rows=most))

    assert taken == pieces[: len(taken)]
    assert taken
    total = sum(piece.rows for piece in taken)
    assert len(taken) == 1 or ((not objects or len(taken) <= objects) and (not most or total <= most))
    if len(taken) < len(pieces):
        following = pieces[len(taken)]
        assert (objects and len(taken) + 1 > objects) or (most and total + following.rows > most)


def test_a_step_never_passes_its_target_nor_goes_back() -> None:
    """What came after the target is left for the next query, partitions that appeared since included."""
    start, reached, target = {"0": 5, "1": 9}, {"0": 12, "1": 9, "2": 4}, {"0": 8, "1": 7}

    assert {"0": 8, "1": 9} == capped(start, reached, target)
    assert {"0": 8, "1": 9} == capped({"0": 8, "1": 9}, {"0": 20, "1": 30, "2": 4}, target)


class GrowingFeed:
    """Partitions with so many rows, of which a step takes as many of each as its limit says."""

    def __init__(self, **ends: int) -> None:
        self.ends = ends

    async def begin(self) -> Offset:
        return dict.fromkeys(self.ends, 0)

    async def reach(self, start: Offset, limit: Limit) -> Offset:
        return {name: min(end, start.get(name, 0) + (limit.rows or end)) for name, end in self.ends.items()}


def test_a_stream_of_what_is_there_ends_though_more_comes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps keep the limit up to where the source ended when it began; a stream without an end goes on."""
    feed = GrowingFeed(a=9, b=2)
    monkeypatch.setattr(sources, "open_feed", lambda name, where, options: feed)
    ending, endless = (SourceStreamReader(TopicSource({"topic": "t", "max_rows": "4"}), StructType()) for _ in range(2))
    limit, at = ending.getDefaultReadLimit(), ending.initialOffset()
    ending.prepareForTriggerAvailableNow()
    feed.ends |= {"a": 20, "new": 3}

    steps = []
    while (reached := ending.latestOffset(at, limit)) != at:
        steps.append(at := reached)

    assert [{"a": 4, "b": 2}, {"a": 8, "b": 2}, {"a": 9, "b": 2}] == steps
    assert {"a": 13, "b": 2, "new": 3} == endless.latestOffset(at, limit)
