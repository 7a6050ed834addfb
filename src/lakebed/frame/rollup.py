"""The `.lmrollup.zst` chunk: what samples of one metric came to, per series and window. Written by the pipeline.

An Arrow IPC stream inside one zstd frame. A chunk never changes; chunks of one window, hour and metric are made from
different batches, so a reader adds them up. Imports pyarrow when called.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from lakebed.errors import Invalid
from lakebed.frame.packed import CHUNK_BYTES_MAX, check_schema, pack, unpack
from lakebed.frame.windows import Rows

V1, V2 = "lightmetrics.rollup.v1", "lightmetrics.rollup.v2"
WHAT = "a rollup chunk"


@cache
def rollup_schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            *_first_fields(),
            _field("nan_count", pa.int64()),
            _field("sum_rest", pa.list_(pa.float64())),
            _field("sketch_bucket", pa.list_(pa.int32())),
            _field("sketch_count", pa.list_(pa.int64())),
        ],
        metadata={"schema": V2},
    )


@cache
def rollup_schema_v1() -> Any:
    import pyarrow as pa

    return pa.schema(_first_fields(), metadata={"schema": V1})


def encode_rollup(table: Any) -> bytes:
    """The bytes of a chunk. Raises Invalid unless the table has exactly the columns of `rollup_schema`."""
    check_schema(WHAT, table, rollup_schema())
    return pack(table.cast(rollup_schema()))


def decode_rollup(data: bytes, bytes_max: int = CHUNK_BYTES_MAX) -> Any:
    """The chunk as an Arrow table of `rollup_schema`. Raises Invalid for anything else, in bounded memory.

    A chunk of version 1 has no NaN, no rest of its sums and no sketch.
    """
    (table,) = unpack(WHAT, data, 1, bytes_max)
    version = (table.schema.metadata or {}).get(b"schema", b"").decode(errors="replace")
    if version == V1:
        check_schema(WHAT, table, rollup_schema_v1())
        return _upgraded(table)
    if version != V2:
        raise Invalid(f"{WHAT} of version {version[:80]!r} is not known here", hint="upgrade the reader first")
    check_schema(WHAT, table, rollup_schema())
    lengths = [np.diff(_offsets(table, name)) for name in ("sketch_bucket", "sketch_count")]
    if not np.array_equal(*lengths):
        raise Invalid(f"{WHAT} has sketches whose buckets and counts do not fit together")
    return table


def table_of(rows: Rows, agents: Any, labels: Any) -> Any:
    """Rows as a table; `agents` and `labels` are those of each series code."""
    import pyarrow as pa

    series = pa.array(rows.series)
    return pa.Table.from_arrays(
        [
            agents.take(series),
            labels.take(series),
            pa.array(rows.starts_ns),
            pa.array(rows.counts),
            pa.array(rows.sums),
            pa.array(rows.leasts),
            pa.array(rows.greatests),
            pa.array(rows.lasts_ns),
            pa.array(rows.lasts),
            pa.array(rows.nans),
            pa.ListArray.from_arrays(pa.array(rows.rest_offsets.astype(np.int32)), pa.array(rows.rests)),
            pa.ListArray.from_arrays(pa.array(rows.bucket_offsets.astype(np.int32)), pa.array(rows.buckets)),
            pa.ListArray.from_arrays(pa.array(rows.bucket_offsets.astype(np.int32)), pa.array(rows.sketch_counts)),
        ],
        schema=rollup_schema(),
    )


def rows_in(table: Any, series: Any) -> Rows:
    """The rows of a table with these columns (whatever else it has), with the series codes that the caller gives."""
    return Rows(
        series=series,
        starts_ns=_plain(table, "start_ns"),
        counts=_plain(table, "count"),
        nans=_plain(table, "nan_count"),
        sums=_plain(table, "sum"),
        rest_offsets=_offsets(table, "sum_rest"),
        rests=_entries(table, "sum_rest"),
        leasts=_plain(table, "min"),
        greatests=_plain(table, "max"),
        lasts_ns=_plain(table, "last_ns"),
        lasts=_plain(table, "last"),
        bucket_offsets=_offsets(table, "sketch_bucket"),
        buckets=_entries(table, "sketch_bucket"),
        sketch_counts=_entries(table, "sketch_count"),
    )


def _first_fields() -> list[Any]:
    import pyarrow as pa

    return [
        _field("agent_id", pa.string()),
        _field("labels", pa.map_(pa.string(), pa.string())),
        _field("start_ns", pa.int64()),
        _field("count", pa.int64()),
        _field("sum", pa.float64()),
        _field("min", pa.float64()),
        _field("max", pa.float64()),
        _field("last_ns", pa.int64()),
        _field("last", pa.float64()),
    ]


def _field(name: str, kind: Any) -> Any:
    import pyarrow as pa

    return pa.field(name, kind, nullable=False)


def _upgraded(table: Any) -> Any:
    import pyarrow as pa

    count = table.num_rows
    none = pa.array(np.zeros(count + 1, np.int32))
    more = [
        pa.array(np.zeros(count, np.int64)),
        *(pa.ListArray.from_arrays(none, pa.array([], kind)) for kind in (pa.float64(), pa.int32(), pa.int64())),
    ]
    return pa.Table.from_arrays([*table.columns, *more], schema=rollup_schema())


def _plain(table: Any, name: str) -> Any:
    return table[name].to_numpy()


def _offsets(table: Any, name: str) -> Any:
    lists = table[name].combine_chunks()
    offsets = lists.offsets.to_numpy().astype(np.int64)
    return offsets - offsets[0] if len(offsets) else np.zeros(1, np.int64)


def _entries(table: Any, name: str) -> Any:
    return table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
