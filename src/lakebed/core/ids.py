"""Ids and random numbers, passed in. Only this module draws them; everything else takes an `Ids`."""

from __future__ import annotations

import random
import uuid

ORDERED_MAX = 10_000  # ordered ids of one millisecond: as many as four digits count; the next one takes the next


class Ids:
    """Draws ids and random numbers from one source: the system's, or a seed's."""

    def __init__(self, source: random.Random | None = None) -> None:
        self._random = source or random.SystemRandom()
        self._last = (0, 0)  # the last moment that `ordered` gave, and how many of it before

    @classmethod
    def seeded(cls, seed: int | str) -> Ids:
        return cls(random.Random(seed))

    def uuid(self) -> str:
        """A random UUID (version 4), as text."""
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))

    def uuid7(self, now_ms: int) -> str:
        """A UUID of version 7, as text: it carries the time at which it was made, and sorts by it."""
        drawn = self._random.getrandbits(74)
        high, low = drawn >> 62, drawn & ((1 << 62) - 1)
        return str(uuid.UUID(int=now_ms << 80 | 7 << 76 | high << 64 | 2 << 62 | low))

    def token(self) -> str:
        """A short random id, 16 hex digits: for attempts, owners and requests."""
        return f"{self._random.getrandbits(64):016x}"

    def ordered(self, at_ms: int) -> str:
        """A new id that sorts after every earlier one of this source: a time, a count within that time, a token.

        The time is `at_ms`, or the last one given when the clock has not moved or was set back. Ids of different
        processes sort by their clocks.
        """
        last_ms, count = self._last
        if at_ms > last_ms:
            last_ms, count = at_ms, 0
        elif count + 1 < ORDERED_MAX:
            count += 1
        else:
            last_ms, count = last_ms + 1, 0
        self._last = (last_ms, count)
        return f"{last_ms:015d}-{count:04d}-{self.token()}"

    def secret(self) -> str:
        """40 hex digits from this source; unguessable when the source is the system's."""
        return f"{self._random.getrandbits(160):040x}"

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)

    def jitter_s(self, attempt: int, *, base_s: float, cap_s: float) -> float:
        """Full-jitter backoff: anywhere between nothing and the exponential bound of this attempt."""
        return self._random.uniform(0.0, min(cap_s, base_s * (2.0 ** min(attempt, 30))))
