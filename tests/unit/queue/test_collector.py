"""The collector and what comes after it: order, take-over, clean-up, sweeps and dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from lakebed.core.clock import Clock, ManualClock, SystemClock
from lakebed.core.errors import Conflict, Corrupt, Fenced, Invalid, NotFound, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.queue import paths
from lakebed.queue.collector import MISSING_S, Collector
from lakebed.queue.ingestor import Ingestor
from lakebed.queue.model import Append, Closed, ClosedLetter, KeyValueEntry
from lakebed.queue.roles import Queue, queue_names
from lakebed.queue.settings import QueueSettings
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo
from lakebed.store.runtime import StoreRuntime

Open = Callable[..., Queue]
FOLDER = paths.generation_folder("ingest", "ingest/manifest.json", 0)


def runtime_of(store: MemoryStore, clock: Clock) -> StoreRuntime:
    return StoreRuntime(clock=clock, ids=Ids(), metrics=Metrics(), store=store)


async def fill(queue: Queue, *words: str) -> None:
    """One batch for each word."""
    ingestor = queue.ingestor()
    for word in words:
        await ingestor.ingest([KeyValueEntry(b"k", word.encode())])
        await ingestor.flush()


async def poison(queue: Queue, data: bytes = b"no batch at all") -> str:
    location = queue.settings.location(0, f"poison-{len(data)}", "binary")
    await queue.store.create(location, data)
    await queue.producer.append([Append(f"poisoner-{location}", 1, 0, location, len(data), 1)])
    return location


async def word(collector: Collector) -> str | None:
    batch = await collector.next_batch()
    return batch.entries[0].value.decode() if batch else None


async def drain(collector: Collector) -> list[str]:
    words = []
    while (batch := await collector.next_batch()) is not None:
        words.append(batch.entries[0].value.decode())
        await collector.ack(batch)
    return words


async def test_batches_come_in_order_once(open_queue: Open) -> None:
    """What was ingested is delivered in that order; after the acks there is nothing more."""
    queue = open_queue()
    await fill(queue, "a", "b", "c")
    collector = queue.collector()

    assert await drain(collector) == ["a", "b", "c"]
    assert await drain(open_queue().collector()) == []
    await collector.close()


async def test_claims_are_kept_alive_while_work_goes_on(open_queue: Open, manual_clock: ManualClock) -> None:
    """A heartbeat at a third of the timeout: however long the work, nobody else gets the batch."""
    queue = open_queue(heartbeat_timeout_s=30.0)
    await fill(queue, "a")
    mine, theirs = queue.collector(), open_queue().collector()
    batch = await mine.next_batch()
    assert batch is not None

    await manual_clock.advance(300.0)

    assert await word(theirs) is None
    await mine.ack(batch)
    await mine.close()
    await theirs.close()


async def test_a_heartbeat_comes_at_each_third_of_the_timeout(open_queue: Open, manual_clock: ManualClock) -> None:
    """So that two may be lost before a claim is stale."""
    queue = open_queue(heartbeat_timeout_s=30.0)
    await fill(queue, "a")
    mine = queue.collector()
    assert await mine.next_batch() is not None
    (held,) = mine._held.values()
    began_s, seen = held.confirmed_s, []
    for _ in range(6):
        await manual_clock.advance(5.0)
        seen.append(held.confirmed_s - began_s)
    await mine.close()

    assert [0, 10, 10, 20, 20, 30] == seen


async def test_a_silent_collector_is_taken_over_in_order_and_fenced(
    open_queue: Open, manual_clock: ManualClock, metrics: Metrics
) -> None:
    """After the timeout another starts where the first left off; the first cannot ack any more."""
    await fill(open_queue(), "a", "b", "c", "d")
    dead = open_queue(prefetch_batches=2).collector()
    first = await dead.next_batch()
    await dead.ack(first)  # type: ignore[arg-type]
    second = await dead.next_batch()
    assert second is not None
    dead._heart.cancel()  # type: ignore[union-attr]

    await manual_clock.advance(31.0)
    heir = open_queue().collector()
    words = await drain(heir)

    assert words == ["b", "c", "d"]
    assert metrics.value("lakebed_queue_takeovers_total") == 1
    with pytest.raises(Fenced):
        await dead.ack(second)
    await heir.close()


async def test_a_collector_that_slept_asks_before_it_hands_out(open_queue: Open, manual_clock: ManualClock) -> None:
    """What it had read ahead is another's by now: it is not delivered twice."""
    await fill(open_queue(), "a", "b")
    sleeper = open_queue(prefetch_batches=2).collector()
    assert await word(sleeper) == "a"
    sleeper._heart.cancel()  # type: ignore[union-attr]
    await manual_clock.advance(31.0)
    other = open_queue().collector()
    assert await word(other) == "a"

    assert await word(sleeper) is None
    assert await word(other) == "b"
    await other.close()


