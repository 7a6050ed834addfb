"""Runs bronze, silver and gold of this process on its one Spark session; the wiring gives it to the parts.

The session is opened on first use, and everything here blocks: call it in a thread from a loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from pyspark.sql import SparkSession

from lakebed.core.clock import now_ms
from lakebed.core.context import Context
from lakebed.core.errors import NotFound
from lakebed.core.logs import logger
from lakebed.core.traces import traced
from lakebed.delta import cleanup, vacuum
from lakebed.pipeline.bronze.ingestion import Ingestion
from lakebed.pipeline.bronze.places import every_table, projects, table_name
from lakebed.pipeline.bronze.ticks import BronzeWriter, TableDone
from lakebed.pipeline.models.definition import BadModel, Model, nearest
from lakebed.pipeline.models.folder import read_models
from lakebed.pipeline.models.graph import Graph, graph_of
from lakebed.pipeline.models.job import ModelRunner
from lakebed.pipeline.models.plan import ModelStep, Window
from lakebed.pipeline.models.runs import MODELS, SILVER, ModelReport, PipelineRun, failed, report_to, write_run
from lakebed.pipeline.settings import BronzeSettings, PipelineSettings
from lakebed.pipeline.silver.contract import Contract, read_contracts
from lakebed.pipeline.silver.job import Silver, SilverReport
from lakebed.spark.lineage import Dataset, lineage_of
from lakebed.spark.location import Location
from lakebed.spark.progress import reporting
from lakebed.spark.session import open_session, warm
from lakebed.spark.settings import SparkSettings
from lakebed.store.settings import StoreSettings
from lakebed.ticks.model import BronzeTick

R = TypeVar("R")

log = logger("pipeline")


class PipelineReport(msgspec.Struct, frozen=True):
    """What a job did. Tables without a contract stay in bronze and are listed in `without_contract`."""

    ticks: tuple[str, ...]
    silver: tuple[SilverReport, ...] = ()
    gold: tuple[ModelReport, ...] = ()
    without_contract: tuple[str, ...] = ()


class PipelineRunner:
    """Contracts and models are read once, at the start: an error in them stops a process before it takes a tick."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._settings = context.settings.of(PipelineSettings)
        self._lineage, self._runs = lineage_of(context), context.run_log("tables")
        self._lock = threading.Lock()
        self._built: tuple[BronzeWriter, Silver, ModelRunner] | None = None
        self._contracts: list[Contract] = _read(self._settings.contracts_folder, read_contracts)
        models: list[Model] = _read(self._settings.gold_folder, read_models)
        self.graph: Graph = graph_of(models, {contract.table for contract in self._contracts})
        self.late: set[tuple[str, str, str]] = set()  # org, project, model: its last run with a tick did not make it
        waited = {word: model.file for model in models for word in model.options.lag}
        self._ingestion = Ingestion(context, self) if waited else None
        known = self._ingestion.words if self._ingestion else []
        if missing := [word for word in waited if word not in known]:
            raise BadModel(
                f"{waited[missing[0]]}: lag: nothing loads {missing[0]} into bronze", hint=nearest(missing[0], known)
            )

    def warm(self) -> None:
        """Starts Spark in the background; returns at once."""
        warm(self._context.settings.of(SparkSettings))

    @property
    def bronze(self) -> BronzeWriter:
        return self._open()[0]

    @property
    def silver(self) -> Silver:
        return self._open()[1]

    @property
    def gold(self) -> ModelRunner:
        return self._open()[2]

    @traced("silver job")
    def run_silver(
        self,
        org_id: str,
        project_id: str,
        tick_ids: Sequence[str],
        versions: Mapping[str, int],
        *,
        anew: Collection[str] = (),
        raises: bool = True,
    ) -> PipelineReport:
        """Brings these ticks to silver and gold, reading each bronze table at exactly its version. Idempotent.

        Raises when silver fails; when a model fails, only with `raises`, and after all that could run have run. In
        `lakebed work` models fail alone: silver is committed, and the worker of models makes them later.

        Ticks that an earlier job has brought along already (its version was later) are found done; what is made of the
        bronze tables in `anew` is computed again as a whole.
        """
        if not self._contracts:  # everything stays in bronze: Spark is not needed
            return PipelineReport(tuple(tick_ids), without_contract=tuple(sorted(versions)))
        if tick_ids:
            return self._run_silver(org_id, project_id, tick_ids, versions, anew, raises)  # its ticks have the run
        with self._runs.job(SILVER, f"{org_id}/{project_id}", {"org": org_id, "project": project_id}) as run:
            report = self._run_silver(org_id, project_id, tick_ids, versions, anew, raises)
            run.rows_in = sum(each.rows_in for each in report.silver)
            run.rows_out = sum(each.good for each in report.silver)
            run.reason = ", ".join(f"{each.table}: {each.quarantined} quarantined" for each in report.silver)
            for each in report.silver:
                run.note(f"{each.table} version {each.silver_version}: {each.good} of {each.rows_in} rows are good")
        return report

    def _run_silver(
        self,
        org_id: str,
        project_id: str,
        tick_ids: Sequence[str],
        versions: Mapping[str, int],
        anew: Collection[str],
        raises: bool,
    ) -> PipelineReport:
        _, silver, gold = self._open()
        read = [Dataset(_key("bronze", org_id, project_id, name), version) for name, version in versions.items()]
        with self._lineage.job(f"silver/{org_id}/{project_id}", inputs=read) as run:
            reports = silver.run(org_id, project_id, versions, anew=anew)
            for report in reports:
                at = (org_id, project_id, report.table)
                run.wrote(_key("silver", *at), version=report.silver_version, rows=report.good)
                run.wrote(_key("quarantine", *at), rows=report.quarantined)
        wanted = [model.name for model in gold.graph.models.values() if _by_tick(model)]
        self._count(reports)
        made = self.run_models(org_id, project_id, wanted, trigger="tick", raises=raises) if wanted else []
        known = {contract.bronze for contract in silver.contracts}
        alone = tuple(sorted(name for name in versions if name not in known))
        return PipelineReport(tuple(tick_ids), tuple(reports), tuple(made), alone)

    def run_models(
        self,
        org_id: str,
        project_id: str,
        names: Collection[str] | None = None,
        *,
        trigger: str,
        full_refresh: bool = False,
        window: Window | None = None,
        filled: Collection[str] | None = None,
        reason: str = "",
        shown: Callable[[ModelReport], None] = lambda report: None,
        raises: bool = True,
    ) -> list[ModelReport]:
        """Makes models of a project, and records the run. Raises the first error after all that could run have run."""
        clock, gold = self._context.clock, self.gold
        began_ms, began_s = now_ms(clock), clock.monotonic_s()
        whose = {"org": org_id, "project": project_id, "models": " ".join(names or ())}
        with (
            self._runs.job(MODELS, f"{org_id}/{project_id}", whose) as recorded,
            reporting(recorded),
            self._lineage.job(f"gold/{org_id}/{project_id}") as run,
        ):
            made, error = gold.run(
                org_id, project_id, names, full_refresh=full_refresh, window=window, filled=filled, shown=shown
            )
            for report in (each for each in made if each.state in ("made", "unchanged")):
                for source, version in report.sources.items():
                    run.read(gold.table(org_id, project_id, source).spec.root, version=version)
                columns = _columns(report, lambda source: gold.table(org_id, project_id, source).spec.root)
                key = _key("gold", org_id, project_id, report.table)
                run.wrote(key, version=report.version, rows=report.rows, columns=columns)
            tables = self._context.metrics.counter("lakebed_gold_tables_total")
            for report in made:
                tables.labels(outcome=report.state).inc()
                if trigger == "tick":
                    self._note_late((org_id, project_id, report.table), report)
            record = PipelineRun(
                self._context.ids.ordered(began_ms),
                org_id,
                project_id,
                trigger,
                began_ms,
                round(clock.monotonic_s() - began_s, 3),
                "failed" if failed(made) else "done",
                tuple(made),
                reason,
            )
            asyncio.run(write_run(self._context.store, record))
            report_to(recorded, record)
            if error is not None and raises:
                raise error
            return made

    def _note_late(self, at: tuple[str, str, str], report: ModelReport) -> None:
        if report.state not in ("failed", "skipped"):
            self.late.discard(at)
            return
        self.late.add(at)
        why = report.error or report.reason
        log.warning("a model was not made", model=report.table, project=f"{at[0]}/{at[1]}", error=why[:300])

    def lags(self, words: Collection[str]) -> dict[str, int]:
        """How many records of these topics and queues wait to be loaded. Starts no Spark."""
        return self._ingestion.lags(words) if self._ingestion else {}

    def load(self, words: Collection[str]) -> None:
        """Loads these topics and queues into bronze, and brings them to silver and gold."""
        if self._ingestion:
            self._ingestion.run(only=words)

    def plan_models(
        self, org_id: str, project_id: str, names: Collection[str], *, full_refresh: bool = False
    ) -> dict[str, ModelStep]:
        """What a run would do now. Starts no Spark."""
        planner = ModelRunner(None, self.graph, self._context, location=None)
        return planner.plan(org_id, project_id, names, full_refresh=full_refresh)

    def projects(self) -> list[tuple[str, str]]:
        """The projects that have tables in a layer that a model reads."""
        read = {source for model in self.graph.models.values() for source in model.sources if "/" not in source}
        layers = sorted({"gold", *(source.partition(".")[0] for source in read)})
        found = [asyncio.run(projects(self._context.store, layer)) for layer in layers]
        return sorted({each for one in found for each in one})

    def commit(self, tick: BronzeTick) -> list[TableDone]:
        """Writes a tick's rows to bronze, exactly once: see Bronze.commit."""
        whose = (tick.org_id, tick.project_id)
        parts = Dataset(
            f"ticks/v1/parts/{tick.org_id}/{tick.project_id}/{tick.tick_id}",
            rows=sum(table.row_count for table in tick.tables),
            size_bytes=sum(part.size for table in tick.tables for part in table.parquets),
        )
        with self._lineage.job("/".join(("bronze", *whose)), inputs=[parts]) as run:
            done = self.bronze.commit(tick)
            for table in done:
                rows = table.rows_inserted + table.rows_replaced
                run.wrote(_key("bronze", *whose, table.name), version=table.version, rows=rows)
            return done

    @traced("silver rebuild")
    def rebuild(self, org_id: str, project_id: str, tables: Collection[str] = ()) -> PipelineReport:
        """Makes silver (these tables of it, or all) and gold anew, from bronze as it is now. Idempotent."""
        known = {contract.table: contract.bronze for contract in self._contracts}
        if unknown := [name for name in tables if name not in known]:
            raise NotFound(f"no contract defines a silver table {unknown[0]!r}", hint=f"one of: {', '.join(known)}")
        wanted = {known[name] for name in tables} if tables else set(known.values())
        held = set(self.bronze.names(org_id, project_id)) & wanted
        versions = {name: self.bronze.table(org_id, project_id, name).snapshot().version for name in sorted(held)}
        return self.run_silver(org_id, project_id, (), versions, anew=held)

    def _count(self, silver: Sequence[SilverReport]) -> None:
        rows = self._context.metrics.counter("lakebed_silver_rows_total")
        for report in silver:
            rows.labels(outcome="good").inc(report.good)
            rows.labels(outcome="quarantined").inc(report.quarantined)
            rows.labels(outcome="duplicate").inc(report.duplicates)

    def _open(self) -> tuple[BronzeWriter, Silver, ModelRunner]:
        with self._lock:
            if self._built is None:
                self._built = self._build(open_session(self._context.settings.of(SparkSettings)))
            return self._built

    def _build(self, spark: SparkSession) -> tuple[BronzeWriter, Silver, ModelRunner]:
        runtime = self._context
        location = Location.of(self._context.settings.of(StoreSettings))
        return (
            BronzeWriter(spark, runtime, location=location, drift=self._settings.bronze_drift),
            Silver(spark, self._contracts, runtime, location=location),
            ModelRunner(spark, self.graph, runtime, location=location),
        )


