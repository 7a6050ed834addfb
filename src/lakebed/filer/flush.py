"""Has the filer write the changes it still holds in memory: it does so each minute, and at an orderly end of 15 s.

Its buffer also makes room when a change does not fit: what is held is written first. So one change is made that never
fits, of an entry of a few bytes that carries a list of a few million signatures, which the filer passes on and does
not keep. It is proven, not trusted: the log's newest piece on disk must be younger than that change. Whoever is told
False ends the filer in order.
"""

from __future__ import annotations

import asyncio

from lakebed.clock import Clock
from lakebed.errors import LakebedError
from lakebed.filer.client import FilerClient

LOG = "/topics/.system/log"  # a folder for each day, a file for each minute and filer
SCRATCH = "/lakebed"
BALLAST_BYTES = 9 * 1024 * 1024  # the buffer has 8 MiB
FLUSH_S = 5.0  # all of it; it takes less than one
PROOF_EVERY_S = 0.05


async def flush(filer: FilerClient, clock: Clock) -> bool:
    """True when every change made before is on disk. False when that is not seen in time, or the filer is in trouble:
    nothing is raised, since whoever asks is about to end it.
    """
    try:
        async with asyncio.timeout(FLUSH_S):
            await filer.create(SCRATCH, "flush")  # a log that holds nothing would write nothing, and prove nothing
            began_ns = clock.now_ns()
            await filer.create(SCRATCH, "flush", ballast_bytes=BALLAST_BYTES)
            while await _newest_ns(filer) < began_ns:
                await clock.sleep(PROOF_EVERY_S)
    except (LakebedError, TimeoutError):
        return False
    return True


async def _newest_ns(filer: FilerClient) -> int:
    """When the last piece of the log was written; 0 when none ever was."""
    days = [entry.name async for entry in filer.entries(LOG)]
    if not days:
        return 0
    files = [entry async for entry in filer.entries(f"{LOG}/{max(days)}")]
    return max((chunk.modified_ts_ns for file in files for chunk in file.chunks), default=0)