async def test_close_gives_back_what_is_not_acked(open_queue: Open) -> None:
    """Another need not wait for the timeout."""
    queue = open_queue()
    await fill(queue, "a", "b")
    leaving = queue.collector()
    assert await word(leaving) == "a"

    await leaving.close()

    staying = open_queue().collector()
    assert await drain(staying) == ["a", "b"]
    with pytest.raises(Closed):
        await leaving.next_batch()
    await staying.close()


async def test_acks_at_one_time_share_a_write(open_queue: Open, metrics: Metrics) -> None:
    """Eight batches acked together cost one write of the consumer manifest."""
    queue = open_queue(prefetch_batches=8)
    await fill(queue, *"abcdefgh")
    collector = queue.collector()
    batches = [await collector.next_batch() for _ in range(8)]
    before = metrics.value("lakebed_register_writes_total", register="queue_consumer")

    await collector.ack_all([batch for batch in batches if batch])

    after = metrics.value("lakebed_register_writes_total", register="queue_consumer")
    assert (before, after) == (1, 2)
    await collector.close()


async def test_clean_up_removes_what_is_done_and_nothing_else(open_queue: Open, memory: MemoryStore) -> None:
    """At the threshold done batches leave both manifests and the bucket; the rest stays."""
    queue = open_queue(done_cleanup_threshold=2)
    await fill(queue, "a", "b", "c")
    collector = queue.collector()
    for _ in range(2):
        await collector.ack(await collector.next_batch())  # type: ignore[arg-type]
    await collector.close()

    producer, consumer = await queue.producer.read(), await queue.consumer.read()
    left = [info.key async for info in memory.list(FOLDER)]
    assert [list(producer.pending), consumer.done] == [left, ()]
    assert len(left) == 1


@pytest.mark.parametrize("broken_off_after", ["remove", "delete"])
async def test_a_clean_up_that_was_broken_off_is_repaired(
    open_queue: Open, memory: MemoryStore, broken_off_after: str
) -> None:
    """After any of its steps, the next clean-up finishes; nothing is delivered again."""
    queue = open_queue()
    await fill(queue, "a", "b")
    collector = queue.collector()
    await collector.ack(await collector.next_batch())  # type: ignore[arg-type]
    done = (await queue.consumer.read()).done
    await queue.producer.remove(dict.fromkeys(done, (1, 0)))
    if broken_off_after == "delete":
        await memory.delete(done[0])

    assert await open_queue().sweeper.sweep_done() == 1

    assert (await queue.consumer.read()).done == ()
    with pytest.raises(NotFound):
        await memory.get(done[0])
    assert await drain(collector) == ["b"]
    await collector.close()


async def test_an_outdated_view_does_not_bring_back_what_was_cleaned(open_queue: Open) -> None:
    """A collector that read the manifest before the clean-up reads it again instead of claiming a ghost."""
    queue, late = open_queue(prefetch_batches=1), open_queue(prefetch_batches=1).collector()
    await fill(queue, "a", "b", "c")
    late._ahead = await queue.producer.view(9)
    early = queue.collector()
    await early.ack(await early.next_batch())  # type: ignore[arg-type]
    await queue.sweeper.sweep_done()

    assert await drain(late) == ["b", "c"]
    await early.close()
    await late.close()


