"""Samples aggregated in windows of time: count, sum, least, greatest, last and a sketch, per series.

One function does it all. A sample is a row of its own, rows merge into rows, and the result does not depend on the
order or on the grouping in between: sums are exact and sketches add up (`statistics.py`), and of samples with one time
the greater value is the last. So chunks of rollups, late chunks and raw samples give the same result in any mixture.

NaN, whatever its payload (stale markers too), is counted in `count` and in `nan`, and takes part in nothing else; a
window of NaN alone has the sum 0 and NaN as least, greatest and last. Negative zero counts as zero.

`series_keys` makes one string of a series, for grouping without a loop: metric, agent, then names and values of labels
in the order of their names, joined by U+001F, which is escaped inside them. Imports pyarrow when called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from lakebed.batches.model import Batch
from lakebed.rollups.codec.statistics import BUCKET_MAX, buckets_of, exact_sums

SECOND_NS = 1_000_000_000
_SPREAD = 2 * BUCKET_MAX + 1


class WindowRows(msgspec.Struct, frozen=True, eq=False):
    """Rows as columns, one entry a row. `series` are codes of the caller's own; the ragged parts have offsets.

    int64: series, starts_ns, counts, nans, lasts_ns (-1 without a number), sketch_counts and all offsets.
    float64: sums, rests, leasts, greatests, lasts. int32: buckets, ascending inside a row. uint8: kinds of the samples;
    of several the greatest, which does not depend on their order.
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
    kinds: Any

    def __len__(self) -> int:
        return len(self.starts_ns)

    def take(self, rows: Any) -> WindowRows:
        """The rows with these numbers, in this order."""
        rests, buckets = _spread(self.rest_offsets, rows), _spread(self.bucket_offsets, rows)
        return WindowRows(
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
            self.kinds[rows],
        )


def rows_of(series: Any, times_ns: Any, values: Any, kinds: Any = None) -> WindowRows:
    """Each sample as a row of its own."""
    values = np.asarray(values, np.float64) + 0.0
    count = len(values)
    number = ~np.isnan(values)
    ones, held = np.ones(count, np.int64), number.astype(np.int64)
    return WindowRows(
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
        kinds=np.zeros(count, np.uint8) if kinds is None else np.asarray(kinds, np.uint8),
    )


def joined(parts: Sequence[WindowRows]) -> WindowRows:
    """The rows of several, one after the other; their series codes must speak of the same series."""
    return WindowRows(
        *(_joined([getattr(part, name) for part in parts], name) for name in WindowRows.__struct_fields__)
    )


def merged(rows: WindowRows, window_ns: int) -> WindowRows:
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
    return WindowRows(
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
        kinds=np.maximum.reduceat(rows.kinds[order], begins),
    )


def _order(rows: WindowRows, starts: Any) -> Any:
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


def _sums(rows: WindowRows, order: Any, groups: Any, count: int) -> tuple[Any, Any, Any]:
    """Exact sums of the groups. A sum that is NaN means both infinities."""
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


def _sketches(rows: WindowRows, order: Any, groups: Any, count: int) -> tuple[Any, Any, Any]:
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


SEPARATOR, ESCAPE = "\x1f", "\x1e"


def series_keys(batch: Batch) -> Any:
    """The key of each series of the batch, as an Arrow array of strings."""
    import pyarrow as pa

    columns = batch.columns
    texts = escaped(pa.array([*columns.strings, batch.identity.agent_id], pa.string()))
    agents = np.full(len(columns.series_metric), len(columns.strings))
    label_offsets = columns.label_offsets.astype(np.int64)
    return _keys(texts, [columns.series_metric, agents], label_offsets, columns.label_names, columns.label_values)


def row_keys(agents: Any, labels: Any) -> Any:
    """A key of each row of a chunk, whose metric goes without saying: agent and labels."""
    import pyarrow as pa

    names, values = labels.keys, labels.items
    offsets = labels.offsets.to_numpy().astype(np.int64)
    texts = escaped(pa.concat_arrays([agents, names, values]))
    at = np.arange(len(names))
    return _keys(texts, [np.arange(len(agents))], offsets, len(agents) + at, len(agents) + len(names) + at)


def _keys(texts: Any, heads: list[Any], label_offsets: Any, names: Any, values: Any) -> Any:
    """Joins texts by their numbers: first the heads of each series, then its labels, name by value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    count, width = len(label_offsets) - 1, len(heads)
    first, last = int(label_offsets[0]), int(label_offsets[-1])
    offsets = (label_offsets - first) * 2 + width * np.arange(count + 1)
    items = np.empty(int(offsets[-1]), np.int64)
    for place, head in enumerate(heads):
        items[offsets[:-1] + place] = head
    at = np.repeat(width * np.arange(1, count + 1), np.diff(label_offsets)) + 2 * np.arange(last - first)
    items[at], items[at + 1] = names[first:last], values[first:last]
    parts = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), texts.take(pa.array(items)))
    return pc.binary_join(parts, SEPARATOR)


def split_keys(keys: Any) -> tuple[Any, Any, Any]:
    """Of each key: metric, agent and labels, as Arrow arrays."""
    import pyarrow as pa
    import pyarrow.compute as pc

    parts = pc.split_pattern(keys, SEPARATOR)
    if isinstance(parts, pa.ChunkedArray):
        parts = parts.combine_chunks()
    texts, offsets = unescaped(parts.flatten()), parts.offsets.to_numpy().astype(np.int64)
    begins = offsets[:-1] - offsets[0]
    label_offsets = (offsets - offsets[0] - 2 * np.arange(len(offsets))) // 2
    series_of_label = np.repeat(np.arange(len(keys)), np.diff(label_offsets))
    at = 2 * series_of_label + 2 + 2 * np.arange(int(label_offsets[-1]))
    labels = pa.MapArray.from_arrays(
        pa.array(label_offsets.astype(np.int32)), texts.take(pa.array(at)), texts.take(pa.array(at + 1))
    )
    return texts.take(pa.array(begins)), texts.take(pa.array(begins + 1)), labels


def escaped(texts: Any) -> Any:
    import pyarrow.compute as pc

    return pc.replace_substring(
        pc.replace_substring(texts, pattern=ESCAPE, replacement=ESCAPE + "a"),
        pattern=SEPARATOR,
        replacement=ESCAPE + "b",
    )


def unescaped(texts: Any) -> Any:
    import pyarrow.compute as pc

    return pc.replace_substring(
        pc.replace_substring(texts, pattern=ESCAPE + "b", replacement=SEPARATOR),
        pattern=ESCAPE + "a",
        replacement=ESCAPE,
    )
