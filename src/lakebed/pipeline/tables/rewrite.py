"""Takes rows out of a table's files: deletes by a condition, and upserts of rows that are already written.

A file that the log excludes is not opened; of the others only the tested columns are read, and only a file that holds
such a row is written again without it. Files are read and written in Arrow: by threads of this process, or by Spark's
executors where the session is a cluster's. Nothing changes before the one commit; after a lost race only files that are
new are looked at.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

import msgspec

from lakebed.core.errors import Invalid, Overloaded, Stale
from lakebed.delta.log import Commit, Raced, fields_of
from lakebed.delta.model import CommitResult, DataFile, Snapshot, TableSpec, WriteBatch
from lakebed.delta.predicate import Predicate, chosen
from lakebed.delta.protocol import mapping
from lakebed.delta.types import arrow_type, widens
from lakebed.pipeline.tables import files
from lakebed.pipeline.tables.frames import quoted
from lakebed.pipeline.tables.merge import holding, keys_of, overlapping_files, twice
from lakebed.pipeline.tables.scan import FILE_COLUMN, FileScan
from lakebed.spark.location import Location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from lakebed.pipeline.tables.table import Table

RACES_MAX = 30
KEYS_MAX = 500_000  # of one upsert, held whole by each task
ROWS_PER_TASK = 500_000  # of files that a large upsert writes again: one large file is spread over tasks
_AT = "_at"
_OBJECT = msgspec.json.Decoder(dict[str, Any], float_hook=Decimal)


class Rewritten(msgspec.Struct, frozen=True):
    """What became of one file: the rows that were taken out, and the files with the rest. Nothing: it stays."""

    path: str
    rows: int
    files: tuple[DataFile, ...] = ()


class RowRemoval(msgspec.Struct, frozen=True):
    """Which rows go: those that match the predicate; those whose key is among `keys` (an Arrow table); or those whose
    `column` is a JSON object with these `values`, given as text.
    """

    predicate: Predicate = Predicate()
    keys: Any = None
    values: dict[str, str] = {}
    column: str = ""

    @property
    def columns(self) -> list[str]:
        if self.column:
            return [self.column]
        return self.predicate.columns if self.keys is None else list(self.keys.column_names)

    def stays(self, rows: Any, types: Mapping[str, Any]) -> Any:
        """The places of the rows that stay, in their order."""
        import pyarrow as pa
        import pyarrow.compute as pc

        at = pa.arange(0, rows.num_rows)
        if self.column:
            return at.filter(pa.array([not _has(text, self.values) for text in rows.column(0).to_pylist()], pa.bool_()))
        if self.keys is not None and len(self.columns) == 1:
            # As in the join below, and in SQL, a null equals nothing.
            gone = pc.is_in(rows.column(0), value_set=self.keys.column(0).drop_null().combine_chunks())
            return at.filter(pc.invert(gone))
        numbered = rows.append_column(_AT, at)
        if self.keys is not None:
            left = numbered.join(self.keys, keys=self.columns, join_type="left anti")
            return left.column(_AT).combine_chunks().sort()
        matched = numbered.filter(self.predicate.expression(types)).column(_AT)
        return at.filter(pc.invert(pc.is_in(at, value_set=matched.combine_chunks())))


def _has(text: str | None, values: Mapping[str, str]) -> bool:
    try:
        row = _OBJECT.decode(text or "")
    except (msgspec.DecodeError, msgspec.ValidationError):
        return False
    return all(name in row and _same(row[name], value) for name, value in values.items())


def _same(found: Any, text: str) -> bool:
    """Whether a value of JSON is what this text says: numbers by what they are worth, text as it is written."""
    if isinstance(found, bool):
        return str(found).lower() == text.lower()
    if not isinstance(found, (int, Decimal)):
        return bool(found == text)
    try:
        return found == Decimal(text)
    except InvalidOperation:
        return False


class Rewriting(msgspec.Struct, frozen=True):
    """The work on one file; plain values, so that it travels to executors.

    `counts`: only look, write nothing. `copies`: take nothing out, write every row with the spec's types.
    """

    spec: TableSpec
    location: Location
    removal: RowRemoval
    counts: bool = False
    copies: bool = False

    def run(self, file: DataFile, filesystem: Any) -> Rewritten:
        kinds = fields_of(self.spec.schema_json)
        if self.copies:
            return Rewritten(file.path, 0, (self._write(file, filesystem, kinds, None),))
        tested = {name: arrow_type(kinds[name]) for name in self.removal.columns}
        held = self._read(file, filesystem, kinds, tested)
        stays = self.removal.stays(held, tested)
        gone = held.num_rows - len(stays)
        if self.counts or not gone or not len(stays):
            return Rewritten(file.path, gone)
        return Rewritten(file.path, gone, (self._write(file, filesystem, kinds, stays),))

    def _write(self, file: DataFile, filesystem: Any, kinds: Mapping[str, Any], stays: Any) -> DataFile:
        stored = {name: arrow_type(kind) for name, kind in kinds.items() if name not in file.partition}
        rows = self._read(file, filesystem, kinds, stored)
        rest = rows if stays is None else rows.take(stays)
        return files.write_part(rest, file.partition, self.spec, self.location, filesystem)

    def _read(self, file: DataFile, filesystem: Any, kinds: Mapping[str, Any], types: Mapping[str, Any]) -> Any:
        import pyarrow as pa

        wanted = FileScan(self.location, self.spec.root, dict(kinds), dict(types))
        batches = wanted.batches(file, filesystem, batch_rows=1 << 20)
        return pa.Table.from_batches(batches, pa.schema(list(types.items())))


def widen(table: Table) -> CommitResult:
    """Gives columns the wider types that the table's spec has for them, in a version that changes no rows.

    Every file is written again with the wider types, so that no reader needs a table feature. `repeated` when the table
    has them. Raises Stale when the spec changes a type otherwise.
    """
    done: dict[str, Rewritten] = {}
    for _ in range(RACES_MAX):
        state = table.snapshot()
        if not widening(state, table.spec):
            return CommitResult(state.version, repeated=True)
        work = Rewriting(table.spec, table.location, RowRemoval(), copies=True)
        done |= {one.path: one for one in run(table, work, [f for f in state.files if f.path not in done])}
        adds = tuple(made for file in state.files for made in done[file.path].files)
        commit = Commit("CHANGE COLUMN", adds, state.files, spec=table.spec, table_id=state.table_id, data_change=False)
        result = CommitResult(0, files_added=len(adds), files_removed=len(state.files))
        try:
            return table.commit_on(state, commit, result, None)
        except Raced:
            continue
    raise Overloaded(f"table {table.spec.name} changed under a widening {RACES_MAX} times")


def widening(state: Snapshot, spec: TableSpec) -> list[str]:
    """The columns whose type in the spec is wider than the table's. Raises Stale for any other difference."""
    held, wanted = fields_of(state.schema_json), fields_of(spec.schema_json)
    changed = [name for name, kind in held.items() if wanted.get(name) != kind]
    if wrong := [name for name in changed if not widens(held[name], wanted.get(name))]:
        raise Stale(f"table {spec.name} has another {wrong[0]!r} at version {state.version} than its writer knows")
    return changed


