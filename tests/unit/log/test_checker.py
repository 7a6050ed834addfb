"""The history checker: silent on correct histories, and loud on each anomaly."""

from __future__ import annotations

import pytest

from lakebed.log.checker import Operation, Poll, Send, check

GOOD: list[Operation] = [
    Send("c1", "p", "a", "ok", 1),
    Send("c2", "p", "b", "ok", 2),
    Send("c1", "p", "c", "info"),
    Send("c1", "p", "d", "fail"),
    Send("c1", "p", "e", "ok", 4),
    Poll("r", "p", [(1, "a"), (2, "b")]),
    Poll("r", "p", [(3, "c"), (4, "e")]),
    Poll("r", "p", [(2, "b")], seek=True),
    Poll("last", "p", [(1, "a"), (2, "b"), (3, "c"), (4, "e")], final=True),
]


def test_a_correct_history_has_no_anomaly() -> None:
    """Unknown sends may appear, refused ones do not, seeks go back."""
    assert check(GOOD) == []
    assert (
        check([operation for operation in GOOD if not (isinstance(operation, Send) and operation.record == "c")]) == []
    )


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("lost write", [*GOOD, Send("c3", "p", "f", "ok", 3)]),
        ("lost write", [*GOOD, Send("c3", "p", "f", "ok", 4)]),
        ("inconsistent offsets", [*GOOD, Poll("x", "p", [(2, "z")])]),
        ("duplicate", [*GOOD, Poll("x", "p", [(9, "a")])]),
        ("aborted read", [*GOOD, Poll("x", "p", [(5, "d")])]),
        ("reorder", [Send("c1", "p", "a", "ok", 2), Send("c1", "p", "b", "ok", 1)]),
        ("nonmonotonic poll", [*GOOD, Poll("r", "p", [(1, "a")])]),
        ("nonmonotonic poll", [*GOOD, Poll("x", "p", [(2, "b"), (1, "a")])]),
        ("skipped", [*GOOD, Poll("x", "p", [(1, "a"), (4, "e")])]),
        ("skipped", [*GOOD, Poll("x", "p", [(1, "a"), (3, "c")])]),
        ("unseen", [*GOOD, Send("c2", "p", "g", "ok", 5)]),
    ],
)
def test_every_anomaly_is_named(kind: str, wrong: list[Operation]) -> None:
    """A history with one thing wrong is refused, and reports what."""
    assert kind in [anomaly.kind for anomaly in check(wrong)]


def test_partitions_are_judged_apart() -> None:
    """The same offset in two partitions is no conflict."""
    assert check([Send("c", "p", "a", "ok", 1), Send("c", "q", "b", "ok", 1)]) == []
