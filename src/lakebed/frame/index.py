"""The `.lmindex.zst` chunk: which batches hold samples of which series, in one hour. Written by the pipeline.

Two Arrow IPC streams end to end inside one zstd frame: the batches, and the series with the numbers of their batches.
Imports pyarrow when called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from lakebed.errors import Invalid
from lakebed.frame.packed import CHUNK_BYTES_MAX, check_schema, pack, unpack
from lakebed.frame.work import Told

VERSION = "lightmetrics.index.v1"
WHAT = "an index chunk"
SERIES_MAX = 20_000  # series of one chunk, and pairs of series and batch: a chunk stays far below what a reader takes
PAIRS_MAX = 4_000_000


@cache
def batch_schema() -> Any:
    """A batch: its by-time name, its blob, and the span of its samples."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("manifest_id", pa.string(), nullable=False),
            pa.field("frame_sha256", pa.string(), nullable=False),
            pa.field("first_ns", pa.int64(), nullable=False),
            pa.field("last_ns", pa.int64(), nullable=False),
            pa.field("samples", pa.int64(), nullable=False),
        ],
        metadata={"schema": VERSION},
    )


@cache
def series_schema() -> Any:
    """A series, and which of the batches above hold samples of it in this hour, ascending."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("metric", pa.string(), nullable=False),
            pa.field("agent_id", pa.string(), nullable=False),
            pa.field("labels", pa.map_(pa.string(), pa.string()), nullable=False),
            pa.field("batches", pa.list_(pa.int32()), nullable=False),
        ]
    )


def encode_index(batches: Any, series: Any) -> bytes:
    """The bytes of a chunk, in the given order. Raises Invalid for other columns."""
    check_schema(WHAT, batches, batch_schema())
    check_schema(WHAT, series, series_schema())
    return pack(batches.cast(batch_schema()), series.cast(series_schema()))


def decode_index(data: bytes, bytes_max: int = CHUNK_BYTES_MAX) -> tuple[Any, Any]:
    """(batches, series). Raises Invalid for anything else, in bounded memory."""
    import pyarrow.compute as pc

    batches, series = unpack(WHAT, data, 2, bytes_max)
    version = (batches.schema.metadata or {}).get(b"schema", b"").decode(errors="replace")
    if version != VERSION:
        raise Invalid(f"{WHAT} of version {version[:80]!r} is not known here", hint="upgrade the reader first")
    check_schema(WHAT, batches, batch_schema())
    check_schema(WHAT, series, series_schema())
    numbers = series["batches"].combine_chunks().flatten()
    if len(numbers) and (pc.min(numbers).as_py() < 0 or pc.max(numbers).as_py() >= batches.num_rows):
        raise Invalid(f"{WHAT} speaks of batches that it does not have")
    return batches, series


def build_index(told: Sequence[Told], fragments: Sequence[Any]) -> Iterator[tuple[int, bytes]]:
    """(series, bytes) of each chunk of one hour. `fragments` number batches as `told` does; a metric is in one of them.

    A chunk lists only the batches that its series are in, in the order of their numbers.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    by_number = {each.number: each for each in told}
    series = pa.concat_tables(fragments)
    series = series.take(pc.sort_indices(series["metric"])).combine_chunks()  # stable: a metric's own order stays
    bounds = series["batches"].combine_chunks().offsets.to_numpy()
    start = 0
    while start < series.num_rows:
        end = int(np.searchsorted(bounds, bounds[start] + PAIRS_MAX, side="right")) - 1
        end = min(max(end, start + 1), start + SERIES_MAX, series.num_rows)
        some = series.slice(start, end - start).combine_chunks()
        lists = some["batches"].combine_chunks()
        numbers = lists.flatten().to_numpy()
        used = np.unique(numbers)
        renumbered = np.searchsorted(used, numbers).astype(np.int32)
        offsets = lists.offsets.to_numpy() - lists.offsets.to_numpy()[0]
        some = some.set_column(
            3, series_schema().field("batches"), pa.ListArray.from_arrays(pa.array(offsets), pa.array(renumbered))
        )
        listed = [by_number[number] for number in used.tolist()]
        batches = pa.Table.from_arrays(
            [
                pa.array([each.manifest_id for each in listed], pa.string()),
                pa.array([each.frame_sha256 for each in listed], pa.string()),
                *(
                    pa.array([getattr(each, name) for each in listed], pa.int64())
                    for name in ("first_ns", "last_ns", "samples")
                ),
            ],
            schema=batch_schema(),
        )
        yield some.num_rows, encode_index(batches, some)
        start = end