Plan = Callable[[Snapshot], tuple[RowRemoval, list[DataFile]]]


def delete(table: Table, predicate: Predicate, *, note: str = "") -> CommitResult:
    """Removes the rows that match, in one version. `repeated` when none does. Raises Invalid for a wrong condition."""
    if not predicate:
        raise Invalid("a delete needs a condition", hint="replace the table to remove every row")

    def plan(state: Snapshot) -> tuple[RowRemoval, list[DataFile]]:
        typed = predicate.typed(state.schema_json) if state.schema_json else predicate
        return RowRemoval(typed), chosen(state.files, typed, state.schema_json)

    return remove(table, plan, note=note)


def remove(table: Table, plan: Plan, *, note: str = "") -> CommitResult:
    """Removes the planned rows from the planned files, in one version; planned again after a lost race."""

    def commit(removed: Sequence[Rewritten], gone: tuple[DataFile, ...]) -> Commit | None:
        adds = tuple(copies(file for one in removed for file in one.files))
        return Commit("DELETE", adds, gone, note=note) if removed else None

    return _repeatedly(table, plan, commit, None)


def check_plain(state: Snapshot, name: str) -> None:
    """Raises Invalid for a table whose files do not have its columns and rows as they are: it is not written to."""
    if mapping(state) != "none" or any(file.vector for file in state.files):
        raise Invalid(
            f"table {name} maps column names or has deletion vectors, which Lakebed reads but does not write",
            hint="write it with the engine that chose them",
        )


