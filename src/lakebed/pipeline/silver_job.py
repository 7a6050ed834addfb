"""The silver job: brings each table from the bronze version it has seen to the one it is told, exactly once.

Silver remembers the last bronze version in its own commits. A step reads bronze between that version and the wanted
one, quarantines first and writes silver after, each under the same batch number; a job that died between the two is
finished at exactly the version it was at before anything newer is looked at. So no row is quarantined or counted twice.

Silver also remembers the contract it was made by, in the note of its commits. A job that meets another contract, or is
told to, makes silver and quarantine anew from bronze and from what only they still know: the same rows in, so the same
rows out, however often.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from lakebed.clock import Clock
from lakebed.delta.log import fields_of
from lakebed.delta.model import ONCE, Batch, Committed, Snapshot, TableSpec
from lakebed.errors import Corrupt, Overloaded, Stale, Unavailable
from lakebed.ids import Ids
from lakebed.pipeline import silver, silver_anew
from lakebed.pipeline.bronze import LINEAGE, Bronze, schema_of, table_name
from lakebed.pipeline.bronze_parts import line_of
from lakebed.pipeline.contract import BadContract, Contract
from lakebed.pipeline.tables.location import Location
from lakebed.pipeline.tables.table import Table
from lakebed.store.protocol import Store

APPLICATION = "silver"
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
        *,
        store: Store,
        location: Location,
        clock: Clock,
        ids: Ids,
    ) -> None:
        self.contracts = tuple(contracts)
        self._spark, self._store, self._location = spark, store, location
        self._clock, self._ids = clock, ids
        self._bronze = Bronze(spark, store=store, location=location, clock=clock, ids=ids)
        self._turns: dict[tuple[str, str], threading.Lock] = {}

    def run(
        self, org_id: str, project_id: str, versions: Mapping[str, int], *, anew: Collection[str] = ()
    ) -> list[SilverReport]:
        """Brings every contract's table to the given versions of the bronze tables; what is there already is skipped.

        Tables whose contract has changed, and those of the bronze tables in `anew`, are made again as a whole.
        Raises BadManifest where a contract's drift policy refuses, Unavailable or Overloaded when worth trying again.
        """
        turn = self._turns.setdefault((org_id, project_id), threading.Lock())
        with turn:  # two jobs of one process on one project would only race
            try:
                return [
                    report
                    for contract in self.contracts
                    if contract.bronze in versions
                    for report in self._bring(
                        contract, org_id, project_id, versions[contract.bronze], anew=contract.bronze in anew
                    )
                ]
            except PySparkException as error:
                told = f"Spark could not run silver of {org_id}/{project_id}: {line_of(error)}"
                raise Unavailable(told, retry_after_s=5.0) from error

    def table(self, contract: Contract, org_id: str, project_id: str) -> Table:
        """The silver table as it is; empty, with the contract's columns, before anything came."""
        columns = {name: column.type for name, column in contract.columns.items()}
        return self._open("silver", contract, org_id, project_id, columns)

    def quarantine(self, contract: Contract, org_id: str, project_id: str) -> Table:
        spec = TableSpec(
            table_name("quarantine", org_id, project_id, contract.table), schema_of(silver.QUARANTINE).json()
        )
        return self._of(spec)

    def _bring(self, contract: Contract, org_id: str, project_id: str, until: int, *, anew: bool) -> list[SilverReport]:
        reports: list[SilverReport] = []
        for _ in range(RACES_MAX):
            state = self.table(contract, org_id, project_id).snapshot()
            written = state.applied.get(APPLICATION, -1)
            aside = self.quarantine(contract, org_id, project_id).snapshot().applied.get(APPLICATION, -1)
            try:
                if written >= 0 and (anew or state.note != contract.digest):
                    return [self._anew(contract, org_id, project_id, written, aside, max(until, written, aside))]
                if aside > written:
                    reports.append(self._step(contract, org_id, project_id, written, aside, aside))
                    written = aside
                if until > written:
                    reports.append(self._step(contract, org_id, project_id, written, until, aside))
                return reports
            except Stale:
                continue
        raise Overloaded(f"silver table {contract.table!r} was written by others {RACES_MAX} times")

    def _step(
        self, contract: Contract, org_id: str, project_id: str, after: int, until: int, aside: int
    ) -> SilverReport:
        bronze = self._bronze.table(org_id, project_id, contract.bronze)
        changes = bronze.changes(after, until) if after >= 0 else []
        whole = after < 0 or any(change.overwrites for change in changes)
        rows = bronze.read(until)
        if not whole:
            ticks = [app.removeprefix(ONCE) for change in changes for app in change.applications]
            rows = bronze.added(after, until).filter(F.col("_tick_id").isin(ticks))
        fit = silver.fitted(contract, rows.schema)
        target = self._target(contract, org_id, project_id, fit.columns)
        columns = [name for name in target.spec.columns if name not in LINEAGE]
        types = {name: kind for name, kind in fields_of(target.spec.schema_json).items() if name in columns}
        prepared = silver.checked(silver.cast(rows, contract, types), contract).cache()
        try:
            total, bad = self._count(prepared)
            self._set_aside(contract, org_id, project_id, prepared, until, aside, bad)
            done = self._write(contract, target, silver.good(prepared, columns), after, until, whole)
        finally:
            prepared.unpersist()
        kept = 0 if done.repeated else done.rows_inserted + (0 if whole else done.rows_replaced)
        return SilverReport(
            contract.table, after, until, done.version, total, kept, bad, total - bad - kept, fit.discarded, fit.added
        )

    def _anew(
        self, contract: Contract, org_id: str, project_id: str, written: int, aside: int, at: int
    ) -> SilverReport:
        """Makes both tables again at this version, with the contract's own columns. Raises Stale when raced."""
        bronze = self._bronze.table(org_id, project_id, contract.bronze)
        rows = bronze.read(at)
        fit = silver.fitted(contract, rows.schema)
        aside_table = self.quarantine(contract, org_id, project_id)
        recomputed = silver.cast(rows, contract, fit.columns).cache()
        held = self.table(contract, org_id, project_id).read()
        more = silver_anew.only_in_silver(held, recomputed, contract, fit.columns)
        both = recomputed.unionByName(silver.cast(more, contract, fit.columns))
        prepared = silver.checked(both, contract).cache()
        try:
            total, bad = self._count(prepared)
            kept_aside = silver_anew.still_aside(aside_table.read(), recomputed, bronze.spec.keys)
            now_aside = silver.quarantined(prepared, at).unionByName(kept_aside)
            self._replace(aside_table, now_aside, aside, at, contract)
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

    def _replace(self, table: Table, rows: DataFrame, was: int, at: int, contract: Contract) -> Committed:
        """Replaces a table that is at batch `was`; at the same version again there is no new batch to name."""
        batch = Batch(APPLICATION, at, after=was) if at > was else None
        done = table.replace(rows, batch, note=contract.digest, unless=_moved(was))
        if done.repeated:
            raise Stale(f"{table.spec.name} was written by another job meanwhile")
        return done

    def _count(self, prepared: DataFrame) -> tuple[int, int]:
        counted = prepared.agg(F.count("*"), F.count(F.when(F.size(silver.REASONS) > 0, 1))).first()
        return (counted[0], counted[1]) if counted else (0, 0)

    def _set_aside(
        self, contract: Contract, org_id: str, project_id: str, rows: DataFrame, until: int, aside: int, bad: int
    ) -> None:
        if aside >= until:
            return
        table = self.quarantine(contract, org_id, project_id)
        done = table.append(silver.quarantined(rows, until), Batch(APPLICATION, until, after=aside))
        if not done.repeated and done.rows_inserted != bad:
            raise Corrupt(f"{table.spec.name}: {bad} rows have a reason, but {done.rows_inserted} were set aside")

    def _write(
        self, contract: Contract, target: Table, rows: DataFrame, after: int, until: int, whole: bool
    ) -> Committed:
        batch = Batch(APPLICATION, until, after=after)
        if whole:
            return target.replace(silver.latest(rows, contract), batch, note=contract.digest)
        return target.upsert(silver.latest(rows, contract, target.read()), batch)

    def _target(self, contract: Contract, org_id: str, project_id: str, columns: Mapping[str, str]) -> Table:
        """The silver table with every column it has and every column it gets."""
        held = fields_of(self.table(contract, org_id, project_id).snapshot().schema_json)
        for name, kind in columns.items():
            if held.get(name, kind) != kind:
                raise BadContract(
                    f"contract of {contract.table!r}: {name!r} is {kind}, but the silver table has it as {held[name]}",
                    hint="give the column another name, or the table",
                )
        return self._open("silver", contract, org_id, project_id, {**held, **columns})

    def _open(self, layer: str, contract: Contract, org_id: str, project_id: str, columns: Mapping[str, str]) -> Table:
        lineage = {name: LINEAGE[name] for name in silver.KEPT_LINEAGE}
        schema = schema_of({**columns, **{name: kind for name, kind in lineage.items() if name not in columns}})
        name = table_name(layer, org_id, project_id, contract.table)
        return self._of(TableSpec(name, schema.json(), keys=contract.keys))

    def _of(self, spec: TableSpec) -> Table:
        return Table(self._spark, spec, store=self._store, location=self._location, clock=self._clock, ids=self._ids)


def _moved(was: int) -> Callable[[Snapshot], bool]:
    return lambda state: state.applied.get(APPLICATION, -1) != was
