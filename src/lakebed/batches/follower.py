"""Keeps live state complete on the query collector, by following accepted-by-time behind everybody else.

Each look reaches back over an overlap, because an index entry is written after its batch is accepted and clocks differ.
Any collector uses the same look once at its start, to rebuild what it held.
"""

from __future__ import annotations

from lakebed.batches.live import Live
from lakebed.batches.raw import RawBatches
from lakebed.clock import Clock
from lakebed.errors import Corrupt, LakebedError, NotFound
from lakebed.logs import logger

log = logger("batches")


class Follower:
    """Feeds `live` from the bucket. `caught_up_ns` is the acceptance time up to which everything indexed was seen."""

    def __init__(
        self, raw: RawBatches, live: Live, *, window_s: float, overlap_s: float, interval_s: float, clock: Clock
    ) -> None:
        self._raw, self._live, self._clock = raw, live, clock
        self.window_ns, self._overlap_ns = round(window_s * 1e9), round(overlap_s * 1e9)
        self._interval_s = interval_s
        self.caught_up_ns = 0

    def is_fresh(self) -> bool:
        """Whether the last look was complete and is not older than three intervals."""
        age_ns = self._clock.now_ns() - self.caught_up_ns
        return self.caught_up_ns > 0 and age_ns <= 3 * self._interval_s * 1e9

    async def look(self) -> int:
        """Reads what was accepted since the last look, or within the window at first; returns how many were new."""
        now_ns = self._clock.now_ns()
        since_ns = max(now_ns - self.window_ns, self.caught_up_ns - self._overlap_ns)
        found = 0
        # Clocks of other collectors may be ahead of ours by as much as the overlap covers behind it.
        async for key, manifest_id in self._raw.entries(max(0, since_ns), now_ns + self._overlap_ns):
            if self._live.holds(manifest_id):
                continue
            try:
                found += await self._take(key)
            except (Corrupt, NotFound) as error:
                log.warning("a batch is left out of live state", key=key, cause=error.message)
        self.caught_up_ns = now_ns
        return found

    async def run(self) -> None:
        """Looks again and again until cancelled; a look that fails is tried at the next turn."""
        while True:
            try:
                await self.look()
            except LakebedError as error:
                log.warning("live state could not be refreshed", cause=error.message)
            await self._clock.sleep(self._interval_s)

    async def _take(self, key: str) -> bool:
        entry = await self._raw.entry(key)
        if entry is None:
            return False
        batch = await self._raw.batch(entry.frame_sha256)
        accepted = await self._raw.manifest(batch.identity)
        return self._live.add(accepted, batch)
