"""One table: append, upsert by key, replace, and reads at a pinned version.

Executors write Parquet first; the version becomes true when the driver creates the table's next log entry, only if
absent. A writer that loses that race reads the winning version: an append follows it, everything else is planned again.
A batch that was applied before changes nothing.

A spec with more columns than the table has adds them, as nullable, in the version that first writes them. Any other
difference is refused, except by a replace, which brings its own schema.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema, to_arrow_type
from pyspark.sql.types import StructType

from lakebed.core.clock import now_ms
from lakebed.core.errors import AlreadyExists, Invalid, Overloaded, Stale
from lakebed.delta import history
from lakebed.delta.log import Commit, Raced, encode, fields_of, grows, log_key, overlapping
from lakebed.delta.model import CommitResult, DataFile, Snapshot, TableSpec, VersionChange, WriteBatch
from lakebed.pipeline.tables import compaction, files, merge
from lakebed.spark.location import Location
from lakebed.spark.tasks import in_arrow
from lakebed.store.runtime import StoreRuntime

RACES_MAX = 30  # commits that others may make before ours gives up as Overloaded
FILES_PER_TASK = 4

R = TypeVar("R")


class Table:
    """A table of this spec on the bucket. Synchronous, as Spark is: call it from a thread of its own."""

    def __init__(
        self,
        spark: SparkSession,
        spec: TableSpec,
        runtime: StoreRuntime,
        *,
        location: Location,
        known: Snapshot | None = None,
    ) -> None:
        """`known` is any earlier snapshot of the table: reading goes on from it."""
        self.spec = spec
        self.spark, self._store, self.location = spark, runtime.store, location
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

    def added(self, after: int, until: int) -> DataFrame:
        """The rows of the files that versions after `after`, up to `until`, brought and that were not replaced since.

        For a table that is only appended to, these are exactly the rows added between the two: compaction moves rows to
        other files, and brings none.
        """
        if after > until:
            raise Invalid(f"{self.spec.name}: version {after} is not before {until}")
        state = self.snapshot(until)
        brought = _wait(history.brought(self._store, self.spec.root, after, until))
        return self.rows_of(brought, self.columns_of(state), state)

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
            changed = state.schema_json != self.spec.schema_json or state.keys != self.spec.keys
            commit = Commit("WRITE", tuple(written), state.files, batch, self.spec if changed else None, state.table_id)
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

    def upsert(
        self, rows: DataFrame, batch: WriteBatch | None = None, *, bounds: tuple[Any, Any] | None = None
    ) -> CommitResult:
        """Inserts rows with new keys and replaces rows whose keys are there. Keys must be unique in `rows`.

        Only files that hold one of the keys are written again. `bounds` is the range of the first key in `rows`, where
        the caller knows it: rows behind every file need no look at the table then.
        """
        if not self.spec.keys:
            raise Invalid(f"table {self.spec.name} has no keys to upsert by", hint="append, or give its spec keys")
        kept = False
        try:
            for _ in range(RACES_MAX):
                if done := self._repeated(batch):
                    return done
                state = self.snapshot()
                self._growing(state)
                if not kept and self._candidates(state, bounds):
                    rows, kept = rows.cache(), True  # read more than once from here on
                touched, replaced = self._touched(rows, state, bounds)
                written = self.write(self._merged(rows, touched, state))
                inserted = sum(file.rows for file in written) - sum(file.rows for file in touched)
                commit = Commit("MERGE", tuple(written), tuple(touched), batch)
                commit = msgspec.structs.replace(commit, rows_inserted=inserted, rows_replaced=replaced)
                result = CommitResult(0, inserted, replaced, len(written), len(touched))
                try:
                    return self.commit_on(state, commit, result, batch)
                except Raced:
                    continue
        finally:
            if kept:
                rows.unpersist()
        raise Overloaded(f"table {self.spec.name} changed under an upsert {RACES_MAX} times")

    def merge(
        self, load: merge.Load, batch: WriteBatch | None, *, bounds: tuple[Any, Any] | None
    ) -> CommitResult | None:
        """An upsert of few rows, which each task loads for itself. None: too many files may hold them, so upsert."""
        schema = StructType.fromJson(msgspec.json.decode(self.spec.schema_json))
        types = to_arrow_schema(schema, timezone="UTC")
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
            written = tuple(file for one in merged for file in one.files)
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

    def _touched(self, rows: DataFrame, state: Snapshot, bounds: tuple[Any, Any] | None) -> tuple[list[DataFile], int]:
        """The files that hold any of the keys, and how many rows will be replaced."""
        keys = list(self.spec.keys)
        if bounds is None and state.files:
            first = rows.agg(F.min(keys[0]), F.max(keys[0])).first()
            bounds = None if first is None or first[0] is None else (first[0], first[1])
        candidates = self._candidates(state, bounds)
        if not candidates:
            return [], 0
        held = self.rows_of(candidates, keys, state, with_file=True)
        hits = held.join(rows.select(*keys), on=keys, how="left_semi").groupBy(files.FILE_COLUMN).count().collect()
        by_path = {file.path: file for file in candidates}
        return [by_path[hit[files.FILE_COLUMN]] for hit in hits], sum(hit["count"] for hit in hits)

    def _merged(self, rows: DataFrame, touched: Sequence[DataFile], state: Snapshot) -> DataFrame:
        ours = self._checked(rows)
        if not touched:
            return ours
        kept = self.rows_of(touched, self.spec.columns, state)
        kept = kept.join(rows.select(*self.spec.keys), on=list(self.spec.keys), how="left_anti")
        return kept.select(*self.spec.columns).unionByName(ours).coalesce(max(1, len(touched)))

    def write(self, rows: DataFrame) -> list[DataFile]:
        """Files with these rows, which nothing refers to until they are committed."""
        task = files.writing(self.spec, self.location)
        return [
            msgspec.json.decode(row["file"], type=DataFile)
            for row in in_arrow(self._checked(rows), task, files.WRITTEN).collect()
        ]

    def _checked(self, rows: DataFrame) -> DataFrame:
        """The rows in the spec's order. Raises Invalid when a column or a type differs: nothing is cast silently."""
        wanted = StructType.fromJson(msgspec.json.decode(self.spec.schema_json))
        have = {field.name: field.dataType for field in rows.schema.fields}
        wrong = [
            f"{field.name} is {have[field.name].simpleString() if field.name in have else 'missing'}, "
            f"not {field.dataType.simpleString()}"
            for field in wanted.fields
            if have.get(field.name) != field.dataType
        ]
        wrong += [f"{name} is not in the spec" for name in have if name not in self.spec.columns]
        if wrong:
            raise Invalid(f"rows do not fit table {self.spec.name}: {'; '.join(wrong[:5])}")
        return rows.select(*self.spec.columns)

    def rows_of(
        self, chosen: Sequence[DataFile], columns: Sequence[str], state: Snapshot, *, with_file: bool = False
    ) -> DataFrame:
        known = [self.spec.schema_json, *([state.schema_json] if state.schema_json else [])]
        schema = {field.name: field for text in known for field in StructType.fromJson(msgspec.json.decode(text))}
        typed = [schema[name] for name in columns]
        stored = ", ".join(
            f"`{field.name}` {'string' if field.name in state.partition_by else field.dataType.simpleString()}"
            for field in typed
        ) + (f", `{files.FILE_COLUMN}` string" if with_file else "")
        listed = [(file.path, msgspec.json.encode(file.partition).decode()) for file in chosen]
        tasks = max(1, -(-len(listed) // FILES_PER_TASK))
        sources = self.spark.createDataFrame(listed, "path string, partition string").repartition(tasks)
        types = {field.name: to_arrow_type(field.dataType, timezone="UTC") for field in typed}
        task = files.reading(self.location, self.spec.root, types, state.partition_by, with_file=with_file)
        rows = in_arrow(sources, task, stored)
        casts = [F.col(field.name).cast(field.dataType).alias(field.name) for field in typed]
        return rows.select(*casts, *([files.FILE_COLUMN] if with_file else []))

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
            if state.version == -1:
                commit = msgspec.structs.replace(commit, spec=self.spec, table_id=self._ids.uuid())
            elif not commit.overwrites and self._growing(state):
                commit = msgspec.structs.replace(commit, spec=self.spec, table_id=state.table_id)
            data = encode(commit, attempt_id=attempt, now_ms=now_ms(self._clock), version=state.version + 1)
            try:
                _wait(self._store.create(log_key(self.spec.root, state.version + 1), data))
            except AlreadyExists as error:
                if not rebase:
                    raise Raced from error
                continue
            self._known = _wait(history.committed(self._store, self.spec.root, state, data))
            return msgspec.structs.replace(result(commit), version=state.version + 1)
        raise Overloaded(f"table {self.spec.name} was committed to by others {RACES_MAX} times")


class _Overlaps(Exception):
    """Files of the table may hold keys that are to be inserted."""


def _wait(work: Coroutine[Any, Any, R]) -> R:
    return asyncio.run(work)
