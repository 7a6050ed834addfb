"""The checker of histories: catches each kind of violation, and accepts what a correct system may do."""

from __future__ import annotations

import pytest

from support.histories import (
    AT_LEAST_ONCE,
    LOST,
    OUT_OF_ORDER,
    REFUSED,
    TWICE,
    TWO_VALUES,
    UNORDERED,
    Event,
    Handled,
    Seen,
    Write,
    check,
)


def kinds(*history: Event, shared: bool = False) -> list[str]:
    return [found.kind for found in check(history, shared=shared)]


GOOD: list[Event] = [
    Write("c1", "t/0", "a", "ok", 1),
    Write("c2", "t/0", "b", "unknown"),
    Write("c2", "t/0", "x", "unknown"),
    Write("c2", "t/0", "r", "fail"),
    Write("c1", "t/0", "c", "ok", 3),
    Seen("t/0", "a", 1, final=False),
    Seen("t/0", "a", 1),
    Seen("t/0", "b", 2),
    Seen("t/0", "c", 3),
    Handled("k1", "t/0", 1),
    Handled("k1", "t/0", 1),
    Handled("k2", "t/0", 2),
]


def test_a_good_history_has_no_violation() -> None:
    """Unknown writes may be there or not, readers may see a part, and one collector may repeat its own ack."""
    assert kinds(*GOOD) == []


def test_places_are_judged_apart() -> None:
    """One value and one position in two partitions is no violation."""
    assert (
        kinds(
            Write("c", "t/0", "a", "ok", 1),
            Write("c", "t/1", "a", "ok", 1),
            Seen("t/0", "a", 1),
            Seen("t/1", "a", 1),
            Handled("k1", "t/0", 1),
            Handled("k2", "t/1", 1),
        )
        == []
    )


@pytest.mark.parametrize(
    "read", [[], [Seen("t/0", "b", 2)], [Seen("t/0", "a", 1, final=False)]], ids=["nothing", "another", "only before"]
)
def test_an_acknowledged_write_that_the_final_read_lacks_is_lost(read: list[Event]) -> None:
    """Also when a reader saw it earlier: it was there, and is gone."""
    assert kinds(Write("c", "t/0", "a", "ok", 1), *read) == [LOST]


def test_a_value_at_two_positions_was_acknowledged_twice() -> None:
    """By the final read, or by what the client was answered against what is read."""
    write = Write("c", "t/0", "a", "ok", 1)
    assert kinds(write, Seen("t/0", "a", 1), Seen("t/0", "a", 2)) == [TWICE]
    assert kinds(write, Seen("t/0", "a", 2)) == [TWICE]
    assert kinds(Write("c", "t/0", "a", "unknown"), Seen("t/0", "a", 1), Seen("t/0", "a", 2)) == [TWICE]
    assert kinds(Write("c", "t/0", "a", "ok"), Seen("t/0", "a"), Seen("t/0", "a")) == [TWICE]


def test_a_client_that_repeats_plain_writes_is_not_promised_once() -> None:
    """Its value may stand twice, and must be there at all."""
    write = Write("c", "t/0", "a", "ok", 2, AT_LEAST_ONCE)
    assert kinds(write, Seen("t/0", "a", 1), Seen("t/0", "a", 2)) == []
    assert kinds(write) == [LOST]


def test_a_batch_that_two_collectors_acknowledged_is_found() -> None:
    """Only one of them may have been answered that its ack counts."""
    assert kinds(Handled("k1", "q", 7), Handled("k2", "q", 7)) == [TWICE]


@pytest.mark.parametrize(
    "reported",
    [
        [Write("c", "t/0", "a", "ok", 1), Write("d", "t/0", "b", "ok", 1), Seen("t/0", "a"), Seen("t/0", "b")],
        [Write("c", "t/0", "a", "ok", 1), Seen("t/0", "a"), Seen("t/0", "b", 1, final=False)],
        [Seen("t/0", "a", 1, final=False), Seen("t/0", "b", 1, final=False)],
    ],
    ids=["two writers", "a writer and a reader", "two readers"],
)
def test_two_values_at_one_position_are_found(reported: list[Event]) -> None:
    """Any of them: writers, readers, or one of each."""
    assert kinds(*reported) == [TWO_VALUES]


def test_values_that_share_a_position_are_no_violation_where_batches_are_read() -> None:
    """Entries of one batch of the queue all have its sequence."""
    reported = [Write("c", "q", "a", "ok", 1), Write("d", "q", "b", "ok", 1), Seen("q", "a", 1), Seen("q", "b", 1)]
    assert kinds(*reported, shared=True) == []


def test_positions_that_go_back_are_out_of_order() -> None:
    """One client's acknowledged writes, one after another."""
    reported = [Write("c", "t/0", "a", "ok", 2), Write("c", "t/0", "b", "ok", 1)]
    assert kinds(*reported, Seen("t/0", "b", 1), Seen("t/0", "a", 2)) == [OUT_OF_ORDER]


def test_a_final_read_in_another_order_is_out_of_order() -> None:
    """Also where writers get no positions."""
    reported = [Write("c", "t/0", "a", "ok"), Write("c", "t/0", "x", "unknown"), Write("c", "t/0", "b", "ok")]
    assert kinds(*reported, Seen("t/0", "b"), Seen("t/0", "a")) == [OUT_OF_ORDER]


def test_clients_are_not_ordered_against_each_other_nor_without_the_promise() -> None:
    """Two clients write at the same time; parallel collectors give order up."""
    seen = [Seen("t/0", "b", 1), Seen("t/0", "a", 2)]
    assert kinds(Write("c", "t/0", "a", "ok", 2), Write("d", "t/0", "b", "ok", 1), *seen) == []
    assert (
        kinds(
            Write("c", "t/0", "a", "ok", 2, UNORDERED),
            Write("c", "t/0", "b", "ok", 1, UNORDERED),
            *seen,
        )
        == []
    )


def test_a_refused_write_that_is_there_is_found() -> None:
    """A client that was answered "nothing was done" may have done it elsewhere since; a later ok of its own is fine."""
    assert kinds(Write("c", "t/0", "a", "fail"), Seen("t/0", "a", 1)) == [REFUSED]
    assert kinds(Write("c", "t/0", "a", "fail"), Write("c", "t/0", "a", "ok", 1), Seen("t/0", "a", 1)) == []
