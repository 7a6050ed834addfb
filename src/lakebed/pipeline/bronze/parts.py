"""What executors do with a tick's parts: check each one completely, and read it as rows of the manifest's types.

A part is fetched first and then parsed from memory, so that a bucket which does not answer (retry) is never taken for a
part that is wrong (fix it). Nothing is cast with loss: a column has the manifest's type or the part is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

import msgspec

from lakebed.core.errors import Unavailable
from lakebed.delta.log import fields_of
from lakebed.delta.model import DataFile, TableSpec
from lakebed.delta.types import arrow_type, parse_type, word_of
from lakebed.pipeline.tables.files import Batches, write_files
from lakebed.pipeline.tables.merge import last_of_each
from lakebed.spark.location import Location
from lakebed.spark.tasks import line_of
from lakebed.ticks.codec import type_of
from lakebed.ticks.model import BadManifest, TickColumn

PART_BYTES_MAX = 512 * 1024 * 1024  # of one part, held in an executor's memory
UNPACKED_BYTES_MAX = 4 * 1024 * 1024 * 1024  # what a part may say that it unpacks to
BATCH_ROWS = 65_536
FILE_SEQ, ROW, INGESTED_AT = "_file_seq", "_row", "_ingested_at"
REPORTS = "report string"  # the schema of what a checking task returns: one JSON PartReport a row


class PartRequest(msgspec.Struct, frozen=True):
    """A part to check: its table in the tick, its key, and what the manifest says of it."""

    table: int
    file_seq: int
    key: str
    rows: int
    size: int = -1


class PartReport(msgspec.Struct, frozen=True):
    """A part as it was found. `low` and `high` bound its first key; `unique`: no key occurs twice in it."""

    table: int
    file_seq: int
    error_class: str = ""
    message: str = ""
    rows: int = 0
    unique: bool = False
    low: int | str | None = None
    high: int | str | None = None
    files: tuple[DataFile, ...] = ()


class Draft(msgspec.Struct, frozen=True):
    """How a part's rows would be written to its table, for the task that has already read them.

    A part whose keys are unique and lie outside `held`, the ranges of the first key in the table's files, is written
    while it is checked. That commits nothing: a file that is not needed in the end is an orphan.
    """

    spec: TableSpec
    lineage: dict[str, str]
    ingested_at: datetime
    held: tuple[tuple[int | str, int | str], ...] = ()

    def takes(self, report: PartReport) -> bool:
        if not report.rows or report.error_class:
            return False
        if not self.spec.keys:
            return True
        if not report.unique or report.low is None or report.high is None:
            return False
        return not any(low <= report.high and report.low <= high for low, high in self.held)  # type: ignore[operator]


def checking_parts(
    location: Location,
    columns: Sequence[Sequence[TickColumn]],
    keys: Sequence[Sequence[str]],
    drafts: Sequence[Draft | None],
) -> Any:
    """The task that checks parts: its input is one JSON PartRequest a row, its output one JSON PartReport a row."""

    def check(batches: Batches) -> Batches:
        import pyarrow as pa

        filesystem = location.filesystem()
        for batch in batches:
            reports = []
            for text in batch["request"].to_pylist():
                request = msgspec.json.decode(text, type=PartRequest)
                data, draft = fetch(filesystem, location, request.key), drafts[request.table]
                report = check_part(data, request, columns[request.table], keys[request.table])
                if draft is not None and draft.takes(report):
                    rows = drafted(data, request, columns[request.table], draft)
                    written = write_files(rows, draft.spec, location, filesystem)
                    report = msgspec.structs.replace(report, files=tuple(written))
                reports.append(msgspec.json.encode(report).decode())
            yield pa.RecordBatch.from_arrays([pa.array(reports, pa.string())], ["report"])

    return check


def reading_parts(location: Location, columns: Sequence[TickColumn]) -> Callable[[Batches], Batches]:
    """The task that reads parts as rows, with the part and the place of each row in it."""

    def read(batches: Batches) -> Batches:
        filesystem = location.filesystem()
        for batch in batches:
            for text in batch["request"].to_pylist():
                request = msgspec.json.decode(text, type=PartRequest)
                yield from with_place(rows_of(fetch(filesystem, location, request.key), columns), request.file_seq)

    return read


def loading(location: Location, requests: Sequence[PartRequest], columns: Sequence[TickColumn], draft: Draft) -> Any:
    """How a task gets all rows of a table's parts, each key once: the last, by part and then by place in it."""

    def load(filesystem: Any) -> Any:
        import pyarrow as pa

        ordered = sorted(requests, key=lambda one: one.file_seq)
        parts = [drafted(fetch(filesystem, location, one.key), one, columns, draft) for one in ordered]
        return last_of_each(pa.concat_tables(parts), draft.spec.keys)

    return load


def drafted(data: Any, request: PartRequest, columns: Sequence[TickColumn], draft: Draft) -> Any:
    """The part's rows with every column of the table, in its order."""
    import pyarrow as pa

    wanted = pa.schema([(name, arrow_type(kind)) for name, kind in fields_of(draft.spec.schema_json).items()])
    rows = pa.Table.from_batches(list(rows_of(data, columns)))
    fixed = {**draft.lineage, FILE_SEQ: request.file_seq, INGESTED_AT: draft.ingested_at}
    arrays = [
        rows.column(field.name).cast(field.type)  # the table's type may be a wider one
        if field.name in rows.column_names
        else pa.repeat(pa.scalar(fixed.get(field.name), field.type), rows.num_rows)
        for field in wanted
    ]
    return pa.Table.from_arrays(arrays, schema=wanted)


