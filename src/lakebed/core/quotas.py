"""What one key may use on one gateway: requests, bytes and records a second, and requests with a body at once.

Each rate is a bucket that holds BURST_S of it. A request is admitted while no bucket is empty, and what it really used
is taken afterwards: so a body of unknown length counts too, and one large request delays the next ones, not itself.
Parts report records with `count_records`; a key without limits costs one look-up.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

from lakebed.core.auth import UNLIMITED, KeyLimits, Principal
from lakebed.core.clock import Clock
from lakebed.core.errors import Throttled

BURST_S = 2.0
WAIT_S_MIN = 0.1
UPLOADS_WAIT_S = 1.0


class RateBucket:
    """Holds up to BURST_S of a rate; may go into debt."""

    __slots__ = ("_at_s", "_left", "_rate", "_size")

    def __init__(self, rate: float, now_s: float) -> None:
        self._rate, self._size = rate, max(1.0, rate * BURST_S)
        self._left, self._at_s = self._size, now_s

    def wait_s(self, now_s: float, needed: float) -> float:
        """How long until this much is there; 0 when it is."""
        if not self._rate:
            return 0.0
        self._left = min(self._size, self._left + (now_s - self._at_s) * self._rate)
        self._at_s = now_s
        return max(0.0, (needed - self._left) / self._rate)

    def take(self, amount: float) -> None:
        self._left -= amount


class KeyUsage:
    """What one key has used lately."""

    def __init__(self, name: str, limits: KeyLimits, clock: Clock) -> None:
        self.limits = limits
        self._name, self._clock = name, clock
        now_s = clock.monotonic_s()
        self._requests = RateBucket(limits.requests_per_s, now_s)
        self._bytes = RateBucket(limits.bytes_per_s, now_s)
        self._records = RateBucket(limits.records_per_s, now_s)
        self._uploads = 0
        self._upload_ended = asyncio.Event()

    def begin(self, *, upload: bool) -> None:
        """Admits a request. Raises Throttled with the time after which it would be admitted."""
        for what, wait_s in self._waits_s().items():
            if wait_s > 0:
                raise self._over(what, max(WAIT_S_MIN, wait_s))
        if upload and self.limits.uploads_max and self._uploads >= self.limits.uploads_max:
            raise self._over("uploads_max", UPLOADS_WAIT_S)
        self._requests.take(1.0)
        self._uploads += upload

    def end(self, *, upload: bool, size: int) -> None:
        """Call it once for each request that was admitted, with the bytes of its body."""
        self._bytes.take(size)
        if upload:
            self._uploads -= 1
            self._upload_ended.set()

    async def wait(self, over: Throttled) -> None:
        """Until a request that `begin` refused may be admitted: for a protocol that delays instead of refusing."""
        if over.detail["limit"] == "uploads_max":
            self._upload_ended.clear()
            await self._upload_ended.wait()
        else:
            await self._clock.sleep(over.retry_after_s)

    def wait_s(self) -> float:
        """How long until the rates admit another request; 0 when they do now."""
        return max(self._waits_s().values())

    def _waits_s(self) -> dict[str, float]:
        now_s = self._clock.monotonic_s()
        return {
            "requests_per_s": self._requests.wait_s(now_s, 1.0),
            "bytes_per_s": self._bytes.wait_s(now_s, 0.0),
            "records_per_s": self._records.wait_s(now_s, 0.0),
        }

    def count_records(self, count: int) -> None:
        self._records.take(count)

    def _over(self, what: str, wait_s: float) -> Throttled:
        limit = getattr(self.limits, what)
        return Throttled(
            f"key {self._name} is over its limit {what} of {limit:g}",
            retry_after_s=wait_s,
            hint="wait Retry-After, or ask the operator for a higher limit",
            limit=what,
        )


class KeyQuotas:
    """The usage of every key with limits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, KeyUsage] = {}

    def of(self, principal: Principal) -> KeyUsage | None:
        """None for a key without limits. Limits that changed begin anew."""
        if principal.limits == UNLIMITED:
            return None
        found = self._known.get(principal.name)
        if found is None or found.limits != principal.limits:
            found = self._known[principal.name] = KeyUsage(principal.name, principal.limits, self._clock)
        return found


USAGE: ContextVar[KeyUsage | None] = ContextVar("usage", default=None)


def count_records(count: int) -> None:
    """Counts records or samples of the request that is being answered against its key."""
    usage = USAGE.get()
    if usage is not None:
        usage.count_records(count)


def check_most(what: str, count: int, most: int, who: str) -> None:
    """Raises Throttled when a key with this limit would have more than it may."""
    if most and count > most:
        raise Throttled(
            f"key {who} may have {most} {what}; this would be {count}",
            retry_after_s=60.0,
            hint="use fewer, or ask the operator for a higher limit",
        )
