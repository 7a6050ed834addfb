"""Record batches for Spark: joined, cast, filled with nulls, and what becomes of pieces that cannot be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from lakebed.core.errors import Corrupt, Invalid
from lakebed.core.feed import FeedFilter, FeedSlice, Limit
from lakebed.spark import feeds
from lakebed.spark.feeds import FEEDS, open_feed
from lakebed.spark.options import read_options
from lakebed.spark.pruning import PIECES_PER_TASK, TASKS_MAX, TASKS_MIN, capped, shared_out

SCHEMA = pa.schema([("id", pa.int64()), ("note", pa.string())])
KEPT = pa.schema([*SCHEMA, (feeds.KEY, pa.string()), (feeds.PROBLEM, pa.string())])


class FakeFeed:
    def __init__(self, **answers: Any) -> None:
        self.answers, self.columns = answers, list[tuple[str, ...]]()

    async def load(self, piece: FeedSlice, columns: Sequence[str], wanted: FeedFilter) -> Any:
        self.columns.append(tuple(columns))
        answer = self.answers[piece.key]
        if isinstance(answer, Exception):
            raise answer
        return answer


def batch(*ids: int) -> Any:
    return pa.RecordBatch.from_pydict({"id": pa.array(ids, pa.int32())})


def read(feed: FakeFeed, schema: Any = SCHEMA, unreadable: Any = "fail") -> list[Any]:
    made: Any = feed
    return list(feeds.batches(made, [FeedSlice(key) for key in feed.answers], schema, FeedFilter(), unreadable))


def test_small_pieces_are_joined_and_fitted_to_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types are cast, missing columns are null, empty pieces add nothing; a batch ends once it is large enough."""
    monkeypatch.setattr(feeds, "ROWS_TOGETHER", 3)
    feed = FakeFeed(a=batch(1), b=None, c=batch(), d=batch(2, 3), e=batch(4))

    found = read(feed)

    assert [[1, 2, 3], [4]] == [each.column("id").to_pylist() for each in found]
    assert all(each.schema == SCHEMA and each.column("note").null_count == each.num_rows for each in found)
    assert {("id", "note")} == set(feed.columns)


def test_an_unreadable_piece_fails_is_skipped_or_kept() -> None:
    """Kept, it is a row of its own with its key and problem; those columns are never queried of the feed."""
    answers = {"a": batch(1), "b": Corrupt("broken"), "c": batch(2)}

    with pytest.raises(Corrupt, match=r"b: corrupt: broken .*unreadable=skip"):
        read(FakeFeed(**answers))
    (skipped,) = read(FakeFeed(**answers), unreadable="skip")
    feed = FakeFeed(**answers)
    (kept,) = read(feed, KEPT, "keep")

    assert [1, 2] == skipped.column("id").to_pylist()
    assert [(1, None, None), (None, "b", "corrupt: broken"), (2, None, None)] == list(
        zip(*(kept.column(name).to_pylist() for name in ("id", feeds.KEY, feeds.PROBLEM)), strict=True)
    )
    assert {("id", "note")} == set(feed.columns)


def test_pieces_are_shared_out_in_order_by_their_bytes() -> None:
    """Neighbours stay together, no task is empty, none is lost; unknown sizes count alike."""
    heavy = [FeedSlice(f"k{n}", size_bytes=size) for n, size in enumerate((1, 1, 1, 1, 96))]
    alike = [FeedSlice(f"k{n}") for n in range(6)]

    assert [] == shared_out([], 3)
    assert [4, 1] == [len(group) for group in shared_out(heavy, 2)]
    assert [2, 2, 2] == [len(group) for group in shared_out(alike, 3)]
    assert [1] * 6 == [len(group) for group in shared_out(alike, 99)]
    assert alike == [piece for group in shared_out(alike, 4) for piece in group]


@pytest.mark.parametrize(
    ("count", "tasks"),
    [
        (3, 3),
        (TASKS_MIN, TASKS_MIN),
        (TASKS_MIN * PIECES_PER_TASK, TASKS_MIN),
        (TASKS_MIN * PIECES_PER_TASK + 1, TASKS_MIN + 1),
    ],
)
def test_a_read_has_as_many_tasks_as_its_pieces_need(count: int, tasks: int) -> None:
    """At least eight where there are so many pieces, then one for every 64."""
    assert tasks == len(shared_out([FeedSlice(f"k{n}") for n in range(count)]))
    assert (64, 8, 10_000) == (PIECES_PER_TASK, TASKS_MIN, TASKS_MAX)


@pytest.mark.parametrize(
    ("start", "reached", "target", "expected"),
    [
        ({"a": 1}, {"a": 9}, {"a": 5}, {"a": 5}),
        ({"a": 1}, {"a": 3}, {"a": 5}, {"a": 3}),
        ({"a": 7}, {"a": 9}, {"a": 5}, {"a": 7}),
        ({"a": 1}, {"a": 3, "new": 4}, {"a": 5}, {"a": 3}),
        ({}, {"a": 3}, {"a": 5}, {"a": 3}),
        ({"a": 2}, {"a": 3}, {}, {"a": 2}),
    ],
)
def test_a_step_neither_passes_its_target_nor_goes_back(start: Any, reached: Any, target: Any, expected: Any) -> None:
    """What the target does not know came after it."""
    assert expected == capped(start, reached, target)


def test_options_are_read_whatever_their_case() -> None:
    """Every option reaches its field; settings may be given in place."""
    found = read_options(
        {
            "Start": "1", "COLUMNS": " a, b,,", "max_objects": "1", "max_rows": "2", "max_bytes": "3",
            "unreadable": "keep", "tasks": "4", "config": "c.toml", "dir": "d", "store.url": "s3://x", "path": "p",
        },
        ("start", "end"),
    )  # fmt: skip

    assert ({"start": "1"}, ("a", "b"), Limit(1, 2, 3), "keep", 4) == (
        found.own, found.columns, found.limit, found.unreadable, found.tasks,
    )  # fmt: skip
    assert ("c.toml", "d", {"store.url": "s3://x"}) == (str(found.config), str(found.dir), found.flags)
    plain = read_options({}, ())
    assert ({}, (), Limit(), "fail", 0, None, None, {}) == (
        plain.own, plain.columns, plain.limit, plain.unreadable, plain.tasks, plain.config, plain.dir, plain.flags,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{"topic": "x"}, {"tasks": "-1"}, {"max_rows": "many"}, {"unreadable": "drop"}, {"store.secret_access_key": "x"},
     {"password": "x"}, {"api_token": "x"}, {"Password": "x"}, {"STORE.SECRET": "x"}, {"store.access_key_id": "x"}],
)  # fmt: skip
def test_options_that_are_wrong_or_secret_are_refused(options: dict[str, str]) -> None:
    """The option is named."""
    with pytest.raises(Invalid, match=next(iter(options)).lower()):
        read_options(options, ("start",))


def test_a_source_that_is_not_there_is_named_with_those_that_are() -> None:
    """No part is loaded for it."""
    where: Any = None
    with pytest.raises(Invalid, match=r"lakebed\.nothing") as caught:
        open_feed("lakebed.nothing", where, {})

    assert all(name in (caught.value.hint or "") for name in FEEDS)
