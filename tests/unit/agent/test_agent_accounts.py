"""What an agent accounts for: its queue, what it parked, and what its ledger says it gave up."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakebed.agent.accounts import Account, accounts
from lakebed.agent.batcher import make_frame
from lakebed.agent.keeper import Keeper
from lakebed.agent.spool import Spool, SpoolLimits
from lakebed.errors import NotFound
from lakebed.frame.model import Identity, Sample


def test_queued_and_dropped_numbers_are_accounted_for(tmp_path: Path) -> None:
    """Batches that wait, and those that a full queue and an owner gave up, name their numbers."""
    limits = SpoolLimits(bytes_max=10**6, batches_max=3, when_full="drop_oldest")
    spool = Spool.open(tmp_path / "queue", agent_id="a", boot_id="b", limits=limits, now_ms=lambda: 0)
    for n in range(5):
        spool.append([make_frame(Identity("a", "b", n * 10, n * 10 + 9), [Sample("m", 1, 1.0)] * 10)])
    spool.close()
    keeper = Keeper(tmp_path / "queue", lambda: 0)
    waiting = [each for each in accounts(tmp_path / "queue") if each.why == "queued"]
    (path,) = (tmp_path / "queue" / "boots").rglob(f"{20:020d}-*.lmbatch")
    keeper.drop(keeper.choose([path.name.split(".")[1]]), reason="test")

    found = accounts(tmp_path / "queue")

    assert [20, 30, 40] == sorted(each.first for each in waiting)
    assert Account("a", "b", 20, 29, "dropped") in found
    assert [(30, "queued"), (40, "queued")] == sorted((each.first, each.why) for each in found if each.why == "queued")
    covered = {number for each in found for number in range(each.first, each.last + 1)}
    assert covered == set(range(50))


def test_a_folder_that_is_no_queue_is_told(tmp_path: Path) -> None:
    """A wrong path is not taken for an agent that lost nothing."""
    with pytest.raises(NotFound, match="no agent queue"):
        accounts(tmp_path)
