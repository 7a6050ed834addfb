"""Answers windows of time: from rollups where they are built, and from samples for what they do not cover yet.

A snapshot of what is covered decides for each batch whether it is taken from chunks or from its samples, so every
sample counts once, and the answer is the same, bit for bit, as from samples alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from lakebed.batches import paths
from lakebed.batches.matchers import Selector, query_labels
from lakebed.batches.model import Batch, Kind
from lakebed.batches.sources import ReadResult, SampleSources, several
from lakebed.core.errors import Corrupt, Invalid, NotFound
from lakebed.core.feed import ahead
from lakebed.rollups.codec.chunk import decode_rollup, rows_in
from lakebed.rollups.codec.statistics import check_quantiles, quantile
from lakebed.rollups.codec.windows import SECOND_NS, WindowRows, joined, merged, row_keys, rows_of
from lakebed.rollups.paths import chunk_folder
from lakebed.rollups.reader import CoverageSnapshot
from lakebed.store.runtime import StoreRuntime

CHUNKS_AT_ONCE = 256  # chunks whose keys are held at once; a query reads as many as its range has
BUCKETS_MAX = 100_000  # windows one query may answer
ROWS_MAX = 5_000_000  # rows and samples one query may gather
RANGE_S_MAX = 366 * 86400


class WindowValues(msgspec.Struct, frozen=True, array_like=True):
    """The samples of one series in one window. `quantiles` are in the order of the request, None if unknown."""

    start_ns: int
    count: int
    sum: float
    min: float
    max: float
    last_ns: int
    last: float
    nan_count: int = 0
    quantiles: list[float | None] = []


class RollupSeries(msgspec.Struct, frozen=True):
    """`kind` is that of its samples: the values of a counter can be rated."""

    labels: dict[str, str]
    buckets: list[WindowValues]
    kind: str = "untyped"


class RollupResponse(msgspec.Struct, frozen=True):
    """`resolution_s` is the window of the rollups that were read, 0 when it was samples alone."""

    metric: str
    window_s: int
    resolution_s: int
    quantiles: list[float]
    partial: bool
    why_partial: list[str]
    from_unix_ns: int
    to_unix_ns: int
    accepted_through_unix_ns: int
    sources: dict[str, int]  # chunks read as "rollup", batches from each other source
    series: list[RollupSeries]


class RollupQuerier:
    def __init__(self, runtime: StoreRuntime, sources: SampleSources) -> None:
        store, clock = runtime.store, runtime.clock
        self._store, self._sources, self._clock = store, sources, clock

    async def range(
        self, selector: Selector, window_s: int, from_ns: int, to_ns: int, quantiles: Sequence[float] = ()
    ) -> RollupResponse:
        """Every window that begins in [from_ns, to_ns), by series. Raises Invalid over the limits."""
        if window_s < 1 or not 0 <= from_ns < to_ns or to_ns - from_ns > RANGE_S_MAX * SECOND_NS:
            raise Invalid(f"windows of {window_s} s from {from_ns} to {to_ns} are not a range of up to a year")
        wanted = check_quantiles(list(quantiles))
        window_ns = window_s * SECOND_NS
        first_ns, end_ns = -(-from_ns // window_ns) * window_ns, (to_ns - 1) // window_ns * window_ns + window_ns
        now_ns = self._clock.now_ns()
        gathered = _Gathered(selector, first_ns, end_ns)
        resolution_s, reading = 0, ReadResult()
        if first_ns < end_ns:
            before = await self._sources.coverage.merged_spans()
            covered = await self._sources.coverage.snapshot()
            spans = self._sources.coverage.usable(before, await self._sources.coverage.merged_spans())
            resolution_s = max((each for each in covered.state.windows_s if window_s % each == 0), default=0)
            if covered.state.committed and resolution_s:
                reading = await self._sources.uncovered(gathered.samples, covered, first_ns, end_ns, now_ns)
                await self._read_chunks(gathered, reading, covered, resolution_s, spans)
                await self._sources.note_removed(reading, first_ns)
            else:
                resolution_s = 0
                reading = await self._sources.points(gathered.samples, selector, first_ns, end_ns, now_ns)
        why = reading.why()
        return RollupResponse(
            metric=selector.metric,
            window_s=window_s,
            resolution_s=resolution_s,
            quantiles=wanted,
            partial=bool(why),
            why_partial=why,
            from_unix_ns=from_ns,
            to_unix_ns=to_ns,
            accepted_through_unix_ns=now_ns,
            sources={"rollup": gathered.chunks} | reading.sources,
            series=gathered.series(window_ns, wanted),
        )

    async def _read_chunks(
        self,
        gathered: _Gathered,
        reading: ReadResult,
        covered: CoverageSnapshot,
        resolution_s: int,
        spans: dict[str, int],
    ) -> None:
        """Reads every committed chunk, or the merged one of its day or month; damaged ones are counted."""
        step_ns = max(resolution_s * SECOND_NS, paths.HOUR_NS)
        metric = gathered.selector.metric
        folders: dict[str, int] = {}  # by the generation through which it is merged; 0: not
        for at_ns in range(gathered.first_ns // step_ns * step_ns, gathered.end_ns, step_ns):
            hour = paths.hour_of(at_ns)
            folder, through = chunk_folder(resolution_s, hour, metric, spans)
            folders[folder] = through

        async def take(key: str) -> None:
            try:
                table = decode_rollup((await self._store.get(key)).data)
            except (Invalid, NotFound):
                reading.damaged_chunks += 1
                return
            gathered.rollup(table)  # not inside the try: Invalid means there that the query is over its limits

        async def listed(folder: str) -> list[str]:
            if not (through := folders[folder]):
                return [key async for key in self._sources.coverage.chunks(covered, folder)]
            try:
                return await self._sources.coverage.merged_chunks(folder, through)
            except Corrupt:
                reading.damaged_chunks += 1
                return []

        keys: list[str] = []
        async for some in ahead(list(folders), listed):
            keys += some
            if len(keys) >= CHUNKS_AT_ONCE:
                await several([take(key) for key in keys])
                keys = []
        await several([take(key) for key in keys])


class _Gathered:
    """Rows of one query, whatever they came from; series are numbered as they appear."""

    def __init__(self, selector: Selector, first_ns: int, end_ns: int) -> None:
        self.selector, self.first_ns, self.end_ns = selector, first_ns, end_ns
        self.chunks = 0
        self._numbers: dict[tuple[tuple[str, str], ...], int] = {}
        self._parts: list[WindowRows] = []
        self._rows = 0

    def samples(self, batch: Batch) -> None:
        columns = batch.columns
        wanted = self.selector.series(columns, batch.identity.agent_id)
        if not wanted:
            return
        codes = np.full(len(columns.series_metric), -1, np.int64)
        for series, labels in wanted.items():
            codes[series] = self._number(labels)
        of = codes[columns.series]
        rows = np.flatnonzero((of >= 0) & (columns.times_ns >= self.first_ns) & (columns.times_ns < self.end_ns))
        self._keep(rows_of(of[rows], columns.times_ns[rows], columns.values[rows], columns.kinds[rows]))

    def rollup(self, table: Any) -> None:
        self.chunks += 1
        table = table.combine_chunks()
        if not table.num_rows:
            return
        agents, labels = table["agent_id"].chunk(0), table["labels"].chunk(0)
        keys = row_keys(agents, labels).dictionary_encode()
        indices = keys.indices.to_numpy()
        _, firsts = np.unique(indices, return_index=True)
        codes = np.full(len(keys.dictionary), -1, np.int64)
        for code, row in zip(indices[firsts].tolist(), firsts.tolist(), strict=True):
            found = query_labels(agents[row].as_py(), dict(labels[row].as_py()))
            if self.selector.takes(found):
                codes[code] = self._number(found)
        of, starts = codes[indices], table["start_ns"].to_numpy()
        rows = np.flatnonzero((of >= 0) & (starts >= self.first_ns) & (starts < self.end_ns))
        self._keep(rows_in(table, of).take(rows))

    def series(self, window_ns: int, quantiles: list[float]) -> list[RollupSeries]:
        if not self._rows:
            return []
        rows = merged(joined(self._parts), window_ns)
        if len(rows) > BUCKETS_MAX:
            raise Invalid(f"more than {BUCKETS_MAX} windows", hint="narrow the range or take a larger window")
        by_series: dict[int, list[WindowValues]] = {}
        kinds: dict[int, int] = {}
        for at, code in enumerate(rows.series.tolist()):
            by_series.setdefault(code, []).append(_bucket(rows, at, quantiles))
            kinds[code] = max(kinds.get(code, 0), int(rows.kinds[at]))
        return [
            RollupSeries(dict(labels), by_series[code], Kind(kinds[code]).name.lower())
            for labels, code in sorted(self._numbers.items())
            if code in by_series
        ]

    def _number(self, labels: dict[str, str]) -> int:
        return self._numbers.setdefault(tuple(sorted(labels.items())), len(self._numbers))

    def _keep(self, rows: WindowRows) -> None:
        self._parts.append(rows)
        self._rows += len(rows)
        if self._rows > ROWS_MAX:
            raise Invalid(f"more than {ROWS_MAX} rows", hint="narrow the range, or add matchers")


def _bucket(rows: WindowRows, at: int, quantiles: list[float]) -> WindowValues:
    low, high = int(rows.bucket_offsets[at]), int(rows.bucket_offsets[at + 1])
    count, nans = int(rows.counts[at]), int(rows.nans[at])
    counts = rows.sketch_counts[low:high]
    known = bool(count - nans) and int(counts.sum()) == count - nans  # chunks of version 1 have no sketch
    least, greatest = float(rows.leasts[at]), float(rows.greatests[at])
    return WindowValues(
        start_ns=int(rows.starts_ns[at]),
        count=count,
        sum=float(rows.sums[at]),
        min=least,
        max=greatest,
        last_ns=int(rows.lasts_ns[at]),
        last=float(rows.lasts[at]),
        nan_count=nans,
        quantiles=[quantile(q, rows.buckets[low:high], counts, least, greatest) if known else None for q in quantiles],
    )
