"""The silver job: updates each table from the last bronze version it has read to the given one, exactly once.

Silver remembers the last bronze version in its own commits. A step reads bronze between that version and the wanted
one, quarantines first and writes silver after, each under the same batch number; a job that died between the two is
finished at exactly its own version before anything newer is read. So no row is quarantined or counted twice.

Silver that is far behind goes on: where compaction took files of the wanted version out of the table and vacuum has
deleted them, the step reads the newest version instead; where even the log entries in between are gone, or a step was
half done, silver is rebuilt at the newest version.

Silver also remembers the contract it was made by, in the note of its commits. A job that finds another contract, or
is requested to, rebuilds silver and quarantine from bronze and from the rows that only they still have: the same rows
in give the same rows out, however often it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from lakebed.core.errors import Corrupt, Overloaded, Stale, Unavailable
from lakebed.core.logs import logger
from lakebed.delta.log import fields_of
from lakebed.delta.model import CommitResult, Snapshot, TableSpec, WriteBatch
from lakebed.delta.types import parse_type
from lakebed.pipeline.bronze.places import LAKE, source_of, table_name
from lakebed.pipeline.bronze.ticks import LINEAGE, BronzeWriter, schema_of
from lakebed.pipeline.silver import transforms as silver
from lakebed.pipeline.silver.contract import BadContract, Contract
from lakebed.pipeline.silver.source import SilverSource
from lakebed.pipeline.tables.table import Table
from lakebed.spark.location import Location
from lakebed.spark.tasks import line_of
from lakebed.store.runtime import StoreRuntime

APPLICATION = "silver"
log = logger("pipeline")

RACES_MAX = 5  # other jobs on the same table that may finish before ours gives up


class SilverReport(msgspec.Struct, frozen=True):
    """One step of one table: rows_in = good + quarantined + duplicates, or the step was never committed.

    `good` were written; `duplicates` lost to a later row of the same key, in this step or in silver already.
    """

    table: str
    bronze_after: int
    bronze_version: int
    silver_version: int
    rows_in: int
    good: int
    quarantined: int
    duplicates: int
    discarded: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    anew: bool = False


class Silver:
    """Runs contracts. Synchronous, as Spark is; several jobs at once on one project lose and double nothing."""

    def __init__(
        self,
        spark: SparkSession,
        contracts: Sequence[Contract],
        runtime: StoreRuntime,
        *,
        location: Location,
    ) -> None:
        self.contracts = tuple(contracts)
        self._spark, self._runtime, self._location = spark, runtime, location
        self._bronze = BronzeWriter(spark, runtime, location=location)
        self._turns: dict[tuple[str, str], threading.Lock] = {}

    def run(
        self, org_id: str, project_id: str, versions: Mapping[str, int], *, anew: Collection[str] = ()
    ) -> list[SilverReport]:
        """Updates every contract's table to the given versions of the bronze tables; tables that have them are skipped.

        Tables whose contract has changed, and those of the bronze tables in `anew`, are made again as a whole.
        Raises BadManifest where a contract's drift policy refuses, Unavailable or Overloaded when a retry makes sense.
        """
        turn = self._turns.setdefault((org_id, project_id), threading.Lock())
        with turn:  # two jobs of one process on one project would race
            try:
                return [
                    report
                    for contract in self.contracts
                    if contract.bronze in versions
                    for report in self._update(
                        contract, org_id, project_id, versions[contract.bronze], anew=contract.bronze in anew
                    )
                ]
            except PySparkException as error:
                message = f"Spark could not run silver of {org_id}/{project_id}: {line_of(error)}"
                raise Unavailable(message, retry_after_s=5.0) from error

    def table(self, contract: Contract, org_id: str, project_id: str) -> Table:
        """The silver table as it is; empty, with the contract's columns, before anything came."""
        columns = {name: parse_type(column.type) for name, column in contract.columns.items()}
        return self._open("silver", contract, org_id, project_id, columns)

    def quarantine(self, contract: Contract, org_id: str, project_id: str) -> Table:
        spec = TableSpec(
            table_name("quarantine", org_id, project_id, contract.table), schema_of(silver.QUARANTINE).json()
        )
        return self._of(spec)

    def _update(
        self, contract: Contract, org_id: str, project_id: str, until: int, *, anew: bool
    ) -> list[SilverReport]:
        reports: list[SilverReport] = []
        where = (contract, org_id, project_id)
        for _ in range(RACES_MAX):
            state = self.table(contract, org_id, project_id).snapshot()
            written = state.applied.get(APPLICATION, -1)
            quarantined_at = self.quarantine(contract, org_id, project_id).snapshot().applied.get(APPLICATION, -1)
            try:
                if written >= 0 and (anew or state.note != contract.digest):
                    at = self._reach(*where, -1, max(until, written, quarantined_at)) or 0
                    return [self._anew(*where, written, quarantined_at, at)]
                if quarantined_at > written:
                    reach = self._reach(*where, written, quarantined_at)
                    if reach != quarantined_at:  # what was quarantined cannot be read again: both are made anew
                        at = self._reach(*where, -1, max(until, quarantined_at)) or 0
                        return [*reports, self._anew(*where, written, quarantined_at, at)]
                    reports.append(self._step(*where, written, quarantined_at, quarantined_at))
                    written = quarantined_at
                if until > written:
                    reach = self._reach(*where, written, until)
                    if reach is None:
                        at = self._reach(*where, -1, until) or 0
                        return [*reports, self._anew(*where, written, quarantined_at, at)]
                    reports.append(self._step(*where, written, reach, quarantined_at))
                return reports
            except Stale:
                continue
        raise Overloaded(f"silver table {contract.table!r} was written by others {RACES_MAX} times")

    def _reach(self, contract: Contract, org_id: str, project_id: str, after: int, until: int) -> int | None:
        """The version that a step from `after` reads: `until`, or the newest one when files of `until` were swept.

        None when not even that can be reached from `after`, because log entries between them are gone.
        """
        bronze = self.source(contract, org_id, project_id)
        if bronze.readable(after, until):
            return until
        newest = bronze.table.snapshot().version
        log.warning(
            "bronze is read at a later version: files of the wanted one are gone",
            table=bronze.table.spec.name,
            wanted=until,
            version=newest,
        )
        return newest if bronze.readable(after, newest) else None

    def source(self, contract: Contract, org_id: str, project_id: str) -> SilverSource:
        """The bronze table that the contract names. Raises NotFound."""
        table = self._bronze.table(org_id, project_id, contract.bronze)
        return SilverSource(table, appended=(org_id, project_id) == LAKE and bool(source_of(contract.bronze)))

    def _step(
        self, contract: Contract, org_id: str, project_id: str, after: int, until: int, quarantined_at: int
    ) -> SilverReport:
        rows, whole = self.source(contract, org_id, project_id).since(after, until)
        fit = silver.fitted(contract, rows.schema)
        target = self._target(contract, org_id, project_id, fit.columns)
        columns = [name for name in target.spec.columns if name not in LINEAGE]
        types = {name: kind for name, kind in fields_of(target.spec.schema_json).items() if name in columns}
        prepared = silver.checked(silver.cast(rows, contract, types), contract).cache()
        try:
            total, bad = self._count(prepared)
            self._quarantine_bad(contract, org_id, project_id, prepared, until, quarantined_at, bad)
            done = self._write(contract, target, silver.good(prepared, columns), after, until, whole)
        finally:
            prepared.unpersist()
        kept = 0 if done.repeated else done.rows_inserted + (0 if whole else done.rows_replaced)
        return SilverReport(
            contract.table, after, until, done.version, total, kept, bad, total - bad - kept, fit.discarded, fit.added
        )

    def _anew(
        self, contract: Contract, org_id: str, project_id: str, written: int, quarantined_at: int, at: int
    ) -> SilverReport:
        """Makes both tables again at this version, with the contract's own columns. Raises Stale when raced."""
        bronze = self.source(contract, org_id, project_id)
        rows = bronze.read(at)
        fit = silver.fitted(contract, rows.schema)
        quarantine_table = self.quarantine(contract, org_id, project_id)
        recomputed = silver.cast(rows, contract, fit.columns).cache()
        held = self.table(contract, org_id, project_id).read()
        more = silver.only_in_silver(held, recomputed, contract, fit.columns)
        both = recomputed.unionByName(silver.cast(more, contract, fit.columns))
        prepared = silver.checked(both, contract).cache()
        try:
            total, bad = self._count(prepared)
            kept_rows = silver.kept_in_quarantine(quarantine_table.read(), recomputed, bronze.table.spec.keys)
            all_rows = silver.quarantined(prepared, at).unionByName(kept_rows)
            self._replace(quarantine_table, all_rows, quarantined_at, at, contract)
            target = self._open("silver", contract, org_id, project_id, fit.columns)
            good = silver.latest(silver.good(prepared, list(fit.columns)), contract)
            done = self._replace(target, good, written, at, contract)
        finally:
            prepared.unpersist()
            recomputed.unpersist()
        kept = done.rows_inserted
        return SilverReport(
            contract.table, -1, at, done.version, total, kept, bad, total - bad - kept, fit.discarded, fit.added, True
        )

    def _replace(self, table: Table, rows: DataFrame, was: int, at: int, contract: Contract) -> CommitResult:
        """Replaces a table that is at batch `was`; at the same version again there is no new batch to name."""
        batch = WriteBatch(APPLICATION, at, after=was) if at > was else None
        done = table.replace(rows, batch, note=contract.digest, unless=_moved(was))
        if done.repeated:
            raise Stale(f"{table.spec.name} was written by another job meanwhile")
        return done

    def _count(self, prepared: DataFrame) -> tuple[int, int]:
        counted = prepared.agg(F.count("*"), F.count(F.when(F.size(silver.REASONS) > 0, 1))).first()
        return (counted[0], counted[1]) if counted else (0, 0)

    def _quarantine_bad(
        self,
        contract: Contract,
        org_id: str,
        project_id: str,
        rows: DataFrame,
        until: int,
        quarantined_at: int,
        bad: int,
    ) -> None:
        if quarantined_at >= until:
            return
        table = self.quarantine(contract, org_id, project_id)
        done = table.append(silver.quarantined(rows, until), WriteBatch(APPLICATION, until, after=quarantined_at))
        if not done.repeated and done.rows_inserted != bad:
            raise Corrupt(f"{table.spec.name}: {bad} rows have a reason, but {done.rows_inserted} were quarantined")

    def _write(
        self, contract: Contract, target: Table, rows: DataFrame, after: int, until: int, whole: bool
    ) -> CommitResult:
        batch = WriteBatch(APPLICATION, until, after=after)
        if whole:
            return target.replace(silver.latest(rows, contract), batch, note=contract.digest)
        return target.upsert(silver.latest(rows, contract, target.near(rows)), batch)

    def _target(self, contract: Contract, org_id: str, project_id: str, columns: Mapping[str, Any]) -> Table:
        """The silver table with every column it has and every column it gets."""
        held = fields_of(self.table(contract, org_id, project_id).snapshot().schema_json)
        for name, kind in columns.items():
            if held.get(name, kind) != kind:
                raise BadContract(
                    f"contract of {contract.table!r}: {name!r} is {kind}, but the silver table has it as {held[name]}",
                    hint="rename the column or the table in the contract",
                )
        return self._open("silver", contract, org_id, project_id, {**held, **columns})

    def _open(self, layer: str, contract: Contract, org_id: str, project_id: str, columns: Mapping[str, Any]) -> Table:
        lineage = {name: LINEAGE[name] for name in silver.KEPT_LINEAGE}
        schema = schema_of({**columns, **{name: kind for name, kind in lineage.items() if name not in columns}})
        name = table_name(layer, org_id, project_id, contract.table)
        layout = {"partition_by": contract.partition_by, "cluster_by": contract.cluster_by}
        return self._of(TableSpec(name, schema.json(), keys=contract.keys, **layout))

    def _of(self, spec: TableSpec) -> Table:
        return Table(self._spark, spec, self._runtime, location=self._location)


def _moved(was: int) -> Callable[[Snapshot], bool]:
    return lambda state: state.applied.get(APPLICATION, -1) != was
