"""What was last seen of each thing, shared by everybody who looks.

However many people look, each thing is asked for once at a time and at most once in its time to live. When it fails,
the last good answer stays, with the trouble beside it, and the next look asks again: a page recovers by itself. A
backend that hangs holds nobody up longer than WAIT_S once there is anything to show.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from lakebed.clock import Clock, now_ms
from lakebed.errors import LakebedError
from lakebed.logs import logger

ENTRIES_MAX = 256
TIMEOUT_S = 10.0
PATIENCE_S = 12.0  # a little longer: an answer that comes at all is waited for
WAIT_S = 1.5
FAILED_S = 2.0  # a failure is asked about again after this, whatever its time to live

Make = Callable[[], Awaitable[Any]]

log = logger("console")


class Trouble(msgspec.Struct, frozen=True):
    code: str
    message: str
    hint: str = ""


class Seen(msgspec.Struct, frozen=True):
    """`value` is the last good answer, from `at_ms`; None when there never was one."""

    value: Any = None
    at_ms: int = 0
    trouble: Trouble | None = None


class _Entry:
    def __init__(self) -> None:
        self.seen: Seen | None = None
        self.until_s = 0.0
        self.asking: asyncio.Task[None] | None = None


class Samples:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def last(self, key: str) -> Seen:
        """What is known, without asking."""
        entry = self._entries.get(key)
        return entry.seen if entry is not None and entry.seen is not None else Seen()

    async def get(
        self, key: str, ttl_s: float, make: Make, *, timeout_s: float = TIMEOUT_S, patience_s: float = PATIENCE_S
    ) -> Seen:
        """Never raises: what goes wrong is the answer's trouble. After `patience_s` it may be empty: still asking."""
        entry = self._entry(key)
        if entry.seen is not None and self._clock.monotonic_s() < entry.until_s:
            return entry.seen
        if entry.asking is None or entry.asking.done():
            entry.asking = asyncio.create_task(self._ask(entry, ttl_s, make, timeout_s))
        wait_s = patience_s if entry.seen is None else min(WAIT_S, patience_s)
        await asyncio.wait({entry.asking}, timeout=wait_s)
        return entry.seen or Seen()

    def forget(self) -> None:
        """Everything is asked for again at the next look: something was changed by hand."""
        for entry in self._entries.values():
            entry.until_s = 0.0

    async def stop(self) -> None:
        tasks = [entry.asking for entry in self._entries.values() if entry.asking is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _entry(self, key: str) -> _Entry:
        entry = self._entries.setdefault(key, _Entry())
        self._entries.move_to_end(key)
        if len(self._entries) > ENTRIES_MAX:
            self._entries.popitem(last=False)
        return entry

    async def _ask(self, entry: _Entry, ttl_s: float, make: Make, timeout_s: float) -> None:
        trouble: Trouble
        try:
            async with asyncio.timeout(timeout_s):
                value = await make()
            entry.seen = Seen(value, now_ms(self._clock))
            entry.until_s = self._clock.monotonic_s() + ttl_s
            return
        except TimeoutError:
            trouble = Trouble("timeout", f"no answer within {timeout_s:g} s", "it hangs, and is asked again")
        except LakebedError as error:
            trouble = Trouble(error.code, error.message, error.hint)
        except Exception as error:
            log.error("a page could not be made", exc_info=error)
            trouble = Trouble("internal", f"this could not be read: {type(error).__name__}", "the log holds the cause")
        before = entry.seen or Seen()
        entry.seen = Seen(before.value, before.at_ms, trouble)
        entry.until_s = self._clock.monotonic_s() + min(ttl_s, FAILED_S)
