"""Blockers and retry budgets: each place has its own, and each limit is where it is said to be."""

from __future__ import annotations

import pytest

from lakebed.core.errors import Invalid, NotFound
from lakebed.lifecycle import blockers
from lakebed.lifecycle.blockers import Failure
from lakebed.lifecycle.cluster import SHARDS
from lakebed.lifecycle.model import (
    Position,
    StreamKind,
    StreamResolution,
)
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.state import BlockerState, ReaderState, RetryBudget, Stream, scan_place
from support.lifecycle_harness import Harness

# Troubles.


def failure(stream: Stream, error: str = "e", cause: str = "TRANSPORT_ERROR", rule_hash: str = "") -> Failure:
    return Failure(stream, "b", "k", cause, error, rule_hash)


def blocked(*streams: Stream) -> BlockerState:
    known = BlockerState()
    for number, stream in enumerate(streams):
        known = blockers.block(known, [failure(stream, "e" * 900)], number + 1, reason="r")
    return known


def test_a_blocker_is_found_by_the_beginning_of_its_id_when_that_is_one() -> None:
    """None, several and an empty name are refused with the command that lists them."""
    known = blocked(*(Stream(StreamKind.ORIGINAL, n) for n in range(40)))
    some = next(iter(known.blockers))
    shared = next(a for a in "0123456789abcdef" if sum(name.startswith(a) for name in known.blockers) > 1)

    assert some == blockers.find(known, some[:10]).blocker_id
    for ident in ("", "zz", shared):
        with pytest.raises(NotFound) as caught:
            blockers.find(known, ident)
        assert "blockers list" in (caught.value.hint or "")
    assert 500 == len(known.blockers[some].last_error)


def test_a_stream_is_blocked_by_its_own_blockers_alone() -> None:
    """A delay group by shard and delay, the predicates by shard, a scan by bucket, a drain by bucket and action."""
    streams = [
        Stream(StreamKind.ORIGINAL, 5, Position(1)),
        Stream(StreamKind.ORIGINAL, 5, Position(1), shard=1),
        Stream(StreamKind.ORIGINAL, 6, Position(1)),
        Stream(StreamKind.PREDICATE, position=Position(9)),
        Stream(StreamKind.BOOTSTRAP, bucket="b", key="k"),
        Stream(StreamKind.BOOTSTRAP, bucket="c", key="k"),
        Stream(StreamKind.PENDING, bucket="b", action="h/K", key="k"),
        Stream(StreamKind.PENDING, bucket="b", action="h/L", key="k"),
        Stream(StreamKind.PENDING, bucket="c", action="h/K", key="k"),
    ]
    for stream in streams:
        known = blocked(stream)
        assert [stream] == [other for other in streams if blockers.blocks(known, other.lane)]