def _columns(report: ModelReport, key: Callable[[str], str]) -> dict[str, tuple[tuple[str, str], ...]]:
    """Each `silver.orders.total` as the key of its table and its column."""

    def split(text: str) -> tuple[str, str]:
        source = next((one for one in report.sources if text.startswith(f"{one}.")), f"gold.{report.table}")
        return key(source), text.removeprefix(f"{source}.")

    return {name: tuple(map(split, made_of)) for name, made_of in report.columns.items()}


def _by_tick(model: Model) -> bool:
    return not model.options.scheduled and not model.options.lag and model.options.on != "manual"


def _key(layer: str, org_id: str, project_id: str, name: str) -> str:
    return f"tables/{table_name(layer, org_id, project_id, name)}"


async def vacuum_tables(context: Context) -> dict[str, int]:
    """Deletes files that no kept version of any table refers to; returns how many, by table. Cleans up their logs too.
    Needs no Spark.
    """
    deleted: dict[str, int] = {}
    keep_s = max(vacuum.KEEP_S, context.settings.of(BronzeSettings).keep_versions_s)
    for name in await every_table(context.store):
        try:
            gone = await vacuum.sweep(context.store, f"tables/{name}", clock=context.clock, keep_s=keep_s)
            await cleanup.clean(context.store, f"tables/{name}", clock=context.clock)
        except vacuum.REFUSED as error:
            log.warning("a table was not vacuumed", table=name, error=error.message)
            continue
        deleted |= {name: gone} if gone else {}
    return deleted


def _read(folder: Path | None, reader: Callable[[Path], list[R]]) -> list[R]:
    if folder is None:
        return []
    if not folder.is_dir():
        raise NotFound(f"there is no folder {folder}", hint="set pipeline.contracts and pipeline.gold to folders")
    return reader(folder)
