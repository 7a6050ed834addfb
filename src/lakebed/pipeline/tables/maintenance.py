"""Compaction, retention and vacuum of tables, planned from their logs: without Spark while nothing is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import msgspec
from pyspark.sql import SparkSession

from lakebed.batches.settings import BatchesSettings
from lakebed.core.context import Context
from lakebed.core.errors import Invalid, LakebedError
from lakebed.core.logs import logger
from lakebed.delta import cleanup, history, vacuum
from lakebed.delta.log import fields_of
from lakebed.delta.model import Snapshot, TableSpec
from lakebed.delta.protocol import check_writable
from lakebed.pipeline.bronze.places import BATCHES, BEFORE, LAYERS, SAMPLES, UNREADABLE_BEFORE, every_table
from lakebed.pipeline.models.runs import COMPACTION, RETENTION, VACUUM
from lakebed.pipeline.settings import BronzeSettings
from lakebed.pipeline.tables import compaction
from lakebed.pipeline.tables.table import Table
from lakebed.spark.lineage import Dataset, lineage_of
from lakebed.spark.location import Location
from lakebed.spark.session import open_session
from lakebed.spark.settings import SparkSettings
from lakebed.store.settings import StoreSettings

COMPACTED_LAYERS = ("bronze",)  # silver and gold have few files, written whole or by key
AGED_BY = ("_ingested_at", "accepted_at", "_time")  # when a row came, in bronze of ticks, of samples and of records

log = logger("bronze")


class MaintenanceReport(msgspec.Struct, frozen=True):
    """What maintenance did to a table, or would do."""

    table: str
    files_joined: int = 0
    files_made: int = 0
    rows_removed: int = 0
    files_swept: int = 0
    bytes_swept: int = 0
    log_entries_cleaned: int = 0
    problem: str = ""  # why this table was left as it is


class TableMaintenance:
    """Synchronous where Spark is needed: call it in a thread from a loop."""

    def __init__(self, context: Context, spark: Callable[[], SparkSession] | None = None) -> None:
        self._context = context
        self._settings = context.settings.of(BronzeSettings)
        self._lineage, self._runs = lineage_of(context), context.run_log("tables")
        self._spark = spark or (lambda: open_session(context.settings.of(SparkSettings)))

    def compact(self, only: str = "", *, dry_run: bool = False) -> list[MaintenanceReport]:
        """Joins small files of the tables that are appended to. Older versions stay readable until vacuum."""
        found = (self._of_table(self._compact, name, only, dry_run) for name in self._chosen(only, compacted=True))
        return [report for report in found if report is not None]

    def _compact(self, name: str, dry_run: bool) -> MaintenanceReport | None:
        state = self._state(name)
        planned = compaction.groups(state.files, self._settings.file_bytes)
        if not planned:
            return None
        check_writable(state, name)
        if dry_run:
            return MaintenanceReport(name, sum(len(group) for group in planned), len(planned))
        read = [Dataset(f"tables/{name}", state.version)]
        with self._runs.job(COMPACTION, name) as run, self._lineage.job(f"compaction/{name}", inputs=read) as job:
            result = self._table(name, state).compact(file_bytes=self._settings.file_bytes)
            job.wrote(f"tables/{name}", version=result.version)
            run.rows_in = run.rows_out = sum(file.rows or 0 for group in planned for file in group)
            run.reason = f"{result.files_removed} files into {result.files_added}, version {result.version}"
            run.idle = not result.files_removed
        self._context.metrics.counter("lakebed_tables_files_joined_total").labels(table=name).inc(result.files_removed)
        return MaintenanceReport(name, result.files_removed, result.files_added)

    def expire(self) -> list[MaintenanceReport]:
        """Removes rows past their retention from bronze of every source, if there is one. Idempotent."""
        if not self._retention_days(SAMPLES):  # samples have every retention that there is
            return []
        aged = [name for name in self._chosen("", compacted=True) if self._retention_days(name)]
        found = (self._of_table(self._expire, name, "", False) for name in aged)
        return [report for report in found if report is not None]

    def _expire(self, name: str, dry_run: bool) -> MaintenanceReport | None:
        moment = datetime.fromtimestamp(self._context.clock.now_ns() / 1e9, UTC)
        moment -= timedelta(days=self._retention_days(name))
        state = self._state(name)
        columns = fields_of(state.schema_json)
        by = next((column for column in AGED_BY if column in columns), "")
        if not by:
            return None
        with self._runs.job(RETENTION, name) as run, self._lineage.job(f"retention/{name}", polls=True) as job:
            result = self._table(name, state).remove_before(by, moment)
            run.rows_out, run.idle = result.rows_removed, not result.rows_removed
            run.reason = f"rows before {moment:%Y-%m-%d} removed"
            if result.rows_removed:
                job.wrote(f"tables/{name}", version=result.version)
        return MaintenanceReport(name, rows_removed=result.rows_removed) if result.rows_removed else None

    def _retention_days(self, name: str) -> float:
        """How long the rows of a table are kept; 0: for ever. Samples are never kept longer than their batches."""
        days: list[float] = [self._settings.retention_days]
        if name.rpartition("/")[0] in (BATCHES, BEFORE[BATCHES]):
            days.append(self._context.settings.of(BatchesSettings).retention_days)
        return min(filter(None, days), default=0.0)

    def _of_table(
        self, work: Callable[[str, bool], MaintenanceReport | None], name: str, only: str, dry_run: bool
    ) -> MaintenanceReport | None:
        """A table that cannot be read or may not be written is reported, and the others go on; alone, it raises."""
        try:
            return work(name, dry_run)
        except vacuum.REFUSED as error:
            if only:
                raise
            return _left(name, error)

    def vacuum(self, only: str = "", *, dry_run: bool = False) -> list[MaintenanceReport]:
        """Deletes the files that no kept version of a table refers to. Needs no Spark."""
        return asyncio.run(self._vacuum(only, dry_run))

    async def _vacuum(self, only: str, dry_run: bool) -> list[MaintenanceReport]:
        store, clock = self._context.store, self._context.clock
        keep_s = vacuum.checked(self._settings.keep_versions_s)
        done = []
        for name in _only(await every_table(store), only):
            root = f"tables/{name}"
            try:
                async with self._runs.record(VACUUM, name) as run:
                    found = await vacuum.sweepable(store, root, clock=clock, keep_s=keep_s)
                    expired = await cleanup.expired(store, root, clock=clock)
                    if not dry_run:
                        await vacuum.delete(store, found)
                        await cleanup.clean(store, root, clock=clock)
                    run.idle = dry_run or not (found or expired)
                    run.reason = f"{len(found)} files deleted, {len(expired)} entries of its log cleaned up"
            except vacuum.REFUSED as error:  # only this table is skipped
                if only:
                    raise
                done.append(_left(name, error))
                continue
            if found or expired:
                size = sum(info.size for info in found)
                report = MaintenanceReport(name, files_swept=len(found), bytes_swept=size)
                done.append(msgspec.structs.replace(report, log_entries_cleaned=len(expired)))
        return done

    def _chosen(self, only: str, *, compacted: bool) -> list[str]:
        found = _only(asyncio.run(every_table(self._context.store)), only)
        apart = ("topics-quarantine", *(set(LAYERS) - set(COMPACTED_LAYERS)))
        return [
            name for name in found if not compacted or (name != UNREADABLE_BEFORE and name.split("/")[0] not in apart)
        ]

    def _state(self, name: str) -> Snapshot:
        return asyncio.run(history.snapshot(self._context.store, f"tables/{name}"))

    def _table(self, name: str, state: Snapshot) -> Table:
        """The table as its own log describes it."""
        spec = TableSpec(
            name, state.schema_json, keys=state.keys, partition_by=state.partition_by, cluster_by=state.cluster_by
        )
        context = self._context
        return Table(
            self._spark(),
            spec,
            context,
            location=Location.of(context.settings.of(StoreSettings)),
            known=state,
        )


def _left(name: str, error: LakebedError) -> MaintenanceReport:
    log.warning("a table was left as it is", table=name, error=error.message)
    return MaintenanceReport(name, problem=error.message)


def _only(found: list[str], only: str) -> list[str]:
    if only and only not in found:
        raise Invalid(f"there is no table {only!r}", hint="lakebed tables list")
    return [name for name in found if not only or name == only]
