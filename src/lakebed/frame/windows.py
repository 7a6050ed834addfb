"""What samples come to in windows of time: count, sum, least, greatest, last and a sketch, per series.

One function does it all. A sample is a row that stands for itself, rows merge into rows, and the result does not depend
on the order or on the grouping in between: sums are exact (`exact.py`), sketches add up, and of samples with one time
the greater value is the last. So chunks of rollups, late chunks and raw samples give the same answer in any mixture.

NaN, whatever its payload (stale markers too), is counted in `count` and in `nan`, and takes part in nothing else; a
window of NaN alone has the sum 0 and NaN as least, greatest and last. Negative zero counts as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from lakebed.frame.exact import exact_sums
from lakebed.frame.sketch import BUCKET_MAX, buckets_of

SECOND_NS = 1_000_000_000
_SPREAD = 2 * BUCKET_MAX + 1


class Rows(msgspec.Struct, frozen=True, eq=False):
    """Rows as columns, one entry a row. `series` are codes of the caller's own; the ragged parts have offsets.

    int64: series, starts_ns, counts, nans, lasts_ns (-1 without a number), sketch_counts and all offsets.
    float64: sums, rests, leasts, greatests, lasts. int32: buckets, ascending inside a row.
    """

    series: Any
    starts_ns: Any
    counts: Any
    nans: Any
    sums: Any
    rest_offsets: Any
    rests: Any
    leasts: Any
    greatests: Any
    lasts_ns: Any
    lasts: Any
    bucket_offsets: Any
    buckets: Any
    sketch_counts: Any

    def __len__(self) -> int:
        return len(self.starts_ns)

    def take(self, rows: Any) -> Rows:
        """The rows with these numbers, in this order."""
        rests, buckets = _spread(self.rest_offsets, rows), _spread(self.bucket_offsets, rows)
        return Rows(
            self.series[rows],
            self.starts_ns[rows],
            self.counts[rows],
            self.nans[rows],
            self.sums[rows],
            rests[0],
            self.rests[rests[1]],
            self.leasts[rows],
            self.greatests[rows],
            self.lasts_ns[rows],
            self.lasts[rows],
            buckets[0],
            self.buckets[buckets[1]],
            self.sketch_counts[buckets[1]],
        )


def rows_of(series: Any, times_ns: Any, values: Any) -> Rows:
    """Each sample as a row that stands for itself alone."""
    values = np.asarray(values, np.float64) + 0.0
    count = len(values)
    number = ~np.isnan(values)
    ones, held = np.ones(count, np.int64), number.astype(np.int64)
    return Rows(
        series=np.asarray(series, np.int64),
        starts_ns=np.asarray(times_ns, np.int64),
        counts=ones,
        nans=ones - held,
        sums=np.where(number, values, 0.0),
        rest_offsets=np.zeros(count + 1, np.int64),
        rests=np.zeros(0),
        leasts=values,
        greatests=values,
        lasts_ns=np.where(number, times_ns, -1),
        lasts=values,
        bucket_offsets=_offsets(held),
        buckets=buckets_of(values[number]),
        sketch_counts=np.ones(int(held.sum()), np.int64),
    )


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of several, one after the other; their series codes must speak of the same series."""
    return Rows(*(_joined([getattr(part, name) for part in parts], name) for name in Rows.__struct_fields__))