def fetch(filesystem: Any, location: Location, key: str) -> Any:
    with filesystem.open_input_file(location.path(key)) as source:
        if source.size() > PART_BYTES_MAX:
            raise BadManifest("part_too_large", f"{key} has {source.size()} bytes, more than {PART_BYTES_MAX}")
        data = source.read_buffer(source.size())
        if len(data) != source.size():  # not the part's fault: the job is tried again
            raise Unavailable(f"{key}: {len(data)} of {source.size()} bytes were received")
        return data


def check_part(data: Any, request: PartRequest, columns: Sequence[TickColumn], keys: Sequence[str]) -> PartReport:
    """Reads the part to its end. What is wrong with it is in the report, not raised."""
    try:
        if request.size >= 0 and len(data) != request.size:
            raise BadManifest("part_size_mismatch", f"it has {len(data)} bytes, the manifest says {request.size}")
        return _checked(data, request, columns, keys)
    except BadManifest as refused:
        return PartReport(request.table, request.file_seq, refused.detail["error_class"], refused.message)


def rows_of(data: Any, columns: Sequence[TickColumn]) -> Iterator[Any]:
    """The part's rows as Arrow batches of exactly these columns. Raises BadManifest."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        unpacked = sum(file.metadata.row_group(n).total_byte_size for n in range(file.metadata.num_row_groups))
        schema = file.schema_arrow
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError) as error:
        raise BadManifest("not_parquet", f"it is not a Parquet file: {line_of(error)}") from error
    if unpacked > UNPACKED_BYTES_MAX:
        raise BadManifest("part_too_large", f"it unpacks to {unpacked} bytes, more than {UNPACKED_BYTES_MAX}")
    check_columns(schema, columns)
    wanted = pa.schema([(column.name, arrow_type(parse_type(column.type))) for column in columns])
    try:
        for batch in file.iter_batches(batch_size=BATCH_ROWS):
            yield _fitted(batch, wanted)
    except BadManifest:
        raise
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise BadManifest("part_damaged", f"its rows cannot be read: {line_of(error)}") from error


def check_columns(schema: Any, columns: Sequence[TickColumn]) -> None:
    """Raises BadManifest when the file's columns are not the manifest's, whatever their order."""
    have, want = list(schema.names), {column.name: word_of(parse_type(column.type)) for column in columns}
    if len(set(have)) != len(have):
        raise BadManifest("duplicate_column", "a column occurs twice in it")
    if missing := [name for name in want if name not in have]:
        raise BadManifest("missing_column", f"it lacks column {missing[0]!r}")
    if more := [name for name in have if name not in want]:
        raise BadManifest("unknown_column", f"it has column {more[0]!r}, which the manifest does not name")
    for field in schema:
        found = type_of(field.type)
        if found not in (want[field.name], "null"):
            raise BadManifest(
                "wrong_type", f"column {field.name!r} is {found or field.type}, the manifest says {want[field.name]}"
            )


def with_place(batches: Iterator[Any], file_seq: int) -> Iterator[Any]:
    import pyarrow as pa

    at = 0
    for batch in batches:
        places = [
            pa.array([file_seq] * batch.num_rows, pa.int32()),
            pa.array(range(at, at + batch.num_rows), pa.int64()),
        ]
        at += batch.num_rows
        yield pa.RecordBatch.from_arrays([*batch.columns, *places], [*batch.schema.names, FILE_SEQ, ROW])


def _checked(data: Any, request: PartRequest, columns: Sequence[TickColumn], keys: Sequence[str]) -> PartReport:
    import pyarrow as pa
    import pyarrow.compute as pc

    empty = pa.schema([(column.name, arrow_type(parse_type(column.type))) for column in columns if column.name in keys])
    batches, rows = [], 0
    for batch in rows_of(data, columns):
        rows += batch.num_rows
        batches.append(batch.select(empty.names))
    if rows != request.rows:
        raise BadManifest("row_count_mismatch", f"it has {rows} rows, the manifest says {request.rows}")
    if not keys:
        return PartReport(request.table, request.file_seq, rows=rows)
    held = pa.Table.from_batches(batches, empty)
    for name in keys:
        if held.column(name).null_count:
            raise BadManifest("null_key", f"primary key {name!r} is null in {held.column(name).null_count} rows")
    unique = held.group_by(list(keys)).aggregate([]).num_rows == rows
    ends = pc.min_max(held.column(keys[0])).as_py()
    low, high = (ends[end] if isinstance(ends[end], (int, str)) else None for end in ("min", "max"))
    return PartReport(request.table, request.file_seq, rows=rows, unique=unique, low=low, high=high)


def _fitted(batch: Any, wanted: Any) -> Any:
    import pyarrow as pa

    batch.validate(full=True)
    arrays = []
    for field in wanted:
        column = batch.column(field.name)
        try:
            arrays.append(column if column.type == field.type else column.cast(field.type))
        except pa.ArrowException as error:
            raise BadManifest(
                "wrong_type", f"column {field.name!r} would lose precision or range: {line_of(error)}"
            ) from error
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)
