"""Bronze: a tick's rows as they came, every column and where it came from, in one table per (org, project, name).

    check every part → fit every schema → write table after table, each once per tick

Nothing is committed before every part was read to its end. Each table's version is committed with the tick's name, so a
tick that was half done goes on where it stopped: tables that have it return their first counts and version.
Bronze keeps the order of commits; silver decides which row is the newest by the data's own clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from lakebed.core.errors import NotFound, Overloaded, Stale, Unavailable
from lakebed.core.traces import traced
from lakebed.delta.log import fields_of
from lakebed.delta.model import CommitResult, Snapshot, TableSpec, WriteBatch
from lakebed.delta.types import parse_type
from lakebed.pipeline.bronze import parts
from lakebed.pipeline.bronze.drift import Drift, Fit, fit
from lakebed.pipeline.bronze.parts import FILE_SEQ, INGESTED_AT, ROW, Draft, PartReport, PartRequest
from lakebed.pipeline.bronze.places import (
    FOLDERS,
    LAKE,
    SHARED,
    UNREADABLE_BEFORE,
    committed,
    placed,
    source_of,
    table_name,
    tables_of,
)
from lakebed.pipeline.tables import merge, rewrite
from lakebed.pipeline.tables.table import Table
from lakebed.spark.location import Location
from lakebed.spark.session import parallelism
from lakebed.spark.tasks import in_arrow, line_of
from lakebed.store.runtime import StoreRuntime
from lakebed.ticks.model import BadManifest, BronzeTick, TickTable

LINEAGE = {
    "_tick_id": "string",
    "_org_id": "string",
    "_project_id": "string",
    FILE_SEQ: "integer",
    INGESTED_AT: "timestamp",
}
KNOWN_MAX = 512  # tables whose last snapshot is cached
RANGES_MAX = 4_096  # ranges of keys that are sent along to tasks
SCHEMA_RACES_MAX = 5  # times that other writers may change a table's columns under one tick


class TableDone(msgspec.Struct, frozen=True):
    """What a tick did to a table.

    rows_in = inserted + replaced + duplicates for a delta, and inserted + duplicates for a full, whose `rows_replaced`
    are the rows that went.
    """

    name: str
    version: int
    rows_in: int
    rows_inserted: int
    rows_replaced: int
    duplicates: int
    repeated: bool = False
    added: tuple[str, ...] = ()
    discarded: tuple[str, ...] = ()


class BronzeWriter:
    """Commits ticks. Synchronous, as Spark is; safe in several threads and processes at once."""

    def __init__(
        self,
        spark: SparkSession,
        runtime: StoreRuntime,
        *,
        location: Location,
        drift: Drift = "evolve",
    ) -> None:
        self._spark, self._runtime, self._location, self._drift = spark, runtime, location, drift
        self._known: dict[str, Snapshot] = {}
        self._places: dict[str, str] = {}

    @traced("bronze commit")
    def commit(self, tick: BronzeTick) -> list[TableDone]:
        """Writes the tick's rows, exactly once. A repeat returns the first result again.

        Raises BadManifest when parts or columns are not what the manifest says (nothing is committed then), Unavailable
        or Overloaded when a retry makes sense.
        """
        try:
            done = [self._done(tick, table) for table in tick.tables]
            if all(done):
                return [one for one in done if one]
            drafts = [None if one else self._draft(tick, table) for one, table in zip(done, tick.tables, strict=True)]
            reports = self._check(tick, drafts)
            return [
                earlier or self._write(tick, table, [one for one in reports if one.table == n])
                for n, (earlier, table) in enumerate(zip(done, tick.tables, strict=True))
            ]
        except PySparkException as error:
            message = f"Spark could not write tick {tick.tick_id}: {line_of(error)}"
            raise Unavailable(message, retry_after_s=5.0) from error

    def table(self, org_id: str, project_id: str, name: str) -> Table:
        """The table as it is now; in the lake's project a contract's word names another source. Raises NotFound."""
        source = source_of(name) if (org_id, project_id) == LAKE else ""
        return self.named(self._placed(source or table_name("bronze", org_id, project_id, name)))

    def named(self, full_name: str) -> Table:
        """The same, by its whole name, of any source."""
        state = self._held(full_name)
        if state.version == -1:
            raise NotFound(f"there is no table {full_name}", hint="lakebed tables list")
        layout = (state.partition_by, state.cluster_by)
        return self._open(full_name, fields_of(state.schema_json), state.keys, layout)

    def names(self, org_id: str, project_id: str) -> list[str]:
        """The project's tables, with those of sources that have no org in the lake's own project; a folder in which
        nothing was ever committed is none.
        """
        return asyncio.run(self._names(org_id, project_id))

    async def _names(self, org_id: str, project_id: str) -> list[str]:
        store = self._runtime.store
        found = list(await tables_of(store, "bronze", org_id, project_id))
        if (org_id, project_id) == LAKE:
            for kind, folder in FOLDERS.items():
                named = {*await committed(store, f"bronze/{folder}/{SHARED}"), *await committed(store, folder)}
                found += [f"{kind}.{name}" for name in sorted(named) if f"{folder}/{name}" != UNREADABLE_BEFORE]
        return found

    def _placed(self, name: str) -> str:
        """Where the table is. Remembered: a table does not move."""
        if name not in self._places:
            if len(self._places) >= KNOWN_MAX:
                self._places.pop(next(iter(list(self._places))), None)
            self._places[name] = asyncio.run(placed(self._runtime.store, name))
        return self._places[name]

    def _draft(self, tick: BronzeTick, table: TickTable) -> Draft | None:
        """How the table's parts may be written while they are checked. Raises BadManifest for columns that conflict."""
        _, target = self._fit(tick, table)
        held: list[Any] = []
        if table.mode == "delta":
            key = table.primary_keys[0]
            held = [(file.low.get(key), file.high.get(key)) for file in target.snapshot().files]
        if len(held) > RANGES_MAX or any(low is None or high is None for low, high in held):
            return None
        return Draft(target.spec, self._lineage(tick), self._now(), tuple(held))

    def _check(self, tick: BronzeTick, drafts: Sequence[Draft | None]) -> list[PartReport]:
        requests = [
            PartRequest(n, part.file_seq, tick.keys[part.file_seq], part.rows, part.size)
            for n, table in enumerate(tick.tables)
            for part in table.parquets
        ]
        if not requests:
            return []
        columns, keys = [table.schema for table in tick.tables], [table.primary_keys for table in tick.tables]
        task = parts.checking_parts(self._location, columns, keys, drafts)
        rows = in_arrow(self._listed(requests), task, parts.REPORTS).collect()
        reports = sorted(
            (msgspec.json.decode(row["report"], type=PartReport) for row in rows), key=lambda one: one.file_seq
        )
        for one in reports:
            if one.error_class:
                name = tick.tables[one.table].name
                raise BadManifest(
                    one.error_class,
                    f"table {name!r}: part {one.file_seq}: {one.message}",
                    table=name,
                    file_seq=one.file_seq,
                )
        return reports

    def _fit(self, tick: BronzeTick, table: TickTable) -> tuple[Fit, Table]:
        held = self._held(self._name(tick, table))
        coming = {column.name: parse_type(column.type) for column in table.schema}
        mine = {name: kind for name, kind in fields_of(held.schema_json).items() if name not in LINEAGE}
        fitted = fit(table.name, mine, coming, self._drift)
        _check_keys(table, held, fitted)
        order = fields_of(held.schema_json) or {**coming, **LINEAGE}
        columns = {**order, **fitted.columns}
        whole = table.mode == "full" or held.version < 0
        if not whole and table.partition_by and table.partition_by != held.partition_by:
            raise BadManifest(
                "partitioning_changed",
                f"table {table.name!r} is partitioned by {', '.join(held.partition_by) or 'nothing'}",
                hint="send the table once in full mode with its new partition_by",
            )
        layout = (table.partition_by, table.cluster_by) if whole else (held.partition_by, held.cluster_by)
        return fitted, self._open(self._name(tick, table), columns, table.primary_keys, layout)

    def _write(self, tick: BronzeTick, table: TickTable, mine: Sequence[PartReport]) -> TableDone:
        batch = WriteBatch.once(tick.tick_id)
        for _ in range(SCHEMA_RACES_MAX):
            fitted, target = self._fit(tick, table)
            if fitted.widened and table.mode == "delta":
                rewrite.widen(target)
            if done_at_once := self._drafted(table, target, mine, batch):
                return _result(table, done_at_once, fitted)
            try:
                if merged := self._merged(tick, table, target, mine, batch):
                    return _result(table, merged, fitted)
                rows = self._rows(tick, table, mine).select(*self._projected(tick, table, target.spec))
                if table.mode == "full":
                    done = target.replace(rows, batch)
                else:
                    done = target.upsert(rows, batch)
            except Stale:
                continue
            return _result(table, done, fitted)
        raise Overloaded(
            f"the columns of table {table.name!r} changed {SCHEMA_RACES_MAX} times under tick {tick.tick_id}"
        )

    def _drafted(
        self, table: TickTable, target: Table, reports: Sequence[PartReport], batch: WriteBatch
    ) -> CommitResult | None:
        """Commits what was written during the check, if it is all of the table's rows and no key occurs twice."""
        filled = [one for one in reports if one.rows]
        if not all(one.files for one in filled) or may_repeat(table, filled):
            return None
        written = [file for one in filled for file in one.files]
        try:
            if table.mode == "full":
                return target.replace_by(written, batch)
            return target.insert_files(written, batch, bounds=_bounds(filled)) if filled else None
        except Stale:  # the table has got other columns since
            return None

    def _merged(
        self, tick: BronzeTick, table: TickTable, target: Table, reports: Sequence[PartReport], batch: WriteBatch
    ) -> CommitResult | None:
        """Upserts a table of few rows file by file; None where it has many, or none."""
        requests = [PartRequest(0, p.file_seq, tick.keys[p.file_seq], p.rows) for p in table.parquets if p.rows]
        if table.mode == "full" or not requests or table.row_count > merge.ROWS_MAX:
            return None
        draft = Draft(target.spec, self._lineage(tick), self._now())
        load = parts.loading(self._location, requests, table.schema, draft)
        return target.merge(load, batch, bounds=_bounds(reports))

    def _lineage(self, tick: BronzeTick) -> dict[str, str]:
        return {"_tick_id": tick.tick_id, "_org_id": tick.org_id, "_project_id": tick.project_id}

    def _rows(self, tick: BronzeTick, table: TickTable, reports: Sequence[PartReport]) -> DataFrame:
        """The parts' rows with their places, each key once."""
        columns = {column.name: parse_type(column.type) for column in table.schema}
        schema = schema_of(columns | {FILE_SEQ: "integer", ROW: "long"})
        requests = [PartRequest(0, p.file_seq, tick.keys[p.file_seq], p.rows) for p in table.parquets if p.rows]
        if not requests:
            return self._spark.createDataFrame([], schema)
        rows = in_arrow(self._listed(requests), parts.reading_parts(self._location, table.schema), schema)
        return last_of_each(rows, table.primary_keys) if may_repeat(table, reports) else rows

    def _projected(self, tick: BronzeTick, table: TickTable, spec: TableSpec) -> list[Expression]:
        lineage = {name: F.lit(value) for name, value in self._lineage(tick).items()}
        lineage[INGESTED_AT] = F.lit(self._now()).cast("timestamp")
        coming = {column.name for column in table.schema} | {FILE_SEQ}
        return [
            lineage.get(field.name, F.col(field.name) if field.name in coming else F.lit(None).cast(field.dataType))
            .cast(field.dataType)
            .alias(field.name)
            for field in StructType.fromJson(msgspec.json.decode(spec.schema_json))
        ]

    def _done(self, tick: BronzeTick, table: TickTable) -> TableDone | None:
        name = self._name(tick, table)
        self._held(name)
        done = self._open(name, {}).applied(WriteBatch.once(tick.tick_id))
        return _result(table, done, Fit({})) if done else None

    def _listed(self, requests: Sequence[PartRequest]) -> DataFrame:
        import pyarrow as pa

        listed = pa.table({"request": [msgspec.json.encode(one).decode() for one in requests]})
        frame: DataFrame = self._spark.createDataFrame(listed)
        tasks = min(len(requests), parallelism(self._spark))
        return frame.coalesce(1) if tasks == 1 else frame.repartition(tasks)

    def _name(self, tick: BronzeTick, table: TickTable) -> str:
        return self._placed(table_name("bronze", tick.org_id, tick.project_id, table.name))

    def _open(
        self,
        name: str,
        columns: dict[str, Any],
        keys: Sequence[str] = (),
        layout: tuple[Sequence[str], Sequence[str]] = ((), ()),
    ) -> Table:
        """The table with these columns; `layout` is what its files are partitioned and ordered by."""
        stats = (INGESTED_AT,) if INGESTED_AT in columns else ()
        partition_by, cluster_by = tuple(layout[0]), tuple(layout[1])
        spec = TableSpec(name, schema_of(columns).json(), tuple(keys), partition_by, stats, cluster_by)
        return Table(self._spark, spec, self._runtime, location=self._location, known=self._known.get(name))

    def _held(self, name: str) -> Snapshot:
        """The table as it is now, cached: the next read replays only what was committed since."""
        state = self._open(name, {}).snapshot()
        if len(self._known) >= KNOWN_MAX:
            self._known.pop(next(iter(list(self._known))), None)
        self._known[name] = state
        return state

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._runtime.clock.now_ns() / 1e9, UTC)


