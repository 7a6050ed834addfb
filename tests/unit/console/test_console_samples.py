"""Looking is cheap: shared answers, one asker at a time, a bounded number of live viewers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lakebed.clock import ManualClock, SystemClock
from lakebed.console import samples as module
from lakebed.console.live import RATES, VIEWERS_MAX, Live, event, totals
from lakebed.console.looker import levels
from lakebed.console.samples import ENTRIES_MAX, Samples
from lakebed.errors import Overloaded, Unavailable
from lakebed.metrics import Metrics
from lakebed.queue.model import QueueStatus
from lakebed.views.lifecycle import StreamRow


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
    shared = Samples(clock)

    seen = await asyncio.gather(*(shared.get("a", 5.0, backend) for _ in range(100)))
    again = await shared.get("a", 5.0, backend)
    await clock.advance(5.1)
    later = await shared.get("a", 5.0, backend)

    assert {one.value for one in seen} == {1}
    assert (again.value, later.value, backend.asked) == (1, 2, 2)


async def test_trouble_keeps_the_last_good_answer_and_goes_by_itself() -> None:
    clock, backend = ManualClock(), Backend()
    shared = Samples(clock)
    await shared.get("a", 60.0, backend)

    backend.error = Unavailable("gone", hint="wait")
    shared.forget()
    during = await shared.get("a", 60.0, backend)
    backend.error = None
    await clock.advance(module.FAILED_S + 0.1)
    after = await shared.get("a", 60.0, backend)

    assert (during.value, during.trouble and during.trouble.message) == (1, "gone")
    assert (after.value, after.trouble) == (3, None)


async def test_the_last_good_answer_keeps_its_time_while_there_is_trouble() -> None:
    """A page says how old a number is: an answer that failed does not make the last good one look fresh."""
    clock, backend = ManualClock(), Backend()
    shared = Samples(clock)
    good = await shared.get("a", 5.0, backend)
    await clock.advance(60.0)

    backend.error = Unavailable("gone", hint="wait")
    during = await shared.get("a", 5.0, backend)

    assert during.trouble is not None
    assert (good.value, good.at_ms) == (during.value, during.at_ms)


async def test_what_is_no_error_of_ours_is_told_without_its_text() -> None:
    shared, backend = Samples(ManualClock()), Backend()
    backend.error = RuntimeError("a secret path")

    seen = await shared.get("a", 1.0, backend)

    assert seen.trouble is not None
    assert "secret" not in seen.trouble.message


async def test_a_backend_that_hangs_holds_nobody_up_for_long() -> None:
    """The first look waits for the timeout; once something was seen, a look waits WAIT_S at most."""
    shared = Samples(SystemClock())

    async def hang() -> Any:
        await asyncio.Event().wait()

    never = await shared.get("a", 1.0, hang, timeout_s=0.05)
    await shared.stop()

    assert never.trouble is not None and never.trouble.code == "timeout"


async def test_once_something_was_seen_a_backend_that_hangs_is_waited_for_shortly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last answer is shown after WAIT_S, however patient the page would be without one."""
    monkeypatch.setattr(module, "WAIT_S", 0.01)
    shared = Samples(SystemClock())
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

    assert ("seen", None) == (found.value, found.trouble)


async def test_what_is_kept_is_bounded() -> None:
    shared, backend = Samples(ManualClock()), Backend()

    for number in range(ENTRIES_MAX * 2):
        await shared.get(str(number), 60.0, backend)

    assert len(shared._entries) == ENTRIES_MAX


def live(metrics: Metrics, clock: Any) -> Live:
    return Live(metrics, clock, lambda: {"queue_waiting": 3.0})


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
    said = event("sample", {"a": "x\n\nevent: evil\ndata: 1\n\n"})

    assert said.count(b"\n\n") == 1 and said.endswith(b"\n\n")


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
