"""Bronze of batches, through real Spark on the real bucket: every accepted sample once, whatever happens."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from pyspark.sql import SparkSession

from lakebed.core.context import Context
from lakebed.core.feed import Limit
from lakebed.core.settings import load
from lakebed.pipeline.bronze.runs import IngestReport
from lakebed.pipeline.bronze.samples import SampleLoader
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections
from support.accepted_batches import BatchesYard
from support.bad_batches import BAD, BLOBS, entry_key, spoil

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def context(bucket_settings: StoreSettings) -> Context:
    return make_context(load(sections(), stack=bucket_settings.as_layer()), role="test")


@pytest.fixture
def yard(bucket: Store) -> BatchesYard:
    return BatchesYard(bucket)


@pytest.fixture
def samples(spark: SparkSession, context: Context) -> SampleLoader:
    return SampleLoader(spark, context)


def drained(samples: SampleLoader, limit: Limit = Limit(objects=100)) -> IngestReport | None:
    total: IngestReport | None = None
    for _ in range(20):
        step = samples.step(limit)
        if step is None:
            return total
        total = total.plus(step) if total else step
    raise AssertionError("twenty steps were not enough")


def seqs(samples: SampleLoader) -> list[tuple[str, int]]:
    rows = samples.table.read(columns=["agent_id", "seq"]).collect()
    return sorted((row["agent_id"], row["seq"]) for row in rows)


def numbers(count: int, agent: str = "agent-a") -> list[tuple[str, int]]:
    return [(agent, n) for n in range(count)]


def test_every_accepted_sample_is_in_the_table_once(samples: SampleLoader, yard: BatchesYard) -> None:
    """Steps of any size give the same table and tell how far they lag; a run that finds nothing new changes nothing."""
    for n in range(5):
        yard.accept(n * 10, n * 10 + 9, at_s=n * 0.5)

    first = samples.step(Limit(objects=2))
    rest = drained(samples, Limit(objects=2))

    assert first is not None
    assert rest is not None
    assert (True, 0.0) == (first.lag_s > 86_400, rest.lag_s)  # accepted long ago, and others wait
    report = first.plus(rest)
    assert (3, 5, 50, 50, 0, 0) == (
        report.steps,
        report.objects,
        report.rows_in,
        report.good,
        report.quarantined,
        report.duplicates,
    )
    assert numbers(50) == seqs(samples)
    assert samples.step(Limit()) is None
    assert 2 == samples.table.snapshot().version
    row = samples.table.read().filter("seq = 7").first()
    assert row is not None
    assert (row["metric"], row["value"], row["labels"], row["kind"]) == (
        "cpu",
        7.5,
        {"host": "h3", "zone": "z"},
        "gauge",
    )


def test_late_batches_come_in_whenever_they_are_indexed(samples: SampleLoader, yard: BatchesYard) -> None:
    """Within the overlap the index is looked through again; beyond it the reconciler's note brings them."""
    yard.accept(100, 109, at_s=10_000)
    drained(samples)
    yard.accept(0, 9, at_s=9_500)  # within the overlap, indexed after its neighbour
    yard.accept(10, 19, at_s=0, noted=True)  # hours late

    report = drained(samples)

    assert report is not None
    assert 20 == report.good
    assert [*numbers(20), *((("agent-a", n)) for n in range(100, 110))] == seqs(samples)
    assert samples.step(Limit()) is None


def test_what_cannot_be_read_is_set_aside_once_and_the_rest_goes_on(samples: SampleLoader, yard: BatchesYard) -> None:
    """Missing, half-written, another hash, a later format, an entry that is none: in = good + quarantined + duplicates,
    and each object's key and reason are a row of the quarantine."""
    yard.accept(0, 9)
    key = yard.damage(yard.accept(10, 19, at_s=1))
    yard.accept(5, 14, at_s=2)  # numbers that were there, and some that were lost with the damaged batch
    bad = {key: "another hash"}
    for how, words in BAD.items():
        spoilt = asyncio.run(spoil(yard.store, yard.accept(0, 9, agent=how, at_s=3), how))
        bad[entry_key(spoilt)] = "not_found" if how == "missing" else words

    report = drained(samples)

    assert report is not None
    blobs = 10 * (1 + len(BLOBS))  # how many an unreadable entry stands for is not known
    assert (20 + blobs, 15, blobs, 5) == (report.rows_in, report.good, report.quarantined, report.duplicates)
    assert set(bad) == set(report.unreadable)
    assert not report.sound
    aside = {row["key"]: row for row in samples.quarantine.table.read().collect()}
    assert bad.keys() == aside.keys()
    for at, words in bad.items():
        assert words in aside[at]["problem"]
    assert numbers(15) == seqs(samples)


def test_what_was_set_aside_comes_in_when_it_is_mended(samples: SampleLoader, yard: BatchesYard) -> None:
    """A retry reads it again: mended batches leave the quarantine for the table, once, the others stay."""
    mended = yard.accept(0, 9)
    frame = yard.frame(mended)
    lost = yard.damage(yard.accept(10, 19, at_s=1))
    yard.damage(mended)
    drained(samples)
    yard.damage(mended, frame)

    report = samples.retry(Limit())
    again = samples.retry(Limit())

    assert report is not None
    assert again is not None
    assert (20, 10, 10) == (report.rows_in, report.good, report.quarantined)
    assert (0, (lost,)) == (again.good, again.unreadable)
    assert numbers(10) == seqs(samples)
    assert [lost] == [row["key"] for row in samples.quarantine.table.read().collect()]
    assert samples.step(Limit()) is None


def test_two_runs_at_once_take_every_batch_once(spark: SparkSession, context: Context, yard: BatchesYard) -> None:
    """Whoever commits second looks again and finds it done."""
    for n in range(6):
        yard.accept(n * 10, n * 10 + 9, at_s=n * 0.1)

    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda _: drained(SampleLoader(spark, context), Limit(objects=2)), range(2)))

    assert 60 == sum(report.good for report in reports if report)
    assert numbers(60) == seqs(SampleLoader(spark, context))
