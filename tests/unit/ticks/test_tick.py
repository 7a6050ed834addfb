"""The pure steps of a tick: what was checked is what is pinned."""

from __future__ import annotations

import pytest

from lakebed.core.errors import TooEarly
from lakebed.ticks import transitions as tick
from lakebed.ticks.model import StoredPart, TickState

ONE, TWO = StoredPart("a" * 64, 1, 0, "one"), StoredPart("b" * 64, 1, 0, "two")


@pytest.mark.parametrize("parts", [{}, {"1": ONE, "2": TWO}, {"1": TWO}])
def test_a_finalize_begins_only_on_the_parts_that_were_checked(parts: dict[str, StoredPart]) -> None:
    """A part was dropped, added or put anew while the finalize looked at them: it is requested again."""
    seen = TickState(tick_id="t", parts={"1": ONE})

    with pytest.raises(TooEarly):
        tick.begin(TickState(tick_id="t", parts=parts), seen, {"m": 1}, epoch=1, now_ms=5)

    begun, _ = tick.begin(seen, seen, {"m": 1}, epoch=3, now_ms=5)
    assert ("finalizing", {"m": 1}, 3, 5) == (begun.state, begun.manifest, begun.finalizing_epoch, begun.updated_at_ms)
