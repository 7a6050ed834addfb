"""The loops of the long-running processes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from lakebed.core.settings import load
from lakebed.wiring import processes
from lakebed.wiring.parts import sections

BLOCKED = 24  # jobs of silver, models, loads and upkeep, and the calls that keep their messages


def test_jobs_that_block_leave_a_worker_threads_for_its_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own default is as many threads as cores and four: a few models and loads would take them all, and the
    messages of a running job would not be hidden any more.
    """
    met = threading.Barrier(BLOCKED, timeout=20)

    async def work(*given: Any) -> None:
        await asyncio.gather(*(asyncio.to_thread(met.wait) for _ in range(BLOCKED)))

    monkeypatch.setattr(processes, "_work", work)
    processes.work(load(sections(), flags={"store.url": "memory:"}))

    assert not met.broken
