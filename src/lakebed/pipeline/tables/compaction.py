"""Compaction and retention of a table: small files are joined, old rows are removed. Both are ordinary versions.

A reader at an older version keeps reading the files of that version; vacuum deletes them when no kept version needs
them. Compaction changes no rows, and the log says so, so a reader of added rows does not read them twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from lakebed.core.errors import Overloaded
from lakebed.delta.log import Commit, Raced
from lakebed.delta.model import CommitResult, DataFile, Snapshot, TableSpec, WriteBatch
from lakebed.delta.stats import moments, shown
from lakebed.pipeline.tables import files, rewrite
from lakebed.pipeline.tables.clustering import clustered
from lakebed.pipeline.tables.frames import quoted
from lakebed.spark.location import Location
from lakebed.spark.tasks import in_arrow

if TYPE_CHECKING:
    from lakebed.pipeline.tables.table import Table

RACES_MAX = 30
FILE_BYTES = 64 * 1024 * 1024  # what joined files come to: large enough to scan, small enough for one task's memory
ROWS_MAX = 2_000_000  # in one joined file, which a task holds whole
RETENTION = "lakebed.retention"  # the application of removals: its number is the moment, in microseconds


class CompactedFiles(msgspec.Struct, frozen=True):
    """Files that became others, with the same rows."""

    paths: tuple[str, ...]
    files: tuple[DataFile, ...]


def groups(held: Sequence[DataFile], file_bytes: int = FILE_BYTES, rows_max: int = ROWS_MAX) -> list[list[DataFile]]:
    """Neighbouring small files that are joined, each group up to one file's worth and of one partition. Pure; after a
    compaction there are none.

    Small is below half of either bound, so that what was joined is left alone, and a file is never written again only
    to grow by a little.
    """
    small = [file for file in held if file.size < file_bytes / 2 and 0 <= file.rows < rows_max / 2]
    parts: dict[tuple[tuple[str, str | None], ...], list[DataFile]] = {}
    for file in small:
        parts.setdefault(tuple(file.partition.items()), []).append(file)
    found: list[list[DataFile]] = []
    for part in parts.values():
        size = rows = 0
        for number, file in enumerate(part):
            if not number or size + file.size > file_bytes or rows + file.rows > rows_max:
                found.append([])
                size = rows = 0
            found[-1].append(file)
            size, rows = size + file.size, rows + file.rows
    return [group for group in found if len(group) > 1]


def compact(table: Table, *, file_bytes: int, dry_run: bool) -> CommitResult:
    state = table.snapshot()
    planned = groups(state.files, file_bytes)
    gone = sum(len(group) for group in planned)
    if dry_run or not planned:
        return CommitResult(state.version, files_added=len(planned), files_removed=gone, repeated=not planned)
    joined = _joined(table, planned, state.partition_by)

    def plan(now: Snapshot) -> Commit | None:
        """Only groups that are still complete: what was deleted meanwhile must not come back."""
        have = {file.path: file for file in now.files}
        sound = [one for one in joined if all(path in have for path in one.paths)]
        if not sound:
            return None
        removes = tuple(have[path] for one in sound for path in one.paths)
        adds = tuple(file for one in sound for file in one.files)
        return Commit("OPTIMIZE", adds, removes, data_change=False)

    def result(commit: Commit) -> CommitResult:
        return CommitResult(0, files_added=len(commit.adds), files_removed=len(commit.removes))

    return table.commit(plan, result, None, rebase=True)


def _joined(table: Table, planned: Sequence[Sequence[DataFile]], partition_by: Sequence[str]) -> list[CompactedFiles]:
    every = StructType.fromJson(msgspec.json.decode(table.spec.schema_json))
    stored = StructType([field for field in every.fields if field.name not in partition_by])
    task = joining(table.spec, table.location, to_arrow_schema(stored, timezone="UTC"))
    requests = [(msgspec.json.encode(group).decode(),) for group in planned]
    rows = table.spark.createDataFrame(requests, "files string").coalesce(1).repartition(len(requests))
    return [
        msgspec.json.decode(row["file"], type=CompactedFiles) for row in in_arrow(rows, task, files.WRITTEN).collect()
    ]


def joining(spec: TableSpec, location: Location, schema: Any) -> Callable[[files.Batches], files.Batches]:
    """The task: its input is a JSON list of files of one partition a row, its output a JSON CompactedFiles a row.

    `schema` is what is in the files. No row passes through Java."""

    def join(batches: files.Batches) -> files.Batches:
        import pyarrow as pa

        filesystem = location.filesystem()
        for batch in batches:
            for text in batch["files"].to_pylist():
                group = msgspec.json.decode(text, type=tuple[DataFile, ...])
                paths = tuple(file.path for file in group)
                parts = [files.read_file(location, filesystem, spec.root, path, schema) for path in paths]
                rows = pa.concat_tables(parts)
                rows = rows if spec.cluster_by else clustered(rows, spec.keys)
                made = files.write_part(rows, group[0].partition, spec, location, filesystem)
                result = msgspec.json.encode(CompactedFiles(paths, (made,))).decode()
                yield pa.RecordBatch.from_arrays([pa.array([result])], ["file"])

    return join


def kept_since_us(state: Snapshot) -> int:
    """The moment before which rows were removed from this table, in microseconds; 0: it has kept everything."""
    return state.applied.get(RETENTION, 0)


def remove_before(table: Table, column: str, moment: datetime) -> CommitResult:
    """The commit of the removal records the moment: a comparison of tables must not report these rows as lost."""
    limit = shown(moment)
    moment_us = (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    for _ in range(RACES_MAX):
        state = table.snapshot()
        touched = [file for file in state.files if (moments(file, column)[0] or "") < limit]
        if not touched:
            return CommitResult(state.version, repeated=True)
        mixed = [file for file in touched if file.nulls.get(column, 1) or (moments(file, column)[1] or "~") >= limit]
        rows = table.rows_of(mixed, table.columns_of(state), state)
        kept = rows.filter(F.col(column).isNull() | (F.col(column) >= F.lit(moment)))
        written = (
            table.write(kept.select(*map(quoted, table.spec.columns)).coalesce(max(1, len(mixed)))) if mixed else []
        )
        gone = sum(file.rows for file in touched) - sum(file.rows for file in written)
        if not gone:
            return CommitResult(state.version, repeated=True)
        # What came late and is older than an earlier removal goes too; the mark never moves back.
        mark = WriteBatch(RETENTION, moment_us) if moment_us > kept_since_us(state) else None
        commit = Commit("DELETE", tuple(rewrite.copies(written)), tuple(touched), mark)
        result = CommitResult(0, files_added=len(written), files_removed=len(touched), rows_removed=gone)
        try:
            return table.commit_on(state, commit, result, mark)
        except Raced:
            continue
    raise Overloaded(f"table {table.spec.name} changed under a delete {RACES_MAX} times")
