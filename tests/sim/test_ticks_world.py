"""Ticks under faults, stalls and crashes: committed once, answered alike, and in silver when the faults are over."""

from __future__ import annotations

from collections import Counter

import pytest

from lakebed.sim.commands import play
from lakebed.sim.world import InvariantBroken, World
from lakebed.ticks.fakes import FakeBronze
from lakebed.ticks.finalizer import Finalizer
from lakebed.ticks.model import BronzeTick
from lakebed.ticks.simulation import ticks

SEEDS = 40
FOUND = (1061, 2017)  # a project let go while it was taken; a heartbeat that was cut off


def test_every_tick_is_committed_once_and_reaches_silver() -> None:
    """Whatever fails or dies, on every seed."""
    for seed in (*range(SEEDS), *FOUND):
        assert not play("ticks", seed).cut


def test_the_seeds_meet_what_the_world_is_about() -> None:
    """Crashes, pauses, lost answers and lost races all happen."""
    met: Counter[str] = Counter()
    for seed in range(15):
        world = World(seed, name="ticks")
        world.run(ticks)
        met.update({verb for _, _, _, verb, _, _ in world.trace} | {out for *_, out in world.trace})

    assert min(met[what] for what in ("crash", "pause", "conflict", "done, lost")) >= 2


def test_a_finalizer_that_sends_no_message_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The world is no world in which nothing can go wrong: a known bug is found."""

    class Silent:
        async def send(self, message: object) -> str:
            return ""

    begin = Finalizer.__init__

    def forgetful(self: Finalizer, *args: object, **named: object) -> None:
        begin(self, *args, **named)  # type: ignore[arg-type]
        self._queue = Silent()  # type: ignore[assignment]

    monkeypatch.setattr(Finalizer, "__init__", forgetful)
    with pytest.raises(InvariantBroken):
        for seed in range(5):
            World(seed, name="ticks").run(ticks)


def test_a_bronze_that_is_not_idempotent_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting a repeat anew gives two answers to one tick, or rows that were never inserted."""
    commit = FakeBronze.commit

    async def forgetful(self: FakeBronze, tick: BronzeTick) -> object:
        done = await commit(self, tick)
        register = self.register(tick.org_id, tick.project_id)
        await register.change(lambda now: (type(now)(now.rows, now.versions, {}), None))
        return done

    monkeypatch.setattr(FakeBronze, "commit", forgetful)
    with pytest.raises(InvariantBroken):
        for seed in range(SEEDS):
            World(seed, name="ticks").run(ticks)
