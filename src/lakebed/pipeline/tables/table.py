"""One table: append, upsert by key, replace, and reads at a pinned version.

Executors write Parquet first; the version becomes true when the driver creates the table's next log entry, only if
absent. A writer that loses that race looks at what won: an append goes on behind it, everything else is planned again.
A batch that was applied before changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from lakebed.clock import Clock, now_ms
from lakebed.errors import AlreadyExists, Invalid, Overloaded
from lakebed.ids import Ids
from lakebed.pipeline.tables import files, history
from lakebed.pipeline.tables.location import Location
from lakebed.pipeline.tables.log import Commit, encode, log_key, overlapping
from lakebed.pipeline.tables.model import Batch, Committed, DataFile, Snapshot, TableSpec
from lakebed.store.protocol import Store

RACES_MAX = 30  # commits that others may make before ours gives up as Overloaded
FILES_PER_TASK = 4

R = TypeVar("R")


class Table:
    """A table of this spec on the bucket. Synchronous, as Spark is: call it from a thread of its own."""

    def __init__(
        self, spark: SparkSession, spec: TableSpec, *, store: Store, location: Location, clock: Clock, ids: Ids
    ) -> None:
        self.spec = spec
        self._spark, self._store, self._location = spark, store, location
        self._clock, self._ids = clock, ids
        self._known: Snapshot | None = None

    def snapshot(self, version: int | None = None) -> Snapshot:
        """The table at a version, or as it is now (version -1: not yet made). Raises NotFound for a missing version."""
        found = _wait(history.snapshot(self._store, self.spec.root, version=version, known=self._known))
        if version is None:
            self._known = found
        return found

    def read(self, version: int | None = None, *, columns: Sequence[str] = ()) -> DataFrame:
        """The rows at a version, or as they are now. A table that does not exist yet is empty."""
        state = self.snapshot(version)
        return self._rows(state.files, columns or self._columns(state), state)

    def added(self, after: int, until: int) -> DataFrame:
        """The rows of the files that are in version `until` and were not in version `after`.

        For a table that is only appended to, these are exactly the rows added between the two.
        """
        if after > until:
            raise Invalid(f"{self.spec.name}: version {after} is not before {until}")
        state = self.snapshot(until)
        old = {file.path for file in self.snapshot(after).files} if after >= 0 else set()
        return self._rows([file for file in state.files if file.path not in old], self._columns(state), state)

    def append(self, rows: DataFrame, batch: Batch | None = None) -> Committed:
        """Adds the rows. With a batch, exactly once."""
        if done := self._repeated(batch):
            return done
        written = self._write(rows)
        total = sum(file.rows for file in written)
        return self._commit(
            lambda state: Commit("WRITE", adds=tuple(written), batch=batch),
            lambda commit: Committed(0, total, 0, len(commit.adds)),
            batch,
            rebase=True,
        )

    def replace(self, rows: DataFrame, batch: Batch | None = None) -> Committed:
        """Makes these rows the whole table, with this spec's schema. With a batch, exactly once."""
        if done := self._repeated(batch):
            return done
        written = self._write(rows)
        total = sum(file.rows for file in written)

        def plan(state: Snapshot) -> Commit:
            changed = state.schema_json != self.spec.schema_json
            return Commit("WRITE", tuple(written), state.files, batch, self.spec if changed else None, state.table_id)

        def result(commit: Commit) -> Committed:
            gone = sum(file.rows for file in commit.removes)
            return Committed(0, total, gone, len(commit.adds), len(commit.removes))

        return self._commit(plan, result, batch, rebase=True)

    def upsert(self, rows: DataFrame, batch: Batch | None = None) -> Committed:
        """Inserts rows with new keys and replaces rows whose keys are there. Keys must be unique in `rows`.

        Only files that hold one of the keys are written again.
        """
        if not self.spec.keys:
            raise Invalid(f"table {self.spec.name} has no keys to upsert by", hint="append, or give its spec keys")
        rows = rows.cache()
        try:
            for _ in range(RACES_MAX):
                if done := self._repeated(batch):
                    return done
                state = self.snapshot()
                touched, replaced = self._touched(rows, state)
                written = self._write(self._merged(rows, touched, state))
                inserted = sum(file.rows for file in written) - sum(file.rows for file in touched)
                commit = Commit("MERGE", tuple(written), tuple(touched), batch)
                result = Committed(0, inserted, replaced, len(written), len(touched))
                try:
                    return self._commit(lambda _, commit=commit: commit, lambda _, r=result: r, batch, on=state)  # type: ignore[misc]
                except _Raced:
                    continue
        finally:
            rows.unpersist()
        raise Overloaded(f"table {self.spec.name} changed under an upsert {RACES_MAX} times")

    def _touched(self, rows: DataFrame, state: Snapshot) -> tuple[list[DataFile], int]:
        """The files that hold any of the keys, and how many rows will be replaced."""
        keys = list(self.spec.keys)
        candidates = list(state.files)
        first = rows.agg(F.min(keys[0]), F.max(keys[0])).first() if candidates else None
        if first is not None and first[0] is not None and isinstance(first[0], (int, str)):
            candidates = overlapping(candidates, keys[0], first[0], first[1])
        if not candidates:
            return [], 0
        held = self._rows(candidates, keys, state, with_file=True)
        hits = held.join(rows.select(*keys), on=keys, how="left_semi").groupBy(files.FILE_COLUMN).count().collect()
        by_path = {file.path: file for file in candidates}
        return [by_path[hit[files.FILE_COLUMN]] for hit in hits], sum(hit["count"] for hit in hits)

    def _merged(self, rows: DataFrame, touched: Sequence[DataFile], state: Snapshot) -> DataFrame:
        ours = self._checked(rows)
        if not touched:
            return ours
        kept = self._rows(touched, self.spec.columns, state)
        kept = kept.join(rows.select(*self.spec.keys), on=list(self.spec.keys), how="left_anti")
        return kept.select(*self.spec.columns).unionByName(ours).coalesce(max(1, len(touched)))

    def _write(self, rows: DataFrame) -> list[DataFile]:
        task = files.writing(self.spec, self._location)
        return [
            msgspec.json.decode(row["file"], type=DataFile)
            for row in self._checked(rows).mapInArrow(task, files.WRITTEN).collect()
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

    def _rows(
        self, chosen: Sequence[DataFile], columns: Sequence[str], state: Snapshot, *, with_file: bool = False
    ) -> DataFrame:
        schema = StructType.fromJson(msgspec.json.decode(state.schema_json or self.spec.schema_json))
        typed = [schema[name] for name in columns]
        stored = ", ".join(
            f"`{field.name}` {'string' if field.name in state.partition_by else field.dataType.simpleString()}"
            for field in typed
        ) + (f", `{files.FILE_COLUMN}` string" if with_file else "")
        listed = [(file.path, msgspec.json.encode(file.partition).decode()) for file in chosen]
        tasks = max(1, -(-len(listed) // FILES_PER_TASK))
        sources = self._spark.createDataFrame(listed, "path string, partition string").repartition(tasks)
        task = files.reading(self._location, self.spec.root, list(columns), state.partition_by, with_file=with_file)
        rows = sources.mapInArrow(task, stored)
        casts = [F.col(field.name).cast(field.dataType).alias(field.name) for field in typed]
        return rows.select(*casts, *([files.FILE_COLUMN] if with_file else []))

    def _columns(self, state: Snapshot) -> list[str]:
        if not state.schema_json:
            return self.spec.columns
        return [field["name"] for field in msgspec.json.decode(state.schema_json)["fields"]]

    def _repeated(self, batch: Batch | None) -> Committed | None:
        """The answer for a batch that was applied before."""
        state = self.snapshot()
        if batch is None or state.applied.get(batch.application, -1) < batch.number:
            return None
        return Committed(state.version, repeated=True)

    def _commit(
        self,
        plan: Callable[[Snapshot], Commit],
        result: Callable[[Commit], Committed],
        batch: Batch | None,
        *,
        rebase: bool = False,
        on: Snapshot | None = None,
    ) -> Committed:
        """Creates the next log entry. Loses a race: with `rebase` plans again on what won, otherwise raises _Raced."""
        attempt = self._ids.token()
        for _ in range(RACES_MAX):
            state = on or self.snapshot()
            if batch is not None and state.applied.get(batch.application, -1) >= batch.number:
                return Committed(state.version, repeated=True)
            commit = plan(state)
            if state.version == -1:
                commit = msgspec.structs.replace(commit, spec=self.spec, table_id=self._ids.uuid())
            data = encode(commit, attempt_id=attempt, now_ms=now_ms(self._clock))
            try:
                _wait(self._store.create(log_key(self.spec.root, state.version + 1), data))
            except AlreadyExists as error:
                if not rebase:
                    raise _Raced from error
                continue
            _wait(history.keep(self._store, self.spec.root, self.snapshot()))
            return msgspec.structs.replace(result(commit), version=state.version + 1)
        raise Overloaded(f"table {self.spec.name} was committed to by others {RACES_MAX} times")


class _Raced(Exception):
    """Another version was committed on the snapshot that this one was planned on."""


def _wait(work: Coroutine[Any, Any, R]) -> R:
    return asyncio.run(work)
