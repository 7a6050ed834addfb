"""What executors do with a table's files: write Parquet under fresh names, read the files of a snapshot.

Both are functions from Arrow batches to Arrow batches (`mapInArrow`): no Python loop per row. Files written by a job
that never commits are orphans that nothing refers to; vacuum deletes them.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from lakebed.core.errors import Invalid
from lakebed.delta.model import DataFile, TableSpec, key_of, path_of
from lakebed.delta.stats import measured
from lakebed.pipeline.tables import columns
from lakebed.pipeline.tables.clustering import clustered
from lakebed.spark.location import Location

ROWS_PER_FILE_MAX = 2_000_000
ROW_GROUP_ROWS = 131_072  # what a lookup by key decodes at least: small enough to skip the rest, large enough to scan
BYTES_PER_FILE_MAX = 128 * 1024 * 1024  # of Arrow memory, before Parquet makes it smaller
WRITTEN = "file string"  # the schema of what a writing task returns: one JSON DataFile a row
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
# In a partition's folder only characters that every engine encodes alike in the log's paths: delta-spark's VACUUM and
# delta-rs's RESTORE compare encoded paths, and each would take a path that the other encoded for another file.
_ESCAPED = re.compile(r"[^A-Za-z0-9_. -]")

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


def read_file(location: Location, filesystem: Any, root: str, path: str, schema: Any) -> Any:
    """The rows of one file of a table that Lakebed writes, whoever wrote this file, with the schema's columns."""
    import pyarrow as pa

    with columns.opened(location, filesystem, key_of(root, path)) as file:
        rows = file.read()
    return fitted(rows, pa.schema(schema))


def fitted(rows: Any, schema: Any) -> Any:
    """The rows with the schema's columns in its order and representation; a column they are older than is null."""
    import pyarrow as pa

    arrays = [
        columns.fit(rows.column(field.name), field.type)
        if field.name in rows.column_names
        else pa.nulls(rows.num_rows, columns.relaxed(field.type))
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, names=schema.names)


def write_files(table: Any, spec: TableSpec, location: Location, filesystem: Any) -> list[DataFile]:
    """One Parquet file per partition value in the table."""
    return [write_part(part, values, spec, location, filesystem) for values, part in _split(table, spec.partition_by)]


def write_part(
    part: Any, values: dict[str, str | None], spec: TableSpec, location: Location, filesystem: Any
) -> DataFile:
    """One Parquet file of the partition with these values, which are in its folder and the log, not in the file."""
    for name in spec.required:
        if name in part.column_names and part.column(name).null_count:
            raise Invalid(f"table {spec.name}: {name} may not be null, and a row has none")
    folder = "".join(f"{folder_name(name)}={folder_name(value)}/" for name, value in values.items())
    path = path_of(f"{folder}part-{uuid.uuid4()}.parquet")
    part = clustered(part, spec.cluster_by)
    return _write(part, path, values, spec, location, filesystem, encodings(part.schema))


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

    metadata: list[Any] = []
    options = {"compression": "zstd", "coerce_timestamps": "us", "row_group_size": ROW_GROUP_ROWS, **layout}
    with filesystem.open_output_stream(location.path(key_of(spec.root, path))) as sink:
        pq.write_table(part, sink, metadata_collector=metadata, **options)
        size = sink.tell()
    found = measured(part, metadata[0], (*spec.keys, *spec.stats))
    return DataFile(path, size, part.num_rows, values, found.low, found.high, found.nulls, found.text)


def _split(table: Any, partition_by: Sequence[str]) -> Iterator[tuple[dict[str, str | None], Any]]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not partition_by:
        yield {}, table
        return
    texts = [partition_text(table.column(name)) for name in partition_by]
    rest = table.drop_columns(list(partition_by))
    keyed = pa.table(texts, names=list(partition_by))
    for row in keyed.group_by(list(partition_by)).aggregate([]).to_pylist():
        mask = None
        for name, text in zip(partition_by, texts, strict=True):
            same = pc.is_null(text) if row[name] is None else pc.fill_null(pc.equal(text, row[name]), False)
            mask = same if mask is None else pc.and_(mask, same)
        yield {name: row[name] for name in partition_by}, rest.filter(mask)


def partition_text(column: Any) -> Any:
    """Values of a partition's column as Delta writes them. An empty text is no value there."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_timestamp(column.type):
        return pc.strftime(column, format="%Y-%m-%d %H:%M:%S")
    text = pc.cast(column, pa.string())
    return pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)


def folder_name(value: str | None) -> str:
    """A value as the folder of its partition has it. Engines read values from the log, not from here."""
    if value is None:
        return NO_VALUE
    return _ESCAPED.sub(lambda found: quote(found[0], safe="").replace("~", "%7E"), value)


def _described(pa: Any, files: list[DataFile]) -> Any:
    return pa.RecordBatch.from_arrays([pa.array([msgspec.json.encode(file).decode() for file in files])], ["file"])
