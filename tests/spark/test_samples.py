"""Bronze of batches, through real Spark on the real bucket: every accepted sample once, whatever happens."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pyspark.sql import SparkSession

from lakebed.core.context import Context
from lakebed.core.feed import Limit
from lakebed.core.settings import load
from lakebed.pipeline.bronze.runs import IngestReport, ObjectQuarantine, QuarantinedObject
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
def env(bucket: Store) -> BatchesYard:
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


def test_every_accepted_sample_is_in_the_table_once(samples: SampleLoader, env: BatchesYard) -> None:
    """Steps of any size give the same table and tell how far they lag; a run that finds nothing new changes nothing."""
    for n in range(5):
        env.accept(n * 10, n * 10 + 9, at_s=n * 0.5)

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


def test_late_batches_come_in_whenever_they_are_indexed(samples: SampleLoader, env: BatchesYard) -> None:
    """Within the overlap the index is looked through again; beyond it the reconciler's note brings them."""
    env.accept(100, 109, at_s=10_000)
    drained(samples)
    env.accept(0, 9, at_s=9_500)  # within the overlap, indexed after its neighbour
    env.accept(10, 19, at_s=0, noted=True)  # hours late

    report = drained(samples)

    assert report is not None
    assert 20 == report.good
    assert [*numbers(20), *((("agent-a", n)) for n in range(100, 110))] == seqs(samples)
    assert samples.step(Limit()) is None


def test_what_cannot_be_read_is_set_aside_once_and_the_rest_goes_on(samples: SampleLoader, env: BatchesYard) -> None:
    """Missing, half-written, another hash, a later format, an entry that is none: in = good + quarantined + duplicates,
    and each object's key and reason are a row of the quarantine."""
    env.accept(0, 9)
    key = env.damage(env.accept(10, 19, at_s=1))
    env.accept(5, 14, at_s=2)  # numbers that were there, and some that were lost with the damaged batch
    bad = {key: "another hash"}
    for how, words in BAD.items():
        spoilt = asyncio.run(spoil(env.store, env.accept(0, 9, agent=how, at_s=3), how))
        bad[entry_key(spoilt)] = "not_found" if how == "missing" else words

    report = drained(samples)

    assert report is not None
    blobs = 10 * (1 + len(BLOBS))  # how many an unreadable entry stands for is not known
    assert (20 + blobs, 15, blobs, 5) == (report.rows_in, report.good, report.quarantined, report.duplicates)
    assert set(bad) == set(report.unreadable)
    assert not report.sound
    quarantined_rows = {row["key"]: row for row in samples.quarantine.table.read().collect()}
    assert bad.keys() == quarantined_rows.keys()
    for at, words in bad.items():
        assert words in quarantined_rows[at]["problem"]
    assert numbers(15) == seqs(samples)


@pytest.mark.full
def test_what_was_set_aside_comes_in_when_it_is_mended(samples: SampleLoader, env: BatchesYard) -> None:
    """A retry reads it again: repaired batches leave the quarantine for the table, once, the others stay."""
    repaired = env.accept(0, 9)
    frame = env.frame(repaired)
    lost = env.damage(env.accept(10, 19, at_s=1))
    env.damage(repaired)
    drained(samples)
    env.damage(repaired, frame)

    report = samples.retry(Limit())
    again = samples.retry(Limit())

    assert report is not None
    assert again is not None
    assert (20, 10, 10) == (report.rows_in, report.good, report.quarantined)
    assert (0, (lost,)) == (again.good, again.unreadable)
    assert numbers(10) == seqs(samples)
    assert [lost] == [row["key"] for row in samples.quarantine.table.read().collect()]
    assert samples.step(Limit()) is None


def test_what_leaves_the_quarantine_takes_nothing_along_that_another_job_put_there(
    spark: SparkSession, context: Context, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry takes out what it loaded while another job sets a batch aside: that one stays."""
    ours, theirs = (ObjectQuarantine(spark, context, "quarantine/batches/lake/samples") for _ in range(2))
    ours.put([QuarantinedObject("a", "bad"), QuarantinedObject("b", "bad")])
    commit, rivals = ours.table.commit, [QuarantinedObject("c", "bad")]

    def raced(*args: Any, **more: Any) -> Any:
        if rivals:
            theirs.put([rivals.pop()])
        return commit(*args, **more)

    monkeypatch.setattr(ours.table, "commit", raced)
    ours.remove(["a"])

    assert ["b", "c"] == [piece.key for piece in theirs.pieces()]


def test_two_runs_at_once_take_every_batch_once(spark: SparkSession, context: Context, env: BatchesYard) -> None:
    """Anyone who commits second looks again and finds it done."""
    for n in range(6):
        env.accept(n * 10, n * 10 + 9, at_s=n * 0.1)

    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda _: drained(SampleLoader(spark, context), Limit(objects=2)), range(2)))

    assert 60 == sum(report.good for report in reports if report)
    assert numbers(60) == seqs(SampleLoader(spark, context))


def test_a_backfill_loads_what_bronze_lacks_of_a_range_and_nothing_twice(
    samples: SampleLoader, env: BatchesYard
) -> None:
    """A batch whose rows were removed comes back; others, and batches outside the range, are left alone."""
    for start in (0, 10, 20):
        env.accept(start, start + 9)
    drained(samples)
    first = samples.table.read(columns=["batch_id", "seq", "accepted_at"]).filter("seq = 10").first()
    assert first is not None
    samples.table.delete(f"batch_id = '{first['batch_id']}'")
    at_ns = int(first["batch_id"].split("-")[0])

    before = samples.lacking(at_ns, at_ns + 1)
    outside = samples.backfill(at_ns + 1, at_ns + 2)
    report = samples.backfill(0, at_ns + 1)
    again = samples.backfill(0, 2**62)

    assert (1, None, 0) == (before, outside, samples.lacking(0, 2**62))
    assert report is not None and (10, 10, 0) == (report.rows_in, report.good, report.duplicates)
    assert again is None
    assert numbers(30) == seqs(samples)
