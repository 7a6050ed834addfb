"""Takes up a policy by the event of its change, whoever put it: a poll alone would take `poll_s`.

A watch that breaks is opened again; what changed meanwhile is found by the poll.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing

from lakebed.core.clock import Clock
from lakebed.core.errors import LakebedError
from lakebed.core.logs import logger
from lakebed.lifecycle.seams import Policies

log = logger("lifecycle")
REOPEN_S = 5.0
SETTLE_S = 0.2  # changes that come within this time after one cost one round


async def watch_policies(policies: Policies, clock: Clock, changed: Callable[[], None]) -> None:
    """Calls `changed` after a bucket's policy or versioning may have changed, until cancelled."""
    while True:
        last_s = float("-inf")
        try:
            async with aclosing(policies.changes()) as buckets:
                async for _ in buckets:
                    if clock.monotonic_s() - last_s >= SETTLE_S:
                        await clock.sleep(SETTLE_S)
                        last_s = clock.monotonic_s()
                        changed()
        except LakebedError as error:
            log.info("policies not watched", error=error.message)
        await clock.sleep(REOPEN_S)