def count(table: Table, removal: RowRemoval, held: Sequence[DataFile]) -> list[Rewritten]:
    """How many such rows each of these files has. Changes nothing; files may lack columns that are newer."""
    return run(table, Rewriting(table.spec, table.location, removal, counts=True), held)


def upsert_files(
    table: Table,
    written: Sequence[DataFile],
    batch: WriteBatch | None,
    *,
    note: str = "",
    deleted: Sequence[DataFile] = (),
) -> CommitResult:
    """Upserts the rows of files that executors have written: their keys are taken out of all other files.

    The keys of the files in `deleted` are taken out too, in the same version; these files stay out of the table.
    Raises Invalid when a key comes twice in them; nothing is committed then.
    """
    if sum(file.rows for file in (*written, *deleted)) > KEYS_MAX and table.spark is not None:
        return _upsert_joined(table, written, batch, note, deleted)
    keys = keys_of(table.spec, table.location, [*written, *deleted])
    going = keys_of(table.spec, table.location, deleted) if deleted else None
    dead = 0

    def plan(state: Snapshot) -> tuple[RowRemoval, list[DataFile]]:
        nonlocal dead
        if going is not None:
            found = count(table, RowRemoval(keys=going), holding(state.files, going, table.spec))
            dead = sum(one.rows for one in found)
        return RowRemoval(keys=keys), holding(state.files, keys, table.spec)

    def commit(removed: Sequence[Rewritten], gone: tuple[DataFile, ...]) -> Commit:
        rest = [file for one in removed for file in one.files]
        return merged(written, rest, gone, batch, note, replaced=sum(one.rows for one in removed) - dead, dead=dead)

    return _repeatedly(table, plan, commit, batch)


def check_keys(table: Table, written: Sequence[DataFile]) -> None:
    """Raises Invalid when a key comes twice in the rows of these files, which have the table's spec."""
    names = list(table.spec.keys)
    if sum(file.rows for file in written) <= KEYS_MAX or table.spark is None:
        keys_of(table.spec, table.location, written)
    else:
        rows = table.rows_of(written, names, Snapshot(partition_by=table.spec.partition_by))
        if _comes_twice(rows, names):
            raise twice(table.spec)


def _comes_twice(rows: DataFrame, names: Sequence[str]) -> bool:
    """Whether two rows have the same values in these columns, which may have any name (`count` too)."""
    counted = rows.groupBy(*map(quoted, names)).count()
    found = counted.toDF(*(f"key_{number}" for number in range(len(names))), "times").filter("times > 1")
    return bool(found.limit(1).count())


def merged(
    written: Sequence[DataFile],
    rest: Sequence[DataFile],
    gone: Sequence[DataFile],
    batch: WriteBatch | None,
    note: str,
    *,
    replaced: int,
    dead: int,
) -> Commit:
    """The version of an upsert. Where it also deletes, the rest is not marked as copied: readers of changes then pair
    the rows of both sides by key, and find those that are gone.
    """
    inserted = sum(file.rows for file in written) - replaced
    adds = (*written, *(rest if dead and written else copies(rest)))
    return Commit("MERGE", adds, tuple(gone), batch, note=note, rows_inserted=inserted, rows_replaced=replaced)


def copies(files: Iterable[DataFile]) -> Iterable[DataFile]:
    """The files, marked as holding rows that were there before."""
    return (msgspec.structs.replace(file, copied=True) for file in files)


