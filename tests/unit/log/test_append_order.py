"""The lane of a partition: appends take their turns in the order in which they came, no matter who gives up."""

from __future__ import annotations

from lakebed.core.clock import settle
from lakebed.log.commit import Sequencer
from support.log_host import TP


async def test_who_leaves_before_their_turn_lets_nobody_overtake() -> None:
    """The second gives up while the first is at work: the third still waits for the first."""
    sequencer = Sequencer(TP)
    first, second, third = sequencer.ticket(), sequencer.ticket(), sequencer.ticket()

    second.leave()
    second.leave()
    await settle()
    assert (True, False) == (first.ready, third.ready)
    assert 3 == sequencer.waiting

    first.leave()
    await settle()
    assert third.ready
    assert 1 == sequencer.waiting
    third.leave()
    assert 0 == sequencer.waiting
