"""Queues as people look at them: who holds what and for how long, and no object that is not of the queue."""

from __future__ import annotations

import msgspec
import pytest

from lakebed.core.clock import ManualClock, now_ms
from lakebed.core.errors import LakebedError, NotFound
from lakebed.queue import paths
from lakebed.queue import view as views
from lakebed.queue.model import BatchClaim, ConsumerManifest, KeyValueEntry, PendingBatch, ProducerManifest
from lakebed.queue.roles import Queue
from lakebed.store.memory import MemoryStore
from support.tick_fixtures import context_of


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


async def test_a_claim_that_is_no_longer_held_has_no_age(manual_clock: ManualClock) -> None:
    """What is known of a claim may stay in the manifest after the claim itself is gone: nobody holds the batch."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    queue = Queue.of(context, "jobs")
    location = await put(queue, "a")
    left = ConsumerManifest(claims={location: BatchClaim("worker-1", 1, 1, now_ms(manual_clock))})
    await context.store.create(paths.consumer_manifest(queue.settings.manifest_path), msgspec.json.encode(left))
    await manual_clock.advance(4.0)

    (row,) = await views.waiting(context, "jobs")

    assert ("", None) == (row.held_by, row.claimed_s)


async def test_what_waits_says_its_size_and_why_it_was_rejected(manual_clock: ManualClock) -> None:
    """A rejected batch waits on, with the number of its rejections and the last reason."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    queue = Queue.of(context, "jobs")
    first, second = await put(queue, "a"), await put(queue, "b")
    collector = queue.collector("worker-1")
    batch = await collector.next_batch()
    assert batch is not None
    await collector.reject(batch, "no schema")
    await collector.close()

    rows = await views.waiting(context, "jobs")

    assert [(first, 1, "no schema"), (second, 0, "")] == [(row.location, row.rejections, row.trouble) for row in rows]
    assert [(await context.store.head(row.location)).size for row in rows] == [row.bytes for row in rows]
    assert rows[0].sequence < rows[1].sequence


async def test_of_many_the_first_are_shown_and_no_more_than_the_limit(manual_clock: ManualClock) -> None:
    """Limits of what waits, of what is looked into and of its entries are exact."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    queue = Queue.of(context, "jobs")
    places = [await put(queue, f"w{number}") for number in range(4)]

    waiting = await views.waiting(context, "jobs", limit=3)
    peeked = await views.peek(context, "jobs", count=2, entries=0)
    none = await views.peek(context, "jobs", count=0, entries=1)

    assert places[:3] == [row.location for row in waiting]
    assert [(place, 1, []) for place in places[:2]] == [
        (row["location"], row["entries"], row["first"]) for row in peeked
    ]
    assert [] == none


async def test_a_look_into_a_batch_shows_its_first_entries_or_why_not(manual_clock: ManualClock) -> None:
    """A batch whose data is gone is a row with the error: the other batches are shown all the same."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    queue = Queue.of(context, "jobs")
    gone, there = await put(queue, "a"), await put(queue, "b")
    await context.store.delete(gone)

    first, second = await views.peek(context, "jobs", count=5, entries=5)

    assert (None, True) == (first["entries"], first["first"][0].startswith("not_found: "))
    assert (there, 1, 1) == (second["location"], second["entries"], len(second["first"]))
    assert ("", (await context.store.head(there)).size) == (second["held_by"], second["bytes"])


async def test_a_large_batch_shows_its_first_entries_and_counts_all(manual_clock: ManualClock) -> None:
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    queue = Queue.of(context, "jobs")
    ingestor = queue.ingestor()
    entries = [KeyValueEntry(b"k%d" % number, b"v%d" % number) for number in range(views.ENTRIES_MAX + 5)]
    watcher = await ingestor.ingest(entries)
    await ingestor.flush()
    location = (await watcher.await_durable()).location

    page = await views.batch(context, "jobs", location)

    assert (location, views.ENTRIES_MAX + 5, views.ENTRIES_MAX) == (page.location, page.entries, len(page.shown))
    assert ("k0", "v0") == (page.shown[0].key.text, page.shown[0].value.text)


async def test_dead_letters_are_shown_oldest_first_up_to_the_limit_and_can_be_opened(manual_clock: ManualClock) -> None:
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    queue = Queue.of(context, "jobs")
    places = [await put(queue, f"w{number}") for number in range(3)]
    collector = queue.collector("worker-1")
    for _ in range(3 * queue.settings.rejections_max):
        batch = await collector.next_batch()
        assert batch is not None
        await collector.reject(batch, "no schema")
        await manual_clock.advance(queue.settings.redelivery_delay_max_s)
    await collector.close()

    assert places == [letter.location for letter in await views.letters(context, "jobs")]
    assert places[:2] == [letter.location for letter in await views.letters(context, "jobs", limit=2)]
    assert [] == await views.waiting(context, "jobs")
    assert "w1" == (await views.batch(context, "jobs", places[1])).shown[0].value.text


async def test_the_status_is_of_every_queue_or_of_the_one_asked_for(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    for name in ("a", "b", "c"):
        await put(Queue.of(context, name), "x")

    assert ["a", "b", "c"] == [row.queue for row in await views.statuses(context)]
    assert [("b", 1)] == [(row.queue, row.pending) for row in await views.statuses(context, "b")]
    monkeypatch.setattr(views, "QUEUES_MAX", 2)
    assert ["a", "b"] == [row.queue for row in await views.statuses(context)]


async def test_a_batch_of_unknown_time_has_no_age(manual_clock: ManualClock) -> None:
    """A manifest of the first version names locations alone: their age is not the time since 1970."""
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    queue = Queue.of(context, "jobs")
    known = ProducerManifest(pending=("x.batch",), entries={"x.batch": PendingBatch(1)})
    await context.store.create(queue.settings.manifest_path, msgspec.json.encode(known))

    (row,) = await views.waiting(context, "jobs")

    assert ("x.batch", 0.0) == (row.location, row.age_s)


async def test_a_batch_that_is_too_large_is_not_opened(
    manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    location = await put(Queue.of(context, "jobs"), "a" * 1000)
    assert 1 == (await views.batch(context, "jobs", location)).entries

    monkeypatch.setattr(views, "BATCH_BYTES_MAX", 100)
    with pytest.raises(LakebedError):
        await views.batch(context, "jobs", location)


async def test_no_age_is_negative_though_another_clock_is_ahead(manual_clock: ManualClock) -> None:
    context = context_of(MemoryStore(clock=manual_clock), clock=manual_clock)
    queue = Queue.of(context, "jobs")
    ahead_ms = now_ms(manual_clock) + 5000
    produced = ProducerManifest(pending=("x.batch",), entries={"x.batch": PendingBatch(1, 1, 1, ahead_ms)})
    consumed = ConsumerManifest(
        claimed={"x.batch": ahead_ms}, claims={"x.batch": BatchClaim("worker-1", 1, 1, ahead_ms)}
    )
    await context.store.create(queue.settings.manifest_path, msgspec.json.encode(produced))
    await context.store.create(paths.consumer_manifest(queue.settings.manifest_path), msgspec.json.encode(consumed))

    (row,) = await views.waiting(context, "jobs")

    assert ("worker-1", 0.0, 0.0) == (row.held_by, row.age_s, row.claimed_s)
