"""One store, used from many event loops one after another, as jobs do that run to their end."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path

from lakebed.store.connect import connect
from lakebed.store.settings import StoreSettings
from support.runtimes import runtime_of


def open_files() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_loops_that_have_ended_leave_no_connections(bucket_settings: StoreSettings) -> None:
    """Every loop writes over connections of its own, and they close with it."""
    store = connect(bucket_settings, runtime_of())
    asyncio.run(store.create("first", b"x"))
    before = open_files()

    for number in range(20):
        asyncio.run(store.create(f"n/{number}", b"x"))

    deadline = time.monotonic() + 60
    while (now := open_files()) > before + 1:
        assert time.monotonic() < deadline, f"{now} files are open, {before} were"
        time.sleep(0.05)
