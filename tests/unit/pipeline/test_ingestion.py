"""A load into bronze: which tables, until nothing is left, and what is counted and reported. No Spark."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import PySparkException

from lakebed.core.context import Context
from lakebed.core.errors import Corrupt, LakebedError, NotFound, Unavailable
from lakebed.core.feed import Limit
from lakebed.core.runs import RunReader
from lakebed.core.settings import load
from lakebed.pipeline.bronze import ingestion as module
from lakebed.pipeline.bronze.ingestion import SAMPLES_WORD, Ingestion
from lakebed.pipeline.bronze.runs import IngestReport
from lakebed.pipeline.demo import STEP_OBJECTS, load_samples
from lakebed.spark.settings import SparkSettings
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections

CLICKS = "table: clicks\nsource: raw\nkeys: [id]\ncolumns: {id: {type: long, required: true}}\n"


def stand(name: str, version: int) -> Any:
    """A table of this name at this version."""
    return SimpleNamespace(spec=SimpleNamespace(name=name), snapshot=lambda: SimpleNamespace(version=version))


class Yard:
    """Loaders that have so many steps left, and what they were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: dict[str, list[IngestReport]] = {}
        self.asked: list[tuple[str, Any]] = []
        self.again: IngestReport | None = None
        self.error: Exception | None = None
        self.errors: dict[str, Exception] = {}
        yard = self

        class Samples:
            table = stand("bronze/batches/lake/samples", 4)

            def __init__(self, spark: Any, context: Context, *, overlap_s: float) -> None:
                yard.asked.append(("samples", overlap_s))

            def step(self, limit: Limit) -> IngestReport | None:
                return yard.next("bronze/batches/lake/samples", limit)

            def retry(self, limit: Limit) -> IngestReport | None:
                yard.asked.append(("retry", limit))
                return yard.again

        class Topic:
            table = stand("bronze/topics/lake/clicks", -1)

            def __init__(self, spark: Any, context: Context, made: Any) -> None:
                yard.asked.append(("topic", made.topic))
                if error := yard.errors.get(f"topic.{made.contract.table}"):
                    raise error

            def step(self, limit: Limit) -> IngestReport | None:
                return yard.next("bronze/topics/lake/clicks", limit)

        monkeypatch.setattr(module, "SampleLoader", Samples)
        monkeypatch.setattr(module, "TopicLoader", Topic)
        monkeypatch.setattr(module, "open_session", lambda settings: None)

    def next(self, table: str, limit: Limit) -> IngestReport | None:
        self.asked.append((table, limit))
        if self.error is not None:
            raise self.error
        left = self.steps.get(table, [])
        return left.pop(0) if left else None


@pytest.fixture
def yard(monkeypatch: pytest.MonkeyPatch) -> Yard:
    return Yard(monkeypatch)


def context_of(folder: Path | None = None, **flags: object) -> Context:
    given = {"bronze.topics": str(folder)} if folder else {}
    return make_context(load(sections(), flags={"store.url": "memory:", **given, **flags}), role="test")


def report(version: int, **counts: Any) -> IngestReport:
    return IngestReport("bronze/batches/lake/samples", version=version, **counts)


def test_a_load_goes_on_until_nothing_is_left_and_counts_every_row(yard: Yard, tmp_path: Path) -> None:
    """Batches first, then each topic with a contract; what is left is nothing, on the gauges too."""
    (tmp_path / "clicks.yaml").write_text(CLICKS)
    flags = {"bronze.step_rows": 77, "bronze.overlap_s": 60}
    context = context_of(tmp_path, **flags)
    yard.steps["bronze/batches/lake/samples"] = [
        report(3, objects=2, rows_in=20, good=17, duplicates=2, quarantined=1, lag_s=9.0, behind=4, unreadable=("k",)),
        report(4, objects=1, rows_in=5, good=5, lag_s=3.0, behind=2, through="later"),
    ]
    steps: list[int] = []

    samples, topic = Ingestion(context).run(lambda one: steps.append(one.version))

    assert ([3, 4], 4, 2, 3, 25, 22, 2, 1) == (
        steps,
        samples.version,
        samples.steps,
        samples.objects,
        samples.rows_in,
        samples.good,
        samples.duplicates,
        samples.quarantined,
    )
    assert (0.0, 0, "later", ("k",), False) == (
        samples.lag_s,
        samples.behind,
        samples.through,
        samples.unreadable,
        samples.sound,
    )
    assert ("bronze/topics/lake/clicks", 0, -1, True) == (topic.table, topic.steps, topic.version, topic.sound)
    (run,) = asyncio.run(RunReader(context, "tables").latest(9))  # the topic had nothing to load
    assert ("bronze load", "bronze/batches/lake/samples", 25, 22) == (run.kind, run.subject, run.rows_in, run.rows_out)
    assert "version 4, 1 quarantined, 2 duplicates, 1 unreadable" == run.reason and {"word": SAMPLES_WORD} == run.fields
    assert {77} == {limit.rows for name, limit in yard.asked if "/" in name}
    assert [("samples", 60.0), ("topic", "raw")] == [each for each in yard.asked if "/" not in each[0]]

    def value(name: str, **labels: str) -> float | None:
        return context.metrics.registry.get_sample_value(name, {"table": "bronze/batches/lake/samples", **labels})

    assert (22, 1, 2, 1, 0, 0) == (
        value("lakebed_bronze_rows_total", outcome="good"),
        value("lakebed_bronze_rows_total", outcome="quarantined"),
        value("lakebed_bronze_rows_total", outcome="duplicate"),
        value("lakebed_bronze_unreadable_total"),
        value("lakebed_bronze_behind"),
        value("lakebed_bronze_lag_seconds"),
    )