async def test_a_batch_that_does_not_decode_becomes_a_dead_letter(open_queue: Open, metrics: Metrics) -> None:
    """It is set aside with its data and the reason, and what is behind it is delivered."""
    queue = open_queue()
    await fill(queue, "a")
    location = await poison(queue)
    await fill(queue, "b")
    collector = queue.collector()

    words = await drain(collector)
    await queue.sweeper.sweep_done()

    letters = [letter async for letter in queue.dead_letters.letters()]
    assert words == ["a", "b"]
    assert [(letter.location, letter.sequence) for letter in letters] == [(location, 2)]
    assert "neither LBQ1 nor a JSON array" in letters[0].reason
    assert (await queue.store.get(location)).data == b"no batch at all"
    assert (await queue.status()).dead == 1
    assert metrics.value("lakebed_queue_dead_letters", queue="default") == 1
    await collector.close()


async def test_a_missing_batch_becomes_a_dead_letter(
    open_queue: Open, memory: MemoryStore, manual_clock: ManualClock
) -> None:
    """Data that somebody removed holds up the queue for a minute only, and is reported."""
    queue = open_queue()
    await fill(queue, "a", "b")
    await memory.delete((await queue.producer.read()).pending[0])
    collector = queue.collector()
    with pytest.raises(Unavailable):
        await collector.next_batch()
    assert [letter async for letter in queue.dead_letters.letters()] == []
    await manual_clock.advance(MISSING_S)

    assert await drain(collector) == ["b"]

    assert [letter.reason[:9] async for letter in queue.dead_letters.letters()] == ["not_found"]
    await collector.close()


async def test_a_rejected_batch_comes_again_until_it_is_buried(open_queue: Open) -> None:
    """Next in order each time, N times in all; then it is a dead letter and the queue goes on."""
    queue = open_queue(rejections_max=3)
    await fill(queue, "bad", "good")
    collector = queue.collector()
    seen = []
    for _ in range(3):
        batch = await collector.next_batch()
        assert batch is not None
        seen.append((batch.entries[0].value, await collector.reject(batch, "disk full")))

    assert seen == [(b"bad", False), (b"bad", False), (b"bad", True)]
    assert await drain(collector) == ["good"]
    (letter,) = [letter async for letter in queue.dead_letters.letters()]
    assert (letter.reason, letter.rejections) == ("disk full", 3)
    assert await queue.dead_letters.entries(letter) == [KeyValueEntry(b"k", b"bad")]
    await collector.close()


async def buried(queue: Queue) -> str:
    """A queue with one dead letter; its id."""
    await fill(queue, "bad")
    collector = queue.collector()
    for _ in range(queue.settings.rejections_max):
        batch = await collector.next_batch()
        assert batch is not None
        await collector.reject(batch, "no")
    await collector.close()
    return paths.dead_id(batch.sequence, batch.location)


async def test_a_replayed_letter_is_delivered_again_at_the_end(open_queue: Open, memory: MemoryStore) -> None:
    """Under a new sequence; the letter is closed, and why is kept."""
    queue = open_queue()
    letter_id = await buried(queue)
    await fill(queue, "good")

    durable = await queue.dead_letters.replay(letter_id, "the disk is empty again")

    closed = msgspec.json.decode(
        (await memory.get(paths.closed_letter("ingest/manifest.json", letter_id))).data, type=ClosedLetter
    )
    collector = queue.collector()
    assert durable.sequence == 3
    assert (closed.action, closed.reason) == ("replayed", "the disk is empty again")
    assert await drain(collector) == ["good", "bad"]
    assert await queue.dead_letters.count() == 0
    await collector.close()


async def test_a_replay_that_was_broken_off_is_finished_once(open_queue: Open, memory: MemoryStore) -> None:
    """It died after enqueuing: the next one recognises that, even when the batch was processed meanwhile."""
    queue = open_queue()
    letter_id = await buried(queue)
    kept = paths.dead_letter("ingest/manifest.json", letter_id)
    location = (await queue.dead_letters.show(letter_id)).location
    data = (await memory.get(location)).data
    await queue.dead_letters._name_replay(letter_id, anew=False)
    named = (await memory.get(kept)).data
    await queue.dead_letters.replay(letter_id, "once")
    collector = queue.collector()
    words = await drain(collector)
    await queue.sweeper.sweep_done()
    await memory.create(kept, named)  # as if the letter and its data had not been removed
    await memory.create(location, data)

    await open_queue().dead_letters.replay(letter_id, "again")

    assert words == ["bad"]
    assert await drain(collector) == []
    await collector.close()


