"""What executors do with a table's files: write Parquet under fresh names, read the files of a snapshot.

Both are functions from Arrow batches to Arrow batches (`mapInArrow`): no Python loop per row. Files written by a job
that never commits are orphans that nothing refers to; vacuum deletes them.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import msgspec

from lakebed.delta.model import DataFile, TableSpec, key_of, path_of
from lakebed.spark.location import Location

ROWS_PER_FILE_MAX = 2_000_000
BYTES_PER_FILE_MAX = 128 * 1024 * 1024  # of Arrow memory, before Parquet makes it smaller
WRITTEN = "file string"  # the schema of what a writing task returns: one JSON DataFile a row
FILE_COLUMN = "_file"

Batches = Iterator[Any]


def writing(spec: TableSpec, location: Location) -> Callable[[Batches], Batches]:
    """The task that writes its rows and returns a description of each file."""

    def write(batches: Batches) -> Batches:
        import pyarrow as pa

        filesystem = location.filesystem()
        held: list[Any] = []
        size = rows = 0
        for batch in batches:
            held.append(batch)
            size, rows = size + batch.nbytes, rows + batch.num_rows
            if size >= BYTES_PER_FILE_MAX or rows >= ROWS_PER_FILE_MAX:
                yield _described(pa, write_files(pa.Table.from_batches(held), spec, location, filesystem))
                held, size, rows = [], 0, 0
        if rows:
            yield _described(pa, write_files(pa.Table.from_batches(held), spec, location, filesystem))

    return write


def reading(
    location: Location, root: str, types: dict[str, Any], partition_by: Sequence[str], *, with_file: bool = False
) -> Callable[[Batches], Batches]:
    """The task that reads files: its input has columns `path` and `partition` (JSON), its output the table's rows.

    `types` are the wanted columns' Arrow types: a file older than a column gives nulls for it.
    """

    def read(batches: Batches) -> Batches:
        import pyarrow.parquet as pq

        filesystem = location.filesystem()
        for batch in batches:
            for path, partition in zip(batch["path"].to_pylist(), batch["partition"].to_pylist(), strict=True):
                with pq.ParquetFile(location.path(key_of(root, path)), filesystem=filesystem) as file:
                    values = msgspec.json.decode(partition)
                    stored = [name for name in types if name in file.schema_arrow.names and name not in partition_by]
                    for rows in file.iter_batches(batch_size=65_536, columns=stored):
                        yield _with_values(rows, types, values, path if with_file else None)

    return read


def write_files(
    table: Any, spec: TableSpec, location: Location, filesystem: Any, *, dense: bool = False
) -> list[DataFile]:
    """One Parquet file per partition value in the table. `dense` lays columns out by `encodings`."""
    return [
        write_part(part, values, spec, location, filesystem, dense=dense)
        for values, part in _split(table, spec.partition_by)
    ]


def write_part(
    part: Any, values: dict[str, str | None], spec: TableSpec, location: Location, filesystem: Any, *, dense: bool
) -> DataFile:
    """One Parquet file of the partition with these values, which are in its folder and the log, not in the file."""
    folder = "".join(f"{name}={_folder(value)}/" for name, value in values.items())
    path = path_of(f"{folder}part-{uuid.uuid4()}.parquet")
    return _write(part, path, values, spec, location, filesystem, encodings(part.schema) if dense else {})


def encodings(schema: Any) -> dict[str, Any]:
    """How columns of many rows are best laid out: text by dictionary, whole numbers and moments by their differences.

    For samples this halves the time of writing and takes a quarter of the bytes: a dictionary of numbers that never
    repeat is built only to be thrown away.
    """
    import pyarrow as pa

    text, stepped = [], {}
    for field in schema:
        if pa.types.is_string(field.type) or pa.types.is_binary(field.type):
            text.append(field.name)
        elif pa.types.is_map(field.type):
            text += [f"{field.name}.key_value.key", f"{field.name}.key_value.value"]
        elif pa.types.is_signed_integer(field.type) or pa.types.is_timestamp(field.type):
            stepped[field.name] = "DELTA_BINARY_PACKED"
    return {"use_dictionary": text, "column_encoding": stepped}


def _write(
    part: Any,
    path: str,
    values: dict[str, str | None],
    spec: TableSpec,
    location: Location,
    filesystem: Any,
    layout: dict[str, Any],
) -> DataFile:
    import pyarrow.parquet as pq

    with filesystem.open_output_stream(location.path(key_of(spec.root, path))) as sink:
        pq.write_table(part, sink, compression="zstd", coerce_timestamps="us", **layout)
        size = sink.tell()
    measured = [name for name in dict.fromkeys((*spec.keys, *spec.stats)) if name in part.column_names]
    low, high = _bounds(part, measured)
    nulls = {name: part.column(name).null_count for name in measured}
    return DataFile(path, size, part.num_rows, values, low, high, nulls)


def _split(table: Any, partition_by: Sequence[str]) -> Iterator[tuple[dict[str, str | None], Any]]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not partition_by:
        yield {}, table
        return
    texts = [pc.cast(table.column(name), pa.string()) for name in partition_by]
    rest = table.drop_columns(list(partition_by))
    keyed = pa.table(texts, names=list(partition_by))
    for row in keyed.group_by(list(partition_by)).aggregate([]).to_pylist():
        mask = None
        for name, text in zip(partition_by, texts, strict=True):
            same = pc.is_null(text) if row[name] is None else pc.fill_null(pc.equal(text, row[name]), False)
            mask = same if mask is None else pc.and_(mask, same)
        yield {name: row[name] for name in partition_by}, rest.filter(mask)


def _bounds(part: Any, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    import pyarrow.compute as pc

    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    for name in names:
        try:
            ends = pc.min_max(part.column(name)).as_py()
        except NotImplementedError:  # a type without an order, by pyarrow: no bounds, the file is always read
            continue
        if ends["min"] is None or (shown := _json(ends["min"])) is None:
            continue
        low[name], high[name] = shown, _json(ends["max"])
    return low, high


def shown(moment: datetime) -> str:
    """A moment in UTC as it is written in a bound: microseconds, so that it sorts as text."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%f") + "Z"


def _json(value: Any) -> Any:
    """A bound as Delta writes it; None for what has no faithful JSON form."""
    if isinstance(value, datetime):
        return shown(value)
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, str):
        return value if len(value) <= 256 else None  # a cut bound would be wrong, a long one too large
    return None if isinstance(value, (bytes, Decimal)) else value


def _folder(value: str | None) -> str:
    """A readable folder name; the log has the partition's value, so nothing needs to be decoded from the folder."""
    return "__HIVE_DEFAULT_PARTITION__" if value is None else re.sub(r"[^A-Za-z0-9._-]", "_", value)[:64]


def _with_values(rows: Any, types: dict[str, Any], values: dict[str, str | None], path: str | None) -> Any:
    import pyarrow as pa

    def column(name: str, kind: Any) -> Any:
        if name in rows.schema.names:
            return rows.column(name)
        return (
            pa.array([values[name]] * rows.num_rows, pa.string()) if name in values else pa.nulls(rows.num_rows, kind)
        )

    arrays = [column(name, kind) for name, kind in types.items()]
    names = list(types)
    if path is not None:
        arrays.append(pa.array([path] * rows.num_rows, pa.string()))
        names.append(FILE_COLUMN)
    return pa.RecordBatch.from_arrays(arrays, names=names)


def _described(pa: Any, files: list[DataFile]) -> Any:
    return pa.RecordBatch.from_arrays([pa.array([msgspec.json.encode(file).decode() for file in files])], ["file"])
