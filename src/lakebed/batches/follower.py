"""Keeps live state complete on the query collector, by following accepted-by-time behind everybody else.

Each look reaches back over an overlap, because an index entry is written after its batch is accepted and clocks differ.
Any collector uses the same look once at its start, to rebuild what it held.
"""

from __future__ import annotations

import asyncio

from lakebed.batches import paths
from lakebed.batches.live import Live, batch_bytes
from lakebed.batches.model import AcceptedByTime
from lakebed.batches.raw import RawBatches
from lakebed.clock import Clock
from lakebed.errors import Corrupt, LakebedError, NotFound
from lakebed.frame.model import Batch
from lakebed.logs import logger

KEYS_MAX = 100_000  # entries one look takes into account; older ones are left to the bucket
READS_AT_ONCE = 16

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
        """Reads what was accepted since the last look, or within the window at first; returns how many were new.

        The newest come first, and only as many as live state can hold.
        """
        now_ns = self._clock.now_ns()
        since_ns = max(now_ns - self.window_ns, self.caught_up_ns - self._overlap_ns)
        # Clocks of other collectors may be ahead of ours by as much as the overlap covers behind it.
        # What was evicted for want of room is not read again only to be evicted.
        listed = self._raw.entries(max(0, since_ns, self._live.evicted_through_ns + 1), now_ns + self._overlap_ns)
        new = [key async for key, manifest_id in listed if not self._live.holds(manifest_id)]
        if len(new) > KEYS_MAX:
            self._skip(new[-KEYS_MAX - 1])
        found = await self._read(new[-KEYS_MAX:])
        for entry, batch in found:
            self._live.add(entry.accepted_at_unix_ns, batch)
        self.caught_up_ns = now_ns
        return len(found)

    async def _read(self, keys: list[str]) -> list[tuple[AcceptedByTime, Batch]]:
        """The batches of these entries in order of acceptance, from the newest back to where memory ends."""
        found: list[tuple[AcceptedByTime, Batch]] = []
        room = self._live.bytes_max
        for at in range(len(keys), 0, -READS_AT_ONCE):
            group = keys[max(0, at - READS_AT_ONCE) : at]
            read = [one for one in await asyncio.gather(*map(self._take, group)) if one is not None]
            found = read + found
            room -= sum(batch_bytes(batch) for _, batch in read)
            if room < 0 and at > READS_AT_ONCE:
                self._skip(keys[at - READS_AT_ONCE - 1])
                break
        return found

    def _skip(self, key: str) -> None:
        """Acceptances up to this entry's are not in live state: queries must read them from the bucket."""
        self._live.evicted_through_ns = max(self._live.evicted_through_ns, paths.parse_by_time(key)[1])

    async def run(self) -> None:
        """Looks again and again until cancelled; a look that fails is tried at the next turn."""
        while True:
            try:
                await self.look()
            except LakebedError as error:
                log.warning("live state could not be refreshed", cause=error.message)
            await self._clock.sleep(self._interval_s)

    async def _take(self, key: str) -> tuple[AcceptedByTime, Batch] | None:
        entry = await self._raw.entry(key)
        if entry is None:
            self._skip(key)
            return None
        try:
            return entry, await self._raw.batch(entry.frame_sha256)
        except (Corrupt, NotFound) as error:
            log.warning("a batch is left out of live state", key=key, cause=error.message)
            self._skip(key)  # whoever asks for it must be told that it cannot be read
            return None