async def test_a_discarded_letter_is_gone_and_remembered(open_queue: Open, memory: MemoryStore) -> None:
    """The data is deleted; what it was and why it went stays."""
    queue = open_queue()
    letter_id = await buried(queue)
    location = (await queue.dead_letters.show(letter_id)).location

    with pytest.raises(Invalid):
        await queue.dead_letters.discard(letter_id, " ")
    await queue.dead_letters.discard(letter_id, "not worth it")

    assert b"not worth it" in (await memory.get(paths.closed_letter("ingest/manifest.json", letter_id))).data
    for key in (location, paths.dead_letter("ingest/manifest.json", letter_id)):
        with pytest.raises(NotFound):
            await memory.get(key)
    with pytest.raises(NotFound, match="no dead letter"):
        await queue.dead_letters.discard(letter_id, "again")


async def test_a_letter_is_not_closed_before_it_is_buried(open_queue: Open) -> None:
    """Its collector died between the letter and the mark: closing now would bring it back."""
    queue = open_queue(rejections_max=1)
    await fill(queue, "bad")
    collector = queue.collector()
    batch = await collector.next_batch()
    assert batch is not None
    trouble = await queue.consumer.reject(batch.claimed, "no")

    class Dies(Exception):
        pass

    async def die(claimed: Any) -> None:
        raise Dies

    queue.dead_letters._consumer.bury, bury = die, queue.consumer.bury  # type: ignore[method-assign]
    with pytest.raises(Dies):
        await queue.dead_letters.bury(batch.claimed, trouble)
    with pytest.raises(Conflict, match="still being written"):
        await queue.dead_letters.discard(paths.dead_id(batch.sequence, batch.location), "too soon")

    queue.dead_letters._consumer.bury = bury  # type: ignore[method-assign]
    await collector.close()
    heir = open_queue().collector()
    assert await heir.next_batch() is None
    await queue.dead_letters.discard(paths.dead_id(batch.sequence, batch.location), "now")
    await heir.close()


async def test_orphans_are_swept_and_what_is_referenced_stays(
    open_queue: Open, memory: MemoryStore, manual_clock: ManualClock
) -> None:
    """Of a generation that is over: what nothing refers to goes; pending batches and dead letters' data stay."""
    queue = open_queue(horizon_s=10.0)
    letter_id = await buried(queue)
    await fill(queue, "waiting")
    await queue.sweeper.sweep_done()
    orphan = queue.settings.location(0, "never-enqueued", "binary")
    await memory.create(orphan, b"stored by an ingestor that died")
    rounds = []
    for _ in range(4):
        rounds.append(await queue.sweeper.sweep_orphans())
        await manual_clock.advance(10.0)

    kept = [info.key async for info in memory.list(FOLDER)]
    assert rounds == [[], [orphan], [], []]
    assert sorted(kept) == sorted(
        [(await queue.dead_letters.show(letter_id)).location, *(await queue.producer.read()).pending]
    )


