"""A load into bronze: batches, then every topic that has a contract, step by step until nothing is left; then silver
and gold of what was loaded, where a silver contract names it as its source.

Each step is a commit of its own, so a run may be killed anywhere and the next one continues. Synchronous: call it in a
thread from a loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from lakebed.core.context import Context
from lakebed.core.errors import LakebedError, NotFound, Unavailable
from lakebed.core.feed import Limit
from lakebed.core.logs import logger
from lakebed.core.runs import ActiveRun
from lakebed.pipeline.bronze.payloads import TopicContract, read_topic_contracts
from lakebed.pipeline.bronze.places import LAKE, SAMPLES, source_of, word_of
from lakebed.pipeline.bronze.runs import IngestReport
from lakebed.pipeline.bronze.samples import SampleLoader
from lakebed.pipeline.bronze.topics import TopicLoader, behind
from lakebed.pipeline.models.runs import LOAD
from lakebed.pipeline.settings import BronzeSettings, PipelineSettings
from lakebed.pipeline.silver.contract import Contract, read_contracts
from lakebed.pipeline.tables.table import Table
from lakebed.spark.lineage import Run, lineage_of
from lakebed.spark.session import open_session
from lakebed.spark.settings import SparkSettings
from lakebed.spark.tasks import line_of

if TYPE_CHECKING:
    from lakebed.pipeline.runner import PipelineReport, PipelineRunner

SAMPLES_WORD = word_of(SAMPLES)
STEPS_MAX = 10_000  # of one table in one run
log = logger("bronze")


class Ingestion:
    """Contracts are read once, at the start: a mistake in them stops a process before it takes a record."""

    def __init__(self, context: Context, runner: PipelineRunner | None = None) -> None:
        """`runner` is the pipeline of a worker, which tries models again that fail; without one, it is made when it is
        needed, and a model that fails fails the run.
        """
        self._context = context
        self._settings = context.settings.of(BronzeSettings)
        self._contracts = _contracts(self._settings.topics_folder)
        self._samples: SampleLoader | None = None
        self._lineage, self._runs = lineage_of(context), context.run_log("tables")
        self._wanted = {contract.bronze for contract in _silver(context) if source_of(contract.bronze)}
        self._runner, self._raises = runner, runner is None
        self._refined: dict[str, int] = {}  # by source: the version that silver has in this process
        self.refined: PipelineReport | None = None  # what the last run did to silver and gold

    @property
    def words(self) -> list[str]:
        """The topics and queues that are loaded, as a silver contract names them."""
        return [_word(made) for made in self._contracts]

    @property
    def sources(self) -> list[str]:
        """Everything that is loaded, in order."""
        return [*([SAMPLES_WORD] if self._settings.samples else []), *self.words]

    def lags(self, words: Collection[str]) -> dict[str, int]:
        """How many records of each of these topics and queues are not in bronze yet. Needs no Spark."""

        async def counted() -> dict[str, int]:
            chosen = [made for made in self._contracts if _word(made) in words]
            return {_word(made): await behind(self._context, made) for made in chosen}

        return asyncio.run(counted())

    def run(
        self,
        on_step: Callable[[IngestReport], None] = lambda report: None,
        *,
        retry: bool = False,
        only: Collection[str] | None = None,
    ) -> list[IngestReport]:
        """Loads everything that is there now; a report for each table. `on_step` is called after each step.

        `only` are words such as `topic.orders`: nothing else is loaded.
        With `retry`, quarantined batches are read again, and loaded if they can be read.
        A source that fails stops no other: its error is raised at the end, Unavailable when Spark or the store failed.
        What was committed stays, and the next run continues.
        """
        began_s = self._context.clock.monotonic_s()
        spark = open_session(self._context.settings.of(SparkSettings))
        reports: list[IngestReport] = []
        tables: dict[str, Table] = {}
        failed: LakebedError | None = None
        for word in (each for each in self.sources if only is None or each in only):
            try:
                with _spark_errors():
                    report, tables[word] = self._load(spark, word, on_step, retry=retry)
                reports.append(report)
            except LakebedError as error:
                log.warning("a source was not loaded", source=word, error=error.message)
                failed = failed or error
        with _spark_errors():
            self._refine(tables)
        if failed is not None:
            raise failed
        self._context.metrics.histogram("lakebed_bronze_run_seconds").observe(
            self._context.clock.monotonic_s() - began_s
        )
        return reports

    def _load(
        self, spark: SparkSession, word: str, on_step: Callable[[IngestReport], None], *, retry: bool
    ) -> tuple[IngestReport, Table]:
        if word == SAMPLES_WORD:
            samples = self._samples or SampleLoader(spark, self._context, overlap_s=self._settings.overlap_s)
            self._samples = samples  # it caches the notes that it has read
            with self._job(samples.table.spec.name, word) as (job, run):
                again = samples.retry(self._settings.limit) if retry else None
                report = self._drain(samples.table.spec.name, samples.step, on_step, run)
                report = again.plus(report) if again else report
                _trace(job, run, "accepted/v1", report)
            return report, samples.table
        made = next(each for each in self._contracts if _word(each) == word)
        topic = TopicLoader(spark, self._context, made)
        with self._job(topic.table.spec.name, word) as (job, run):
            report = self._drain(topic.table.spec.name, topic.step, on_step, run)
            _trace(job, run, f"{'llog' if made.kind == 'topic' else 'ingest'}/{made.topic}", report)
        return report, topic.table

    def _refine(self, tables: Mapping[str, Table]) -> None:
        """Brings what was loaded to silver and gold of the lake's own project, exactly once."""
        self.refined = None
        versions = {word: table.snapshot().version for word, table in tables.items() if word in self._wanted}
        versions = {word: version for word, version in versions.items() if version >= 0}
        if all(self._refined.get(word) == version for word, version in versions.items()):
            return
        if self._runner is None:
            from lakebed.pipeline.runner import PipelineRunner  # it builds on this module's folder

            self._runner = PipelineRunner(self._context)
        self.refined = self._runner.run_silver(*LAKE, (), versions, raises=self._raises)
        self._refined |= versions

    @contextmanager
    def _job(self, table: str, word: str) -> Iterator[tuple[Run, ActiveRun]]:
        """A load of one table: an event of lineage, and a recorded run."""
        with self._runs.job(LOAD, table, {"word": word}) as run, self._lineage.job(table, polls=True) as job:
            yield job, run

    def _drain(
        self,
        name: str,
        step: Callable[[Limit], IngestReport | None],
        on_step: Callable[[IngestReport], None],
        run: ActiveRun,
    ) -> IngestReport:
        total = IngestReport(name, steps=0)
        for _ in range(STEPS_MAX):
            report = step(self._settings.limit)
            if report is None:
                total = msgspec.structs.replace(total, lag_s=0.0, behind=0)
                break
            on_step(report)
            total = total.plus(report)
            run.rows_in, run.rows_out = total.rows_in, total.good
            run.progress(f"{total.steps} steps")
        self._count(total)
        return total

    def _count(self, report: IngestReport) -> None:
        metrics = self._context.metrics
        rows = metrics.counter("lakebed_bronze_rows_total")
        counts = {"good": report.good, "quarantined": report.quarantined, "duplicate": report.duplicates}
        for outcome, count in counts.items():
            rows.labels(table=report.table, outcome=outcome).inc(count)
        metrics.counter("lakebed_bronze_unreadable_total").labels(table=report.table).inc(len(report.unreadable))
        metrics.gauge("lakebed_bronze_behind").labels(table=report.table).set(report.behind)
        metrics.gauge("lakebed_bronze_lag_seconds").labels(table=report.table).set(report.lag_s)


