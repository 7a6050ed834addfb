"""What one bad entry, one bad read or one late answer may do to a queue: nothing to its neighbours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from lakebed.core.clock import ManualClock, settle
from lakebed.core.errors import Fenced, Unavailable
from lakebed.core.metrics import Metrics
from lakebed.queue import appending, paths
from lakebed.queue.appending import split
from lakebed.queue.collector import Collector
from lakebed.queue.model import Append, DeadLetter, GenerationExpired, KeyValueEntry, PendingBatch, ProducerManifest
from lakebed.queue.roles import Queue
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo, StoredObject

Open = Callable[..., Queue]
BAD = b"bad"


async def put(queue: Queue, *values: bytes) -> None:
    """One batch of all of them."""
    ingestor = queue.ingestor()
    await ingestor.ingest([KeyValueEntry(b"k", value) for value in values])
    await ingestor.flush()


async def consume(collector: Collector) -> list[bytes]:
    """Applies whole batches in order, as a database in one transaction would: a bad entry fails its whole batch."""
    applied: list[bytes] = []
    while (batch := await collector.next_batch()) is not None:
        values = [entry.value for entry in batch.entries]
        if BAD in values:
            await collector.reject(batch, "a value is bad")
            continue
        applied += values
        await collector.ack(batch)
    return applied


async def letters(queue: Queue) -> list[DeadLetter]:
    return [letter async for letter in queue.dead_letters.letters()]


class Cut(MemoryStore):
    """A store whose answers to a GET of a batch end early."""

    left = 0

    async def get(self, key: str) -> StoredObject:
        found = await super().get(key)
        if key.endswith(".batch") and self.left:
            self.left -= 1
            return StoredObject(found.info, found.data[: len(found.data) // 2])
        return found


class Flipped(MemoryStore):
    """A store whose next answer to a GET of a batch is whole, and wrong."""

    left = 0

    async def get(self, key: str) -> StoredObject:
        found = await super().get(key)
        if key.endswith(".batch") and self.left:
            self.left -= 1
            return StoredObject(found.info, bytes(len(found.data)))
        return found


@pytest.mark.parametrize("entries", [2, 13, 300])
async def test_a_bad_entry_becomes_a_dead_letter_alone(open_queue: Open, metrics: Metrics, entries: int) -> None:
    """All its neighbours are delivered once, in their order; only it is set aside, and can be shown."""
    queue = open_queue(rejections_max=2)
    values = [b"%d" % number for number in range(entries)]
    values[entries // 2] = BAD
    await put(queue, *values)
    await put(queue, b"later")
    collector = queue.collector()

    applied = await consume(collector)

    assert sorted(applied) == sorted({b"later", *values} - {BAD})
    (letter,) = await letters(queue)
    assert [entry.value for entry in await queue.dead_letters.entries(letter)] == [BAD]
    assert letter.reason == "a value is bad"
    assert metrics.value("lakebed_queue_splits_total") >= 1
    await collector.close()
    await queue.sweeper.sweep_done()
    status = await queue.status()
    assert (status.pending, status.claimed, status.done, status.dead) == (0, 0, 0, 1)


async def test_a_letter_of_one_entry_can_be_replayed(open_queue: Open) -> None:
    """It is a batch like any other: it comes back alone."""
    queue = open_queue(rejections_max=1)
    await put(queue, b"a", BAD, b"c")
    collector = queue.collector()
    await consume(collector)
    (letter,) = await letters(queue)

    await queue.dead_letters.replay(letter.id, "fixed")

    batch = await collector.next_batch()
    assert batch is not None
    assert [entry.value for entry in batch.entries] == [BAD]
    assert await letters(queue) == []
    await collector.close()


async def test_a_batch_that_kills_its_collectors_is_split_too(open_queue: Open, manual_clock: ManualClock) -> None:
    """Nobody rejects it, they only go silent: its entries come again in smaller batches."""
    await put(open_queue(), b"a", BAD)
    for _ in range(2):
        dying = open_queue(silences_max=2).collector()
        assert await dying.next_batch() is not None
        dying._heart.cancel()  # type: ignore[union-attr]
        await manual_clock.advance(31.0)
    heir = open_queue(silences_max=2).collector()

    first = await heir.next_batch()

    assert first is not None
    assert [entry.value for entry in first.entries] == [b"a"]
    assert first.sequence == 2
    assert await letters(open_queue()) == []
    await heir.close()


async def test_a_collector_that_dies_after_the_split_leaves_nothing_behind(
    open_queue: Open, memory: MemoryStore, manual_clock: ManualClock
) -> None:
    """The pieces are in the queue once, nobody is given the batch again, and the clean-up removes claim and data."""
    queue = open_queue(rejections_max=1)
    await put(queue, b"a", b"b")
    (whole,) = (await queue.producer.read()).pending
    dying = queue.collector()
    batch = await dying.next_batch()
    assert batch is not None

    async def die(claimed: Any) -> int:
        raise Unavailable("the process is gone")

    dying._consumer.ack = die  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await dying.reject(batch, "bad")
    dying._heart.cancel()  # type: ignore[union-attr]
    outdated = open_queue().collector()
    outdated._ahead = None
    other = open_queue()
    heir = other.collector()
    await manual_clock.advance(31.0)

    assert await consume(heir) == [b"a", b"b"]
    await heir.close()
    await other.sweeper.sweep_done()

    status = await other.status()
    assert (status.pending, status.claimed, status.done) == (0, 0, 0)
    assert [info.key async for info in memory.list("ingest/") if info.key == whole] == []
    assert await letters(other) == []


@pytest.mark.parametrize("end", ["taken over", "closed"])
async def test_a_split_batch_whose_claim_is_given_back_leaves_no_row_behind(
    open_queue: Open, manual_clock: ManualClock, end: str
) -> None:
    """Its collector dies or closes after the split, with an earlier batch unfinished: another collector takes that one
    over, with all claims of the first, and the clean-up still closes the one that was split."""
    queue = open_queue(rejections_max=1)
    await put(queue, b"first")
    await put(queue, b"a", b"b")
    dying = queue.collector()
    batches = [await dying.next_batch() for _ in range(2)]
    assert batches[1] is not None

    async def die(claimed: Any) -> int:
        raise Unavailable("the process is gone")

    dying._consumer.ack = die  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await dying.reject(batches[1], "bad")
    if end == "closed":
        await dying.close()
    else:
        dying._heart.cancel()  # type: ignore[union-attr]
    await manual_clock.advance(31.0)
    other = open_queue()
    heir = other.collector()

    assert [b"first", b"a", b"b"] == await consume(heir)
    await heir.close()
    await other.sweeper.sweep_done()

    left = await other.consumer.read()
    assert ({}, {}, ()) == (left.troubles, left.claimed, left.done)


async def test_an_outdated_view_does_not_bring_back_what_was_split(open_queue: Open) -> None:
    """A collector that read the manifest before the split is not given the batch after its clean-up."""
    queue, late = open_queue(rejections_max=1), open_queue().collector()
    await put(queue, b"a", b"b")
    late._ahead = await queue.producer.view(9)
    early = queue.collector()
    batch = await early.next_batch()
    assert batch is not None
    await early.reject(batch, "bad")
    await early.close()
    await queue.sweeper.sweep_done()

    assert await consume(late) == [b"a", b"b"]
    assert await letters(queue) == []
    await late.close()


async def test_a_split_that_is_made_again_changes_nothing(open_queue: Open) -> None:
    """A second collector that finishes the same decision finds the batch gone and appends nothing."""
    manifest = ProducerManifest(pending=("x",), entries={"x": PendingBatch(1)}, next_sequence=2)
    piece = Append("", 0, 0, "y", 1, 1)

    once, first = split(manifest, 1, 0, [piece], now_ms=0)
    twice, second = split(once, 1, 0, [piece], now_ms=0)

    assert (first, second) == (True, False)
    assert twice == once
    assert once.pending == ("y",)
    assert once.cleanups == manifest.cleanups + 1


def test_pieces_of_an_old_generation_are_refused() -> None:
    """The sweep may have removed them: they are stored again."""
    manifest = ProducerManifest(pending=("x",), generation=appending.GENERATIONS_KEPT)

    with pytest.raises(GenerationExpired):
        split(manifest, 1, 0, [Append("", 0, 0, "y", 1, 1)], now_ms=0)


async def test_a_get_that_was_cut_short_buries_nothing(open_queue: Open, manual_clock: ManualClock) -> None:
    """It is unavailable; the next call reads the whole batch."""
    store = Cut(clock=manual_clock)
    queue = open_queue(store=store)
    await put(queue, b"a" * 1000)
    store.left = 3
    collector = queue.collector()

    for _ in range(3):
        with pytest.raises(Unavailable, match="cannot be read now"):
            await collector.next_batch()

    assert await consume(collector) == [b"a" * 1000]
    assert await letters(queue) == []
    await collector.close()


async def test_bytes_that_were_wrong_once_bury_nothing(open_queue: Open, manual_clock: ManualClock) -> None:
    """A batch is corrupt when a second read says so too."""
    store = Flipped(clock=manual_clock)
    queue = open_queue(store=store)
    await put(queue, b"a")
    store.left = 1
    collector = queue.collector()

    assert await consume(collector) == [b"a"]
    assert await letters(queue) == []
    await collector.close()


async def missing_once(queue: Queue, memory: MemoryStore) -> tuple[Collector, str, bytes]:
    """A collector that has met the queue's only batch, `a`, while its object was missing; its key and its bytes."""
    await put(queue, b"a")
    (location,) = (await queue.producer.read()).pending
    data = (await memory.get(location)).data
    await memory.delete(location)
    collector = queue.collector()
    with pytest.raises(Unavailable):
        await collector.next_batch()
    return collector, location, data


