"""Processes that start at once on a fresh bucket."""

from __future__ import annotations

import pytest

from lakebed.sim.commands import play
from lakebed.sim.world import InvariantBroken, World
from lakebed.store import simulation as store
from lakebed.store.authority import Authority
from lakebed.store.runtime import StoreRuntime
from lakebed.store.simulation import boot


def test_all_agree_on_the_authority_and_a_good_store_is_proven() -> None:
    """However they race, fail and die, nobody believes in another authority, and the prover refuses no good store."""
    for seed in range(150):
        assert not play("boot", seed).cut


def test_a_claim_that_creates_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that each believe their own id are seen at once."""

    async def believe(runtime: StoreRuntime, *, expected: str) -> Authority:
        return Authority("lakebed.authority.v1", runtime.ids.uuid(), 0)

    monkeypatch.setattr(store, "claim", believe)

    with pytest.raises(InvariantBroken, match="two authorities"):
        World(1, name="boot").run(boot)
