"""Takes up a policy by the event of its change, whoever put it: a poll alone would take `poll_s`.

A watch that breaks is opened again; what changed meanwhile is found by the poll.
"""

from __future__ import annotations

import asyncio
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
    """Calls `changed` after a bucket's policy or versioning may have changed, until cancelled.

    A change that comes after a call, however soon, gets a call of its own.
    """
    news = asyncio.Event()
    telling = asyncio.ensure_future(_tell(news, clock, changed))
    try:
        while True:
            try:
                async with aclosing(policies.changes()) as buckets:
                    async for _ in buckets:
                        news.set()
            except LakebedError as error:
                log.info("policies not watched", error=error.message)
            await clock.sleep(REOPEN_S)
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def _tell(news: asyncio.Event, clock: Clock, changed: Callable[[], None]) -> None:
    while True:
        await news.wait()
        await clock.sleep(SETTLE_S)
        news.clear()
        changed()