def test_only_the_last_decisions_to_give_up_are_kept_in_the_register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each says when, who, what and why; the position is skipped until its cursor has passed it."""
    monkeypatch.setattr(blockers, "QUARANTINED_MAX", 2)
    known = BlockerState()
    for number in range(3):
        stream = Stream(StreamKind.ORIGINAL, 5, Position(number))
        known = blockers.block(known, [failure(stream)], 1, reason="r")
        (ident,) = known.blockers
        known, _ = blockers.quarantine(known, ident, f"why{number}", "me", 40 + number)

    assert ("41 me ORIGINAL:5:1.-1 why1", "42 me ORIGINAL:5:2.-1 why2") == known.quarantined
    assert 3 == len(known.skips)
    cursors = {shard: ReaderState(originals={"5": Position(1)}) for shard in range(SHARDS)}
    assert ["ORIGINAL:5:2.-1"] == list(blockers.without_passed(known, cursors).skips)
    with pytest.raises(Invalid):
        blockers.quarantine(known, "x", "  ", "me", 1)


@pytest.mark.parametrize(
    ("stream", "skipped"),
    [
        (Stream(StreamKind.ORIGINAL, 5, Position(7)), True),
        (Stream(StreamKind.PREDICATE, position=Position(7)), True),
        (Stream(StreamKind.BOOTSTRAP, bucket="b", key="k"), False),
        (Stream(StreamKind.PENDING, bucket="b", action="h/K", key="k"), False),
    ],
    ids=lambda value: getattr(getattr(value, "kind", None), "value", str(value)),
)
def test_a_quarantined_position_of_either_sweep_is_skipped_until_its_cursor_passed_it(
    stream: Stream, skipped: bool
) -> None:
    """Otherwise the next sweep meets it again, and is blocked again. Scans and drains have places of their own."""
    known = blocked(stream)
    known, _ = blockers.quarantine(known, next(iter(known.blockers)), "known bad", "me", 1)
    behind, passed = (
        {shard: ReaderState(originals={"5": at}, predicate=at) for shard in range(SHARDS)}
        for at in (Position(6), Position(7))
    )

    assert ([stream.id] if skipped else []) == list(blockers.without_passed(known, behind).skips)
    assert [] == list(blockers.without_passed(known, passed).skips)


def retried(known: BlockerState, *failures: Failure, now_ns: int) -> tuple[BlockerState, set[StreamResolution]]:
    after, answers = blockers.recorded(known, failures, now_ns, blockers.Limits(3, 100))
    return after, set(answers.values())


def test_a_budget_is_that_of_the_stream_and_ends_by_count_or_by_age() -> None:
    """It counts tries at the same first position: a stream that moves on begins again. The promotion takes it away."""
    one, other = (Stream(StreamKind.PENDING, bucket="b", action="h/K", key=key) for key in "ab")
    known, answers = retried(BlockerState(), failure(one), failure(other), now_ns=10)
    known, answers = retried(known, failure(one), failure(other), now_ns=20)
    assert {StreamResolution.RETRY_LATER} == answers
    assert [RetryBudget(2, 10, 20, one.id)] == list(known.budgets.values())
    assert [RetryBudget(1, 30, 30, other.id)] == list(retried(known, failure(other), now_ns=30)[0].budgets.values())
    assert {} == blockers.cleared(known, [one]).budgets
    assert known is blockers.cleared(known, [other])

    after, answers = retried(known, failure(one, rule_hash="h"), failure(other), now_ns=30)
    (made,) = after.blockers.values()
    assert ({StreamResolution.BLOCKED}, {}, (one, other)) == (answers, after.budgets, made.items)
    assert (3, 10, 30, "h") == (made.retries, made.first_seen_ns, made.last_retry_ns, made.rule_hash)
    by_age, answers = retried(retried(BlockerState(), failure(one), now_ns=1)[0], failure(one), now_ns=101)
    assert ({StreamResolution.BLOCKED}, 1) == (answers, len(by_age.blockers))


def test_each_cause_has_a_blocker_of_its_own() -> None:
    """Blocking again keeps when it was first seen, and counts."""
    stream = Stream(StreamKind.ORIGINAL, 5, Position(7))
    known = blockers.block(BlockerState(), [failure(stream)], 1, reason="r")
    known = blockers.block(known, [failure(stream, "e2")], 9, reason="r")
    known = blockers.block(known, [failure(stream, cause="FATAL_EVENT_ERROR")], 9, reason="r")

    first, second = known.blockers.values()
    assert (1, 9, 2, "e2") == (first.first_seen_ns, first.last_retry_ns, first.retries, first.last_error)
    assert (1, "r: FATAL_EVENT_ERROR") == (second.retries, second.reason)


def test_places_of_streams_have_names_of_their_own() -> None:
    """No two places share a record."""
    streams = [
        Stream(StreamKind.ORIGINAL, 5, Position(7, 1)),
        Stream(StreamKind.ORIGINAL, 6, Position(7, 1)),
        Stream(StreamKind.ORIGINAL, 5, Position(7, 2)),
        Stream(StreamKind.PREDICATE, position=Position(7, 1)),
        Stream(StreamKind.BOOTSTRAP, bucket="b", key="k"),
        Stream(StreamKind.BOOTSTRAP, bucket="b", key="k", upload_id="u"),
        Stream(StreamKind.BOOTSTRAP, bucket="c", key="k"),
        Stream(StreamKind.PENDING, bucket="b", action="h/K", key="k"),
        Stream(StreamKind.PENDING, bucket="b", action="h/K", key="k", version_id="v"),
        Stream(StreamKind.PENDING, bucket="b", action="i/K", key="k"),
    ]
    assert len(streams) == len({stream.id for stream in streams}) == len({blockers.item_id(s) for s in streams})
    assert ("k", "u\x00k") == (scan_place("k", ""), scan_place("k", "u"))


async def test_blockers_come_in_the_order_in_which_they_were_first_seen() -> None:
    """A retry of the first does not send it to the end."""
    world = Harness()
    one, other = (Stream(StreamKind.ORIGINAL, number) for number in (1, 2))
    known = BlockerState()
    for stream, now_ns in ((other, 20), (one, 10), (one, 30)):
        known = blockers.block(known, [failure(stream)], now_ns, reason="r")
    await world.registers.blockers.change(lambda _: (known, None))

    assert [one, other] == [blocker.stream for blocker in await Operator(world.registers).blockers()]
