"""Makes a filer write the changes it holds in memory."""

from __future__ import annotations

import asyncio

from lakebed.core.clock import Clock
from lakebed.core.errors import LakebedError
from lakebed.filer.client import FilerClient

LOG = "/topics/.system/log"  # a folder for each day, a file for each minute and filer
SCRATCH = "/lakebed"
BALLAST_BYTES = 9 * 1024 * 1024  # the buffer has 8 MiB
FLUSH_S = 5.0  # all of it; it takes less than one
FLUSH_CHECK_S = 0.05


async def flush(filer: FilerClient, clock: Clock) -> bool:
    """Makes the filer write the changes it holds in memory. Otherwise it writes each minute, and at a shutdown (15 s).

    It also writes its buffer when a change does not fit. So one change is made that never fits: an entry of a few bytes
    with a list of a few million signatures, which the filer passes on and does not store.

    True when the newest chunk of the log on disk is younger than that change, so every earlier change is on disk. False
    when that is not seen in time, or the filer fails. Nothing is raised: the caller then shuts the filer down in order.
    """
    try:
        async with asyncio.timeout(FLUSH_S):
            await filer.create(SCRATCH, "flush")  # an empty buffer would write nothing
            began_ns = clock.now_ns()
            await filer.create(SCRATCH, "flush", ballast_bytes=BALLAST_BYTES)
            while await _newest_ns(filer) < began_ns:
                await clock.sleep(FLUSH_CHECK_S)
    except (LakebedError, TimeoutError):
        return False
    return True


async def _newest_ns(filer: FilerClient) -> int:
    """When the last chunk of the log was written; 0 when there is none."""
    days = [entry.name async for entry in filer.entries(LOG)]
    if not days:
        return 0
    files = [entry async for entry in filer.entries(f"{LOG}/{max(days)}")]
    return max((chunk.modified_ts_ns for file in files for chunk in file.chunks), default=0)
