"""The chunks of rollups, `.lmrollup.zst` and `.lmindex.zst`: Arrow IPC streams inside one zstd frame.

A rollup chunk holds the values of one metric, per series and window, in one stream. A chunk never changes; chunks of
one window, hour and metric are made from different batches, so a reader adds them up. An index chunk holds two streams:
the batches of one hour, and the series with the numbers of their batches. Both import pyarrow when called.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from lakebed.core.compression import compress, decompress
from lakebed.core.errors import Invalid
from lakebed.rollups.codec.windows import WindowRows
from lakebed.rollups.model import RollupInputReport

CHUNK_BYTES_MAX = 64 * 1024 * 1024  # after decompression


def pack(*tables: Any) -> bytes:
    """The tables as Arrow IPC streams end to end, compressed. The same tables give the same bytes on one version."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    for table in tables:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.combine_chunks())
    return compress(sink.getvalue().to_pybytes())


def unpack(what: str, data: bytes, count: int, bytes_max: int = CHUNK_BYTES_MAX) -> list[Any]:
    """`count` tables. Raises Invalid for anything else, in bounded memory."""
    import pyarrow as pa

    plain = decompress(data, bytes_max, what=what)
    try:
        source = io.BytesIO(plain)
        tables = [pa.ipc.open_stream(source).read_all() for _ in range(count)]
        if source.tell() != len(plain):
            raise Invalid(f"{what} has trailing bytes after its tables")
        for table in tables:
            table.validate(full=True)
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        raise Invalid(f"{what} does not decode: {error}") from error
    return tables


def check_schema(what: str, table: Any, wanted: Any) -> None:
    """Raises Invalid unless the table has exactly these columns, without nulls where none may be."""
    import pyarrow as pa

    if not table.schema.equals(wanted):
        raise Invalid(f"{what} has other columns than {wanted.names}")
    for field in wanted:
        if not field.nullable and table[field.name].null_count:
            raise Invalid(f"{what} has nulls in {field.name}")
        if pa.types.is_list(field.type) and table[field.name].combine_chunks().flatten().null_count:
            raise Invalid(f"{what} has nulls inside {field.name}")


