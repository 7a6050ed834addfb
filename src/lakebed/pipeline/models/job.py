"""Runs models: frames of pinned versions in, one commit out, which says what it was made from.

Each table is written by one conditional write that holds files, batch number and origin. Before it nothing has changed;
after it a repeat finds the batch applied. Quarantined rows are written first, under the same batch: a run that died in
between is finished at the very versions that it had, before anything newer is read.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from typing import cast

import msgspec
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from lakebed.core.clock import now_ms
from lakebed.core.errors import LakebedError, Overloaded, Stale, Unavailable
from lakebed.core.traces import traced
from lakebed.delta.log import Commit, fields_of, grows
from lakebed.delta.model import CommitResult, Snapshot, TableSpec, WriteBatch
from lakebed.pipeline.bronze.places import placed, table_name
from lakebed.pipeline.models import expectations
from lakebed.pipeline.models.changes import ChangesGone, apart_by_type, changed_rows
from lakebed.pipeline.models.definition import BadModel, Kind, Model, ModelInput
from lakebed.pipeline.models.graph import Graph
from lakebed.pipeline.models.lineage import column_lineage
from lakebed.pipeline.models.plan import APPLICATION, ModelStep, Origin, Window, decide, origin_of, refused
from lakebed.pipeline.models.runs import ModelReport, ModelState
from lakebed.pipeline.models.testing import applied
from lakebed.pipeline.tables import rewrite
from lakebed.pipeline.tables.changes import INSERT, TYPE
from lakebed.pipeline.tables.sql_names import used_columns
from lakebed.pipeline.tables.table import Table
from lakebed.spark.location import Location
from lakebed.spark.tasks import line_of
from lakebed.store.runtime import StoreRuntime

RACES_MAX = 5  # other runs of the same model that may finish before ours gives up
PARALLEL = 2  # models at once: the driver of one prepares while the tasks of another run
EMPTY = StructType([]).json()


class ModelRunner:
    """Runs models for one project after the other. Synchronous, as Spark is; several at once are safe."""

    def __init__(
        self, spark: SparkSession | None, graph: Graph, runtime: StoreRuntime, *, location: Location | None
    ) -> None:
        """Without a session it can only plan; that needs no location either."""
        self.graph, self.spark, self.runtime = graph, spark, runtime
        self._location = location

    def table(self, org_id: str, project_id: str, source: str, spec: TableSpec | None = None) -> Table:
        """The table that `layer.name` means in a project; a path means itself."""
        layer, _, name = source.partition(".")
        path = source if "/" in source else table_name(layer, org_id, project_id, name)
        if layer == "bronze":
            path = asyncio.run(placed(self.runtime.store, path))
        location = cast(Location, self._location)  # only frames need it
        return Table(self.spark, spec or TableSpec(path, EMPTY), self.runtime, location=location)

    def plan(
        self, org_id: str, project_id: str, names: Collection[str], *, full_refresh: bool = False
    ) -> dict[str, ModelStep]:
        """What a run would do now; a model below one that would be made is planned at its present version."""
        run = _Run(self, org_id, project_id, full_refresh=full_refresh)
        return {name: run.step(self.graph.models[name])[0] for name in self.graph.models if name in names}

    @traced("gold models")
    def run(
        self,
        org_id: str,
        project_id: str,
        names: Collection[str] | None = None,
        *,
        full_refresh: bool = False,
        window: Window | None = None,
        filled: Collection[str] | None = None,
        shown: Callable[[ModelReport], None] = lambda report: None,
    ) -> tuple[list[ModelReport], LakebedError | None]:
        """Makes these models (or all) from their sources as they are now, each after those that it reads. Idempotent.

        A `window` is computed again in the models of `filled` (or all); others take in what that changed. A model that
        fails stops only those that read it; its error is given back beside the reports.
        """
        chosen = [name for name in self.graph.models if names is None or name in names]
        windows = dict.fromkeys(chosen if filled is None else filled, window)
        run = _Run(self, org_id, project_id, full_refresh=full_refresh, windows=windows)
        reports: dict[str, ModelReport] = {}
        errors: list[LakebedError] = []
        order = self.graph.among(chosen)
        order.prepare()
        running: dict[Future[ModelReport], str] = {}
        with ThreadPoolExecutor(PARALLEL, thread_name_prefix="model") as pool:
            while order.is_active():
                for name in order.get_ready():
                    blocked = [p for p in self.graph.parents(name) if p in reports and reports[p].state in BLOCKING]
                    context = copy_context()  # what it logs belongs to this run
                    running[pool.submit(context.run, run.make, self.graph.models[name], blocked)] = name
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    name = running.pop(done)
                    try:
                        reports[name] = done.result()
                    except LakebedError as error:
                        errors.append(error)
                        reports[name] = ModelReport(name, "failed", error=error.message)
                    shown(reports[name])
                    order.done(name)
        return [reports[name] for name in chosen], errors[0] if errors else None


BLOCKING = ("failed", "refused", "skipped")


class _Run:
    """One run over a project: every source at one version, seen once."""

    def __init__(
        self,
        runner: ModelRunner,
        org_id: str,
        project_id: str,
        *,
        full_refresh: bool = False,
        windows: Mapping[str, Window | None] | None = None,
    ) -> None:
        self._runner, self._org, self._project = runner, org_id, project_id
        self._runtime = runner.runtime
        self._full_refresh, self._windows = full_refresh, windows or {}
        self._lock = threading.Lock()
        self._versions: dict[str, int] = {}
        self._run_id = self._runtime.ids.token()

    def make(self, model: Model, blocked: Collection[str]) -> ModelReport:
        """Raises BadModel or an error that a retry may change."""
        if blocked:
            return ModelReport(model.name, "skipped", reason=f"{', '.join(blocked)} was not made")
        began = self._runtime.clock.monotonic_s()
        try:
            report = self._make(model)
        except (AnalysisException, ParseException) as error:
            raise BadModel(f"{model.file}: {line_of(error)}") from error
        except PySparkException as error:
            raise Unavailable(f"Spark could not make gold {model.name}: {line_of(error)}") from error
        except LakebedError:
            raise
        except Exception as error:  # of the model's own function
            raise BadModel(f"{model.file}: {model.name}: {type(error).__name__}: {line_of(error)}") from error
        with self._lock:
            self._versions[f"gold.{model.name}"] = report.version
        return msgspec.structs.replace(report, seconds=round(self._runtime.clock.monotonic_s() - began, 3))

    def step(self, model: Model) -> tuple[ModelStep, Snapshot]:
        state = self._open(f"gold.{model.name}").snapshot()
        quarantine = self._quarantine(model).snapshot() if model.options.expect else Snapshot()
        versions = {source: self._version(source) for source in model.sources}
        held = origin_of(state)
        for source, version in versions.items():  # another run has overtaken this one: its sources are later
            if held is not None and held.sources.get(source, -1) > version:
                versions[source] = self._open(source).snapshot().version
        step = decide(
            model, state, quarantine, versions, full_refresh=self._full_refresh, window=self._windows.get(model.name)
        )
        return step, state

    def _make(self, model: Model) -> ModelReport:
        finished: ModelReport | None = None  # of a run that was cut off; newer versions are made after it
        for _ in range(RACES_MAX):
            step, state = self.step(model)
            report = ModelReport(
                model.name,
                _STATES.get(step.action, "made"),
                step.action if step.works else "",
                step.reason,
                state.version,
                sources=step.sources,
                after=step.after,
            )
            if not step.works:
                return finished or report
            try:
                made = self._write_or_refresh(model, step, state, report)
            except Stale:
                continue
            if not step.resumed:
                return made
            finished = made
        raise Overloaded(f"model {model.name} was made by others {RACES_MAX} times")

    def _write_or_refresh(self, model: Model, step: ModelStep, state: Snapshot, report: ModelReport) -> ModelReport:
        try:
            return self._write(model, step, state, report)
        except ChangesGone as error:
            if model.options.incremental == "append":
                return msgspec.structs.replace(report, state="refused", reason=refused(model, str(error)))
            again = step.refreshed(str(error))
            if step.pinned:  # at versions of before: as they are now
                newest = {source: self._open(source).snapshot().version for source in step.sources}
                again = msgspec.structs.replace(again, sources=newest)
            report = msgspec.structs.replace(
                report, mode="refresh", reason=again.reason, sources=again.sources, after={}
            )
            return self._write(model, again, state, report)

    def _write(self, model: Model, step: ModelStep, state: Snapshot, report: ModelReport) -> ModelReport:
        frames = {(one.source, one.kind): self._frame(model, one, step, state) for one in model.inputs}
        found = applied(model, frames, self._runtime.ids)
        marked = model.options.incremental == "merge" and TYPE in found.columns
        if not marked:
            return self._write_rows(model, step, state, report, found, frames)
        found.cache()  # it is read twice: for the rows that are written, and for those that go
        try:
            rows, gone = apart_by_type(found, model.options.keys)
            return self._write_rows(model, step, state, report, rows, frames, gone)
        finally:
            found.unpersist()

    def _write_rows(
        self,
        model: Model,
        step: ModelStep,
        state: Snapshot,
        report: ModelReport,
        rows: DataFrame,
        frames: Mapping[tuple[str, Kind], DataFrame],
        gone: DataFrame | None = None,
    ) -> ModelReport:
        """Writes the rows, and deletes those of the keys in `gone`, which have the same columns."""
        report = msgspec.structs.replace(report, columns=column_lineage(rows, frames))
        at_ms = now_ms(self._runtime.clock)
        origin = Origin(step.sources, model.sha256, step.batch, step.action, at_ms, self._run_id)
        target = self._target(model, rows, step, state)
        if not model.options.expect:
            report = _made(report, self._commit(model, target, rows, step, origin, gone), model, step)
            return msgspec.structs.replace(report, rows_in=report.rows)
        marked = expectations.judged(rows, model.options.expect).cache()
        try:
            found = expectations.counted(marked, model.options.expect)
            found.check(model.name)
            self._set_aside(model, marked, step, origin)
            done = self._commit(model, target, expectations.kept(marked, model.options.expect), step, origin, gone)
        finally:
            marked.unpersist()
        return msgspec.structs.replace(
            _made(report, done, model, step),
            rows_in=found.rows,
            quarantined=found.quarantined,
            dropped=found.dropped,
            expectations=found.results,
        )

    def _frame(self, model: Model, one: ModelInput, step: ModelStep, state: Snapshot) -> DataFrame:
        table = self._open(one.source)
        if one.source == f"gold.{model.name}":
            return self._own(model, table, step, state)
        at = step.sources[one.source]
        if one.kind != "table" and step.action == "increment":
            after = step.after[one.source]
            return changed_rows(self._runtime.store, table, after, at, feed=one.kind == "feed")
        if step.pinned and not table.readable(-1, at):
            raise ChangesGone(f"a file of version {at} of {table.spec.name} was deleted by vacuum")
        held = table.columns_of(table.snapshot(at))
        window = self._windows.get(model.name) if step.action == "backfill" and one.kind != "table" else None
        chosen = window is not None
        if chosen and model.options.time not in held:
            raise BadModel(f"model {model.name}: {one.source} has no column {model.options.time!r} to choose by")
        used = used_columns(model.sql, held) if model.sql else held
        rows = table.read(
            at, columns=[name for name in held if name in used or (chosen and name == model.options.time)]
        )
        if window is not None:
            rows = rows.filter(window.condition(model.options.time))
        return rows.withColumn(TYPE, F.lit(INSERT)) if one.kind == "feed" else rows

    def _own(self, model: Model, table: Table, step: ModelStep, state: Snapshot) -> DataFrame:
        """The model's own table as it was; without rows when it is made again."""
        if step.action != "refresh":
            return table.read(state.version)
        assert self._runner.spark is not None
        return self._runner.spark.createDataFrame([], StructType.fromDDL(model.options.schema))

    def _target(self, model: Model, rows: DataFrame, step: ModelStep, state: Snapshot) -> Table:
        options = model.options
        for role in ("keys", "partitions", "cluster_by"):
            if unknown := [name for name in getattr(options, role) if name not in rows.columns]:
                raise BadModel(f"{model.file}: {role}: {unknown[0]!r} is none of its columns")
        schema = StructType([StructField(field.name, field.dataType, True) for field in rows.schema.fields]).json()
        if step.action != "refresh" and not grows(state.schema_json, schema):
            held, new = fields_of(state.schema_json), fields_of(schema)
            differ = [name for name in held if held[name] != new.get(name)]
            raise BadModel(
                f"{model.file}: {differ[0] if differ else 'a column'!r} differs from the table's",
                hint=f"lakebed pipeline run {model.name} --full-refresh makes it with the new columns",
            )
        name = table_name("gold", self._org, self._project, model.name)
        layout = {"keys": options.keys, "partition_by": options.partitions, "cluster_by": options.cluster_by}
        return self._open(f"gold.{model.name}", TableSpec(name, schema, **layout))

    def _commit(
        self, model: Model, target: Table, rows: DataFrame, step: ModelStep, origin: Origin, gone: DataFrame | None
    ) -> CommitResult:
        batch, note, mode = (
            WriteBatch(APPLICATION, step.batch, after=step.last),
            origin.encode(),
            model.options.incremental,
        )
        if step.action == "refresh":
            files = target.write(rows)
            if mode == "merge":
                rewrite.check_keys(target, files)
            done = target.replace_by(files, batch, note=note)
        elif mode == "replace":
            done = replace_partitions(target, rows, batch, note)
        else:
            written, deleted = target.write(rows), target.write(gone) if gone is not None else []
            if mode == "append" or not (written or deleted):
                done = target.append_files(written, batch, note=note)
            else:
                done = rewrite.upsert_files(target, written, batch, note=note, deleted=deleted)
        if done.repeated:
            raise Stale(f"model {model.name}: batch {step.batch} was written by another run meanwhile")
        return done

    def _set_aside(self, model: Model, marked: DataFrame, step: ModelStep, origin: Origin) -> None:
        """Writes quarantined rows under the batch's number, unless the run that died before us has."""
        if "quarantine" not in model.options.expect.values():
            return
        table = self._quarantine(model)
        rows = expectations.quarantined(marked, model.options.expect, model.name, step.batch, origin.at_ms)
        if step.resumed:
            return
        number = WriteBatch(APPLICATION, step.batch, after=step.quarantined_at)
        batch = number if step.quarantined_at < step.batch else None  # a run of other code died after its quarantine
        if step.action == "refresh":
            done = table.replace(rows, batch, note=origin.encode())
        else:
            done = table.append_files(table.write(rows), batch, note=origin.encode())
        if done.repeated:
            raise Stale(f"model {model.name}: batch {step.batch} was quarantined by another run meanwhile")

    def _quarantine(self, model: Model) -> Table:
        name = table_name("quarantine", self._org, self._project, model.name)
        spec = TableSpec(name, expectations.QUARANTINE_SCHEMA.json())
        return self._open(f"quarantine.{model.name}", spec)

    def _open(self, source: str, spec: TableSpec | None = None) -> Table:
        return self._runner.table(self._org, self._project, source, spec)

    def _version(self, source: str) -> int:
        with self._lock:
            known = self._versions.get(source)
        if known is None:
            known = self._open(source).snapshot().version
            with self._lock:
                known = self._versions.setdefault(source, known)
        return known


