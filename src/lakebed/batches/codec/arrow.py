"""A batch as Arrow columns: a row a sample, without a Python loop over samples. Imports pyarrow when called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lakebed.batches.model import Batch, Kind


def schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("agent_id", pa.string(), nullable=False),
            pa.field("boot_id", pa.string(), nullable=False),
            pa.field("seq", pa.int64(), nullable=False),
            pa.field("metric", pa.string(), nullable=False),
            pa.field("labels", pa.map_(pa.string(), pa.string()), nullable=False),
            pa.field("time_ns", pa.int64(), nullable=False),
            pa.field("value", pa.float64(), nullable=False),
            pa.field("kind", pa.uint8(), nullable=False),
        ]
    )


def record_batch(batch: Batch) -> Any:
    """The samples in sequence order, in the columns of `schema`."""
    import pyarrow as pa

    return pa.record_batch([column(batch, name) for name in schema().names], schema=schema())


def column(batch: Batch, name: str) -> Any:
    """One column of `schema`, in sequence order; also `time` (microseconds, UTC) and `kind_name`."""
    return _COLUMNS[name](batch)


def _metric(batch: Batch) -> Any:
    import pyarrow as pa

    columns = batch.columns
    return pa.array(columns.strings, pa.string()).take(pa.array(columns.series_metric[columns.series]))


def _labels(batch: Batch) -> Any:
    import pyarrow as pa

    columns = batch.columns
    strings = pa.array(columns.strings, pa.string())
    table = pa.MapArray.from_arrays(
        pa.array(columns.label_offsets.astype(np.int32)),
        strings.take(pa.array(columns.label_names)),
        strings.take(pa.array(columns.label_values)),
    )
    return table.take(pa.array(columns.series))


def _repeated(value: str, count: int) -> Any:
    import pyarrow as pa

    return pa.repeat(value, count)


def _array(values: Any) -> Any:
    import pyarrow as pa

    return pa.array(values)


def _time(batch: Batch) -> Any:
    import pyarrow as pa

    return pa.array(batch.columns.times_ns // 1000).cast(pa.timestamp("us", "UTC"))


def _kind_name(batch: Batch) -> Any:
    import pyarrow as pa

    return pa.array([kind.name.lower() for kind in Kind], pa.string()).take(pa.array(batch.columns.kinds))


_COLUMNS: dict[str, Callable[[Batch], Any]] = {
    "agent_id": lambda batch: _repeated(batch.identity.agent_id, batch.columns.samples),
    "boot_id": lambda batch: _repeated(batch.identity.boot_id, batch.columns.samples),
    "seq": lambda batch: _array(np.arange(batch.identity.seq_start, batch.identity.seq_end + 1, dtype=np.int64)),
    "metric": _metric,
    "labels": _labels,
    "time_ns": lambda batch: _array(batch.columns.times_ns),
    "time": _time,
    "value": lambda batch: _array(batch.columns.values),
    "kind": lambda batch: _array(batch.columns.kinds),
    "kind_name": _kind_name,
}
