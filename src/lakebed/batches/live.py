"""Live state: recently accepted batches, in memory, bounded by bytes and age. It is a cache; the bucket is the source
of truth.

It holds what this collector accepted, and what the follower read from accepted-by-time. An identity is held at most
once, so a duplicate is never counted twice. Each poll of the follower starts an overlap earlier, because an index entry
is written after its batch is accepted and clocks differ; a batch that was indexed later than that is found by its note.
Every collector polls once at its start, to rebuild what it held; the query collector polls at an interval.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator

from lakebed.batches import paths
from lakebed.batches.index import IndexedBatch
from lakebed.batches.model import AcceptedByTime, Batch, BatchIdentity
from lakebed.batches.reader import RawBatches
from lakebed.core.clock import Clock
from lakebed.core.errors import Corrupt, LakebedError, NotFound
from lakebed.core.logs import logger
from lakebed.core.runtime import Runtime

ROW_OVERHEAD_BYTES = 2048  # what a batch costs beside its columns: dictionaries and objects


class LiveBatches:
    """The last batches, oldest acceptance first out."""

    def __init__(self, runtime: Runtime, *, bytes_max: int, window_s: float) -> None:
        clock, metrics = runtime.clock, runtime.metrics
        self._bytes_max, self._window_ns, self._clock = bytes_max, round(window_s * 1e9), clock
        self._held: OrderedDict[BatchIdentity, tuple[int, int, Batch]] = OrderedDict()
        self._ids: set[str] = set()
        self._bytes = 0
        metrics.gauge("lakebed_batches_live_bytes").set_function(lambda: self._bytes)
        metrics.gauge("lakebed_batches_live_batches").set_function(lambda: len(self._held))
        self.evicted_through_ns = 0  # acceptances up to here may be missing

    def __contains__(self, identity: BatchIdentity) -> bool:
        return identity in self._held

    def holds(self, manifest_id: str) -> bool:
        """Whether the batch of this by-time entry is held: without reading the entry."""
        return manifest_id in self._ids

    def __len__(self) -> int:
        return len(self._held)

    def add(self, accepted_at_ns: int, batch: Batch) -> bool:
        """Holds the batch unless it is held already; evicts what is over the bounds."""
        if batch.identity in self._held:
            return False
        size = batch_bytes(batch)
        self._held[batch.identity] = (accepted_at_ns, size, batch)
        self._ids.add(paths.manifest_id(batch.identity, accepted_at_ns))
        self._bytes += size
        self._evict()
        return True

    @property
    def bytes_max(self) -> int:
        return self._bytes_max

    def batches(self) -> Iterator[tuple[BatchIdentity, Batch]]:
        self._evict()
        for identity, (_, _, batch) in self._held.items():
            yield identity, batch

    def accepted(self) -> Iterator[tuple[str, Batch]]:
        """Each batch held, with its name in the index by time."""
        self._evict()
        for identity, (at_ns, _, batch) in self._held.items():
            yield paths.manifest_id(identity, at_ns), batch

    def _evict(self) -> None:
        horizon_ns = self._clock.now_ns() - self._window_ns
        while self._held:
            identity = next(iter(self._held))
            at_ns, size, _ = self._held[identity]
            if self._bytes <= self._bytes_max and at_ns >= horizon_ns:
                return
            del self._held[identity]
            self._ids.discard(paths.manifest_id(identity, at_ns))
            self._bytes -= size
            self.evicted_through_ns = max(self.evicted_through_ns, at_ns)


def batch_bytes(batch: Batch) -> int:
    columns = batch.columns
    return int(columns.times_ns.nbytes * 3 + len(columns.strings) * 80) + ROW_OVERHEAD_BYTES


KEYS_MAX = 100_000  # entries one look takes into account; older ones are left to the bucket
READS_AT_ONCE = 256  # at 20 ms a read, 12,000 batches a second
READ_BYTES_MAX = 64 * 1024 * 1024  # of frames in one group of reads

log = logger("batches")

Indexed = tuple[IndexedBatch, AcceptedByTime | None]


class Follower:
    """Feeds `live` from the bucket. `caught_up_ns` is the acceptance time up to which everything indexed was seen."""

    def __init__(
        self, raw: RawBatches, live: LiveBatches, *, window_s: float, overlap_s: float, interval_s: float, clock: Clock
    ) -> None:
        self._raw, self._live, self._clock = raw, live, clock
        self.window_ns, self._overlap_ns = round(window_s * 1e9), round(overlap_s * 1e9)
        self._interval_s = interval_s
        self._seen: dict[str, int] = {}  # segments of which live state has all batches, with their end
        self.caught_up_ns = 0

    def is_fresh(self) -> bool:
        """Whether the last look was complete and is not older than three intervals."""
        age_ns = self._clock.now_ns() - self.caught_up_ns
        return self.caught_up_ns > 0 and age_ns <= 3 * self._interval_s * 1e9

    async def poll(self) -> int:
        """Reads what was accepted since the last look, or within the window at first; returns how many were new.

        The newest come first, and only as many as live state can hold.
        """
        now_ns = self._clock.now_ns()
        since_ns = max(now_ns - self.window_ns, self.caught_up_ns - self._overlap_ns)
        # Clocks of other collectors may be ahead of ours by as much as the overlap covers behind it.
        # What was evicted for want of room is not read again only to be evicted.
        least_ns = max(0, self._live.evicted_through_ns + 1)
        damaged: list[Corrupt] = []
        # The overlap costs a listing, not its rows: a segment that was taken whole is not read again.
        seen = {key: last_ns for key, last_ns in self._seen.items() if last_ns >= since_ns}
        listed = self._raw.entries(max(since_ns, least_ns), now_ns + self._overlap_ns, damaged, seen=seen)
        late = self._raw.late_entries(max(now_ns - self.window_ns, least_ns), now_ns)
        found = {each.manifest_id: each for some in (late, listed) async for each in some}
        new = [found[name] for name in sorted(found) if not self._live.holds(name)]
        for error in damaged:  # queries read these from the bucket, and report that they cannot
            self._skip(paths.parse_segment(str(error.detail["key"]))[1])
        if len(new) > KEYS_MAX:
            self._skip(new[-KEYS_MAX - 1].at_ns)
        read = await self._read(new[-KEYS_MAX:])
        for entry, batch in read:
            self._live.add(entry.accepted_at_unix_ns, batch)
        self.caught_up_ns, self._seen = now_ns, seen
        return len(read)

    async def _read(self, new: list[IndexedBatch]) -> list[tuple[AcceptedByTime, Batch]]:
        """The batches of these entries in order of acceptance, from the newest back to where memory ends."""
        found: list[tuple[AcceptedByTime, Batch]] = []
        room = self._live.bytes_max
        at = len(new)
        while at > 0:
            group = new[max(0, at - READS_AT_ONCE) : at]
            sought = await self._raw.find(each.manifest_id for each in group if each.entry is None)
            entries = _newest([(each, each.entry or sought.get(each.manifest_id)) for each in group])
            at -= len(entries)
            read = [one for one in await asyncio.gather(*(self._take(*each) for each in entries)) if one is not None]
            found = read + found
            room -= sum(batch_bytes(batch) for _, batch in read)
            if room < 0 and at > 0:
                self._skip(new[at - 1].at_ns)
                break
        return found

    def _skip(self, at_ns: int) -> None:
        """Acceptances up to then are not in live state: queries must read them from the bucket."""
        self._live.evicted_through_ns = max(self._live.evicted_through_ns, at_ns)

    async def run(self) -> None:
        """Looks again and again until cancelled; a look that fails is tried at the next turn."""
        while True:
            try:
                await self.poll()
            except LakebedError as error:
                log.warning("live state could not be refreshed", error=error.message)
            await self._clock.sleep(self._interval_s)

    async def _take(self, indexed: IndexedBatch, entry: AcceptedByTime | None) -> tuple[AcceptedByTime, Batch] | None:
        if entry is None:
            self._skip(indexed.at_ns)
            return None
        try:
            return entry, await self._raw.batch(entry.frame_sha256, entry.place)
        except (Corrupt, NotFound) as error:
            log.warning("batch is missing in live state", manifest_id=indexed.manifest_id, error=error.message)
            self._skip(indexed.at_ns)  # a query reports that it cannot be read
            return None


def _newest(entries: list[Indexed]) -> list[Indexed]:
    """As many of the last entries as may be read together, at least one."""
    size_bytes = taken = 0
    for _, entry in reversed(entries):
        size_bytes += entry.frame_bytes if entry is not None else 0
        if taken and size_bytes > READ_BYTES_MAX:
            break
        taken += 1
    return entries[-taken:]
