"""Blockers and retry budgets: each place has its own, and each limit is where it is said to be."""

from __future__ import annotations

import pytest

from lakebed.core.errors import Invalid, NotFound
from lakebed.lifecycle import blockers
from lakebed.lifecycle.model import (
    Position,
    StreamKind,
    StreamResolution,
)
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.state import BlockerState, RetryBudget, Stream, scan_place
from support.lifecycle_harness import DAY_S, Harness

SECOND_NS = 10**9
DAY_NS = round(DAY_S * SECOND_NS)
LONG_NS = 86_400 * SECOND_NS


# Troubles.


def blocked(*streams: Stream) -> BlockerState:
    known = BlockerState()
    for number, stream in enumerate(streams):
        known = blockers.block(known, stream, bucket="b", key="k", now_ns=number + 1, reason="r", error="e" * 900)
    return known


def test_a_blocker_is_found_by_the_beginning_of_its_id_when_that_is_one() -> None:
    """None, several and an empty name are refused with the command that lists them."""
    known = blocked(*(Stream(StreamKind.ORIGINAL, 5, Position(n)) for n in range(40)))
    some = next(iter(known.blockers))
    shared = next(a for a in "0123456789abcdef" if sum(name.startswith(a) for name in known.blockers) > 1)

    assert some == blockers.find(known, some[:10]).blocker_id
    for ident in ("", "zz", shared):
        with pytest.raises(NotFound) as caught:
            blockers.find(known, ident)
        assert "blockers list" in (caught.value.hint or "")
    assert 500 == len(known.blockers[some].last_error)


def test_a_stream_is_blocked_by_its_own_blockers_alone() -> None:
    """A delay group by its delay, the predicates as a whole, a walk by its bucket, a drain by bucket and action."""
    known = blocked(
        Stream(StreamKind.ORIGINAL, 5, Position(1)),
        Stream(StreamKind.BOOTSTRAP, bucket="b", key="k"),
        Stream(StreamKind.PENDING, bucket="b", action="h/K", key="k"),
    )
    asked = [
        (StreamKind.ORIGINAL, {"delay_ns": 5}),
        (StreamKind.ORIGINAL, {"delay_ns": 6}),
        (StreamKind.PREDICATE, {}),
        (StreamKind.BOOTSTRAP, {"bucket": "b"}),
        (StreamKind.BOOTSTRAP, {"bucket": "c"}),
        (StreamKind.PENDING, {"bucket": "b", "action": "h/K"}),
        (StreamKind.PENDING, {"bucket": "b", "action": "h/L"}),
        (StreamKind.PENDING, {"bucket": "c", "action": "h/K"}),
    ]
    found = [blockers.blocks(known, kind, **said) for kind, said in asked]  # type: ignore[arg-type]

    assert [True, False, False, True, False, True, False, False] == found
    predicate = blocked(Stream(StreamKind.PREDICATE, position=Position(9)))
    assert blockers.blocks(predicate, StreamKind.PREDICATE)


def test_only_the_last_decisions_to_give_up_are_kept_in_the_register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each says when, who, what and why."""
    monkeypatch.setattr(blockers, "QUARANTINED_MAX", 2)
    known = BlockerState()
    for number in range(3):
        stream = Stream(StreamKind.ORIGINAL, 5, Position(number))
        known = blockers.block(known, stream, bucket="b", key="k", now_ns=1, reason="r", error="e")
        known, _ = blockers.quarantine(known, blockers.blocker_id(stream), f"why{number}", "me", 40 + number)

    assert ("41 me ORIGINAL:5:1.-1 why1", "42 me ORIGINAL:5:2.-1 why2") == known.quarantined
    with pytest.raises(Invalid):
        blockers.quarantine(known, "x", "  ", "me", 1)


def test_a_budget_remembers_its_first_try_and_a_success_clears_it_alone() -> None:
    """The blocker that grows from it keeps the instant and the count; the ends of the budget are exclusive."""
    one, other = (Stream(StreamKind.PENDING, bucket="b", action="h/K", key=key) for key in "ab")
    known = BlockerState()
    for stream, now_ns in ((one, 10), (one, 20), (other, 20)):
        known, answer = blockers.record_retry(
            known, stream, bucket="b", key="k", now_ns=now_ns, error="e", retries_max=3, age_max_ns=100
        )
        assert StreamResolution.RETRY_LATER is answer
    assert RetryBudget(2, 10, 20) == known.budgets[one.id]
    assert [other.id] == list(blockers.clear_budget(known, one).budgets)
    same = BlockerState()
    assert same is blockers.clear_budget(same, one)
    after, answer = blockers.record_retry(
        known, one, bucket="b", key="k", now_ns=30, error="e", rule_hash="h", retries_max=3, age_max_ns=100
    )
    (made,) = after.blockers.values()
    assert (StreamResolution.BLOCKED, 3, 10, 30, "h") == (
        answer,
        made.retries,
        made.first_seen_ns,
        made.last_retry_ns,
        made.rule_hash,
    )
    assert [other.id] == list(after.budgets)


def test_places_of_streams_have_names_of_their_own() -> None:
    """No two places share a blocker or a budget."""
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
    assert len(streams) == len({stream.id for stream in streams}) == len({blockers.blocker_id(s) for s in streams})
    assert ("k", "u\x00k") == (scan_place("k", ""), scan_place("k", "u"))


async def test_blockers_come_in_the_order_in_which_they_were_first_seen() -> None:
    """A retry of the first does not send it to the end."""
    world = Harness()
    one, other = (Stream(StreamKind.ORIGINAL, 5, Position(number)) for number in (1, 2))
    known = BlockerState()
    for stream, now_ns in ((other, 20), (one, 10), (one, 30)):
        known = blockers.block(known, stream, bucket="b", key="k", now_ns=now_ns, reason="r", error="e")
    await world.registers.blockers.change(lambda _: (known, None))

    assert [one, other] == [blocker.stream for blocker in await Operator(world.registers).blockers()]
