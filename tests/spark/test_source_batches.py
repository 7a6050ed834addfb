"""`lakebed.batches` through real Spark, on the real bucket."""

from __future__ import annotations

import importlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import lakebed.spark
from lakebed.batches.model import BatchIdentity
from lakebed.core.settings import Settings, load
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from lakebed.wiring.parts import sections
from support.accepted_batches import ACCEPTED_NS, BatchesYard, samples_of

pytestmark = pytest.mark.timeout(600)

ACCEPTED = datetime.fromtimestamp(ACCEPTED_NS / 1e9, UTC)


@pytest.fixture
def settings(bucket_settings: StoreSettings) -> Settings:
    return load(sections(), stack=bucket_settings.as_layer())


@pytest.fixture
def yard(bucket: Store) -> BatchesYard:
    return BatchesYard(bucket)


@pytest.fixture
def source(spark: SparkSession, settings: Settings) -> Any:
    lakebed.spark.register(spark, settings)

    def read(**options: Any) -> DataFrame:
        return spark.read.format("lakebed.batches").options(**options).load()

    return read


def test_the_session_of_a_lake_reads_that_lake(
    spark: SparkSession,
    yard: BatchesYard,
    bucket_settings: StoreSettings,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """`lake.spark()` has the sources on the lake that was connected to, not on that of the folder, where none is."""
    yard.accept(0, 9)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lakebed.spark.session.open_session", lambda _: spark)
    monkeypatch.setattr(spark, "sql", spark.sql)  # the lake replaces it
    lakebed.spark.register(spark)

    with lakebed.connect(settings=bucket_settings.as_layer()) as lake:
        rows = lake.spark().read.format("lakebed.batches").load()

        assert 10 == rows.count()


def test_every_sample_comes_back_in_every_column(source: Any, yard: BatchesYard) -> None:
    """What was accepted is what Spark reads: identity, number, acceptance, metric, labels, times, value and kind."""
    accepted = yard.accept(0, 49)
    yard.accept(50, 59, at_s=1)

    rows = source().orderBy("seq").collect()

    assert list(range(60)) == [row["seq"] for row in rows]
    wanted = samples_of(BatchIdentity("agent-a", "boot-1", 0, 59))
    for row, sample in zip(rows, wanted, strict=True):
        assert (row["agent_id"], row["boot_id"]) == ("agent-a", "boot-1")
        assert (row["metric"], row["labels"], row["value"]) == (sample.metric, dict(sample.labels), sample.value)
        assert (row["time_ns"], row["kind"]) == (sample.time_ns, sample.kind.name.lower())
        assert row["time"].timestamp() == pytest.approx(sample.time_ns / 1e9, abs=1e-5)
    assert rows[0]["batch_id"].startswith(f"{accepted.accepted_at_unix_ns:020d}-")
    assert rows[0]["accepted_at"].astimezone(UTC) == ACCEPTED


def test_a_range_of_acceptance_leaves_the_rest_out(source: Any, yard: BatchesYard) -> None:
    """Only batches accepted from start to before end are read."""
    for hour in range(3):
        yard.accept(hour * 10, hour * 10 + 9, at_s=3600.0 * hour)

    middle = source(
        start=(ACCEPTED + timedelta(hours=1)).isoformat(), end=str(ACCEPTED_NS + 2 * 3_600_000_000_000), columns="seq"
    )

    assert list(range(10, 20)) == sorted(row["seq"] for row in middle.collect())
    assert ["seq"] == middle.columns


def test_filters_leave_out_objects_and_never_rows(source: Any, yard: BatchesYard) -> None:
    """An object that cannot hold a wanted row is not opened: here one that could not be read."""
    yard.accept(0, 9, agent="agent-a")
    broken = yard.accept(1000, 1009, agent="agent-b", at_s=7200)
    yard.damage(broken)

    rows = source()

    assert rows.filter("agent_id = 'agent-a'").count() == 10
    assert rows.filter(F.col("time") < F.lit(ACCEPTED + timedelta(seconds=5))).count() == 5
    assert rows.filter("seq >= 3 AND seq < 7").count() == 4
    assert rows.filter(F.col("accepted_at") < F.lit(ACCEPTED + timedelta(hours=1))).count() == 10
    with pytest.raises(PySparkException, match="another hash"):
        rows.filter("seq > 500").count()


def test_what_cannot_be_read_is_named_and_the_rest_goes_on(source: Any, yard: BatchesYard) -> None:
    """A damaged blob fails a read, or is skipped, or is kept as a row with its key and the reason."""
    yard.accept(0, 9)
    key = yard.damage(yard.accept(10, 19))

    kept = source(unreadable="keep", columns="seq").collect()

    assert list(range(10)) == sorted(row["seq"] for row in kept if row["_problem"] is None)
    (problem,) = [row for row in kept if row["_problem"] is not None]
    assert (problem["_key"], problem["seq"]) == (key, None)
    assert "another hash" in problem["_problem"]
    assert source(unreadable="skip").count() == 10
    with pytest.raises(PySparkException, match="unreadable=skip"):
        source().count()


def test_wrong_options_are_refused_before_anything_runs(source: Any, yard: BatchesYard) -> None:
    """A misspelt option, a column that is not there and a credential are told, with what to do."""
    for options, told in (
        ({"strat": "1"}, "there is no option 'strat'"),
        ({"columns": "sequence"}, "no column 'sequence'"),
        ({"store.secret_access_key": "hunter2"}, "credentials are never options"),
    ):
        with pytest.raises(PySparkException, match=told):
            source(**options)


def test_no_plan_shows_a_secret(source: Any, yard: BatchesYard, settings: Settings) -> None:
    """Neither the plan's text nor an option carries the credentials that executors read with."""
    yard.accept(0, 9)

    plan = source()._jdf.queryExecution().toString()

    where = settings.of(StoreSettings)
    assert where.secret_access_key.reveal()
    assert where.secret_access_key.reveal() not in plan
    assert where.access_key_id.reveal() not in plan


def test_an_unbound_source_finds_the_bucket_as_a_command_does(
    spark: SparkSession, yard: BatchesYard, settings: Settings, tmp_path: Path
) -> None:
    """Importing the module registers with the active session; a settings file, named by an option, says the rest."""
    yard.accept(0, 9)
    where = settings.of(StoreSettings).as_layer()
    lines = [f'{key.removeprefix("store.")} = "{value}"' for key, value in where.items() if key != "store.prefix"]
    (tmp_path / "lakebed.toml").write_text("[store]\n" + "\n".join(lines) + "\n")
    importlib.reload(lakebed.spark)

    read = spark.read.format("lakebed.batches").option("config", str(tmp_path / "lakebed.toml"))

    assert 10 == read.option("store.prefix", where["store.prefix"]).load().count()
    assert 0 == read.option("store.prefix", "elsewhere").load().count()
