"""Looking is cheap: shared answers, one asker at a time, a bounded number of live viewers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from lakebed.console import live as live_module
from lakebed.console import samples as module
from lakebed.console.data import STALE_MS, PageData
from lakebed.console.live import RATES, VIEWERS_MAX, LiveMetrics, event, totals
from lakebed.console.pages import levels
from lakebed.console.samples import ENTRIES_MAX, SampleCache
from lakebed.core.clock import ManualClock, SystemClock, now_ms, settle
from lakebed.core.errors import Overloaded, Unavailable
from lakebed.core.metrics import Metrics
from lakebed.lifecycle.view import StreamRow
from lakebed.log.view import TopicRow
from lakebed.pipeline.tables.view import TableRow
from lakebed.queue.model import QueueStatus
from support.runtimes import runtime_of
from support.tick_fixtures import context_of


class Backend:
    def __init__(self) -> None:
        self.asked = 0
        self.error: Exception | None = None

    async def __call__(self) -> Any:
        self.asked += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return self.asked


async def test_many_viewers_ask_once() -> None:
    """A hundred who look at the same time share one answer, and so do those who come within its time to live."""
    clock, backend = ManualClock(), Backend()
    shared = SampleCache(clock)

    seen = await asyncio.gather(*(shared.get("a", 5.0, backend) for _ in range(100)))
    again = await shared.get("a", 5.0, backend)
    await clock.advance(5.1)
    later = await shared.get("a", 5.0, backend)

    assert {one.value for one in seen} == {1}
    assert (again.value, later.value, backend.asked) == (1, 2, 2)


async def test_trouble_keeps_the_last_good_answer_and_goes_by_itself() -> None:
    clock, backend = ManualClock(), Backend()
    shared = SampleCache(clock)
    await shared.get("a", 60.0, backend)

    backend.error = Unavailable("gone", hint="wait")
    shared.forget()
    during = await shared.get("a", 60.0, backend)
    backend.error = None
    await clock.advance(module.FAILED_S + 0.1)
    after = await shared.get("a", 60.0, backend)

    assert (during.value, during.error and during.error.message) == (1, "gone")
    assert (after.value, after.error) == (3, None)


async def test_a_read_that_began_before_an_action_does_not_hide_what_it_changed() -> None:
    """It ends after the action with what was before: the page has it for one look, not for its time to live."""
    clock, backend, go = ManualClock(), Backend(), asyncio.Event()
    shared = SampleCache(clock)

    async def slow() -> Any:
        before = backend.asked
        await go.wait()
        return before

    reading = asyncio.create_task(shared.get("a", 120.0, slow))
    await settle()
    backend.asked = 7  # the action
    shared.forget()
    go.set()
    await reading
    after = await shared.get("a", 120.0, slow)

    assert 7 == after.value


async def test_the_last_good_answer_keeps_its_time_while_there_is_trouble() -> None:
    """A page reports how old a number is: an answer that failed does not make the last good one look fresh."""
    clock, backend = ManualClock(), Backend()
    shared = SampleCache(clock)
    good = await shared.get("a", 5.0, backend)
    await clock.advance(60.0)

    backend.error = Unavailable("gone", hint="wait")
    during = await shared.get("a", 5.0, backend)

    assert during.error is not None
    assert (good.value, good.at_ms) == (during.value, during.at_ms)


async def test_what_is_no_error_of_ours_is_told_without_its_text() -> None:
    shared, backend = SampleCache(ManualClock()), Backend()
    backend.error = RuntimeError("a secret path")

    seen = await shared.get("a", 1.0, backend)

    assert seen.error is not None
    assert "secret" not in seen.error.message


async def test_a_backend_that_hangs_holds_nobody_up_for_long() -> None:
    """The first look waits for the timeout; once something was seen, a look waits WAIT_S at most."""
    shared = SampleCache(SystemClock())

    async def hang() -> Any:
        await asyncio.Event().wait()

    never = await shared.get("a", 1.0, hang, timeout_s=0.05)
    await shared.stop()

    assert never.error is not None and never.error.code == "timeout"


async def test_once_something_was_seen_a_backend_that_hangs_is_waited_for_shortly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last answer is shown after WAIT_S, however patient the page would be without one."""
    monkeypatch.setattr(module, "WAIT_S", 0.01)
    shared = SampleCache(SystemClock())
    hangs = False

    async def backend() -> Any:
        if hangs:
            await asyncio.Event().wait()
        return "seen"

    await shared.get("a", 60.0, backend)
    shared.forget()
    hangs = True

    async with asyncio.timeout(30.0):
        found = await shared.get("a", 60.0, backend, timeout_s=3600.0, patience_s=3600.0)
    await shared.stop()

    assert ("seen", None) == (found.value, found.error)


