"""The lane of a partition: appends take their turns in the order in which they came, whoever gives up."""

from __future__ import annotations

from log_host import TP

from lakebed.clock import settle
from lakebed.log.lane import Lane


async def test_who_leaves_before_their_turn_lets_nobody_overtake() -> None:
    """The second gives up while the first is at work: the third still waits for the first."""
    lane = Lane(TP)
    first, second, third = lane.ticket(), lane.ticket(), lane.ticket()

    second.leave()
    second.leave()
    await settle()
    assert (True, False) == (first.ready, third.ready)
    assert 3 == lane.waiting

    first.leave()
    await settle()
    assert third.ready
    assert 1 == lane.waiting
    third.leave()
    assert 0 == lane.waiting
