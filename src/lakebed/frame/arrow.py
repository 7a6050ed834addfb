"""A batch as an Arrow record batch: a row a sample, without a Python loop over samples. Imports pyarrow when called."""

from __future__ import annotations

from typing import Any

import numpy as np

from lakebed.frame.model import Batch


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

    columns, identity = batch.columns, batch.identity
    strings = pa.array(columns.strings, pa.string())
    series = pa.array(columns.series)
    table = pa.MapArray.from_arrays(
        pa.array(columns.label_offsets.astype(np.int32)),
        strings.take(pa.array(columns.label_names)),
        strings.take(pa.array(columns.label_values)),
    )
    count = columns.samples
    return pa.record_batch(
        [
            pa.repeat(identity.agent_id, count),
            pa.repeat(identity.boot_id, count),
            pa.array(np.arange(identity.seq_start, identity.seq_end + 1, dtype=np.int64)),
            strings.take(pa.array(columns.series_metric)).take(series),
            table.take(series),
            pa.array(columns.times_ns),
            pa.array(columns.values),
            pa.array(columns.kinds),
        ],
        schema=schema(),
    )