async def test_what_is_kept_is_bounded() -> None:
    shared, backend = SampleCache(ManualClock()), Backend()

    for number in range(ENTRIES_MAX * 2):
        await shared.get(str(number), 60.0, backend)

    assert len(shared._entries) == ENTRIES_MAX


def live(metrics: Metrics, clock: Any) -> LiveMetrics:
    return LiveMetrics(runtime_of(clock, metrics=metrics), lambda: {"queue_waiting": 3.0}, lambda: {"log_in": 2.5})


async def test_rates_are_differences_over_time() -> None:
    """Two samples of the registry, two seconds apart, give a rate a second; levels go along."""
    clock, metrics = ManualClock(), Metrics()
    one = live(metrics, clock)
    counted = metrics.counter("lakebed_log_records_total").labels(direction="in")
    assert one.take() is None

    counted.inc(10)
    await clock.advance(2.0)
    sample = one.take()

    assert sample is not None
    assert (sample.rates["log_in"], sample.rates["log_out"]) == (5.0, 0.0)
    assert (sample.totals["log_in"], sample.levels["queue_waiting"]) == (10.0, 3.0)


async def test_what_was_sampled_for_the_last_viewer_is_not_shown_as_now() -> None:
    """With nobody watching the sampler stands still: the next ones get today's totals, and no rates yet."""
    clock, metrics = ManualClock(), Metrics()
    one = live(metrics, clock)
    counted = metrics.counter("lakebed_log_records_total").labels(direction="in")
    async with one.watch() as queue:
        queue.get_nowait()
        await clock.advance(0.0)
        counted.inc(10)
        await clock.advance(1.0)
        assert 10.0 == (await queue.get()).rates["log_in"] == one.now().rates["log_in"]
    await clock.advance(3600.0)
    counted.inc(5)

    found = one.now()
    async with one.watch() as first, one.watch() as second:
        shown = [first.get_nowait(), second.get_nowait(), one.now()]

    assert (now_ms(clock), 0.0, 15.0) == (found.at_ms, found.rates["log_in"], found.totals["log_in"])
    assert [found] * 3 == shown
    await one.stop()


async def test_viewers_are_limited_and_the_sampler_ends_with_the_last() -> None:
    """One more than the limit is refused; when all are gone nothing runs any more."""
    clock = ManualClock()
    one = live(Metrics(), clock)
    async with asyncio.timeout(100):
        watching = [one.watch() for _ in range(VIEWERS_MAX)]
        for watch in watching:
            await watch.__aenter__()
        with pytest.raises(Overloaded):
            await one.watch().__aenter__()
        for watch in watching:
            await watch.__aexit__(None, None, None)
        await clock.advance(3.0)

    assert one.viewers == 0
    assert one._task is not None and one._task.done()


def test_every_live_number_is_in_the_metrics_table() -> None:
    """A renamed metric fails here, not silently on a page."""
    metrics = Metrics()
    known = set(metrics._specs)

    assert {name for name, _, _ in RATES.values()} <= known
    assert set(totals(metrics)) == set(RATES)


def test_an_event_cannot_be_ended_by_what_it_says() -> None:
    output = event("sample", {"a": "x\n\nevent: evil\ndata: 1\n\n"})

    assert output.count(b"\n\n") == 1 and output.endswith(b"\n\n")


def test_levels_of_a_lake_nobody_has_asked_yet_are_unknown() -> None:
    assert set(levels(lambda key: None).values()) == {None}


def test_levels_of_several_queues_are_their_sum_and_their_oldest() -> None:
    """One queue is empty and one is late: the picture shows the late one."""
    late = QueueStatus("a", 3, 10, 1, 0, 2, 90.0, None, None, 0, 4, 0, [])
    empty = QueueStatus("b", 0, 0, 0, 0, 1, None, None, None, 0, 1, 0, [])
    streams = [StreamRow("delay 1 d", 86_400.0, 0, 5.0), StreamRow("predicates", 0.0, 0, 0.0)]
    seen = {"queue.statuses": [late, empty], "lifecycle.streams": streams}

    found = levels(seen.get)

    assert (3, 1, 3) == (found["queue_waiting"], found["queue_claimed"], found["queue_dead"])
    assert (90.0, 5.0) == (found["queue_oldest_s"], found["lifecycle_behind_s"])
    assert found["ticks_lag_s"] is None


