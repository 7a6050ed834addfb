"""Sweeps what rollups leave behind: notes of late batches that were taken, and chunks of abandoned generations.

Both are safe from any owner, however late: a number that was abandoned never counts again, and notes that were looked
at stay looked at, so an old state only sweeps less. What a committed manifest names carries a committed number, and is
not touched. Deleting is idempotent: a crash anywhere leaves some of it for the next run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from lakebed.batches.paths import HOUR_NS, day_ns, hour_ns, parse_by_time
from lakebed.core.errors import Invalid
from lakebed.core.feed import ahead
from lakebed.rollups import paths
from lakebed.rollups.model import RollupState
from lakebed.store.model import ObjectInfo
from lakebed.store.runtime import StoreRuntime

AFTER_S = 30 * 86_400.0
SWEPT_MAX = 10_000  # objects of one sweep; what is left is for the next
DAY_NS = 24 * HOUR_NS
NEVER_NS = 2**63 - 1
EVERY_NS = 86_400_000_000_000  # between two looks at all chunks, while some of an abandoned number may be left


def _ends(folder: str, hours: int) -> int:
    """When a day's or an hour's folder ends; never, for one that is not ours."""
    try:
        return (hour_ns(folder) if "/" in folder else day_ns(folder)) + hours * HOUR_NS
    except Invalid:
        return NEVER_NS


class RollupSweepReport(msgspec.Struct, frozen=True):
    """What one sweep did. `through`: of abandoned numbers up to it nothing is left. `again_ns`: when to look again."""

    notes: int = 0
    chunks: int = 0
    through: int = 0
    again_ns: int = 0

    def noted(self, state: RollupState) -> RollupState:
        return msgspec.structs.replace(
            state, swept=max(state.swept, self.through), sweep_at_ns=max(state.sweep_at_ns, self.again_ns)
        )


class RollupSweeper:
    """`after_s`: nothing younger goes. It is longer than any reader of the index by time may be away."""

    def __init__(self, runtime: StoreRuntime, *, after_s: float) -> None:
        store, clock, metrics = runtime.store, runtime.clock, runtime.metrics
        self._store, self._clock, self._after_ms = store, clock, round(after_s * 1000)
        swept = metrics.counter("lakebed_rollup_swept_total")
        self._notes, self._chunks = swept.labels(what="note"), swept.labels(what="chunk")

    async def sweep(self, state: RollupState) -> RollupSweepReport:
        now_ns = self._clock.now_ns()
        before_ms = now_ns // 1_000_000 - self._after_ms
        notes = await self._sweep_notes(min(before_ms, state.notes_ms))
        gone = {number for number in state.abandoned if number > state.swept}
        if not gone or now_ns < state.sweep_at_ns:
            return RollupSweepReport(notes, through=state.swept, again_ns=state.sweep_at_ns)
        chunks, left = await self._sweep_chunks(gone, before_ms)
        through = min(left, default=max(gone) + 1) - 1
        return RollupSweepReport(notes, chunks, max(state.swept, through), now_ns + EVERY_NS)

    async def sweep_before(self, end_ns: int) -> int:
        """Removes chunks and index chunks of hours that end up to then, and manifests of generations before."""
        windows = [f"{paths.ROLLUP}{window}/" for window in await self._store.children(paths.ROLLUP)]
        count = await self._sweep_merged(end_ns)
        for folder in (paths.INDEX, paths.MANIFESTS, *windows):
            for day in await self._store.children(folder):
                for hour in await self._store.children(f"{folder}{day}/") if _ends(day, 24) <= end_ns + DAY_NS else ():
                    if _ends(f"{day}/{hour}", 1) > end_ns or count >= SWEPT_MAX:
                        continue
                    keys = [info.key async for info in self._store.list(f"{folder}{day}/{hour}/")]
                    async for _ in ahead(keys, self._store.delete):
                        count += 1
        self._chunks.inc(count)
        return count

    async def _sweep_merged(self, end_ns: int) -> int:
        """Removes merged chunks of days that end up to then, and of months whose first day does."""
        count = 0
        for window in await self._store.children(paths.ROLLUP_MERGED):
            for span in await self._store.children(f"{paths.ROLLUP_MERGED}{window}/"):
                if _ends(paths.first_day(span), 24) > end_ns:
                    continue
                keys = [info.key async for info in self._store.list(f"{paths.ROLLUP_MERGED}{window}/{span}/")]
                async for _ in ahead(keys, self._store.delete):
                    count += 1
        return count

    async def _sweep_notes(self, before_ms: int) -> int:
        count = 0
        async for info in self._store.list(paths.ROLLUP_WORK):
            if info.modified_ms >= before_ms or count >= SWEPT_MAX:
                continue
            try:
                parse_by_time(info.key)
            except Invalid:
                continue  # not ours
            await self._store.delete(info.key)
            self._notes.inc()
            count += 1
        return count

    async def _sweep_chunks(self, gone: set[int], before_ms: int) -> tuple[int, set[int]]:
        """How many objects of these numbers went, and of which numbers some are left."""
        count, left = 0, set[int]()
        async for number, info in self._made():
            if number not in gone:
                continue
            if info.modified_ms >= before_ms or count >= SWEPT_MAX:
                left.add(number)
                continue
            await self._store.delete(info.key)
            self._chunks.inc()
            count += 1
        return count, left

    async def _made(self) -> AsyncIterator[tuple[int, ObjectInfo]]:
        """Everything of every generation. Manifests first: none ever names a chunk that was swept."""
        for prefix in (paths.MANIFESTS, paths.INDEX, paths.ROLLUP):
            async for info in self._store.list(prefix):
                try:
                    yield paths.sequence_of(info.key), info
                except Invalid:
                    continue  # not ours