def last_of_each(rows: DataFrame, keys: Sequence[str]) -> DataFrame:
    """Of rows with one key the last: of the highest part, and in it the furthest down."""
    newest = Window.partitionBy(*keys).orderBy(F.col(FILE_SEQ).desc(), F.col(ROW).desc())
    return rows.withColumn("_nth", F.row_number().over(newest)).filter(F.col("_nth") == 1).drop("_nth")


def may_repeat(table: TickTable, reports: Sequence[PartReport]) -> bool:
    """Whether a key may come twice in the tick; False only when the parts' keys show that it does not."""
    if not table.primary_keys:
        return False
    filled = [one for one in reports if one.rows]
    if not all(one.unique for one in filled):
        return True
    if len(filled) < 2:
        return False
    if any(one.low is None or one.high is None for one in filled):
        return True
    ordered: list[Any] = sorted(filled, key=lambda one: one.low)
    return any(after.low <= before.high for before, after in pairwise(ordered))


def _bounds(reports: Sequence[PartReport]) -> tuple[Any, Any] | None:
    filled: list[Any] = [one for one in reports if one.rows]
    if not filled or any(one.low is None or one.high is None for one in filled):
        return None
    return min(one.low for one in filled), max(one.high for one in filled)


def _check_keys(table: TickTable, held: Snapshot, fitted: Fit) -> None:
    unknown = [key for key in table.primary_keys if key in fitted.discarded]
    if unknown or (table.mode == "delta" and held.version >= 0 and held.keys != table.primary_keys):
        raise BadManifest(
            "keys_changed",
            f"table {table.name!r} has the keys {', '.join(held.keys) or 'none'}, not {', '.join(table.primary_keys)}",
            hint="send the table once in full mode with its new keys",
        )


def _result(table: TickTable, done: CommitResult, fitted: Fit) -> TableDone:
    kept = done.rows_inserted + (done.rows_replaced if table.mode == "delta" else 0)
    return TableDone(
        table.name,
        done.version,
        table.row_count,
        done.rows_inserted,
        done.rows_replaced,
        table.row_count - kept,
        done.repeated,
        fitted.added,
        fitted.discarded,
    )


def schema_of(columns: Mapping[str, Any]) -> StructType:
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in columns.items()]
    return StructType.fromJson({"type": "struct", "fields": fields})
