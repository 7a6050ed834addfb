"""The demo's numbers are those of all its processes, also of the ones that were killed."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import httpx2
import msgspec
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.metrics import Metrics
from lakebed.demo.metrics import ENV, Observer, buckets, by, counting, flatten, merge, rates, total
from support.runtimes import runtime_of


def registry(accepted: int, waiting: float) -> Metrics:
    metrics = Metrics()
    uploads = metrics.counter("lakebed_batches_uploads_total")
    uploads.labels(outcome="accepted").inc(accepted)
    uploads.labels(outcome="duplicate").inc(1)
    metrics.gauge("lakebed_queue_length").labels(queue="q").set(waiting)
    for _ in range(accepted):
        metrics.histogram("lakebed_batches_accept_seconds").observe(0.003)
    return metrics


def test_counters_add_up_and_gauges_are_the_largest() -> None:
    """Two processes that look at one queue do not make it twice as long."""
    both = merge([flatten(registry(3, 5).snapshot()), flatten(registry(4, 2).snapshot())])

    assert 7 == total(both, "lakebed_batches_uploads_total", outcome="accepted")
    assert 9 == total(both, "lakebed_batches_uploads_total")
    assert {"accepted": 7, "duplicate": 2} == by(both, "lakebed_batches_uploads_total", "outcome")
    assert 5 == total(both, "lakebed_queue_length")


def test_a_histogram_comes_apart_into_its_buckets() -> None:
    """Cumulative counts of several processes become counts per bucket, and all of them are there."""
    both = merge([flatten(registry(3, 0).snapshot()), flatten(registry(4, 0).snapshot())])

    counted = buckets(both, "lakebed_batches_accept_seconds")

    assert [(0.005, 7.0)] == [(bound, count) for bound, count in counted if count]
    assert math.inf == counted[-1][0]


def test_rates_are_over_the_stretch_before() -> None:
    """A total that grows by ten a second has that rate, and one that falls has none."""
    totals = [(t / 2, t * 5.0) for t in range(20)]

    moved = rates(totals)

    assert 0.0 == moved[0][1]
    assert [pytest.approx(10.0)] * 18 == [rate for _, rate in moved[2:]]
    assert [0.0, 0.0] == [rate for _, rate in rates([(0.0, 9.0), (1.0, 3.0)])]


async def test_a_source_that_is_gone_keeps_its_last_numbers(tmp_path: Path) -> None:
    """Neither a file that is broken nor an address that nobody answers takes a number back."""
    clock = ManualClock()
    observer = Observer(clock)
    file = tmp_path / "small.numbers"
    file.write_bytes(msgspec.json.encode(registry(2, 0).snapshot()))
    observer.watch(file)
    observer.watch("http://gone")
    observer.watch(registry(1, 0))

    answers = iter([httpx2.Response(200, content=msgspec.json.encode(registry(5, 0).snapshot()))])

    def answer(request: httpx2.Request) -> httpx2.Response:
        found = next(answers, None)
        if found is None:
            raise httpx2.ConnectError("killed")
        return found

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client:
        await observer.read(client)
        file.write_bytes(b'{"half')
        await clock.advance(1.0)
        await observer.read(client)

    assert [(0.0, 8.0), (1.0, 8.0)] == observer.totals("lakebed_batches_uploads_total", outcome="accepted")


async def test_a_small_process_leaves_its_last_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was counted up to the end of the work is in the file, also when the work failed."""
    monkeypatch.setenv(ENV, str(tmp_path / "p.numbers"))
    metrics = Metrics()

    async def work() -> None:
        await asyncio.sleep(0)
        metrics.counter("lakebed_queue_entries_total").inc(12)
        raise RuntimeError("the work failed")

    with pytest.raises(RuntimeError):
        await counting(runtime_of(ManualClock(), metrics=metrics), work())

    assert 12 == msgspec.json.decode((tmp_path / "p.numbers").read_bytes())["lakebed_queue_entries_total"]
