"""Compaction, retention and vacuum of tables, planned from their logs: without Spark while nothing is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import msgspec
from pyspark.sql import SparkSession

from lakebed.core.context import Context
from lakebed.core.errors import Invalid
from lakebed.core.logs import logger
from lakebed.delta import history, vacuum
from lakebed.delta.model import Snapshot, TableSpec
from lakebed.pipeline.bronze.samples import NAME, QUARANTINE
from lakebed.pipeline.bronze.topics import FOLDER, QUARANTINE_FOLDER
from lakebed.pipeline.settings import BronzeSettings
from lakebed.pipeline.tables import compaction
from lakebed.pipeline.tables.table import Table
from lakebed.spark.lineage import Dataset, lineage_of
from lakebed.spark.location import Location
from lakebed.spark.session import open_session
from lakebed.spark.settings import SparkSettings
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings

TICK_LAYERS = ("bronze", "silver", "quarantine", "gold")  # tables/<layer>/<org>/<project>/<table>
COMPACTED_LAYERS = ("bronze",)  # of those: silver and gold have few files, written whole or by key
AGED_BY = {"batches": "accepted_at", "topics": "_time"}  # the column that retention compares

log = logger("bronze")


class MaintenanceReport(msgspec.Struct, frozen=True):
    """What maintenance did to a table, or would do."""

    table: str
    files_joined: int = 0
    files_made: int = 0
    rows_removed: int = 0
    files_swept: int = 0
    bytes_swept: int = 0


class TableMaintenance:
    """Synchronous where Spark is needed: call it in a thread from a loop."""

    def __init__(self, context: Context, spark: Callable[[], SparkSession] | None = None) -> None:
        self._context = context
        self._settings = context.settings.of(BronzeSettings)
        self._lineage = lineage_of(context)
        self._spark = spark or (lambda: open_session(context.settings.of(SparkSettings)))

    def compact(self, only: str = "", *, dry_run: bool = False) -> list[MaintenanceReport]:
        """Joins small files of the tables that are appended to. Older versions stay readable until vacuum."""
        done = []
        for name in self._chosen(only, compacted=True):
            state = self._state(name)
            planned = compaction.groups(state.files, self._settings.file_bytes)
            if not planned:
                continue
            if dry_run:
                done.append(MaintenanceReport(name, sum(len(group) for group in planned), len(planned)))
                continue
            with self._lineage.job(f"compaction/{name}", inputs=[Dataset(f"tables/{name}", state.version)]) as job:
                result = self._table(name, state).compact(file_bytes=self._settings.file_bytes)
                job.wrote(f"tables/{name}", version=result.version)
            self._context.metrics.counter("lakebed_tables_files_joined_total").labels(table=name).inc(
                result.files_removed
            )
            done.append(MaintenanceReport(name, result.files_removed, result.files_added))
        return done

    def expire(self) -> list[MaintenanceReport]:
        """Removes samples and records past their retention, if there is one."""
        done = []
        if self._settings.retention_days:
            moment = datetime.fromtimestamp(self._context.clock.now_ns() / 1e9, UTC)
            moment -= timedelta(days=self._settings.retention_days)
            for name in self._chosen("", compacted=True):
                column = AGED_BY.get(name.split("/")[0])
                if column is not None:
                    with self._lineage.job(f"retention/{name}", polls=True) as job:
                        result = self._table(name, self._state(name)).remove_before(column, moment)
                        if result.rows_removed:
                            job.wrote(f"tables/{name}", version=result.version)
                    if result.rows_removed:
                        done.append(MaintenanceReport(name, rows_removed=result.rows_removed))
        return done

    def vacuum(self, only: str = "", *, dry_run: bool = False) -> list[MaintenanceReport]:
        """Deletes the files that no kept version of a table refers to. Needs no Spark."""
        return asyncio.run(self._vacuum(only, dry_run))

    async def _vacuum(self, only: str, dry_run: bool) -> list[MaintenanceReport]:
        store, clock = self._context.store, self._context.clock
        keep_s = vacuum.checked(self._settings.keep_versions_s)
        done = []
        for name in _only(await names(store), only):
            try:
                found = await vacuum.sweepable(store, f"tables/{name}", clock=clock, keep_s=keep_s)
            except vacuum.REFUSED as error:  # only this table is skipped
                if only:
                    raise
                log.warning("a table was not vacuumed", table=name, error=error.message)
                continue
            if found and not dry_run:
                await vacuum.delete(store, found)
            if found:
                size = sum(info.size for info in found)
                done.append(MaintenanceReport(name, files_swept=len(found), bytes_swept=size))
        return done

    def _chosen(self, only: str, *, compacted: bool) -> list[str]:
        found = _only(asyncio.run(names(self._context.store)), only)
        apart = (QUARANTINE_FOLDER, *(set(TICK_LAYERS) - set(COMPACTED_LAYERS)))
        return [name for name in found if not compacted or (name != QUARANTINE and name.split("/")[0] not in apart)]

    def _state(self, name: str) -> Snapshot:
        return asyncio.run(history.snapshot(self._context.store, f"tables/{name}"))

    def _table(self, name: str, state: Snapshot) -> Table:
        """The table as its own log describes it: bounds are kept for the columns that have them."""
        bounded = {column for file in state.files for column in file.low}
        spec = TableSpec(name, state.schema_json, keys=state.keys, partition_by=state.partition_by)
        stats = tuple(column for column in spec.columns if column in bounded)
        context = self._context
        return Table(
            self._spark(),
            msgspec.structs.replace(spec, stats=stats),
            context,
            location=Location.of(context.settings.of(StoreSettings)),
            known=state,
        )


async def names(store: Store) -> list[str]:
    """Every table there is, by its log."""
    found = [NAME, QUARANTINE]
    for folder in (FOLDER, QUARANTINE_FOLDER):
        found += [f"{folder}/{name}" for name in await store.children(f"tables/{folder}/")]
    for layer in TICK_LAYERS:
        for org in await store.children(f"tables/{layer}/"):
            for project in await store.children(f"tables/{layer}/{org}/"):
                tables = await store.children(f"tables/{layer}/{org}/{project}/")
                found += [f"{layer}/{org}/{project}/{table}" for table in tables]
    return [name for name in found if "_delta_log" in await store.children(f"tables/{name}/")]


def _only(found: list[str], only: str) -> list[str]:
    if only and only not in found:
        raise Invalid(f"there is no table {only!r}", hint="lakebed tables list")
    return [name for name in found if not only or name == only]