async def test_a_batch_that_a_replica_does_not_have_yet_is_delivered_later(
    open_queue: Open, memory: MemoryStore, manual_clock: ManualClock
) -> None:
    """Not found is believed only after a while; until then the claim is kept."""
    queue = open_queue()
    collector, location, data = await missing_once(queue, memory)
    await manual_clock.advance(20.0)
    with pytest.raises(Unavailable):
        await collector.next_batch()

    await memory.create(location, data)

    assert await consume(collector) == [b"a"]
    assert await letters(queue) == []
    await collector.close()


async def test_a_batch_that_was_missing_once_and_delivered_is_not_buried_when_it_is_missing_again(
    open_queue: Open, memory: MemoryStore, manual_clock: ManualClock
) -> None:
    """The time for which a batch was missing begins anew after it was read."""
    queue = open_queue()
    collector, location, data = await missing_once(queue, memory)
    await memory.create(location, data)
    batch = await collector.next_batch()
    assert batch is not None
    await collector.reject(batch, "later")
    await memory.delete(location)
    await manual_clock.advance(120.0)

    with pytest.raises(Unavailable):
        await collector.next_batch()

    assert await letters(queue) == []
    await collector.close()


async def test_a_split_that_cannot_read_its_batch_is_made_later(open_queue: Open, memory: MemoryStore) -> None:
    """The decision stands, the batch is neither delivered nor buried, and the next call splits it."""
    queue = open_queue(rejections_max=1)
    await put(queue, b"a", b"b")
    collector = queue.collector()
    batch = await collector.next_batch()
    assert batch is not None
    real = memory.get

    async def away(key: str) -> StoredObject:
        if key == batch.location:
            raise Unavailable("away")
        return await real(key)

    memory.get = away  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await collector.reject(batch, "bad")
    memory.get = real  # type: ignore[method-assign]

    assert await consume(collector) == [b"a", b"b"]
    assert await letters(queue) == []
    await collector.close()