async def test_an_answer_is_asked_for_again_when_its_time_is_over_and_not_before() -> None:
    clock, backend = ManualClock(), Backend()
    shared = SampleCache(clock)
    first = await shared.get("a", 5.0, backend)
    await clock.advance(4.9)
    again = await shared.get("a", 5.0, backend)
    await clock.advance(0.1)
    later = await shared.get("a", 5.0, backend)

    assert (1, 1, 2) == (first.value, again.value, later.value)
    assert 5000 == later.at_ms - first.at_ms


@pytest.mark.parametrize(("ttl_s", "after_s"), [(60.0, module.FAILED_S), (0.5, 0.5)])
async def test_a_failure_is_asked_about_again_soon(ttl_s: float, after_s: float) -> None:
    """After two seconds, or after its time to live where that is shorter."""
    clock, backend = ManualClock(), Backend()
    backend.error = Unavailable("gone", hint="wait")
    shared = SampleCache(clock)
    await shared.get("a", ttl_s, backend)
    await clock.advance(after_s - 0.1)
    during = await shared.get("a", ttl_s, backend)
    assert 1 == backend.asked
    await clock.advance(0.1)
    await shared.get("a", ttl_s, backend)

    assert 2 == backend.asked
    assert during.error == module.DataError("unavailable", "gone", "wait")


async def test_different_keys_are_different_things_and_the_last_is_known_without_asking() -> None:
    shared, backend = SampleCache(ManualClock()), Backend()
    assert module.DataSample() == shared.last("a")
    await shared.get("a", 5.0, backend)
    await shared.get("b", 5.0, backend)

    assert (1, 2, 2) == (shared.last("a").value, shared.last("b").value, backend.asked)


async def test_what_was_looked_at_last_is_kept() -> None:
    shared, backend = SampleCache(ManualClock()), Backend()
    await shared.get("kept", 60.0, backend)
    for number in range(ENTRIES_MAX - 1):
        await shared.get(str(number), 60.0, backend)
    await shared.get("kept", 60.0, backend)
    await shared.get("new", 60.0, backend)

    assert 1 == shared.last("kept").value
    assert shared.last("0").value is None


async def test_who_is_not_patient_gets_nothing_yet_and_the_answer_later() -> None:
    shared, go = SampleCache(SystemClock()), asyncio.Event()

    async def slow() -> Any:
        await go.wait()
        return "there"

    early = await shared.get("a", 60.0, slow, patience_s=0.0)
    go.set()
    late = await shared.get("a", 60.0, slow)

    assert (None, None, "there") == (early.value, early.error, late.value)


async def test_rates_never_fall_below_zero_and_need_time_to_pass() -> None:
    clock, metrics = ManualClock(), Metrics()
    one = live(metrics, clock)
    one.take()
    assert one.take() is None  # no time has passed
    one._before = (clock.monotonic_s(), dict.fromkeys(RATES, 100.0))
    await clock.advance(1.0)
    sample = one.take()

    assert sample is not None
    assert {0.0} == set(sample.rates.values())


@pytest.mark.parametrize(
    ("name", "counter", "labels", "counts"),
    [
        ("batches_accepted", "lakebed_batches_uploads_total", {"outcome": "accepted"}, True),
        ("batches_accepted", "lakebed_batches_uploads_total", {"outcome": "duplicate"}, False),
        ("batches_duplicate", "lakebed_batches_uploads_total", {"outcome": "duplicate"}, True),
        ("batches_conflict", "lakebed_batches_uploads_total", {"outcome": "conflict"}, True),
        ("log_out", "lakebed_log_records_total", {"direction": "out"}, True),
        ("log_in_bytes", "lakebed_log_record_bytes_total", {"direction": "in"}, True),
        ("store_in_bytes", "lakebed_store_bytes_total", {"direction": "in"}, True),
        ("store_out_bytes", "lakebed_store_bytes_total", {"direction": "in"}, False),
        ("store_failures", "lakebed_store_failures_total", {"verb": "get", "kind": "unavailable"}, True),
        ("store_failures", "lakebed_store_failures_total", {"verb": "get", "kind": "denied"}, True),
        ("store_failures", "lakebed_store_failures_total", {"verb": "get", "kind": "not_found"}, False),
        ("store_requests", "lakebed_store_requests_total", {"verb": "get"}, True),
        ("http_requests", "lakebed_http_requests_total", {"route": "/", "method": "GET", "status": "200"}, True),
        ("http_errors", "lakebed_http_requests_total", {"route": "/", "method": "GET", "status": "503"}, True),
        ("http_errors", "lakebed_http_requests_total", {"route": "/", "method": "GET", "status": "404"}, False),
    ],
)
def test_each_number_counts_its_own_label(name: str, counter: str, labels: dict[str, str], counts: bool) -> None:
    metrics = Metrics()
    metrics.counter(counter).labels(**labels).inc(3)

    assert (3.0 if counts else 0.0) == totals(metrics)[name]


