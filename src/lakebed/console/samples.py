"""A cache of the data that pages show, shared by all viewers.

However many people look, each source is read by one task at a time and at most once in its time to live. When a read
fails, the last value stays, with the error beside it, and the next request reads again: a page recovers by itself. A
backend that hangs delays a page by at most WAIT_S once there is a value to show.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from lakebed.core.clock import Clock, now_ms
from lakebed.core.errors import LakebedError
from lakebed.core.logs import logger

ENTRIES_MAX = 256
TIMEOUT_S = 10.0
PATIENCE_S = 12.0  # longer than TIMEOUT_S: a first read ends before
WAIT_S = 1.5
FAILED_S = 2.0  # after a failure the next read is allowed this soon, whatever the time to live

Load = Callable[[], Awaitable[Any]]

log = logger("console")


class DataError(msgspec.Struct, frozen=True):
    code: str
    message: str
    hint: str = ""


class ShownError(DataError, frozen=True, kw_only=True):
    """An error on a page that is rendered once. Several sources may have it; the page shows it at one place."""

    shown: set[str]

    def first(self) -> bool:
        """Whether the page has not shown it yet."""
        new = self.message not in self.shown
        self.shown.add(self.message)
        return new


class DataSample(msgspec.Struct, frozen=True):
    """`value` is the last value that was read, at `at_ms`; None when there is none. `error`: the last read failed."""

    value: Any = None
    at_ms: int = 0
    error: DataError | None = None


def shown_once(samples: dict[str, DataSample]) -> dict[str, DataSample]:
    """The samples for one page: what is missing is said once, however many of them miss it."""
    shown: set[str] = set()

    def one(sample: DataSample) -> DataSample:
        error = sample.error
        if error is None:
            return sample
        return msgspec.structs.replace(sample, error=ShownError(error.code, error.message, error.hint, shown=shown))

    return {name: one(sample) for name, sample in samples.items()}


class _Entry:
    def __init__(self) -> None:
        self.sample: DataSample | None = None
        self.until_s = 0.0
        self.reading: asyncio.Task[None] | None = None


class SampleCache:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._changes = 0  # by operators

    def last(self, key: str) -> DataSample:
        """What is cached, without a read."""
        entry = self._entries.get(key)
        return entry.sample if entry is not None and entry.sample is not None else DataSample()

    async def get(
        self, key: str, ttl_s: float, load: Load, *, timeout_s: float = TIMEOUT_S, patience_s: float = PATIENCE_S
    ) -> DataSample:
        """Never raises: what goes wrong is the sample's error. Empty when the first read takes over `patience_s`."""
        entry = self._entry(key)
        if entry.sample is not None and self._clock.monotonic_s() < entry.until_s:
            return entry.sample
        if entry.reading is None or entry.reading.done():
            entry.reading = asyncio.create_task(self._read(entry, ttl_s, load, timeout_s))
        wait_s = patience_s if entry.sample is None else min(WAIT_S, patience_s)
        await asyncio.wait({entry.reading}, timeout=wait_s)
        return entry.sample or DataSample()

    def forget(self) -> None:
        """The next request reads everything again: an operator changed something."""
        self._changes += 1
        for entry in self._entries.values():
            entry.until_s = 0.0

    async def stop(self) -> None:
        tasks = [entry.reading for entry in self._entries.values() if entry.reading is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _entry(self, key: str) -> _Entry:
        entry = self._entries.setdefault(key, _Entry())
        self._entries.move_to_end(key)
        if len(self._entries) > ENTRIES_MAX:
            self._entries.popitem(last=False)
        return entry

    async def _read(self, entry: _Entry, ttl_s: float, load: Load, timeout_s: float) -> None:
        failure: DataError
        changes = self._changes
        try:
            async with asyncio.timeout(timeout_s):
                value = await load()
            entry.sample = DataSample(value, now_ms(self._clock))
            # What was read while an operator changed something may be from before.
            entry.until_s = self._clock.monotonic_s() + ttl_s if changes == self._changes else 0.0
            return
        except TimeoutError:
            failure = DataError("timeout", f"no answer within {timeout_s:g} s", "the page retries automatically")
        except LakebedError as error:
            failure = DataError(error.code, error.message, error.hint)
        except Exception as error:
            log.error("page data could not be read", error=type(error).__name__, exc_info=error)
            failure = DataError("internal", f"failed: {type(error).__name__}", "the gateway's log has the cause")
        before = entry.sample or DataSample()
        entry.sample = DataSample(before.value, before.at_ms, failure)
        entry.until_s = self._clock.monotonic_s() + min(ttl_s, FAILED_S)