@pytest.mark.parametrize("kind", [Cut, Flipped])
async def test_bytes_that_were_wrong_once_at_a_split_bury_no_neighbour(
    open_queue: Open, manual_clock: ManualClock, kind: type[Cut | Flipped]
) -> None:
    """The batch was readable when it was rejected: it is read again before it becomes one letter with all entries."""
    store = kind(clock=manual_clock)
    queue = open_queue(store=store, rejections_max=1)
    await put(queue, b"a", BAD)
    collector = queue.collector()
    batch = await collector.next_batch()
    assert batch is not None
    store.left = 1

    await collector.reject(batch, "a value is bad")

    assert await consume(collector) == [b"a"]
    assert [1] == [len(await queue.dead_letters.entries(letter)) for letter in await letters(queue)]
    await collector.close()


class Late(MemoryStore):
    """Another handle on the same objects, whose answers to a replace may come late."""

    def __init__(self, memory: MemoryStore, clock: ManualClock) -> None:
        super().__init__(clock=clock, bucket=memory.bucket)
        self.answers = asyncio.Event()
        self.answers.set()

    async def replace(self, key: str, data: bytes, etag: str) -> ObjectInfo:
        info = await super().replace(key, data, etag)
        await self.answers.wait()
        return info


async def test_a_heartbeat_that_is_answered_late_makes_nothing_fresh(
    open_queue: Open, memory: MemoryStore, manual_clock: ManualClock
) -> None:
    """It was written in time; when its answer came the claims were another's: what was read ahead is not handed out."""
    store = Late(memory, manual_clock)
    for value in (b"a", b"b"):
        await put(open_queue(), value)
    slow = open_queue(store=store, prefetch_batches=2).collector()
    first = await slow.next_batch()
    assert first is not None
    slow._heart.cancel()  # type: ignore[union-attr]
    store.answers.clear()
    beating = asyncio.ensure_future(slow.heartbeat())
    await settle()
    await manual_clock.advance(31.0)
    other = open_queue().collector()
    taken = await other.next_batch()
    assert taken is not None and taken.location == first.location
    store.answers.set()
    await beating

    assert await slow.next_batch() is None
    ahead = await other.next_batch()
    assert ahead is not None and [entry.value for entry in ahead.entries] == [b"b"]
    await other.close()
    await slow.close()


