"""What an agent accounts for: its queue, what it parked, and what its ledger reports it gave up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lakebed.agent.batcher import make_frame
from lakebed.agent.codec import Account, accounts
from lakebed.agent.disk_queue import DiskQueue, QueueLimits
from lakebed.agent.inspector import QueueInspector
from lakebed.batches.model import BatchIdentity, Sample
from lakebed.core.errors import NotFound


def test_queued_and_dropped_numbers_are_accounted_for(tmp_path: Path) -> None:
    """Batches that wait, and those that a full queue and an owner gave up, name their numbers."""
    limits = QueueLimits(bytes_max=10**6, batches_max=3, when_full="drop_oldest")
    disk_queue = DiskQueue.open(tmp_path / "queue", agent_id="a", boot_id="b", limits=limits, now_ms=lambda: 0)
    for n in range(5):
        disk_queue.append([make_frame(BatchIdentity("a", "b", n * 10, n * 10 + 9), [Sample("m", 1, 1.0)] * 10)])
    disk_queue.close()
    inspector_ = QueueInspector(tmp_path / "queue", lambda: 0)
    waiting = [each for each in accounts(tmp_path / "queue") if each.why == "queued"]
    (path,) = (tmp_path / "queue" / "boots").rglob(f"{20:020d}-*.lmbatch")
    inspector_.drop(inspector_.select([path.name.split(".")[1]]), reason="test")

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


def test_the_owner_sees_waiting_batches_oldest_first_up_to_a_limit_over_all_boots(tmp_path: Path) -> None:
    """The limit is of all boots together; a boot's age is that of its first batch, and not of its last."""
    limits = QueueLimits(bytes_max=10**6, batches_max=100, when_full="block")
    folder = tmp_path / "queue"
    for boot in ("one", "two"):
        disk_queue = DiskQueue.open(folder, agent_id="a", boot_id=boot, limits=limits, now_ms=lambda: 0)
        for n in range(3):
            disk_queue.append([make_frame(BatchIdentity("a", boot, n * 10, n * 10 + 9), [Sample("m", 1, 1.0)] * 10)])
        disk_queue.close()
    for path in (folder / "boots").rglob("*.lmbatch"):
        at_s = 1000 + int(path.name.split("-")[0])
        os.utime(path, (at_s, at_s))
    inspector_ = QueueInspector(folder, lambda: 0)

    found = [[(each.boot_id, each.seq_start) for each in inspector_.queued(limit)] for limit in (2, 4, 100)]
    rows = inspector_.boots()

    assert [("one", 0), ("one", 10)] == found[0]
    assert [("one", 0), ("one", 10), ("one", 20), ("two", 0)] == found[1]
    assert 6 == len(found[2])
    assert [(3, 30, 0, 29, 1_000_000)] * 2 == [
        (row.batches, row.samples, row.seq_start, row.seq_end, row.oldest_at_ms) for row in rows
    ]
