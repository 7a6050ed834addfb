"""The lease under faults, crashes, pauses and clocks that differ."""

from __future__ import annotations

from typing import Any

import pytest

from lakebed.sim import store
from lakebed.sim.store import lease
from lakebed.sim.world import InvariantBroken, World
from lakebed.sim.worlds import play
from lakebed.store.lease import Lease

SEEDS = 300
SEEDS_TO_CATCH = 100


@pytest.mark.parametrize("first", range(0, SEEDS, 100))
def test_one_holder_at_a_time_and_a_fenced_one_never_writes(first: int) -> None:
    """No two believe they hold it, no term has two holders, no late write lands, and the lease is never stuck."""
    for seed in range(first, first + 100):
        assert not play("lease", seed).cut


class Hasty(Lease):
    """Takes over as soon as its own clock says so, as if clocks did not differ."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "skew_s": 0.0})


class Immortal(Lease):
    """Never lets a lease expire."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "skew_s": 1e9})


@pytest.mark.parametrize("kind", [Hasty, Immortal])
def test_a_broken_lease_is_caught(kind: type[Lease], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgetting that clocks differ, or that holders die, is seen within a small number of seeds."""
    monkeypatch.setattr(store, "Lease", kind)

    def caught(seed: int) -> bool:
        try:
            World(seed, name="lease").run(lease)
        except InvariantBroken:
            return True
        return False

    assert any(caught(seed) for seed in range(SEEDS_TO_CATCH))