def ipc_bytes(table: Any) -> bytes:
    """A table on its way between tasks."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table.combine_chunks())
    data: bytes = sink.getvalue().to_pybytes()
    return data


def ipc_table(data: bytes) -> Any:
    import pyarrow as pa

    return pa.ipc.open_stream(data).read_all()


V1, V2, V3 = "lightmetrics.rollup.v1", "lightmetrics.rollup.v2", "lightmetrics.rollup.v3"
ROLLUP_CHUNK = "a rollup chunk"


@cache
def rollup_schema() -> Any:
    import pyarrow as pa

    return pa.schema([*rollup_schema_v2(), _field("sample_kind", pa.uint8())], metadata={"schema": V3})


@cache
def rollup_schema_v2() -> Any:
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
    check_schema(ROLLUP_CHUNK, table, rollup_schema())
    return pack(table.cast(rollup_schema()))


def decode_rollup(data: bytes, bytes_max: int = CHUNK_BYTES_MAX) -> Any:
    """The chunk as an Arrow table of `rollup_schema`. Raises Invalid for anything else, in bounded memory.

    A chunk of version 1 has no NaN, no rest of its sums and no sketch; one of version 2 has no kind of its samples.
    """
    (table,) = unpack(ROLLUP_CHUNK, data, 1, bytes_max)
    version = (table.schema.metadata or {}).get(b"schema", b"").decode(errors="replace")
    if version == V1:
        check_schema(ROLLUP_CHUNK, table, rollup_schema_v1())
        return _upgraded(table)
    if version not in (V2, V3):
        raise Invalid(
            f"{ROLLUP_CHUNK} of version {version[:80]!r} is not supported by this version",
            hint="upgrade the reader first",
        )
    check_schema(ROLLUP_CHUNK, table, rollup_schema() if version == V3 else rollup_schema_v2())
    lengths = [np.diff(_offsets(table, name)) for name in ("sketch_bucket", "sketch_count")]
    if not np.array_equal(*lengths):
        raise Invalid(f"{ROLLUP_CHUNK} has sketches whose buckets and counts do not match")
    return table if version == V3 else _with_kind(table)


def table_of(rows: WindowRows, agents: Any, labels: Any) -> Any:
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
            pa.array(rows.kinds),
        ],
        schema=rollup_schema(),
    )


def rows_in(table: Any, series: Any) -> WindowRows:
    """The rows of a table with these columns (whatever else it has), with the series codes that the caller gives."""
    return WindowRows(
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
        kinds=_plain(table, "sample_kind"),
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
    return _with_kind(pa.Table.from_arrays([*table.columns, *more], schema=rollup_schema_v2()))


def _with_kind(table: Any) -> Any:
    """A chunk of an earlier version, whose samples are untyped."""
    import pyarrow as pa

    untyped = pa.array(np.zeros(table.num_rows, np.uint8))
    return pa.Table.from_arrays([*table.columns, untyped], schema=rollup_schema())


def _plain(table: Any, name: str) -> Any:
    return table[name].to_numpy()


def _offsets(table: Any, name: str) -> Any:
    lists = table[name].combine_chunks()
    offsets = lists.offsets.to_numpy().astype(np.int64)
    return offsets - offsets[0] if len(offsets) else np.zeros(1, np.int64)


def _entries(table: Any, name: str) -> Any:
    return table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)


VERSION = "lightmetrics.index.v1"
PACKED_VERSION = "lightmetrics.index.v2"  # where a batch of the chunk is in a pack
INDEX_CHUNK = "an index chunk"
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
def packed_batch_schema() -> Any:
    """The same with the place of each frame: the pack and the offset in it, or its own blob and 0."""
    import pyarrow as pa

    place = [
        pa.field("raw_blob_key", pa.string(), nullable=False),
        pa.field("raw_blob_offset", pa.int64(), nullable=False),
        pa.field("frame_bytes", pa.int64(), nullable=False),
    ]
    return pa.schema([*batch_schema(), *place], metadata={"schema": PACKED_VERSION})


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
    wanted = packed_batch_schema() if "raw_blob_key" in batches.schema.names else batch_schema()
    check_schema(INDEX_CHUNK, batches, wanted)
    check_schema(INDEX_CHUNK, series, series_schema())
    return pack(batches.cast(wanted), series.cast(series_schema()))


def decode_index(data: bytes, bytes_max: int = CHUNK_BYTES_MAX) -> tuple[Any, Any]:
    """(batches, series). Raises Invalid for anything else, in bounded memory."""
    import pyarrow.compute as pc

    batches, series = unpack(INDEX_CHUNK, data, 2, bytes_max)
    version = (batches.schema.metadata or {}).get(b"schema", b"").decode(errors="replace")
    known = {VERSION: batch_schema(), PACKED_VERSION: packed_batch_schema()}
    if version not in known:
        raise Invalid(
            f"{INDEX_CHUNK} of version {version[:80]!r} is not supported by this version",
            hint="upgrade the reader first",
        )
    check_schema(INDEX_CHUNK, batches, known[version])
    check_schema(INDEX_CHUNK, series, series_schema())
    numbers = series["batches"].combine_chunks().flatten()
    if len(numbers) and (pc.min(numbers).as_py() < 0 or pc.max(numbers).as_py() >= batches.num_rows):
        raise Invalid(f"{INDEX_CHUNK} refers to batches that it does not have")
    return batches, series


def build_index(reports: Sequence[RollupInputReport], fragments: Sequence[Any]) -> Iterator[tuple[int, bytes]]:
    """(series, bytes) of each chunk of one hour. `fragments` number batches as `reports` do; a metric is in one.

    A chunk lists only the batches that its series are in, in the order of their numbers.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    by_number = {each.number: each for each in reports}
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
        yield some.num_rows, encode_index(_listed([by_number[number] for number in used.tolist()]), some)
        start = end


def _listed(reports: Sequence[RollupInputReport]) -> Any:
    """The batches of a chunk; with their places where one of them is in a pack."""
    import pyarrow as pa

    schema = packed_batch_schema() if any(each.raw_blob_offset for each in reports) else batch_schema()
    names = ["key" if field.name == "raw_blob_key" else field.name for field in schema]
    columns = [[getattr(each, name) for each in reports] for name in names]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)