def merged(rows: Rows, window_ns: int) -> Rows:
    """One row for each series and window, in order of both. Starts are rounded down to the window."""
    if not len(rows):
        return rows
    starts = rows.starts_ns // window_ns * window_ns
    order = _order(rows, starts)
    series, starts = rows.series[order], starts[order]
    begins = np.flatnonzero((np.diff(series, prepend=-1) != 0) | (np.diff(starts, prepend=-1) != 0))
    ends = np.append(begins[1:], len(order)) - 1
    groups = np.repeat(np.arange(len(begins)), ends - begins + 1)
    sums, rest_offsets, rests = _sums(rows, order, groups, len(begins))
    bucket_offsets, buckets, sketch_counts = _sketches(rows, order, groups, len(begins))
    numbers = rows.lasts_ns[order] >= 0
    leasts = np.minimum.reduceat(np.where(numbers, rows.leasts[order], np.inf), begins)
    greatests = np.maximum.reduceat(np.where(numbers, rows.greatests[order], -np.inf), begins)
    lasts_ns = rows.lasts_ns[order][ends]
    empty = lasts_ns < 0
    return Rows(
        series=series[begins],
        starts_ns=starts[begins],
        counts=np.add.reduceat(rows.counts[order], begins),
        nans=np.add.reduceat(rows.nans[order], begins),
        sums=sums,
        rest_offsets=rest_offsets,
        rests=rests,
        leasts=np.where(empty, np.nan, leasts),
        greatests=np.where(empty, np.nan, greatests),
        lasts_ns=lasts_ns,
        lasts=np.where(empty, np.nan, rows.lasts[order][ends]),
        bucket_offsets=bucket_offsets,
        buckets=buckets,
        sketch_counts=sketch_counts,
    )


def _order(rows: Rows, starts: Any) -> Any:
    """By series and window; inside them by time and value of the last, so that the end of a run is its last.

    Rows mostly come in order of time: a stable sort by series alone is right then, and far cheaper.
    """
    order = np.argsort(rows.series, kind="stable")
    same = rows.series[order][1:] == rows.series[order][:-1]
    at, ns, value = starts[order], rows.lasts_ns[order], rows.lasts[order]
    later = (at[1:] > at[:-1]) | ((at[1:] == at[:-1]) & ((ns[1:] > ns[:-1]) | ((ns[1:] == ns[:-1]) & (ns[1:] < 0))))
    tied = (at[1:] == at[:-1]) & (ns[1:] == ns[:-1]) & (value[1:] >= value[:-1])
    if bool((~same | later | tied).all()):
        return order
    return np.lexsort((rows.lasts, rows.lasts_ns, starts, rows.series))


def _sums(rows: Rows, order: Any, groups: Any, count: int) -> tuple[Any, Any, Any]:
    """Exact sums of the groups. A sum that is NaN stands for both infinities."""
    parts, of = rows.sums[order], groups
    if len(rows.rests):
        offsets, at = _spread(rows.rest_offsets, order)
        of = np.concatenate([of, np.repeat(groups, np.diff(offsets))])
        parts = np.concatenate([parts, rows.rests[at]])
    if np.isnan(parts).any():
        lost = np.isnan(parts)
        of = np.concatenate([of[~lost], of[lost], of[lost]])
        infinities = np.full(int(lost.sum()), np.inf)
        parts = np.concatenate([parts[~lost], infinities, -infinities])
    if len(of) != len(groups) or of is not groups:
        by_group = np.argsort(of, kind="stable")
        parts, of = parts[by_group], of[by_group]
    return exact_sums(parts, of, count)


def _sketches(rows: Rows, order: Any, groups: Any, count: int) -> tuple[Any, Any, Any]:
    offsets, at = _spread(rows.bucket_offsets, order)
    of = np.repeat(groups, np.diff(offsets))
    keys = of * _SPREAD + (rows.buckets[at].astype(np.int64) + BUCKET_MAX)
    by_key = np.argsort(keys, kind="stable")
    keys = keys[by_key]
    begins = np.flatnonzero(np.diff(keys, prepend=-1))
    found = keys[begins]
    counts = np.add.reduceat(rows.sketch_counts[at][by_key], begins) if len(begins) else np.zeros(0, np.int64)
    sizes = np.bincount(found // _SPREAD, minlength=count)
    return _offsets(sizes), (found % _SPREAD - BUCKET_MAX).astype(np.int32), counts


def _spread(offsets: Any, rows: Any) -> tuple[Any, Any]:
    """For ragged parts of chosen rows: their new offsets, and where their entries lie."""
    lengths = (offsets[1:] - offsets[:-1])[rows]
    fresh = _offsets(lengths)
    return fresh, np.arange(int(fresh[-1])) + np.repeat(offsets[:-1][rows] - fresh[:-1], lengths)


def _offsets(lengths: Any) -> Any:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _joined(parts: list[Any], name: str) -> Any:
    if not name.endswith("_offsets"):
        return np.concatenate(parts)
    return _offsets(np.concatenate([np.diff(part) for part in parts]))