class Meanwhile(MemoryStore):
    """Lets something happen once, just before or just after the dead letters are listed."""

    moment = ""
    happens: Callable[[], Awaitable[None]] | None = None

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        if prefix != paths.dead_folder("ingest/manifest.json"):
            async for info in super().list(prefix, after=after):
                yield info
            return
        happens, self.happens = self.happens, None
        if happens and self.moment == "before":
            await happens()
        async for info in super().list(prefix, after=after):
            yield info
        if happens and self.moment == "after":
            await happens()


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_batch_that_is_buried_during_a_sweep_of_orphans_keeps_its_data(
    open_queue: Open, manual_clock: ManualClock, moment: str
) -> None:
    """It is pending or has a letter at every instant: the sweep looks in the order in which it moves."""
    store = Meanwhile(clock=manual_clock)
    queue, other = (open_queue(store=store, horizon_s=10.0, rejections_max=1) for _ in range(2))
    await fill(queue, "bad")
    for _ in range(3):  # its generation is over
        await queue.producer.age()
        await manual_clock.advance(10.0)

    async def bury() -> None:
        async with other.collector() as collector:
            batch = await collector.next_batch()
            assert batch is not None and await collector.reject(batch, "no")
        await other.sweeper.sweep_done()

    store.moment, store.happens = moment, bury
    swept = await queue.sweeper.sweep_orphans()

    assert ([], 0) == (swept, (await queue.producer.read()).waiting)
    (letter,) = [letter async for letter in queue.dead_letters.letters()]
    assert [KeyValueEntry(b"k", b"bad")] == await queue.dead_letters.entries(letter)


async def test_a_store_that_is_away_keeps_the_claim(open_queue: Open, memory: MemoryStore) -> None:
    """A read that fails is tried again by the next call; nothing becomes a dead letter."""
    queue = open_queue()
    await fill(queue, "a")
    real, away = memory.get, True

    async def get(key: str) -> Any:
        if away and key.endswith(".batch"):
            raise Unavailable("away")
        return await real(key)

    memory.get = get  # type: ignore[method-assign]
    collector = queue.collector()
    with pytest.raises(Unavailable):
        await collector.next_batch()
    away = False

    assert await drain(collector) == ["a"]
    assert await queue.dead_letters.count() == 0
    await collector.close()


async def test_a_corrupt_consumer_manifest_is_left_alone(open_queue: Open, memory: MemoryStore) -> None:
    """A clear error, and not a byte of it changes."""
    queue = open_queue()
    await fill(queue, "a")
    await memory.create("ingest/manifest.consumer.json", b'{"version": 3}')

    with pytest.raises(Corrupt, match="version 3 is unknown"):
        await queue.collector().next_batch()

    assert (await memory.get("ingest/manifest.consumer.json")).data == b'{"version": 3}'


async def test_queues_are_apart_and_found(open_queue: Open, memory: MemoryStore, manual_clock: ManualClock) -> None:
    """Each name has manifests and batches of its own; one that looks like a generation is no name."""
    await fill(open_queue("orders"), "o")
    await fill(open_queue(), "d")

    collector = Collector(QueueSettings().of_queue("orders"), runtime_of(memory, manual_clock))
    assert await queue_names(memory, QueueSettings()) == ["default", "orders"]
    assert await drain(collector) == ["o"]
    assert (await open_queue().status()).pending == 1
    with pytest.raises(Invalid):
        open_queue("00000001")
    await collector.close()


async def test_the_iterator_goes_on_until_closed(open_queue: Open, manual_clock: ManualClock) -> None:
    """Batches as they come: what is put in later is delivered too."""
    queue = open_queue()
    collector = queue.collector()
    seen: list[str] = []

    async def consume() -> None:
        async for batch in collector.batches():
            seen.append(batch.entries[0].value.decode())
            await collector.ack(batch)

    task = asyncio.ensure_future(consume())
    await fill(queue, "a")
    await manual_clock.advance(1.0)
    await fill(queue, "b")
    await manual_clock.advance(1.0)
    await collector.close()
    await manual_clock.advance(1.0)

    assert seen == ["a", "b"]
    assert task.done()


async def test_a_large_batch_goes_through_whole(memory: MemoryStore) -> None:
    """Above the size that is coded in a thread, compressed or not."""
    settings = QueueSettings(flush_interval_s=0.001)
    runtime = runtime_of(memory, SystemClock())
    ingestor, collector = Ingestor(settings, runtime), Collector(settings, runtime)
    value = bytes(3 * 1024 * 1024)
    await ingestor.ingest([KeyValueEntry(b"1", value), KeyValueEntry(b"2", value)])
    await ingestor.close()

    batch = await collector.next_batch()

    assert batch is not None
    assert [(entry.key, entry.value == value) for entry in batch.entries] == [(b"1", True), (b"2", True)]
    await collector.close()
