"""From batches to chunks, without I/O: what a task does with the batches it has read, and with the rows it was sent.

    partials(batches)   one row for each series and base window, and which batches hold which series in which hour
    chunks(partials)    the bytes of rollup chunks, one for each window, hour and metric, and the series of the index

Both take and give Arrow tables, so that any engine may carry rows from one to the other; nothing loops over samples.
Imports pyarrow when called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from lakebed.batches.model import Batch
from lakebed.core.errors import Invalid
from lakebed.rollups.codec.chunk import encode_rollup, rows_in, series_schema, table_of
from lakebed.rollups.codec.windows import SECOND_NS, WindowRows, merged, rows_of, series_keys, split_keys

HOUR_S = 3600
HOUR_NS = HOUR_S * SECOND_NS
ROW, INDEX = 0, 1  # what a partial is: a row of samples, or a note for the index
MARKS_MAX = 1_000_000
CHUNK_ROWS_MAX = 50_000  # rows of one chunk; a metric with more in an hour gets several


def check_windows(windows_s: Sequence[int]) -> tuple[int, ...]:
    """The windows in ascending order. Raises Invalid unless each, and the hour, is made of whole smaller ones."""
    chain = sorted({*windows_s, HOUR_S})
    if not windows_s or chain[0] < 1 or any(big % small for small, big in pairwise(chain)):
        raise Invalid(
            f"windows of {sorted(windows_s)} s do not nest",
            hint="each must divide the next larger one, and an hour or be divided by it, such as 60, 300, 3600",
        )
    return tuple(sorted(set(windows_s)))


def span_ns(windows_s: Sequence[int]) -> int:
    """How much time rows must be brought together for: the largest window, and at least the hour of a folder."""
    return max(*windows_s, HOUR_S) * SECOND_NS


@cache
def partial_schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("kind", pa.int8()),
            pa.field("span", pa.int64()),
            pa.field("metric", pa.string()),
            pa.field("series", pa.string()),
            pa.field("start_ns", pa.int64()),
            pa.field("count", pa.int64()),
            pa.field("nan_count", pa.int64()),
            pa.field("sum", pa.float64()),
            pa.field("sum_rest", pa.list_(pa.float64())),
            pa.field("min", pa.float64()),
            pa.field("max", pa.float64()),
            pa.field("last_ns", pa.int64()),
            pa.field("last", pa.float64()),
            pa.field("sketch_bucket", pa.list_(pa.int32())),
            pa.field("sketch_count", pa.list_(pa.int64())),
            pa.field("sample_kind", pa.uint8()),
            pa.field("batches", pa.list_(pa.int32())),
        ]
    )


def partials(batches: Sequence[tuple[int, Batch]], windows_s: Sequence[int]) -> Any:
    """What these numbered batches come to, in the smallest window that all others and the hour are made of."""
    import pyarrow as pa

    keys = pa.concat_arrays([series_keys(batch) for _, batch in batches]).dictionary_encode()
    codes, names = keys.indices.to_numpy().astype(np.int64), keys.dictionary
    series, notes, at = [], [], 0
    for number, batch in batches:
        columns = batch.columns
        mine = codes[at : at + len(columns.series_metric)]
        at += len(columns.series_metric)
        series.append(mine[columns.series])
        used, hours = _hours(columns.series, len(mine), columns.times_ns)
        notes.append((mine[used], hours, number))
    rows = merged(
        rows_of(
            np.concatenate(series),
            np.concatenate([batch.columns.times_ns for _, batch in batches]),
            np.concatenate([batch.columns.values for _, batch in batches]),
            np.concatenate([batch.columns.kinds for _, batch in batches]),
        ),
        min(*windows_s, HOUR_S) * SECOND_NS,
    )
    metrics = split_keys(names)[0]
    wide = span_ns(windows_s)
    return pa.concat_tables([_row_table(rows, names, metrics, wide), _note_table(notes, names, metrics, wide)])


def split(table: Any) -> Iterator[tuple[int, str, Any]]:
    """Partials by span and metric: what must come together to be made into chunks."""
    metrics = table["metric"].combine_chunks().dictionary_encode()
    names = metrics.dictionary.to_pylist()
    codes, spans = metrics.indices.to_numpy(), table["span"].to_numpy()
    order = np.lexsort((spans, codes))
    edges = np.flatnonzero((np.diff(codes[order], prepend=-1) != 0) | (np.diff(spans[order], prepend=-1) != 0))
    in_order = table.take(order)
    for begin, end in zip(edges.tolist(), [*edges[1:].tolist(), len(order)], strict=True):
        yield int(spans[order[begin]]), names[codes[order[begin]]], in_order.slice(begin, end - begin)


class EncodedChunk(msgspec.Struct, frozen=True):
    """A rollup chunk, ready to be stored. `part` numbers the chunks of one window, hour and metric."""

    window_s: int
    hour_ns: int
    metric: str
    part: int
    rows: int
    samples: int
    data: bytes


def chunks(table: Any, windows_s: Sequence[int]) -> Iterator[EncodedChunk]:
    """Every chunk of these partials, which must be all there are of their spans and metrics."""
    import pyarrow.compute as pc

    found = table.filter(pc.equal(table["kind"], ROW))
    if not found.num_rows:
        return
    names, codes = _sorted_codes(found["series"])
    metrics, agents, labels = split_keys(names)
    metric_codes = metrics.dictionary_encode().indices.to_numpy()
    metric_names = metrics.dictionary_encode().dictionary.to_pylist()
    rows = rows_in(found, codes)
    for window_s in windows_s:
        rows = merged(rows, window_s * SECOND_NS)
        hours = rows.starts_ns // HOUR_NS
        order = np.lexsort((hours, metric_codes[rows.series]))  # stable: series and start stay in order
        of = metric_codes[rows.series][order]
        edges = np.flatnonzero((np.diff(of, prepend=-1) != 0) | (np.diff(hours[order], prepend=-1) != 0))
        for begin, end in zip(edges, np.append(edges[1:], len(order)), strict=True):
            for part, start in enumerate(range(begin, end, CHUNK_ROWS_MAX)):
                some = rows.take(order[start : min(end, start + CHUNK_ROWS_MAX)])
                yield EncodedChunk(
                    window_s=window_s,
                    hour_ns=int(hours[order[begin]]) * HOUR_NS,
                    metric=metric_names[of[begin]],
                    part=part,
                    rows=len(some),
                    samples=int(some.counts.sum()),
                    data=encode_rollup(table_of(some, agents, labels)),
                )


def noted(table: Any) -> dict[int, Any]:
    """By hour: the series of the index, with the numbers of their batches."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found = table.filter(pc.equal(table["kind"], INDEX))
    if not found.num_rows:
        return {}
    names, codes = _sorted_codes(found["series"])
    metrics, agents, labels = split_keys(names)
    lists = found["batches"].combine_chunks()
    lengths = np.diff(lists.offsets.to_numpy())
    series, hours = np.repeat(codes, lengths), np.repeat(found["start_ns"].to_numpy(), lengths)
    numbers = lists.flatten().to_numpy()
    arrays = {}
    for hour in np.unique(hours).tolist():
        here = hours == hour
        pairs = np.unique(series[here] * (1 << 32) + numbers[here])
        of, numbered = pairs >> 32, (pairs & 0xFFFFFFFF).astype(np.int32)
        begins = np.flatnonzero(np.diff(of, prepend=-1))
        offsets = np.append(begins, len(pairs)).astype(np.int32)
        at = pa.array(of[begins])
        arrays[hour] = pa.Table.from_arrays(
            [
                metrics.take(at),
                agents.take(at),
                labels.take(at),
                pa.ListArray.from_arrays(pa.array(offsets), pa.array(numbered)),
            ],
            schema=series_schema(),
        )
    return arrays


