"""One table: append, upsert by key, replace, and reads at a pinned version.

Executors write Parquet first; the version becomes true when the driver creates the table's next log entry, only if
absent. A writer that loses that race reads the winning version: an append follows it, everything else is planned again.
A batch that was applied before changes nothing.

A spec with more columns than the table has adds them, as nullable, in the version that first writes them. Any other
difference is refused, except by a replace, which brings its own schema.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from lakebed.core.clock import now_ms
from lakebed.core.errors import AlreadyExists, Invalid, Overloaded, Stale
from lakebed.delta import history
from lakebed.delta.log import Commit, Raced, encode, fields_of, grows, log_key, overlapping, same_columns
from lakebed.delta.model import CommitResult, DataFile, Snapshot, TableSpec, VersionChange, WriteBatch
from lakebed.delta.predicate import Predicate, parse_predicate
from lakebed.delta.types import arrow_type
from lakebed.pipeline.tables import compaction, files, merge, rewrite
from lakebed.pipeline.tables.columns import ColumnMapping
from lakebed.pipeline.tables.frames import nullable, quoted
from lakebed.pipeline.tables.scan import FILE_COLUMN, FileScan, described, reading
from lakebed.spark.location import Location
from lakebed.spark.tasks import collect_in_arrow, in_arrow
from lakebed.store.runtime import StoreRuntime

RACES_MAX = 30  # commits that others may make before ours gives up as Overloaded
FILES_PER_TASK = 4
KEYS_LISTED = 20_000  # of one step, collected to choose the files that may hold them

R = TypeVar("R")


class Table:
    """A table of this spec on the bucket. Synchronous, as Spark is: call it from a thread of its own."""

    def __init__(
        self,
        spark: SparkSession | None,
        spec: TableSpec,
        runtime: StoreRuntime,
        *,
        location: Location,
        known: Snapshot | None = None,
    ) -> None:
        """`known` is any earlier snapshot of the table: reading goes on from it. Without a session, frames cannot be
        read or written; files that are written already can be committed, and rows deleted.
        """
        self.spec = spec
        self.spark: Any = spark
        self._store, self.location = runtime.store, location
        self._clock, self._ids = runtime.clock, runtime.ids
        self._known = known

    def snapshot(self, version: int | None = None) -> Snapshot:
        """The table at a version, or as it is now (version -1: not yet made). Raises NotFound for a missing version."""
        found = _wait(history.snapshot(self._store, self.spec.root, version=version, known=self._known))
        if version is None:
            self._known = found
        return found

    def read(self, version: int | None = None, *, columns: Sequence[str] = ()) -> DataFrame:
        """The rows at a version, or as they are now. A table that does not exist yet is empty."""
        state = self.snapshot(version)
        return self.rows_of(state.files, columns or self.columns_of(state), state)

    def added(
        self, after: int, until: int, *, joined: bool = False, versions: Collection[int] | None = None
    ) -> DataFrame:
        """The rows of the files that versions after `after`, up to `until`, brought and that were not replaced since.

        For a table that is only appended to, these are exactly the rows added between the two: compaction moves rows to
        other files, and brings none. A table that is also changed is read with `joined`: files that compaction joined
        are read in place of those they replace. Older rows are among theirs, so the caller chooses its own. With
        `versions`, these rows are exactly what those versions wrote.
        """
        if after > until:
            raise Invalid(f"{self.spec.name}: version {after} is not before {until}")
        state = self.snapshot(until)
        brought = _wait(history.brought(self._store, self.spec.root, after, until, joined=joined, versions=versions))
        return self.rows_of(brought, self.columns_of(state), state)

    def near(self, rows: DataFrame) -> DataFrame:
        """The rows of the files that may hold a key of these rows, by the files' bounds of the first key: by each key
        while they are few, otherwise by the least and the greatest.
        """
        state, name = self.snapshot(), self.spec.keys[0]
        keys = rows.select(quoted(name).alias(name))
        listed = keys.distinct().limit(KEYS_LISTED + 1).toArrow()
        if listed.num_rows <= KEYS_LISTED:
            chosen = merge.holding(state.files, listed, self.spec)
        else:
            ends = keys.agg(F.min(name), F.max(name)).toArrow()
            chosen = self._candidates(state, (ends.column(0)[0].as_py(), ends.column(1)[0].as_py()))
        return self.rows_of(chosen, self.columns_of(state), state)

    def readable(self, after: int, until: int, *, joined: bool = True) -> bool:
        """Whether `added(after, until, joined=joined)`, or `read(until)` with `after` -1, finds all its files."""
        if after < 0 and until == self.snapshot().version:
            return True
        return _wait(history.readable(self._store, self.spec.root, after, until, joined=joined))

    def changes(self, after: int, until: int) -> list[VersionChange]:
        """What each version after `after` up to `until` did, in order. Raises NotFound for a missing version."""

        async def read() -> list[VersionChange]:
            return [await history.change(self._store, self.spec.root, n) for n in range(after + 1, until + 1)]

        return _wait(read())

    def applied(self, batch: WriteBatch) -> CommitResult | None:
        """What this batch did, if it was applied before."""
        return self._repeated(batch)

    def append(self, rows: DataFrame, batch: WriteBatch | None = None) -> CommitResult:
        """Adds the rows. With a batch, exactly once."""
        return self._repeated(batch) or self.append_files(self.write(rows), batch)

    def append_files(
        self, written: Sequence[DataFile], batch: WriteBatch | None = None, *, note: str = ""
    ) -> CommitResult:
        """The same with files that executors have written already, with this spec's columns."""
        total = sum(file.rows for file in written)
        commit = Commit("WRITE", adds=tuple(written), batch=batch, rows_inserted=total, note=note)
        return self.commit(lambda _: commit, lambda _: CommitResult(0, total, 0, len(written)), batch, rebase=True)

    def replace(
        self,
        rows: DataFrame,
        batch: WriteBatch | None = None,
        *,
        note: str = "",
        unless: Callable[[Snapshot], bool] = lambda state: False,
    ) -> CommitResult:
        """Makes these rows the whole table, with this spec's schema. With a batch, exactly once.

        `unless` is given the table that would be replaced: when it returns true, nothing is changed (`repeated`).
        """
        return self._repeated(batch) or self.replace_by(self.write(rows), batch, note=note, unless=unless)

    def replace_by(
        self,
        written: Sequence[DataFile],
        batch: WriteBatch | None = None,
        *,
        note: str = "",
        unless: Callable[[Snapshot], bool] = lambda state: False,
    ) -> CommitResult:
        """The same with files that executors have written already, with this spec's columns."""
        total = sum(file.rows for file in written)

        def plan(state: Snapshot) -> Commit | None:
            if unless(state):
                return None
            same = same_columns(state.schema_json, self.spec.schema_json) and state.keys == self.spec.keys
            layout = (state.partition_by, state.cluster_by) == (self.spec.partition_by, self.spec.cluster_by)
            spec = None if same and layout else self.spec
            commit = Commit("WRITE", tuple(written), state.files, batch, spec, state.table_id)
            counts = {"rows_inserted": total, "rows_replaced": state.rows}
            return msgspec.structs.replace(commit, overwrites=True, note=note, **counts)

        def result(commit: Commit) -> CommitResult:
            gone = sum(file.rows for file in commit.removes)
            return CommitResult(0, total, gone, len(commit.adds), len(commit.removes))

        return self.commit(plan, result, batch, rebase=True)

    def insert_files(
        self, written: Sequence[DataFile], batch: WriteBatch | None, *, bounds: tuple[Any, Any] | None
    ) -> CommitResult | None:
        """Adds files whose first keys lie within the bounds, if no file of the table may hold such a key.

        None: one may, so nothing was committed; upsert the rows instead.
        """
        total = sum(file.rows for file in written)

        def plan(state: Snapshot) -> Commit:
            if bounds is None or self._candidates(state, bounds):
                raise _Overlaps
            return Commit("MERGE", tuple(written), batch=batch, rows_inserted=total)

        try:
            return self.commit(plan, lambda commit: CommitResult(0, total, 0, len(commit.adds)), batch, rebase=True)
        except _Overlaps:
            return None

    def upsert(self, rows: DataFrame, batch: WriteBatch | None = None, *, note: str = "") -> CommitResult:
        """Inserts rows with new keys and replaces rows whose keys are there. Keys must be unique in `rows`.

        Only files that hold one of the keys are written again. Raises Invalid when a key comes twice.
        """
        if not self.spec.keys:
            raise Invalid(f"table {self.spec.name} has no keys to upsert by", hint="append, or give its spec keys")
        if done := self._repeated(batch):
            return done
        self._growing(self.snapshot())
        return rewrite.upsert_files(self, self.write(rows), batch, note=note)

    def delete(self, condition: str | Predicate, *, note: str = "") -> CommitResult:
        """Removes the rows that match, such as `id = 5 and at < '2026-01-01'`, in one version.

        Older versions keep them until vacuum. Raises Invalid for a condition that is wrong.
        """
        return rewrite.delete(self, parse_predicate(condition) if isinstance(condition, str) else condition, note=note)

    def merge(
        self, load: merge.Load, batch: WriteBatch | None, *, bounds: tuple[Any, Any] | None
    ) -> CommitResult | None:
        """An upsert of few rows, which each task loads for itself. None: too many files may hold them, so upsert."""
        types = to_arrow_schema(StructType.fromJson(msgspec.json.decode(self.spec.schema_json)), timezone="UTC")
        for _ in range(RACES_MAX):
            if done := self._repeated(batch):
                return done
            state = self.snapshot()
            self._growing(state)
            candidates = {file.path: file for file in self._candidates(state, bounds)}
            if len(candidates) > merge.FILES_MAX or state.partition_by:
                return None
            sources = self.spark.createDataFrame([(path,) for path in (merge.COMING, *candidates)], "path string")
            task = merge.merging(self.spec, self.location, load, types)
            rows = in_arrow(sources, task, files.WRITTEN).collect()
            merged = [msgspec.json.decode(row["file"], type=merge.Merged) for row in rows]
            coming = sum(one.rows for one in merged if one.path == merge.COMING)
            touched = tuple(candidates[one.path] for one in merged if one.path != merge.COMING and one.rows)
            replaced = sum(one.rows for one in merged if one.path != merge.COMING)
            kept = rewrite.copies(file for one in merged if one.path != merge.COMING for file in one.files)
            written = (*(file for one in merged if one.path == merge.COMING for file in one.files), *kept)
            commit = Commit("MERGE", written, touched, batch)
            commit = msgspec.structs.replace(commit, rows_inserted=coming - replaced, rows_replaced=replaced)
            result = CommitResult(0, coming - replaced, replaced, len(written), len(touched))
            try:
                return self.commit_on(state, commit, result, batch)
            except Raced:
                continue
        raise Overloaded(f"table {self.spec.name} changed under a merge {RACES_MAX} times")

    def remove_before(self, column: str, moment: datetime) -> CommitResult:
        """Removes the rows whose timestamp in `column` is before the moment; rows without one stay.

        Files that are old as a whole leave the log without being read; a file that is old in part is written again.
        """
        return compaction.remove_before(self, column, moment)

    def compact(self, *, file_bytes: int = compaction.FILE_BYTES, dry_run: bool = False) -> CommitResult:
        """Joins small files into files of about `file_bytes`. Rows stay as they are, and so do older versions.

        Gives what was, or with `dry_run` would be, done; `repeated` when there is nothing to join.
        """
        return compaction.compact(self, file_bytes=file_bytes, dry_run=dry_run)

    def _candidates(self, state: Snapshot, bounds: tuple[Any, Any] | None) -> list[DataFile]:
        """The files that may hold keys within the bounds of the first key."""
        if bounds is None or not isinstance(bounds[0], (int, str)):
            return list(state.files)
        return overlapping(state.files, self.spec.keys[0], *bounds)

    def write(self, rows: DataFrame) -> list[DataFile]:
        """Files with these rows, which nothing refers to until they are committed."""
        task = files.writing(self.spec, self.location)
        return [
            msgspec.json.decode(row["file"], type=DataFile)
            for row in collect_in_arrow(self._checked(rows), task, files.WRITTEN)
        ]

    def _checked(self, rows: DataFrame) -> DataFrame:
        """The rows in the spec's order. Raises Invalid when a column or a type differs: nothing is cast silently."""
        wanted = StructType.fromJson(msgspec.json.decode(self.spec.schema_json))
        have = {field.name: field.dataType for field in rows.schema.fields}
        wrong = [
            f"{field.name} is {have[field.name].simpleString() if field.name in have else 'missing'}, "
            f"not {field.dataType.simpleString()}"
            for field in wanted.fields
            if field.name not in have or nullable(have[field.name]) != nullable(field.dataType)
        ]
        wrong += [f"{name} is not in the spec" for name in have if name not in self.spec.columns]
        if wrong:
            raise Invalid(f"rows do not fit table {self.spec.name}: {'; '.join(wrong[:5])}")
        return rows.select(*map(quoted, self.spec.columns))

    def rows_of(
        self, chosen: Sequence[DataFile], columns: Sequence[str], state: Snapshot, *, with_file: bool = False
    ) -> DataFrame:
        schema = self.spec.schema_json
        kinds = fields_of(schema) | fields_of(state.schema_json)
        types = {name: arrow_type(kinds[name]) for name in columns}
        mapped = ColumnMapping.of(state, types)
        wanted = FileScan(self.location, self.spec.root, kinds, types, mapped=mapped, version=state.version)
        known = [StructType.fromJson(msgspec.json.decode(text)) for text in (schema, state.schema_json) if text]
        fields = {field.name: field for one in known for field in one.fields}
        given = [StructField(name, nullable(fields[name].dataType)) for name in columns]
        given += [StructField(FILE_COLUMN, StringType())] if with_file else []
        tasks = max(1, -(-len(chosen) // FILES_PER_TASK))
        listed = self.spark.createDataFrame([(described(file),) for file in chosen], files.WRITTEN).repartition(tasks)
        return in_arrow(listed, reading(wanted, with_file=with_file), StructType(given))

    def columns_of(self, state: Snapshot) -> list[str]:
        if not state.schema_json:
            return self.spec.columns
        return [field["name"] for field in msgspec.json.decode(state.schema_json)["fields"]]

    def _growing(self, state: Snapshot) -> bool:
        """Whether this spec adds columns. Raises Stale when it is not the table's schema and does not extend it."""
        if state.version == -1 or fields_of(state.schema_json) == fields_of(self.spec.schema_json):
            return False
        if not grows(state.schema_json, self.spec.schema_json):
            raise Stale(f"table {self.spec.name} has another schema at version {state.version} than its writer knows")
        return len(fields_of(self.spec.schema_json)) > len(fields_of(state.schema_json))

    def _check_layout(self, state: Snapshot, commit: Commit) -> None:
        """Raises Stale for files of other partitions than the table's: other readers would find no value in them."""
        if state.version == -1 or commit.overwrites or not commit.adds or state.partition_by == self.spec.partition_by:
            return
        held, ours = (", ".join(names) or "nothing" for names in (state.partition_by, self.spec.partition_by))
        raise Stale(f"table {self.spec.name} is partitioned by {held}, not by {ours}")

    def _repeated(self, batch: WriteBatch | None, state: Snapshot | None = None) -> CommitResult | None:
        """The answer for a batch that was applied before; for one that is written once, the first answer again."""
        state = state or self.snapshot()
        if batch is None:
            return None
        at = state.applied.get(batch.application, -1)
        if batch.number is not None and at >= batch.number:
            return CommitResult(state.version, repeated=True)
        if batch.after is not None and batch.after != at:
            raise Stale(
                f"{batch.application!r} has written batch {at} to {self.spec.name}, not {batch.after} as its last"
            )
        if batch.number is not None or at == -1:
            return None
        done = _wait(history.change(self._store, self.spec.root, at))
        return CommitResult(at, done.rows_inserted, done.rows_replaced, repeated=True)

    def commit_on(
        self, state: Snapshot, commit: Commit, result: CommitResult, batch: WriteBatch | None
    ) -> CommitResult:
        """Creates the entry that was planned on this very state. Raises Raced."""
        return self.commit(lambda _: commit, lambda _: result, batch, on=state)

    def commit(
        self,
        plan: Callable[[Snapshot], Commit | None],
        result: Callable[[Commit], CommitResult],
        batch: WriteBatch | None,
        *,
        rebase: bool = False,
        on: Snapshot | None = None,
    ) -> CommitResult:
        """Creates the next log entry. After a lost race it plans again (`rebase`) or raises Raced."""
        attempt = self._ids.token()
        for _ in range(RACES_MAX):
            state = on or self.snapshot()
            if done := self._repeated(batch, state):
                return done
            commit = plan(state)
            if commit is None:
                return CommitResult(state.version, repeated=True)
            commit.check(state, self.spec.name)
            self._check_layout(state, commit)
            if state.version == -1:
                commit = msgspec.structs.replace(commit, spec=self.spec, table_id=self._ids.uuid())
            elif commit.spec is not None or (not commit.overwrites and self._growing(state)):
                commit = msgspec.structs.replace(commit, spec=self.spec, table_id=state.table_id, before=state)
            at = state.version + 1
            data = encode(commit, attempt_id=attempt, now_ms=now_ms(self._clock), version=at, note=state.note)
            try:
                _wait(self._store.create(log_key(self.spec.root, at), data))
            except AlreadyExists as error:
                if not rebase:
                    raise Raced from error
                continue
            self._known = _wait(history.committed(self._store, self.spec.root, state, data))
            return msgspec.structs.replace(result(commit), version=at)
        raise Overloaded(f"table {self.spec.name} was committed to by others {RACES_MAX} times")


class _Overlaps(Exception):
    """Files of the table may hold keys that are to be inserted."""


def _wait(work: Coroutine[Any, Any, R]) -> R:
    return asyncio.run(work)
