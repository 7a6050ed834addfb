"""Where a query's samples come from: live state, the local spool and raw batches, each batch offered once.

What rollups cover needs no search: for points, the index names the blobs that hold a series; for windows, the chunks
hold the sums. Only what was accepted since, and what waits out of order, is looked for in the index by time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol

import msgspec

from lakebed.batches import paths
from lakebed.batches.live import Follower, LiveBatches
from lakebed.batches.matchers import Selector, query_labels
from lakebed.batches.model import Batch, BatchIdentity
from lakebed.batches.reader import RawBatches
from lakebed.core.clock import Clock
from lakebed.core.errors import Corrupt, Invalid, NotFound
from lakebed.rollups.paths import index_folder
from lakebed.rollups.reader import CoverageSnapshot, RollupCoverage

SKEW_NS = 300_000_000_000  # how far an agent's clock may run ahead of its collector's
READ_AHEAD = 16  # objects being read at once by one query


class UnlandedBatches(Protocol):
    """What a query needs of the local spool."""

    def unlanded(self) -> AsyncIterator[tuple[BatchIdentity, Batch | None]]: ...


class ReadResult(msgspec.Struct):
    """How reading went: batches by source, and what is missing."""

    sources: dict[str, int] = {}
    missing: list[str] = []
    damaged: int = 0
    damaged_chunks: int = 0
    seen: set[BatchIdentity] = set()

    def why(self) -> list[str]:
        reasons = list(self.missing)
        if self.damaged:
            reasons.append(f"{self.damaged} accepted batches cannot be read: see repairs/v1/")
        if self.damaged_chunks:
            reasons.append(f"{self.damaged_chunks} rollup or index chunks cannot be read")
        return reasons


Take = Callable[[Batch], None]


class SampleSources:
    def __init__(
        self,
        live: LiveBatches,
        raw: RawBatches,
        coverage: RollupCoverage,
        *,
        follower: Follower | None,
        spool: UnlandedBatches | None,
        batches_max: int,
        clock: Clock,
    ) -> None:
        self._live, self._raw, self.coverage = live, raw, coverage
        self._follower, self._spool = follower, spool
        self._batches_max, self._clock = batches_max, clock

    async def points(self, take: Take, selector: Selector, from_ns: int, to_ns: int, through_ns: int) -> ReadResult:
        """Offers every batch that may hold points of the range; those accepted after `through_ns` if they are at hand.

        Raises Corrupt when the state of rollups cannot be read.
        """
        reading = self._begin()
        for _, batch in self._live.batches():
            self._offer(reading, take, "live", batch)
        await self._take_spool(reading, take, frozenset())
        if self._all_live(reading, from_ns):
            return reading
        covered = await self.coverage.snapshot()
        indexed = await self._indexed(reading, covered, selector, from_ns, to_ns)
        tail, full = await self._tail(reading, covered, from_ns, through_ns, len(indexed))
        if full:
            reading.missing.append(f"more than {self._batches_max} raw batches are in the range")
        blobs = [self._take_blob(reading, take, sha256) for sha256 in indexed]
        entries = [self._take_entry(reading, take, manifest_id, from_ns, to_ns) for manifest_id in tail]
        await several([*blobs, *entries])
        return reading

    async def uncovered(
        self, take: Take, covered: CoverageSnapshot, from_ns: int, to_ns: int, through_ns: int
    ) -> ReadResult:
        """Offers every batch that is in no rollup of this snapshot, and may hold samples of the range."""
        reading = self._begin()
        reading.damaged_chunks += len(covered.damaged)
        tail, full = await self._tail(reading, covered, from_ns, through_ns, 0)
        waiting = set(tail)
        for manifest_id, batch in self._live.accepted():
            # Accepted long ago and not waiting: the roller has seen it.
            if manifest_id in waiting or covered.holds(manifest_id) is False:
                self._offer(reading, take, "live", batch)
        await self._take_spool(reading, take, frozenset(_digest(each) for each in covered.ids))
        if full:
            reading.missing.append(f"more than {self._batches_max} raw batches are in no rollup yet")
        await several([self._take_entry(reading, take, each, from_ns, to_ns) for each in tail])
        return reading

    def _begin(self) -> ReadResult:
        reading = ReadResult(sources={"live": 0, "spool": 0, "raw": 0})
        if self._follower is None:
            reading.missing.append("this is not the query collector")
        elif not self._follower.is_fresh():
            reading.missing.append("the query collector has not caught up")
        return reading

    def _all_live(self, reading: ReadResult, from_ns: int) -> bool:
        """Whether live state holds everything that was accepted since shortly before the range."""
        if reading.missing or self._follower is None or self._live.evicted_through_ns >= from_ns - SKEW_NS:
            return False
        return from_ns - SKEW_NS >= self._clock.now_ns() - self._follower.window_ns

    def _offer(self, reading: ReadResult, take: Take, source: str, batch: Batch) -> None:
        if batch.identity in reading.seen:
            return
        reading.seen.add(batch.identity)
        reading.sources[source] += 1
        take(batch)

    async def _take_spool(self, reading: ReadResult, take: Take, landed: frozenset[str]) -> None:
        if self._spool is None:
            return
        async for identity, batch in self._spool.unlanded():
            if reading.sources["spool"] >= self._batches_max:
                reading.missing.append(f"more than {self._batches_max} spooled batches are not in the bucket yet")
                return
            if _digest(paths.manifest_id(identity, 0)) in landed:
                continue
            if batch is not None:
                self._offer(reading, take, "spool", batch)
            elif identity not in reading.seen:
                reading.damaged += 1

    async def _tail(
        self, reading: ReadResult, covered: CoverageSnapshot, from_ns: int, through_ns: int, taken: int
    ) -> tuple[list[str], bool]:
        """Manifest ids that are in no generation: accepted since what is settled, or waiting out of order.

        The flag is True when there are more than a query may read. Batches in live state do not count; batches whose
        coverage is unknown count as damaged.
        """
        unsure: dict[str, Corrupt] = {}
        found, full = await self._waiting(covered, from_ns, through_ns, taken, unsure)
        reading.damaged += len(unsure)
        return found, full

    async def _waiting(
        self, covered: CoverageSnapshot, from_ns: int, through_ns: int, taken: int, unsure: dict[str, Corrupt]
    ) -> tuple[list[str], bool]:
        since_ns = max(0, from_ns - SKEW_NS, covered.state.settled_ns)
        found: list[str] = []
        room = self._batches_max - taken
        if since_ns <= through_ns:
            async for _, manifest_id in self._raw.entries(since_ns, through_ns):
                if not await self.coverage.waiting(covered, [manifest_id], unsure):
                    continue
                if not self._live.holds(manifest_id):
                    room -= 1
                if room < 0:
                    return found, True
                found.append(manifest_id)
        if covered.state.settled_ns:  # otherwise nothing was passed by yet
            seen = set(found)
            noted, _ = await self.coverage.late(covered.state)
            late = await self.coverage.waiting(covered, [each for each in noted if each not in seen], unsure)
            found += late[:room]
            return found, len(late) > room
        return found, False

    async def _indexed(
        self, reading: ReadResult, covered: CoverageSnapshot, selector: Selector, from_ns: int, to_ns: int
    ) -> list[str]:
        """Hashes of the blobs that the index names for the selected series. Empty where nothing is rolled up."""
        found: dict[str, str] = {}
        for hour in paths.hours(from_ns, to_ns - 1) if covered.state.committed else ():
            async for key in self.coverage.chunks(covered, index_folder(hour)):
                try:
                    batches, series = await self.coverage.index_chunk(key)
                except (Invalid, NotFound):
                    reading.damaged_chunks += 1
                    continue
                found |= _selected(selector, batches, series, from_ns, to_ns)
            if len(found) > self._batches_max:
                reading.missing.append(f"more than {self._batches_max} raw batches are in the range")
                break
        held = [sha256 for manifest_id, sha256 in found.items() if not self._live.holds(manifest_id)]
        return held[: self._batches_max]

    async def _take_entry(self, reading: ReadResult, take: Take, manifest_id: str, from_ns: int, to_ns: int) -> None:
        if self._live.holds(manifest_id):
            return
        entry = await self._raw.entry(paths.by_time_of(manifest_id))
        if entry is None:  # entries are never deleted: this one is damaged, and the content of the batch is unknown
            reading.damaged += 1
            return
        if entry.last_time_unix_ns < from_ns or entry.first_time_unix_ns >= to_ns:
            return
        await self._take_blob(reading, take, entry.frame_sha256)

    async def _take_blob(self, reading: ReadResult, take: Take, sha256: str) -> None:
        try:
            batch = await self._raw.batch(sha256)
        except (NotFound, Corrupt):
            reading.damaged += 1
            return
        self._offer(reading, take, "raw", batch)


def _selected(selector: Selector, batches: Any, series: Any, from_ns: int, to_ns: int) -> dict[str, str]:
    """Of an index chunk: manifest id and hash of the batches that hold a selected series inside the range."""
    import pyarrow as pa
    import pyarrow.compute as pc

    of_metric = series.filter(pc.equal(series["metric"], selector.metric))
    numbers: set[int] = set()
    for row in of_metric.to_pylist():
        if selector.takes(query_labels(row["agent_id"], dict(row["labels"]))):
            numbers.update(row["batches"])
    listed = batches.take(pa.array(sorted(numbers), pa.int64())).to_pylist()
    return {
        row["manifest_id"]: row["frame_sha256"]
        for row in listed
        if row["last_ns"] >= from_ns and row["first_ns"] < to_ns
    }


def _digest(manifest_id: str) -> str:
    """The part of a manifest id that depends on the identity alone."""
    return manifest_id.partition("-")[2]


async def several(work: list[Coroutine[Any, Any, None]]) -> None:
    """Runs all of it, a few at a time; the first error is raised after what was in progress has ended."""
    gate = asyncio.Semaphore(READ_AHEAD)

    async def one(coroutine: Coroutine[Any, Any, None]) -> None:
        async with gate:
            await coroutine

    results = await asyncio.gather(*(one(each) for each in work), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
