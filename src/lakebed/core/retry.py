"""Waiting: for a store that is down, which a process does at its start instead of exiting, and as a response asks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from typing import TypeVar

from lakebed.core.errors import Unavailable
from lakebed.core.logs import logger
from lakebed.core.runtime import Runtime

T = TypeVar("T")
RETRY_BASE_S = 0.5
RETRY_CAP_S = 5.0  # a store that is back is found within this
LOG_EVERY_S = 10.0

log = logger("gateway")


async def until_available(
    runtime: Runtime, call: Callable[[], Awaitable[T]], on_wait: Callable[[str], None] = lambda _: None
) -> T:
    """The result of `call`, repeated while it raises Unavailable; every other error is raised at once.

    `call` must be safe to repeat. `on_wait` gets the reason of each wait; the log gets it now and then.
    """
    attempt, logged_s, since_s = 0, 0.0, runtime.clock.monotonic_s()
    while True:
        try:
            return await call()
        except Unavailable as error:
            now_s = runtime.clock.monotonic_s()
            if not attempt or now_s - logged_s >= LOG_EVERY_S:
                log.warning("waiting for the store", waited_s=round(now_s - since_s, 1), error=error.message)
                logged_s = now_s
            attempt += 1
            on_wait(error.message)
        await runtime.clock.sleep(runtime.ids.jitter_s(attempt, base_s=RETRY_BASE_S, cap_s=RETRY_CAP_S) + RETRY_BASE_S)


def retry_after_s(text: str, now_s: float) -> float | None:
    """Seconds from now, from either form of the header; None when it is absent or senseless."""
    if not text:
        return None
    if text.strip().isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now_s)
    except (ValueError, TypeError, OverflowError):
        return None