@contextmanager
def _spark_errors() -> Iterator[None]:
    try:
        yield
    except PySparkException as error:
        raise Unavailable(f"Spark could not finish the run: {line_of(error)}", retry_after_s=5.0) from error


def _word(made: TopicContract) -> str:
    return f"{made.kind}.{made.contract.table}"


def _trace(job: Run, run: ActiveRun, source: str, report: IngestReport) -> None:
    """Reports to lineage and to the record what a run moved; a run that found nothing is not reported."""
    run.rows_in, run.rows_out, run.idle = report.rows_in, report.good, not report.steps
    counts = {"quarantined": report.quarantined, "duplicates": report.duplicates, "unreadable": len(report.unreadable)}
    named = [f"version {report.version}", *(f"{count} {name}" for name, count in counts.items() if count)]
    run.reason = ", ".join(named)
    run.note(f"{report.good} of {report.rows_in} rows of {report.objects} objects loaded in {report.steps} steps")
    for key in report.unreadable:
        run.note(f"unreadable, quarantined: {key}")
    if report.steps:
        job.read(source, rows=report.rows_in)
        job.wrote(f"tables/{report.table}", version=report.version, rows=report.good)


def _silver(context: Context) -> list[Contract]:
    folder = context.settings.of(PipelineSettings).contracts_folder
    return read_contracts(folder) if folder is not None and folder.is_dir() else []


def _contracts(folder: Path | None) -> list[TopicContract]:
    if folder is None:
        return []
    if not folder.is_dir():
        raise NotFound(f"there is no folder {folder}", hint="set bronze.topics to the folder of the topic contracts")
    return read_topic_contracts(folder)
