"""What keeps a table small: old rows leave, small files are joined. Both are versions like any other.

A reader at an older version keeps reading the files of that version; they go when no kept version needs them any more
(`vacuum`). Joining changes no rows, and says so in the log, so nobody who reads what was added reads them twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from lakebed.delta.log import Commit, Raced
from lakebed.delta.model import Committed, DataFile, Snapshot, TableSpec
from lakebed.errors import Invalid, Overloaded
from lakebed.pipeline.tables import files, merge
from lakebed.pipeline.tables.location import Location
from lakebed.pipeline.tasks import in_arrow

if TYPE_CHECKING:
    from lakebed.pipeline.tables.table import Table

RACES_MAX = 30
FILE_BYTES = 64 * 1024 * 1024  # what joined files come to: large enough to scan, small enough for one task's memory
ROWS_MAX = 2_000_000  # in one joined file, which a task holds whole


class Joined(msgspec.Struct, frozen=True):
    """Files that became others, with the same rows."""

    paths: tuple[str, ...]
    files: tuple[DataFile, ...]


def groups(held: Sequence[DataFile], file_bytes: int = FILE_BYTES, rows_max: int = ROWS_MAX) -> list[list[DataFile]]:
    """Neighbouring small files that are joined, each group up to one file's worth. Pure; a second look finds nothing.

    Small is below half of either bound, so that what was joined is left alone, and a file is never written again only
    to grow by a little.
    """
    small = [file for file in held if file.size < file_bytes / 2 and 0 <= file.rows < rows_max / 2]
    found: list[list[DataFile]] = [[]]
    size = rows = 0
    for file in small:
        if found[-1] and (size + file.size > file_bytes or rows + file.rows > rows_max):
            found.append([])
            size = rows = 0
        found[-1].append(file)
        size, rows = size + file.size, rows + file.rows
    return [group for group in found if len(group) > 1]


def compact(table: Table, *, file_bytes: int, dry_run: bool) -> Committed:
    state = table.snapshot()
    if state.partition_by:
        raise Invalid(f"{table.spec.name} is partitioned; its files are not joined")
    planned = groups(state.files, file_bytes)
    gone = sum(len(group) for group in planned)
    if dry_run or not planned:
        return Committed(state.version, files_added=len(planned), files_removed=gone, repeated=not planned)
    joined = _joined(table, planned)

    def plan(now: Snapshot) -> Commit | None:
        """Only groups that are still whole: what was deleted meanwhile must not come back."""
        have = {file.path: file for file in now.files}
        sound = [one for one in joined if all(path in have for path in one.paths)]
        if not sound:
            return None
        removes = tuple(have[path] for one in sound for path in one.paths)
        adds = tuple(file for one in sound for file in one.files)
        return Commit("OPTIMIZE", adds, removes, data_change=False)

    def result(commit: Commit) -> Committed:
        return Committed(0, files_added=len(commit.adds), files_removed=len(commit.removes))

    return table.commit(plan, result, None, rebase=True)


def _joined(table: Table, planned: Sequence[Sequence[DataFile]]) -> list[Joined]:
    schema = to_arrow_schema(StructType.fromJson(msgspec.json.decode(table.spec.schema_json)), timezone="UTC")
    task = joining(table.spec, table.location, schema)
    asked = [(msgspec.json.encode([file.path for file in group]).decode(),) for group in planned]
    rows = table.spark.createDataFrame(asked, "paths string").coalesce(1).repartition(len(asked))
    return [msgspec.json.decode(row["file"], type=Joined) for row in in_arrow(rows, task, files.WRITTEN).collect()]


def joining(spec: TableSpec, location: Location, schema: Any) -> Callable[[files.Batches], files.Batches]:
    """The task: its input is a JSON list of paths a row, its output a JSON Joined a row. No row passes through Java."""

    def join(batches: files.Batches) -> files.Batches:
        import pyarrow as pa
        import pyarrow.parquet as pq

        filesystem = location.filesystem()
        for batch in batches:
            for text in batch["paths"].to_pylist():
                paths = msgspec.json.decode(text, type=tuple[str, ...])
                parts = [
                    merge.fitted(
                        pq.read_table(location.path(f"{spec.root}/{path}"), filesystem=filesystem, partitioning=None),
                        schema,
                    )
                    for path in paths
                ]
                written = files.write_files(pa.concat_tables(parts), spec, location, filesystem, dense=True)
                told = msgspec.json.encode(Joined(paths, tuple(written))).decode()
                yield pa.RecordBatch.from_arrays([pa.array([told])], ["file"])

    return join


def remove_before(table: Table, column: str, moment: datetime) -> Committed:
    shown = files.shown(moment)
    for _ in range(RACES_MAX):
        state = table.snapshot()
        touched = [file for file in state.files if str(file.low.get(column, "")) < shown]
        if not touched:
            return Committed(state.version, repeated=True)
        mixed = [file for file in touched if file.nulls.get(column, 1) or str(file.high.get(column, "~")) >= shown]
        rows = table.rows_of(mixed, table.columns_of(state), state)
        kept = rows.filter(F.col(column).isNull() | (F.col(column) >= F.lit(moment)))
        written = table.write(kept.select(*table.spec.columns).coalesce(max(1, len(mixed)))) if mixed else []
        gone = sum(file.rows for file in touched) - sum(file.rows for file in written)
        if not gone:
            return Committed(state.version, repeated=True)
        commit = Commit("DELETE", tuple(written), tuple(touched))
        result = Committed(0, files_added=len(written), files_removed=len(touched), rows_removed=gone)
        try:
            return table.commit_on(state, commit, result, None)
        except Raced:
            continue
    raise Overloaded(f"table {table.spec.name} changed under a delete {RACES_MAX} times")
