"""Bytes that changed on the agent's disk are never sent as what was stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakebed.agent.batcher import make_frame
from lakebed.agent.disk_queue import DiskQueue, QueueLimits
from lakebed.batches.model import BatchIdentity, Sample
from lakebed.core.errors import Corrupt


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer"])
def test_a_file_that_is_not_what_was_stored_is_corrupt(tmp_path: Path, damage: str) -> None:
    """One other bit in a file of the same size, too few bytes, or too many."""
    limits = QueueLimits(bytes_max=10**6, batches_max=10)
    disk_queue = DiskQueue.open(tmp_path / "q", agent_id="a", boot_id="b", limits=limits, now_ms=lambda: 0)
    frame = make_frame(BatchIdentity("a", "b", 0, 0), [Sample("m", 1, 1.0)])
    (entry,) = disk_queue.append([frame]).stored
    sound = disk_queue.read(entry)
    (file,) = (tmp_path / "q").rglob("*.lmbatch")
    changed = {"flipped": bytes([sound[0] ^ 1]) + sound[1:], "cut": sound[:-1], "longer": sound + b"x"}
    file.write_bytes(changed[damage])

    with pytest.raises(Corrupt):
        disk_queue.read(entry)

    assert frame.data == sound
    disk_queue.close()
