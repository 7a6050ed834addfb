"""Queues as people look at them: who holds what and for how long, and no object that is not of the queue."""

from __future__ import annotations

import pytest

from lakebed.clock import ManualClock
from lakebed.errors import NotFound
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.queue import Queue
from lakebed.store.memory import MemoryStore
from lakebed.views import queue as views
from ticks_kit import context_of


async def put(queue: Queue, word: str) -> str:
    ingestor = queue.ingestor()
    watcher = await ingestor.ingest([KeyValueEntry(b"k", word.encode())])
    await ingestor.flush()
    return (await watcher.await_durable()).location


async def test_what_waits_is_shown_with_its_holder_and_ages_in_seconds(manual_clock: ManualClock) -> None:
    """The first batch is claimed, the second is not: each age counts from its own begin."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    queue = Queue.of(context, "jobs")
    await put(queue, "a")
    await manual_clock.advance(3.0)
    collector = queue.collector("worker-1")
    assert await collector.next_batch() is not None
    await manual_clock.advance(2.0)
    await put(queue, "b")
    await manual_clock.advance(1.0)

    first, second = await views.waiting(context, "jobs")
    await collector.close()

    assert (6.0, 3.0, 1) == (first.age_s, first.claimed_s, first.entries)
    assert first.held_by.startswith("worker-1")
    assert (1.0, None, "") == (second.age_s, second.claimed_s, second.held_by)


async def test_only_batches_of_the_queue_itself_are_opened(manual_clock: ManualClock) -> None:
    """Who may read one queue opens no batch of another, and no other object of the bucket."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    mine = await put(Queue.of(context, "jobs"), "a")
    others = await put(Queue.of(context, "other"), "b")
    await context.store.create("secrets/key.json", b"{}")

    shown = await views.batch(context, "jobs", mine)

    assert ["a"] == [row.value.text for row in shown.shown]
    for location in (others, "secrets/key.json"):
        with pytest.raises(NotFound):
            await views.batch(context, "jobs", location)


async def test_a_batch_that_is_done_is_not_opened_any_more(manual_clock: ManualClock) -> None:
    """Its data may be there until the next clean-up; it is no batch of the queue now."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    queue = Queue.of(context, "jobs")
    location = await put(queue, "a")
    collector = queue.collector()
    batch = await collector.next_batch()
    assert batch is not None
    assert 1 == (await views.batch(context, "jobs", location)).entries

    await collector.ack(batch)
    await collector.close()

    assert (await context.store.head(location)).size
    with pytest.raises(NotFound):
        await views.batch(context, "jobs", location)