def test_the_samples_of_the_demo_are_loaded_by_a_run_that_is_recorded(yard: Yard) -> None:
    """In steps of its own size, and no topic; the runs page of a stack on the demo's folder has the load."""
    context = context_of()
    yard.steps["bronze/batches/lake/samples"] = [
        report(0, objects=500, rows_in=9, good=9),
        report(1, rows_in=3, good=3),
    ]

    loaded = load_samples(context, SparkSettings(quick=True))

    (run,) = asyncio.run(RunReader(context, "tables").latest(9))
    assert (12, "done", "bronze/batches/lake/samples", 12) == (loaded.good, run.state, run.subject, run.rows_out)
    assert {STEP_OBJECTS} == {limit.objects for name, limit in yard.asked if "/" in name}


def test_a_run_ends_at_its_limit_of_steps_and_says_what_is_left(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last step left behind is reported, never zero."""
    monkeypatch.setattr(module, "STEPS_MAX", 2)
    yard.steps["bronze/batches/lake/samples"] = [report(n, lag_s=float(9 - n), behind=9 - n) for n in range(5)]

    (samples,) = Ingestion(context_of()).run()

    assert (2, 1, 8.0, 8) == (samples.steps, samples.version, samples.lag_s, samples.behind)


def test_quarantined_batches_are_read_again_only_when_asked(yard: Yard) -> None:
    """Before the new ones, and in the same report."""
    yard.again = report(2, rows_in=5, good=5)
    yard.steps["bronze/batches/lake/samples"] = [report(3, rows_in=7, good=7)]
    ingestion = Ingestion(context_of())

    (first,) = ingestion.run(retry=True)
    yard.again = None
    (second,) = ingestion.run(retry=True)
    order = [name for name, _ in yard.asked]
    yard.asked.clear()
    ingestion.run()

    assert (2, 12, 3, 0) == (first.steps, first.good, first.version, second.steps)
    assert ["samples", "retry", "bronze/batches/lake/samples"] == order[:3]
    assert 1 == order.count("samples")  # its notes stay cached from run to run
    assert ["bronze/batches/lake/samples"] == [name for name, _ in yard.asked]


@pytest.mark.parametrize(("samples", "tables"), [(True, ["bronze/batches/lake/samples"]), (False, [])])
def test_batches_are_loaded_unless_the_settings_say_no(yard: Yard, samples: bool, tables: list[str]) -> None:
    assert tables == [each.table for each in Ingestion(context_of(**{"bronze.samples": samples})).run()]


def test_what_spark_could_not_finish_is_retried_and_a_missing_folder_is_not(yard: Yard, tmp_path: Path) -> None:
    """A contract that is wrong stops a process at its start."""
    yard.error = PySparkException("lost an executor")

    with pytest.raises(Unavailable, match="lost an executor") as caught:
        Ingestion(context_of()).run()
    with pytest.raises(NotFound, match="nowhere"):
        Ingestion(context_of(tmp_path / "nowhere"))

    assert 5.0 == caught.value.retry_after_s


def test_a_source_that_fails_stops_no_other_and_no_silver(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three fails, for reasons of Spark or of its own: the others are loaded and go on; then it is told."""
    for name in ("clicks", "orders"):
        (tmp_path / f"{name}.yaml").write_text(CLICKS.replace("clicks", name))
    ingestion = Ingestion(context_of(tmp_path))
    refined: list[list[str]] = []
    monkeypatch.setattr(Ingestion, "_refine", lambda self, tables: refined.append(sorted(tables)))
    for error in (PySparkException("lost an executor"), Corrupt("a slice is damaged")):
        yard.errors = {"topic.clicks": error}
        with pytest.raises(LakebedError, match=r"lost an executor|a slice is damaged"):
            ingestion.run()

    assert [[SAMPLES_WORD, "topic.orders"]] * 2 == refined


def test_what_was_loaded_goes_on_to_silver_where_a_contract_names_it(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples at the version they have, once for each version; a source that no contract names stays in bronze."""
    (tmp_path / "loads.yaml").write_text(
        "table: loads\nsource: batches.samples\nkeys: [seq]\ncolumns: {seq: {type: long, required: true}}\n"
    )
    (tmp_path / "orders.yaml").write_text(CLICKS.replace("clicks", "orders").replace("source: raw\n", ""))
    ran: list[tuple[Any, ...]] = []

    class Runner:
        def __init__(self, context: Context) -> None: ...

        def run_silver(self, *given: Any, raises: bool) -> str:
            ran.append((*given, raises))
            return "done"

    monkeypatch.setattr("lakebed.pipeline.runner.PipelineRunner", Runner)
    ingestion = Ingestion(context_of(**{"pipeline.contracts": str(tmp_path)}))

    ingestion.run()
    first = ingestion.refined
    ingestion.run()

    assert [("lake", "main", (), {"batches.samples": 4}, True)] == ran
    assert ("done", None) == (first, ingestion.refined)


def test_a_model_that_fails_fails_a_load_only_where_no_worker_retries_it(yard: Yard, tmp_path: Path) -> None:
    """A worker gives its own pipeline: its loads go on, and it runs the model again."""
    (tmp_path / "loads.yaml").write_text(
        "table: loads\nsource: batches.samples\nkeys: [seq]\ncolumns: {seq: {type: long, required: true}}\n"
    )
    raising: list[bool] = []
    runner = SimpleNamespace(run_silver=lambda *given, raises: raising.append(raises))

    Ingestion(context_of(**{"pipeline.contracts": str(tmp_path)}), runner).run()  # type: ignore[arg-type]

    assert [False] == raising


def test_a_load_whose_silver_failed_is_brought_there_by_the_next_run(yard: Yard, tmp_path: Path) -> None:
    """Nothing new has come since: without another try its rows would wait for the next ones."""
    (tmp_path / "loads.yaml").write_text(
        "table: loads\nsource: batches.samples\nkeys: [seq]\ncolumns: {seq: {type: long, required: true}}\n"
    )
    tried: list[dict[str, int]] = []

    def run_silver(org_id: str, project_id: str, ticks: Any, versions: dict[str, int], *, raises: bool) -> str:
        tried.append(versions)
        if len(tried) == 1:
            raise Unavailable("the bucket is away")
        return "done"

    runner = SimpleNamespace(run_silver=run_silver)
    ingestion = Ingestion(context_of(**{"pipeline.contracts": str(tmp_path)}), runner)  # type: ignore[arg-type]

    with pytest.raises(Unavailable):
        ingestion.run()
    ingestion.run()

    assert ([{"batches.samples": 4}] * 2, "done") == (tried, ingestion.refined)


def test_only_the_sources_that_are_asked_for_are_loaded(yard: Yard, tmp_path: Path) -> None:
    """A worker loads each by itself: one that took all of them along would load each as often as there are sources."""
    for name in ("clicks", "orders"):
        (tmp_path / f"{name}.yaml").write_text(CLICKS.replace("clicks", name).replace("raw", f"raw-{name}"))
    ingestion = Ingestion(context_of(tmp_path))

    ingestion.run(only=["topic.orders"])
    ingestion.run(only=[SAMPLES_WORD])
    ingestion.run(only=[])

    assert [("topic", "raw-orders"), ("samples", 900.0)] == [each for each in yard.asked if "/" not in each[0]]


def test_the_first_version_of_a_source_goes_on_to_silver_and_one_without_versions_does_not(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the sources that a contract of silver names; one into which nothing came has no table yet."""
    for name, source in (("loads", SAMPLES_WORD), ("clicked", "topic.clicks")):
        (tmp_path / f"{name}.yaml").write_text(CLICKS.replace("clicks", name).replace("raw", source))
    topics = tmp_path / "topics"
    topics.mkdir()
    for name in ("clicks", "orders"):
        (topics / f"{name}.yaml").write_text(CLICKS.replace("clicks", name))
    asked: list[dict[str, int]] = []
    runner = SimpleNamespace(run_silver=lambda org, project, ticks, versions, raises: asked.append(versions))
    monkeypatch.setattr(module.SampleLoader, "table", stand("bronze/batches/lake/samples", 0))
    ingestion = Ingestion(context_of(topics, **{"pipeline.contracts": str(tmp_path)}), runner)  # type: ignore[arg-type]

    ingestion.run()

    assert [{SAMPLES_WORD: 0}] == asked


def test_of_several_sources_that_fail_the_first_is_told(yard: Yard, tmp_path: Path) -> None:
    """The others are in the log; a run that failed is no sample of how long a run takes."""
    for name in ("clicks", "orders"):
        (tmp_path / f"{name}.yaml").write_text(CLICKS.replace("clicks", name))
    context = context_of(tmp_path)
    ingestion = Ingestion(context)
    yard.errors = {"topic.clicks": Corrupt("clicks are damaged"), "topic.orders": Corrupt("orders are damaged")}

    with pytest.raises(Corrupt, match="clicks"):
        ingestion.run()
    yard.errors = {}
    ingestion.run()

    taken_s, runs = (
        context.metrics.registry.get_sample_value(f"lakebed_bronze_run_seconds_{what}") for what in ("sum", "count")
    )
    assert runs == 1 and taken_s is not None and 0 <= taken_s < 60
