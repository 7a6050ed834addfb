"""The agent under kills and failing collectors, by seeds; and agents with bugs that the world must catch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from lakebed.agent import sender as sender_module
from lakebed.agent import simulation as world_module
from lakebed.agent.disk_queue import DiskQueue
from lakebed.agent.model import QueuedBatch
from lakebed.agent.simulation import agent
from lakebed.agent.verdict import CollectorResponse, SendOutcome, SendVerdict, judge
from lakebed.sim.commands import play
from lakebed.sim.world import InvariantBroken, World

SEEDS = 60
SEEDS_TO_CATCH = 60


def test_nothing_promised_is_lost_doubled_or_given_up() -> None:
    """Kills, lost answers, refusals and conflicts: each promised sample is accepted once or is on the disk."""
    for seed in range(SEEDS):
        assert not play("agent", seed).cut


def test_the_same_seed_is_the_same_world() -> None:
    """A failure can be seen again."""
    assert play("agent", 5).digest == play("agent", 5).digest


def test_the_seeds_meet_what_the_world_is_about() -> None:
    """Kills with batches on disk, answers lost after acceptance, and conflicts do happen."""
    seen: Counter[str] = Counter()
    for seed in range(25):
        world = World(seed, name="agent")
        world.run(agent)
        seen.update(verb for _, _, _, verb, _, _ in world.trace)
        seen.update(outcome for _, _, _, _, _, outcome in world.trace)

    assert seen["crash"] >= 40
    assert seen["lost, ours stand"] >= 15
    assert seen["fine, other bytes stand"] >= 3


def trusting(answer: CollectorResponse, *, frame_sha256: str, now_s: float) -> SendVerdict:
    """Deletes on any 200."""
    return (
        SendVerdict(SendOutcome.ACCEPTED)
        if answer.status == 200
        else judge(answer, frame_sha256=frame_sha256, now_s=now_s)
    )


def careless(answer: CollectorResponse, *, frame_sha256: str, now_s: float) -> SendVerdict:
    """Takes a conflict for a duplicate."""
    return (
        SendVerdict(SendOutcome.DUPLICATE)
        if answer.status == 409
        else judge(answer, frame_sha256=frame_sha256, now_s=now_s)
    )


@pytest.mark.parametrize("broken", [trusting, careless])
def test_a_sender_that_deletes_too_easily_is_caught(
    broken: Callable[..., SendVerdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The world sees a batch deleted on a stranger's 200, and a conflict that made the agent lose its copy."""
    monkeypatch.setattr(sender_module, "judge", broken)

    with pytest.raises(InvariantBroken):
        for seed in range(SEEDS_TO_CATCH):
            play("agent", seed)


class Forgetful(DiskQueue):
    """Deletes a batch when it is read for sending."""

    def read(self, entry: QueuedBatch) -> bytes:
        data = super().read(entry)
        self.complete(entry)
        return data


def test_a_queue_that_deletes_before_the_answer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleting before the 200 loses what was under way at a kill."""
    monkeypatch.setattr(world_module, "DiskQueue", Forgetful)

    with pytest.raises(InvariantBroken):
        for seed in range(SEEDS_TO_CATCH):
            play("agent", seed)