async def test_a_third_of_the_timeout_is_left_for_clocks_that_differ(
    open_queue: Open, memory: MemoryStore, manual_clock: ManualClock
) -> None:
    """What was read ahead is handed out without a question for two thirds of the timeout; then the claim is renewed."""
    for value in (b"a", b"b", b"c"):
        await put(open_queue(), value)
    queue = open_queue(prefetch_batches=3, heartbeat_timeout_s=30.0)
    collector = queue.collector()
    assert await collector.next_batch() is not None
    collector._heart.cancel()  # type: ignore[union-attr]
    manifest = paths.consumer_manifest(queue.settings.manifest_path)
    before = (await memory.get(manifest)).etag

    await manual_clock.advance(19.0)
    assert await collector.next_batch() is not None
    assert before == (await memory.get(manifest)).etag
    await manual_clock.advance(2.0)
    assert await collector.next_batch() is not None
    assert before != (await memory.get(manifest)).etag
    await collector.close()


def test_pieces_are_batches_of_the_queue() -> None:
    """A piece lives where the sweeper and the clean-up look for batches."""
    assert paths.is_batch(paths.batch("ingest", "ingest/manifest.json", 3, "uuid", "binary"))


async def test_a_late_ack_of_a_lost_claim_does_not_end_the_claim_that_followed(
    open_queue: Open, manual_clock: ManualClock
) -> None:
    """A collector loses a batch and claims it again: acking its first copy is refused, and the second stays held."""
    queue, other = open_queue(), open_queue()
    await put(queue, b"a")
    collector, rival = queue.collector("one"), other.collector("two")
    first = await collector.next_batch()
    assert first is not None
    assert collector._heart is not None
    collector._heart.cancel()  # it sleeps past its claim
    await manual_clock.advance(queue.settings.heartbeat_timeout_s + 1.0)
    assert await rival.next_batch() is not None
    await rival.close()
    await collector.heartbeat()
    second = await collector.next_batch()
    assert second is not None

    with pytest.raises(Fenced):
        await collector.ack(first)

    assert await collector.next_batch() is None
    await collector.ack(second)
    await collector.close()
    assert 0 == (await queue.status()).pending


async def test_a_batch_that_another_collector_split_is_no_dead_letter(open_queue: Open, memory: MemoryStore) -> None:
    """Its data is swept already, and its pieces are in the queue: there is nothing left to set aside."""
    queue = open_queue()
    await put(queue, b"a", b"b")
    collector = queue.collector()
    batch = await collector.next_batch()
    assert batch is not None
    splitter = open_queue().dead_letters._splitter
    assert await splitter.split(batch.claimed, "no")
    await memory.delete(batch.location)

    assert await splitter.split(batch.claimed, "no")
    assert 2 == (await open_queue().producer.read()).waiting
    await collector.close()


async def test_a_repeated_key_takes_no_room_of_the_buffer(open_queue: Open) -> None:
    """Its entries are not enqueued again, so nothing of it waits to be flushed."""
    for number in range(3):
        ingestor = open_queue().ingestor()
        watcher = await ingestor.ingest([KeyValueEntry(b"k", b"v" * 100)], key="order-1")
        await ingestor.flush()

        assert (number > 0, 0) == ((await watcher.await_durable()).repeated, ingestor.unflushed_bytes)
        await ingestor.close()
