"""Counts per action add up over workers and restarts."""

from __future__ import annotations

import asyncio

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.lifecycle.counters import RECORD_S, ActionCounts, CountRecorder, counts_of
from lakebed.lifecycle.engine import ActionRef
from lakebed.lifecycle.gauges import Gauges
from lakebed.lifecycle.model import ActionKey, ActionKind, DeleteOutcome
from lakebed.lifecycle.state import LifecycleState
from lakebed.store.memory import MemoryStore
from lakebed.store.runtime import StoreRuntime

REF = ActionRef("b", ActionKey("0123456789abcdef", ActionKind.EXPIRATION_DAYS))


def process(store: MemoryStore, clock: ManualClock) -> tuple[StoreRuntime, Gauges, CountRecorder]:
    runtime = StoreRuntime(store=store, clock=clock, ids=Ids(), metrics=Metrics())
    state = LifecycleState(runtime)
    return runtime, Gauges(runtime.metrics), CountRecorder(state)


async def stored(runtime: StoreRuntime) -> ActionCounts:
    return (await counts_of(runtime, "b").read()).value.actions[str(REF.key)]


async def test_two_workers_and_a_restart_add_up() -> None:
    """Each adds what it counted itself, once, however often it records."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    runtime, one, recorder = process(store, clock)
    _, other, others = process(store, clock)

    one.evaluated(REF, 5)
    one.verdict(REF, DeleteOutcome.DELETED)
    other.verdict(REF, DeleteOutcome.DELETED)
    other.metadata_only(REF)
    for each in (recorder, others, recorder):
        await each.record(now=True)
    _, again, third = process(store, clock)
    again.verdict(REF, DeleteOutcome.TRANSPORT_ERROR)
    again.verdict(REF, DeleteOutcome.FATAL_EVENT_ERROR)
    again.verdict(REF, DeleteOutcome.SKIPPED_OBJECT_LOCK)
    await third.record(now=True)

    assert ActionCounts(evaluated=5, expired=2, metadata_only=1, skipped_object_lock=1, errors=2) == await stored(
        runtime
    )


async def test_two_recorders_of_one_process_add_what_it_counted_once() -> None:
    """A page of the console opens one beside the worker's: whatever is counted, before or meanwhile, is added once."""
    clock = ManualClock()
    runtime, gauges, recorder = process(MemoryStore(clock=clock), clock)
    gauges.evaluated(REF, 5)
    second = CountRecorder(LifecycleState(runtime))
    gauges.evaluated(REF, 2)

    for each in (second, recorder, second):
        await each.record(now=True)

    assert ActionCounts(evaluated=7) == await stored(runtime)


async def test_recorders_that_record_at_the_same_time_add_it_once() -> None:
    """A page that ends while the worker records: neither adds what the other is adding."""
    clock = ManualClock()
    runtime, gauges, recorder = process(MemoryStore(clock=clock), clock)
    second = CountRecorder(LifecycleState(runtime))
    gauges.evaluated(REF, 5)

    await asyncio.gather(recorder.record(now=True), second.record(now=True))

    assert ActionCounts(evaluated=5) == await stored(runtime)


async def test_what_could_not_be_recorded_is_added_later() -> None:
    """A store that is away costs a log line, and no count."""

    class Away(MemoryStore):
        down = False

        async def create(self, *args: object, **named: object) -> object:
            if self.down:
                raise Unavailable("away")
            return await super().create(*args, **named)  # type: ignore[arg-type]

    clock = ManualClock()
    store = Away(clock=clock)
    runtime, gauges, recorder = process(store, clock)
    gauges.verdict(REF, DeleteOutcome.DELETED)
    store.down = True
    await recorder.record(now=True)
    store.down = False
    await recorder.record(now=True)

    assert 1 == (await stored(runtime)).expired


async def test_what_a_stop_cut_off_is_added_at_the_end() -> None:
    """A worker that is stopped while it records loses no count: the last record adds it."""

    class Slow(MemoryStore):
        slow = True

        async def create(self, *args: object, **named: object) -> object:
            if self.slow:
                await asyncio.Event().wait()
            return await super().create(*args, **named)  # type: ignore[arg-type]

    clock = ManualClock()
    store = Slow(clock=clock)
    runtime, gauges, recorder = process(store, clock)
    gauges.evaluated(REF, 5)
    recording = asyncio.create_task(recorder.record(now=True))
    await asyncio.sleep(0)
    recording.cancel()
    await asyncio.gather(recording, return_exceptions=True)
    store.slow = False

    await CountRecorder(LifecycleState(runtime)).record(now=True)

    assert ActionCounts(evaluated=5) == await stored(runtime)


async def test_rounds_that_follow_each_other_closely_record_once() -> None:
    """At most one write a bucket every ten seconds, and none when nothing was counted."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    runtime, gauges, recorder = process(store, clock)
    gauges.verdict(REF, DeleteOutcome.DELETED)
    await recorder.record()
    with pytest.raises(KeyError):
        await stored(runtime)
    await clock.advance(RECORD_S)
    await recorder.record()
    first = (await counts_of(runtime, "b").read()).etag
    await clock.advance(RECORD_S)
    await recorder.record()

    assert 1 == (await stored(runtime)).expired
    assert first == (await counts_of(runtime, "b").read()).etag