def _hours(series: Any, count: int, times_ns: Any) -> tuple[Any, Any]:
    """The distinct (series, hour) of a batch, of `count` series."""
    hours = times_ns // HOUR_NS
    first = int(hours.min())
    width = int(hours.max()) - first + 1
    pairs = series.astype(np.int64) * width + (hours - first)
    if count * width <= MARKS_MAX:  # marking is far cheaper than sorting, and batches mostly lie in an hour or two
        marks = np.zeros(count * width, bool)
        marks[pairs] = True
        pairs = np.flatnonzero(marks)
    else:
        pairs = np.unique(pairs)
    return pairs // width, (pairs % width + first) * HOUR_NS


def _row_table(rows: WindowRows, names: Any, metrics: Any, wide: int) -> Any:
    import pyarrow as pa

    codes, count = pa.array(rows.series), len(rows)
    sketch = pa.array(rows.bucket_offsets.astype(np.int32))
    return pa.Table.from_arrays(
        [
            pa.array(np.full(count, ROW, np.int8)),
            pa.array(rows.starts_ns // wide),
            metrics.take(codes),
            names.take(codes),
            pa.array(rows.starts_ns),
            pa.array(rows.counts),
            pa.array(rows.nans),
            pa.array(rows.sums),
            pa.ListArray.from_arrays(pa.array(rows.rest_offsets.astype(np.int32)), pa.array(rows.rests)),
            pa.array(rows.leasts),
            pa.array(rows.greatests),
            pa.array(rows.lasts_ns),
            pa.array(rows.lasts),
            pa.ListArray.from_arrays(sketch, pa.array(rows.buckets)),
            pa.ListArray.from_arrays(sketch, pa.array(rows.sketch_counts)),
            pa.array(rows.kinds),
            pa.nulls(count, pa.list_(pa.int32())),
        ],
        schema=partial_schema(),
    )


def _note_table(notes: list[tuple[Any, Any, int]], names: Any, metrics: Any, wide: int) -> Any:
    """One row for each (series, hour), listing the batches that hold samples of it."""
    import pyarrow as pa

    series = np.concatenate([of for of, _, _ in notes])
    hours = np.concatenate([at for _, at, _ in notes])
    numbers = np.repeat(np.array([n for _, _, n in notes], np.int32), [len(of) for of, _, _ in notes])
    order = np.lexsort((numbers, hours, series))
    series, hours, numbers = series[order], hours[order], numbers[order]
    begins = np.flatnonzero((np.diff(series, prepend=-1) != 0) | (np.diff(hours, prepend=-1) != 0))
    codes = pa.array(series[begins])
    arrays = {
        "kind": pa.array(np.full(len(begins), INDEX, np.int8)),
        "span": pa.array(hours[begins] // wide),
        "metric": metrics.take(codes),
        "series": names.take(codes),
        "start_ns": pa.array(hours[begins]),
        "batches": pa.ListArray.from_arrays(
            pa.array(np.append(begins, len(order)).astype(np.int32)), pa.array(numbers)
        ),
    }
    return pa.Table.from_arrays(
        [arrays.get(field.name, pa.nulls(len(begins), field.type)) for field in partial_schema()],
        schema=partial_schema(),
    )


def _sorted_codes(keys: Any) -> tuple[Any, Any]:
    """The distinct keys in the order of their bytes, and the place of each row's key among them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    encoded = keys.combine_chunks().dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    names = encoded.dictionary
    order = pc.array_sort_indices(names)
    rank = np.empty(len(names), np.int64)
    rank[order.to_numpy()] = np.arange(len(names))
    return names.take(order), rank[encoded.indices.to_numpy()]
