"""The lease under faults, crashes, pauses and clocks that differ."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from lakebed.sim.commands import play
from lakebed.sim.world import InvariantBroken, World
from lakebed.store import simulation as store
from lakebed.store.lease import Lease, LeaseRecord
from lakebed.store.simulation import lease
from support.seeds import seeds

SEEDS = 300
SEEDS_TO_CATCH = 100


@pytest.mark.parametrize("first", seeds(range(0, SEEDS, 100), quick=[0]))
def test_one_holder_at_a_time_and_a_fenced_one_never_writes(first: int) -> None:
    """No two believe they hold it, no term has two holders, no late write lands, and the lease is never stuck."""
    for seed in range(first, first + 100):
        assert not play("lease", seed).cut


def test_the_seeds_meet_what_the_world_is_about() -> None:
    """Crashes, stalls and many terms: the lease does change hands."""
    terms, verbs = 0, Counter[str]()
    for seed in range(100):
        world = World(seed, name="lease")
        world.run(lease)
        verbs.update(verb for _, _, _, verb, _, _ in world.trace)
        found = world.peek(store.LEASE_KEY)
        terms += msgspec.json.decode(found.data, type=LeaseRecord).term if found else 0

    assert terms >= 300
    assert verbs["crash"] >= 20 and verbs["pause"] >= 20


class Hasty(Lease):
    """Takes over as soon as its own clock reports it, as if clocks did not differ."""

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