_STATES: Mapping[str, ModelState] = {"wait": "waiting", "unchanged": "unchanged", "refuse": "refused"}


def _made(report: ModelReport, done: CommitResult, model: Model, step: ModelStep) -> ModelReport:
    """An upsert counts rows that it replaced beside those that it inserted; everything else inserts all it writes."""
    upserted = model.options.incremental == "merge" and step.action != "refresh"
    written = done.rows_inserted + (done.rows_replaced if upserted else 0)
    deleted = done.rows_removed if upserted else 0
    return msgspec.structs.replace(
        report, version=done.version, rows=written, replaced=done.rows_replaced, deleted=deleted
    )


def replace_partitions(table: Table, rows: DataFrame, batch: WriteBatch, note: str) -> CommitResult:
    """Makes these rows the whole of the partitions that they are in; other partitions stay."""
    written = table.write(rows)
    partitions = {tuple(sorted(file.partition.items())) for file in written}
    total = sum(file.rows for file in written)

    def plan(state: Snapshot) -> Commit:
        rewrite.check_plain(state, table.spec.name)
        gone = tuple(file for file in state.files if tuple(sorted(file.partition.items())) in partitions)
        out = sum(file.rows for file in gone)
        return Commit("WRITE", tuple(written), gone, batch, note=note, rows_inserted=total, rows_replaced=out)

    def result(commit: Commit) -> CommitResult:
        out = commit.rows_replaced
        return CommitResult(0, total, out, len(written), len(commit.removes))

    return table.commit(plan, result, batch, rebase=True)
