"""The agent's outbox on disk: a tick that was put survives a power failure, whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lakebed.ticks.outbox import Outbox, OutboxTick
from lakebed.ticks.packing import PackedTick


def test_a_tick_is_synced_before_it_has_its_name_and_its_name_before_put_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First its bytes, under another name, then the folder that names it; a removal is synced too."""
    synced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"
        synced.append((kind, outbox.has("t-1")))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    outbox = Outbox(tmp_path / "out")

    outbox.put(OutboxTick(PackedTick("t-1", "p", "", {})))
    put = list(synced)
    synced.clear()
    outbox.remove("t-1")

    assert [("file", False), ("folder", True)] == put
    assert [("folder", False)] == synced