async def test_every_viewer_gets_each_sample_and_a_slow_one_misses_some() -> None:
    """A viewer who comes later gets the last sample first, with the rates of the lake."""
    clock = ManualClock()
    one = live(Metrics(), clock)
    async with one.watch() as coming:
        await clock.advance(0.0)
        await clock.advance(live_module.EVERY_S * (live_module.WAITING_MAX + 3))
        last = one.now()
        async with one.watch() as late:
            assert 2 == one.viewers
            assert last == late.get_nowait()
    await one.stop()

    assert (live_module.WAITING_MAX, 0) == (coming.qsize(), one.viewers)
    assert {"log_in": 2.5} == last.lake


def test_before_anybody_looked_there_are_totals_and_no_rates() -> None:
    metrics = Metrics()
    metrics.counter("lakebed_queue_entries_total").inc(4)
    sample = live(metrics, ManualClock()).now()

    assert (4.0, {0.0}, {"queue_waiting": 3.0}) == (
        sample.totals["queue_entries"], set(sample.rates.values()), sample.levels,
    )  # fmt: skip


def test_each_level_comes_from_its_own_answer() -> None:
    """Sums over topics and tables; a table that cannot be read counts as a table without rows."""
    seen = {
        "batches.reconciler": 12.0,
        "batches.heard": 4,
        "batches.conflicts": [SimpleNamespace(resolution=None), SimpleNamespace(resolution="x")],
        "log.topics": [TopicRow("a", 1, 10, 3), TopicRow("b", 2, 5, 4)],
        "ticks.silver": {"undispatched": 7, "lag_s": 12.5, "dead": 2},
        "tables.all": [TableRow("a", "a", 0, 9, 1, 1), TableRow("b", "b", -1, -1, 0, 0, "corrupt")],
        "lifecycle.blockers": [1, 2, 3],
        "lifecycle.streams": [],
        "queue.statuses": [],
    }
    assert {
        "conflicts_open": 1, "reconciler_behind_s": 12.0, "agents": 4, "queues": 0,
        "log_records": 15, "log_uncompacted": 7, "log_partitions": 3,
        "queue_waiting": 0, "queue_claimed": 0,
        "queue_dead": 0, "queue_oldest_s": 0.0, "ticks_undispatched": 7, "ticks_lag_s": 12.5, "ticks_dead": 2,
        "tables": 2, "table_rows": 9, "blockers": 3, "lifecycle_behind_s": 0.0,
    } == levels(seen.get)  # fmt: skip


async def test_levels_are_asked_for_again_when_the_last_round_is_over() -> None:
    """Querying for the levels starts one round in the background, and the next query after its end another."""
    look = PageData(context_of())
    rounds = 0

    async def refresh() -> None:
        nonlocal rounds
        rounds += 1

    look._refresh = refresh  # type: ignore[method-assign]
    look.levels()
    look.levels()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    look.levels()
    await asyncio.sleep(0)

    assert 2 == rounds
    await look.stop()


async def test_a_level_that_was_not_read_for_minutes_is_unknown() -> None:
    """The store stopped answering: the last value stays on the page of its part, but no state is made from it."""
    clock = ManualClock()
    look = PageData(context_of(clock=clock))
    await look.samples.get("ticks.silver", 1.0, _silver)
    fresh = look.known_levels()["ticks_dead"]
    await clock.advance(STALE_MS / 1000 + 1)

    assert (2, None) == (fresh, look.known_levels()["ticks_dead"])
    await look.stop()


async def _silver() -> Any:
    return {"undispatched": 0, "lag_s": 0.0, "dead": 2}