def _upsert_joined(
    table: Table, written: Sequence[DataFile], batch: WriteBatch | None, note: str, deleted: Sequence[DataFile]
) -> CommitResult:
    """The upsert of many rows: a join of frames takes their keys out of the table's files."""
    names = list(table.spec.keys)
    for _ in range(RACES_MAX):
        if batch is not None and (repeated := table.applied(batch)):
            return repeated
        state = table.snapshot()
        coming = table.rows_of([*written, *deleted], names, state)
        if _comes_twice(coming, names):
            raise twice(table.spec)
        candidates = {file.path: file for file in overlapping_files(state.files, [*written, *deleted], names[0])}
        held = table.rows_of(list(candidates.values()), names, state, with_file=True)
        hits = held.join(coming, on=names, how="left_semi").groupBy(FILE_COLUMN).count().collect()
        touched = [candidates[hit[FILE_COLUMN]] for hit in hits]
        out = sum(hit["count"] for hit in hits)
        dead = held.join(table.rows_of(deleted, names, state), on=names, how="left_semi").count() if deleted else 0
        kept: list[DataFile] = []
        if touched:
            rest = table.rows_of(touched, table.spec.columns, state).join(coming, on=names, how="left_anti")
            tasks = max(len(touched), -(-sum(max(0, file.rows) for file in touched) // ROWS_PER_TASK))
            rest = rest.select(*map(quoted, table.spec.columns))
            kept = table.write(rest.repartition(tasks) if tasks > len(touched) else rest.coalesce(tasks))
        commit = merged(written, kept, touched, batch, note, replaced=out - dead, dead=dead)
        result = _result(commit, out)
        try:
            return table.commit_on(state, commit, result, batch)
        except Raced:
            continue
    raise Overloaded(f"table {table.spec.name} changed under an upsert {RACES_MAX} times")


def _repeatedly(
    table: Table,
    plan: Plan,
    commit: Callable[[Sequence[Rewritten], tuple[DataFile, ...]], Commit | None],
    batch: WriteBatch | None,
) -> CommitResult:
    done: dict[str, Rewritten] = {}
    for _ in range(RACES_MAX):
        if batch is not None and (repeated := table.applied(batch)):
            return repeated
        state = table.snapshot()
        check_plain(state, table.spec.name)
        removal, candidates = plan(state)
        new = [file for file in candidates if file.path not in done]
        done |= {one.path: one for one in run(table, Rewriting(table.spec, table.location, removal), new)}
        removed = [done[file.path] for file in candidates if done[file.path].rows]
        gone = tuple(file for file in candidates if done[file.path].rows)
        planned = commit(removed, gone)
        if planned is None:
            return CommitResult(state.version, repeated=True)
        result = _result(planned, sum(one.rows for one in removed))
        try:
            return table.commit_on(state, planned, result, batch)
        except Raced:
            continue
    raise Overloaded(f"table {table.spec.name} changed under a rewrite {RACES_MAX} times")


def _result(commit: Commit, out: int) -> CommitResult:
    """`out` rows were taken out of files: those that were not replaced are gone."""
    inserted, replaced = commit.rows_inserted, commit.rows_replaced
    return CommitResult(0, inserted, replaced, len(commit.adds), len(commit.removes), rows_removed=out - replaced)


def run(table: Table, work: Rewriting, chosen_files: Sequence[DataFile]) -> list[Rewritten]:
    """The work on each file: in threads here, or in tasks of a cluster."""
    if not chosen_files:
        return []
    if table.spark is not None and not _is_local(table.spark):
        return _in_tasks(table.spark, work, chosen_files)
    filesystem = work.location.filesystem()
    with ThreadPoolExecutor(min(len(chosen_files), os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda file: work.run(file, filesystem), chosen_files))


def _in_tasks(spark: Any, work: Rewriting, chosen_files: Sequence[DataFile]) -> list[Rewritten]:
    from lakebed.spark.tasks import in_arrow

    def task(batches: files.Batches) -> files.Batches:
        import pyarrow as pa

        filesystem = work.location.filesystem()
        for batch in batches:
            made = [
                work.run(msgspec.json.decode(text, type=DataFile), filesystem) for text in batch["file"].to_pylist()
            ]
            texts = [msgspec.json.encode(one).decode() for one in made]
            yield pa.RecordBatch.from_arrays([pa.array(texts, pa.string())], ["file"])

    listed = spark.createDataFrame([(msgspec.json.encode(file).decode(),) for file in chosen_files], files.WRITTEN)
    rows = in_arrow(listed.repartition(len(chosen_files)), task, files.WRITTEN).collect()
    return [msgspec.json.decode(row["file"], type=Rewritten) for row in rows]


def _is_local(spark: Any) -> bool:
    from pyspark.sql.utils import is_remote

    return not is_remote() and str(spark.sparkContext.master).startswith("local")
