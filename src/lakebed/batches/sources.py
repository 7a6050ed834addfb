"""Where a query's samples come from: live state, the local spool and raw batches, each batch offered once.

What rollups cover needs no search: for points, the index names the blobs that hold a series; for windows, the chunks
hold the sums. Only what was accepted since, and what waits out of order, is looked for in the index by time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from lakebed.batches import paths
from lakebed.batches.index import IndexedBatch
from lakebed.batches.live import Follower, LiveBatches
from lakebed.batches.matchers import Selector, query_labels
from lakebed.batches.model import AcceptedBatch, AcceptedByTime, Batch, BatchIdentity, FramePlace
from lakebed.batches.reader import RawBatches
from lakebed.core.clock import Clock
from lakebed.core.context import Context
from lakebed.core.errors import Corrupt, Invalid, NotFound
from lakebed.rollups.paths import index_folder
from lakebed.rollups.reader import CoverageSnapshot, RollupCoverage

SKEW_NS = 300_000_000_000  # how far an agent's clock may run ahead of its collector's
DAY_NS = 86_400_000_000_000
# A collector that follows none: what was accepted in the last seconds may not be indexed yet.
WITHOUT_LIVE = "read without the live state of other collectors: set batches.query_collector on one of them"
READ_AHEAD = 16  # objects being read at once by one query


class UnlandedBatches(Protocol):
    """What a query needs of the local spool."""

    def unlanded(self) -> AsyncIterator[tuple[AcceptedBatch, Batch | None]]: ...

    def damaged_files(self) -> int: ...


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
Frame = tuple[str, FramePlace | None]  # the hash of a frame, and where it is if not under that hash


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

    @classmethod
    def of_bucket(cls, context: Context, *, batches_max: int) -> SampleSources:
        """What is in the bucket, without live batches and without a spool."""
        raw, nothing_live = RawBatches(context.store), LiveBatches(context, bytes_max=0, window_s=0.0)
        coverage = RollupCoverage(context.store, raw)
        return cls(nothing_live, raw, coverage, follower=None, spool=None, batches_max=batches_max, clock=context.clock)

    async def points(
        self, take: Take, selector: Selector, from_ns: int, to_ns: int, through_ns: int, *, limited: bool = False
    ) -> ReadResult:
        """Offers every batch that may hold points of the range; those accepted after `through_ns` if they are at hand.

        `limited`: some were accepted after `through_ns`, so the result may lack them.

        Raises Corrupt when the state of rollups cannot be read.
        """
        reading = self._begin()
        for _, batch in self._live.batches():
            self._offer(reading, take, "live", batch)
        await self._take_spool(reading, take, None)
        if self._all_live(reading, from_ns):
            await self.note_removed(reading, from_ns)
            return reading
        covered = await self.coverage.snapshot()
        indexed = await self._indexed(reading, covered, selector, from_ns, to_ns)
        tail, full = await self._tail(reading, covered, from_ns, to_ns, through_ns, len(indexed))
        if limited:
            reading.missing.append("batches accepted more than late_s after the range were not searched")
        if full:
            reading.missing.append(f"more than {self._batches_max} raw batches are in the range")
        blobs = [self._take_blob(reading, take, frame) for frame in indexed]
        await several([*blobs, *await self._entries(reading, take, tail, from_ns, to_ns)])
        await self.note_removed(reading, from_ns)
        return reading

    async def uncovered(
        self, take: Take, covered: CoverageSnapshot, from_ns: int, to_ns: int, through_ns: int
    ) -> ReadResult:
        """Offers every batch that is in no rollup of this snapshot, and may hold samples of the range.

        The caller reads the rollups, and then calls `note_removed`.
        """
        reading = self._begin()
        reading.damaged_chunks += len(covered.damaged)
        tail, full = await self._tail(reading, covered, from_ns, to_ns, through_ns, 0)
        waiting = {each.manifest_id for each in tail}
        for manifest_id, batch in self._live.accepted():
            # Accepted long ago and not waiting: the roller has seen it.
            if manifest_id in waiting or covered.holds(manifest_id) is False:
                self._offer(reading, take, "live", batch)
        await self._take_spool(reading, take, covered)
        if full:
            reading.missing.append(f"more than {self._batches_max} raw batches are in no rollup yet")
        await several(await self._entries(reading, take, tail, from_ns, to_ns))
        return reading

    def _begin(self) -> ReadResult:
        reading = ReadResult(sources={"live": 0, "spool": 0, "raw": 0})
        if self._follower is None:
            reading.missing.append(WITHOUT_LIVE)
        elif not self._follower.is_fresh():
            reading.missing.append("the query collector has not caught up")
        return reading

    async def note_removed(self, reading: ReadResult, from_ns: int) -> None:
        """Says so when the range begins before what retention has removed. Read for ranges of more than a day.

        Called last: retention stores how far it removes before it removes anything.
        """
        if from_ns < self._clock.now_ns() - DAY_NS + SKEW_NS:
            removed_ns = await self._raw.removed_ns()
            if from_ns < removed_ns + SKEW_NS:
                since = datetime.fromtimestamp(removed_ns // 10**9, UTC).isoformat()
                reading.missing.append(f"batches accepted before {since} were removed: batches.retention_days")

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

    async def _take_spool(self, reading: ReadResult, take: Take, covered: CoverageSnapshot | None) -> None:
        """What the spool holds, less what is rolled up in this snapshot: a batch may have landed meanwhile."""
        if self._spool is None:
            return
        if count := self._spool.damaged_files():
            reading.missing.append(f"{count} damaged files in batches.spool_dir have batches that cannot be read")
        recent = frozenset(_digest(each) for each in covered.ids) if covered is not None else frozenset()
        async for accepted, batch in self._spool.unlanded():
            if reading.sources["spool"] >= self._batches_max:
                reading.missing.append(f"more than {self._batches_max} spooled batches are not in the bucket yet")
                return
            identity = accepted.identity
            if _digest(paths.manifest_id(identity, 0)) in recent:
                continue
            if covered is not None and await self._landed_long_ago(reading, covered, accepted):
                continue
            if batch is not None:
                self._offer(reading, take, "spool", batch)
            elif identity not in reading.seen:
                reading.damaged += 1

    async def _landed_long_ago(self, reading: ReadResult, covered: CoverageSnapshot, spooled: AcceptedBatch) -> bool:
        """Whether a batch that only the index knows of is rolled up: after a restart the spool gives it once more."""
        manifest_id = paths.manifest_id(spooled.identity, spooled.accepted_at_unix_ns)
        unsure: dict[str, Corrupt] = {}
        waits = covered.holds(manifest_id) is False or await self.coverage.waiting(covered, [manifest_id], unsure)
        reading.damaged += len(unsure)
        return not waits

    async def _tail(
        self, reading: ReadResult, covered: CoverageSnapshot, from_ns: int, to_ns: int, through_ns: int, taken: int
    ) -> tuple[list[IndexedBatch], bool]:
        """Batches that are in no generation: accepted since what is settled, or waiting out of order.

        The flag is True when there are more than a query may read. Batches in live state do not count; batches whose
        coverage is unknown count as damaged.
        """
        unsure: dict[str, Corrupt] = {}
        found, full = await self._waiting(reading, covered, from_ns, to_ns, through_ns, taken, unsure)
        reading.damaged += len(unsure)
        return found, full

    async def _waiting(
        self,
        reading: ReadResult,
        covered: CoverageSnapshot,
        from_ns: int,
        to_ns: int,
        through_ns: int,
        taken: int,
        unsure: dict[str, Corrupt],
    ) -> tuple[list[IndexedBatch], bool]:
        since_ns = max(0, from_ns - SKEW_NS, covered.state.settled_ns)
        found: list[IndexedBatch] = []
        room = self._batches_max - taken
        damaged: list[Corrupt] = []
        if since_ns <= through_ns:
            async for each in self._raw.entries(since_ns, through_ns, damaged):
                if each.entry is not None and not _overlaps(each.entry, from_ns, to_ns):
                    continue  # accepted then, and of another time: it costs no read and no room
                if not await self.coverage.waiting(covered, [each.manifest_id], unsure):
                    continue
                if not self._live.holds(each.manifest_id):
                    room -= 1
                if room < 0:
                    return found, True
                found.append(each)
        if damaged:
            reading.missing.append(f"{len(damaged)} index segments cannot be read: lakebed batches reconcile --cold")
        if covered.state.settled_ns:  # otherwise nothing was passed by yet
            seen = {each.manifest_id for each in found}
            noted, left_out_ms = await self.coverage.late(covered.state)
            if left_out_ms is not None:
                reading.missing.append("more late batches than one look takes are in no rollup yet")
            late = await self.coverage.waiting(covered, [each for each in noted if each not in seen], unsure)
            found += [IndexedBatch(each) for each in late[:room]]
            return found, len(late) > room
        return found, False

    async def _indexed(
        self, reading: ReadResult, covered: CoverageSnapshot, selector: Selector, from_ns: int, to_ns: int
    ) -> list[Frame]:
        """The frames that the index names for the selected series. Empty where nothing is rolled up."""
        found: dict[str, Frame] = {}
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
        held = [frame for manifest_id, frame in found.items() if not self._live.holds(manifest_id)]
        return held[: self._batches_max]

    async def _entries(
        self, reading: ReadResult, take: Take, tail: list[IndexedBatch], from_ns: int, to_ns: int
    ) -> list[Coroutine[Any, Any, None]]:
        """Reading the blobs of these batches, less those that live state holds and those outside the range."""
        wanted = [each for each in tail if not self._live.holds(each.manifest_id)]
        sought = await self._raw.find(each.manifest_id for each in wanted if each.entry is None)
        entries = [each.entry or sought.get(each.manifest_id) for each in wanted]
        reading.damaged += entries.count(None)  # entries are never deleted: the content of such a batch is unknown
        return [
            self._take_blob(reading, take, (entry.frame_sha256, entry.place))
            for entry in entries
            if entry is not None and _overlaps(entry, from_ns, to_ns)
        ]

    async def _take_blob(self, reading: ReadResult, take: Take, frame: Frame) -> None:
        try:
            batch = await self._raw.batch(*frame)
        except (NotFound, Corrupt):
            reading.damaged += 1
            return
        self._offer(reading, take, "raw", batch)


def _selected(selector: Selector, batches: Any, series: Any, from_ns: int, to_ns: int) -> dict[str, Frame]:
    """Of an index chunk: manifest id and frame of the batches that hold a selected series inside the range."""
    import pyarrow as pa
    import pyarrow.compute as pc

    of_metric = series.filter(pc.equal(series["metric"], selector.metric))
    numbers: set[int] = set()
    for row in of_metric.to_pylist():
        if selector.takes(query_labels(row["agent_id"], dict(row["labels"]))):
            numbers.update(row["batches"])
    listed = batches.take(pa.array(sorted(numbers), pa.int64())).to_pylist()
    return {
        row["manifest_id"]: (row["frame_sha256"], _place(row))
        for row in listed
        if row["last_ns"] >= from_ns and row["first_ns"] < to_ns
    }


def _place(row: dict[str, Any]) -> FramePlace | None:
    """Where the frame of a batch of an index chunk is; None: it is the blob under its hash."""
    if not row.get("raw_blob_offset"):
        return None
    return FramePlace(row["raw_blob_key"], row["raw_blob_offset"], row["frame_bytes"])


def _overlaps(entry: AcceptedByTime, from_ns: int, to_ns: int) -> bool:
    return entry.last_time_unix_ns >= from_ns and entry.first_time_unix_ns < to_ns


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
