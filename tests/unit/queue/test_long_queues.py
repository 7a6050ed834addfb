"""Queues of any length: what an append writes, what a reader finds, what old and plain manifests become, and shards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Corrupt, Invalid, Overloaded, Unavailable
from lakebed.core.metrics import Metrics
from lakebed.core.settings import Contradiction
from lakebed.queue import appending, codec, paths
from lakebed.queue import shards as sharded
from lakebed.queue.feed import QueueFeed
from lakebed.queue.model import Append, KeyValueEntry, PendingBatch, ProducerManifest
from lakebed.queue.roles import Queue
from lakebed.queue.segments import Segment
from lakebed.queue.settings import QueueSettings
from lakebed.store.memory import MemoryStore
from lakebed.store.model import Written

Open = Callable[..., Queue]


async def append(queue: Queue, count: int, *, ingestor: str = "one", first: int = 1) -> None:
    """Appends batches one by one, each with an object of its own."""
    for number in range(first, first + count):
        location = queue.settings.location(0, f"{ingestor}-{number}")
        await queue.store.create(location, codec.encode([KeyValueEntry(b"k", b"%d" % number)]))
        await queue.producer.append([Append(ingestor, number, 0, location, 20, 1)])
        await queue.producer.settled()


async def drained(queue: Queue, most: int = 10_000) -> list[int]:
    found: list[int] = []
    async with queue.collector() as collector:
        while len(found) < most and (batch := await collector.next_batch()) is not None:
            found += [int(entry.value) for entry in batch.entries]
            await collector.ack(batch)
    return found


async def test_a_batch_is_listed_in_the_manifest_or_in_a_segment(open_queue: Open) -> None:
    """After every append: all of them, in order, once, whichever object holds them."""
    queue = open_queue(segment_batches=4)
    for number in range(1, 23):
        await append(queue, 1, first=number)
        listed = [entry.sequence async for _, entry in open_queue().producer.pending()]
        assert list(range(1, number + 1)) == listed
    head = await queue.producer.read()

    assert (20, 4, 3) == (head.sealed, head.block, len(head.pending))
    assert (22, 440) == (head.waiting, head.waiting_bytes)


async def test_what_an_append_writes_does_not_depend_on_the_backlog(
    open_queue: Open, manual_clock: ManualClock
) -> None:
    """A thousand pending batches later, the manifest has the same size."""

    class Sized(MemoryStore):
        sizes: list[int] = []

        async def replace(self, key: str, data: bytes, etag: str) -> Written:
            self.sizes.append(len(data))
            return await super().replace(key, data, etag)

    store = Sized(clock=manual_clock)
    queue = open_queue(store=store, segment_batches=16)
    await append(queue, 64)
    early = max(store.sizes[-32:])
    await append(queue, 1000, first=65)

    assert max(store.sizes[-32:]) <= 1.1 * early


async def test_a_long_queue_is_drained_in_order_and_leaves_nothing(open_queue: Open, memory: MemoryStore) -> None:
    """Batches, segments and rows are gone, and the numbers of the status are zero."""
    queue = open_queue(segment_batches=4, done_cleanup_threshold=7)
    await append(queue, 50)
    status = await queue.status()

    words = await drained(open_queue(segment_batches=4, done_cleanup_threshold=7))
    await queue.sweeper.sweep_done()

    assert (50, 1000) == (status.pending, status.bytes_waiting)
    assert list(range(1, 51)) == words
    after = await queue.status()
    assert (0, 0, 0, 0) == (after.pending, after.bytes_waiting, after.claimed, after.done)
    left = [info.key async for info in memory.list("ingest/") if not info.key.startswith("ingest/manifest.")]
    assert [] == left
    assert [] == [info.key async for info in memory.list(paths.segments_folder("ingest/manifest.json"))]


async def test_a_consumer_that_was_away_for_days_gets_everything_in_order(
    open_queue: Open, manual_clock: ManualClock, memory: MemoryStore
) -> None:
    """A batch an hour and a sweep after each, for five days: generations end, orphans go, what is pending stays."""
    producing, maintenance = open_queue(segment_batches=4, horizon_s=1800.0), open_queue(segment_batches=4)
    ingestor, swept = producing.ingestor(), 0
    for number in range(1, 121):
        await memory.create(producing.settings.location(await producing.producer.generation(), f"lost-{number}"), b"x")
        watcher = await ingestor.ingest([KeyValueEntry(b"k", b"%d" % number)])
        await manual_clock.advance(3600.0)
        await watcher.await_durable()
        swept += len(await maintenance.sweeper.sweep_orphans())
    await ingestor.close()

    assert 100 < swept < 121
    assert (await producing.producer.read()).generation > 100
    assert list(range(1, 121)) == await drained(open_queue(segment_batches=4))


async def test_batches_done_out_of_order_are_removed_while_an_early_one_waits(open_queue: Open) -> None:
    """One rejected batch at the front keeps its place; what is behind it is cleaned up, in ranges."""
    queue = open_queue(parallel=True, segment_batches=4, redelivery_delay_s=60.0, done_cleanup_threshold=1)
    await append(queue, 30)
    async with queue.collector() as collector:
        first = await collector.next_batch()
        assert first is not None
        await collector.reject(first, "later")
        seen = []
        while (batch := await collector.next_batch()) is not None:
            seen.append(batch.sequence)
            await collector.ack(batch)
    await queue.sweeper.sweep_done()
    head, status = await queue.producer.read(), await queue.status()

    assert list(range(2, 31)) == seen
    assert (1, ((2, 30),), 1) == (head.floor, head.removed, status.pending)
    assert [1] == [entry.sequence async for _, entry in queue.producer.pending()]


async def test_a_block_that_was_removed_before_it_was_sealed_needs_no_segment(open_queue: Open) -> None:
    """An early batch waits while a whole block behind it is done: the queue goes on behind the hole."""
    queue = open_queue(parallel=True, segment_batches=4, redelivery_delay_s=60.0, done_cleanup_threshold=1)
    await append(queue, 1)
    collector = queue.collector()
    first = await collector.next_batch()
    assert first is not None
    await collector.reject(first, "later")
    for number in range(2, 10):
        await append(queue, 1, first=number)
        batch = await collector.next_batch()
        assert batch is not None
        await collector.ack(batch)
        await queue.sweeper.sweep_done()
    await append(queue, 7, first=10)
    head = await queue.producer.read()

    assert (16, 4, ((2, 9),)) == (head.sealed, head.block, head.removed)
    assert [1, *range(10, 17)] == [entry.sequence async for _, entry in open_queue().producer.pending()]
    await collector.close()


async def test_a_collector_looks_behind_what_others_have_claimed(
    open_queue: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many batches at the front are no candidates, the next one is found."""
    settings = {"parallel": True, "segment_batches": 2}
    await append(open_queue(**settings), 20)
    greedy = open_queue(prefetch_batches=7, **settings).collector()
    assert await greedy.next_batch() is not None

    monkeypatch.setattr("lakebed.queue.collector.AHEAD", 1)
    other = open_queue(prefetch_batches=1, **settings).collector()
    found = await other.next_batch()

    assert found is not None and 8 == found.sequence
    await greedy.close()
    await other.close()


async def test_the_age_of_the_oldest_batch_that_waits_is_known_behind_those_that_are_done(
    open_queue: Open, manual_clock: ManualClock, metrics: Metrics
) -> None:
    """However many at the front are done and not cleaned up yet, the age is of the first that is not."""
    queue = open_queue(segment_batches=2, done_cleanup_threshold=100)
    await append(queue, 3)
    await manual_clock.advance(60)
    await append(queue, 3, first=4)
    await manual_clock.advance(5)
    assert [1, 2, 3] == await drained(queue, 3)

    status = await queue.status()

    assert (3, 3, 5.0) == (status.done, status.pending, status.pending_age_s)
    assert 5.0 == metrics.value("lakebed_queue_oldest_age_seconds", queue="default", state="pending")


async def test_a_reader_whose_segment_was_swept_reads_the_manifest_again(open_queue: Open) -> None:
    """It was away while others drained: it goes on where the queue is now."""
    queue = open_queue(segment_batches=4)
    await append(queue, 20)
    late = open_queue(segment_batches=4)
    outdated = await late.producer.read()
    await drained(queue, 12)
    await queue.sweeper.sweep_done()
    reads: list[ProducerManifest] = [outdated]
    real = late.producer.read

    async def read() -> ProducerManifest:
        return reads.pop() if reads else await real()

    late.producer.read = read  # type: ignore[method-assign]
    view = await late.producer.view(100)

    assert list(range(13, 21)) == [view.entries[place].sequence for place in view.pending]


async def test_two_processes_that_seal_at_once_lose_nothing(open_queue: Open, memory: MemoryStore) -> None:
    """The first segment decides the folder; strays of the other are swept."""
    one, other = open_queue(segment_batches=4), open_queue(segment_batches=4)
    one.producer._shorten = other.producer._shorten = _nothing  # type: ignore[method-assign]
    await append(one, 6)
    head = await one.producer.read()
    await asyncio.gather(one.producer._seal(head), other.producer._seal(head))
    after = await one.producer.read()
    folders = await memory.children(paths.segments_folder("ingest/manifest.json"))
    await one.sweeper.sweep_orphans()

    assert 2 == len(folders)
    assert [after.segments] == await memory.children(paths.segments_folder("ingest/manifest.json"))
    assert list(range(1, 7)) == await drained(other)


async def _nothing(head: ProducerManifest, batches: Any) -> None:
    return None


def test_a_segment_that_lacks_a_batch_does_not_stand_for_it() -> None:
    """Sealed by a process with an older manifest, or with another block size or folder: the manifest keeps its rows."""
    rows = {f"b{n}": PendingBatch(n, 10, 1, 1) for n in range(1, 5)}
    manifest = ProducerManifest(pending=tuple(rows), entries=rows, next_sequence=5)
    sealed, done = appending.seal(manifest, "f", 4, 4, frozenset(rows))

    assert done and ("b4",) == sealed.pending and (2, 30) == (sealed.version, sealed.sealed_bytes)
    for folder, block, until, held in (
        ("f", 4, 4, {"b1", "b2"}),  # b3 is missing
        ("f", 4, 8, set(rows)),  # not complete yet
    ):
        assert (appending.complete(manifest), False) == appending.seal(manifest, folder, block, until, held)
    longer = msgspec.structs.replace(sealed, next_sequence=9)
    for folder, block in (("g", 4), ("f", 8)):
        assert (longer, False) == appending.seal(longer, folder, block, 8, {"b4"})


def test_sequences_that_are_removed_become_the_floor_or_ranges() -> None:
    """In any order; twice is once; bytes of sealed batches leave the gauge with them."""
    manifest = ProducerManifest(next_sequence=9, floor=1, sealed=8, sealed_bytes=70, segments="f", block=4, version=2)
    one, first = appending.remove(manifest, {"e": (5, 10), "c": (3, 10)})
    two, second = appending.remove(one, {"d": (4, 10), "c": (3, 10)})
    three, third = appending.remove(two, {"a": (1, 10), "b": (2, 10)})
    same, fourth = appending.remove(three, {"a": (1, 10)})

    assert [((3, 3), (5, 5)), ((3, 5),), ()] == [one.removed, two.removed, three.removed]
    assert [1, 1, 6] == [one.floor, two.floor, three.floor]
    assert [50, 40, 20] == [one.sealed_bytes, two.sealed_bytes, three.sealed_bytes]
    assert (1, 2, 3, 3) == (first, second, third, fourth) and same is three
    assert [6, 5, 3] == [one.waiting, two.waiting, three.waiting]


async def test_a_manifest_of_the_first_version_is_opened_and_shortened(open_queue: Open, memory: MemoryStore) -> None:
    """Rows with gaps, claims and done batches without sequences: all are delivered, in order, and cleaned up."""
    names = {n: f"data/{n}.batch" for n in (3, 4, 7, 8, 9, 12)}
    for n, name in names.items():
        await memory.create(name, codec.encode([KeyValueEntry(b"k", b"%d" % n)]))
    rows = {name: [n, 20, 1, 1] for n, name in names.items()}
    old = {"pending": list(rows), "entries": rows, "next_sequence": 13, "cleanups": 5, "version": 1}
    await memory.create("ingest/manifest.json", msgspec.json.encode(old))
    consumer = {
        "claimed": {},
        "done": [names[4]],
        "finished": {names[4]: [2, 1, False]},
        "next_epoch": 3,
        "cleanups": 5,
    }
    await memory.create("ingest/manifest.consumer.json", msgspec.json.encode(consumer))
    queue = open_queue(segment_batches=4)
    assert 5 == (await queue.status()).pending
    await append(queue, 3, first=101)

    head = await queue.producer.read()
    words = await drained(queue)
    await queue.sweeper.sweep_done()

    assert (16, 3) == (head.sealed, head.floor)
    assert [3, 7, 8, 9, 12, 101, 102, 103] == words
    assert 0 == (await queue.status()).pending


class TestSeedFormat:
    """`queue.format = "seed"`: the two manifests of the original design, and nothing else to understand."""

    async def test_everything_pending_is_in_one_list(self, open_queue: Open, memory: MemoryStore) -> None:
        """A reader that knows `pending`, `claimed` and `done` alone sees the whole queue."""
        queue = open_queue(format="seed", batch_format="json", segment_batches=4)
        await append(queue, 30)
        collector = queue.collector()
        batches = [await collector.next_batch() for _ in range(2)]
        assert batches[0] is not None and batches[1] is not None
        await collector.ack(batches[0])

        producer = msgspec.json.decode((await memory.get("ingest/manifest.json")).data)
        consumer = msgspec.json.decode((await memory.get("ingest/manifest.consumer.json")).data)
        assert 30 == len(producer["pending"]) and 1 == producer["version"]
        assert [batches[0].location] == consumer["done"] and batches[1].location in consumer["claimed"]
        assert [] == [info async for info in memory.list(paths.segments_folder("ingest/manifest.json"))]
        await collector.close()

    async def test_it_has_the_limit_of_a_list(self, open_queue: Open, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each append rewrites it: beyond the limit producers are refused."""
        monkeypatch.setattr("lakebed.queue.producer.SEED_PENDING_MAX", 3)
        queue = open_queue(format="seed")
        await append(queue, 3)

        with pytest.raises(Overloaded, match="the limit is 3"):
            await append(queue, 1, first=4)

    async def test_a_queue_changes_its_format_with_the_setting(self, open_queue: Open) -> None:
        """From lists to segments and back: what is sealed stays readable."""
        await append(open_queue(format="seed", segment_batches=4), 10)
        await append(open_queue(segment_batches=4), 3, first=11)
        plain = open_queue(format="seed", segment_batches=4)
        await append(plain, 9, first=14)

        assert list(range(1, 23)) == await drained(plain)

    def test_it_has_no_shards(self) -> None:
        """The original design names one producer manifest."""
        with pytest.raises(Contradiction):
            QueueSettings(format="seed", shards=2).check()


class TestShards:
    """A queue over several manifests."""

    async def test_each_ingestor_keeps_its_order_and_all_are_delivered(self, open_queue: Open) -> None:
        """An ingestor writes to one shard; a collector reads all of them and says which."""
        queue = open_queue(shards=4)
        for shard in range(4):
            ingestor = queue.ingestor(shard)
            for number in range(5):
                watcher = await ingestor.ingest([KeyValueEntry(b"%d" % shard, b"%d" % number)])
                await ingestor.flush()
                assert shard == (await watcher.await_durable()).shard
        status = await queue.status()
        seen: dict[bytes, list[int]] = {}
        async with open_queue(shards=4).collector() as collector:
            while (batch := await collector.next_batch()) is not None:
                assert batch.entries[0].key == b"%d" % batch.shard
                seen.setdefault(batch.entries[0].key, []).append(int(batch.entries[0].value))
                await collector.ack(batch)

        assert {b"%d" % shard: list(range(5)) for shard in range(4)} == seen
        assert (20, 4) == (status.pending, status.shards)

    async def test_a_shard_with_a_backlog_does_not_hold_up_the_others(self, open_queue: Open) -> None:
        """They are asked in turn, also where one of them is empty."""
        for shard, count in ((0, 9), (1, 3), (3, 3)):
            ingestor = open_queue(shards=4).ingestor(shard)
            for number in range(count):
                await ingestor.ingest([KeyValueEntry(b"k", b"%d" % number)])
                await ingestor.flush()
            await ingestor.close()
        found: list[int] = []
        async with open_queue(shards=4).collector() as collector:
            while (batch := await collector.next_batch()) is not None:
                found.append(batch.shard)
                await collector.ack(batch)

        assert [{0, 1, 3}] * 3 == [set(found[at : at + 3]) for at in (0, 3, 6)]
        assert [0] * 6 == found[9:]

    async def test_a_new_shard_is_found_though_the_others_always_have_a_batch(
        self, open_queue: Open, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A collector that is never idle looks for shards all the same, and skips nothing for it."""
        monkeypatch.setattr(sharded, "LOOK_EVERY", 3)
        await append(open_queue(shards=2), 9)
        async with open_queue(shards=2).collector() as collector:
            found = [await collector.next_batch()]
            ingestor = open_queue(shards=3).ingestor(2)
            await ingestor.ingest([KeyValueEntry(b"k", b"new")])
            await ingestor.close()
            found += [await collector.next_batch() for _ in range(10)]

        shards = [batch.shard for batch in found if batch is not None]
        assert (9, 1, 10) == (shards.count(0), shards.count(2), len(shards))
        assert 5 > shards.index(2)

    async def test_a_shard_that_takes_no_claims_back_does_not_keep_those_of_the_others(
        self, open_queue: Open, memory: MemoryStore, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The others' are free at once, and its own when they are stale: a closed collector sends no heartbeat."""
        rules = {"shards": 2, "heartbeat_timeout_s": 3.0}
        for shard in (0, 1):
            ingestor = open_queue(**rules).ingestor(shard)
            await ingestor.ingest([KeyValueEntry(b"k", b"%d" % shard)])
            await ingestor.close()
        closing = open_queue(**rules)
        collector, of_first = closing.collector(), paths.consumer_manifest(closing.settings.manifest_path)
        for _ in range(2):
            assert await collector.next_batch() is not None
        replace = memory.replace

        async def away(key: str, *arguments: Any) -> Any:
            if key == of_first:
                raise Unavailable("the store is away")
            return await replace(key, *arguments)

        with monkeypatch.context() as patched:
            patched.setattr(memory, "replace", away)
            with pytest.raises(Unavailable):
                await collector.close()
        async with open_queue(**rules).collector() as other:
            at_once = [await other.next_batch() for _ in range(2)]
            for _ in range(10):
                await manual_clock.advance(1.0)
            later = await other.next_batch()

        assert [1, None] == [batch.shard if batch is not None else None for batch in at_once]
        assert later is not None and 0 == later.shard

    async def test_shards_are_read_after_the_setting_was_lowered(self, open_queue: Open) -> None:
        """Nothing is forgotten in a shard that is no longer written; a collector of one shard says what to set."""
        wide = open_queue(shards=3)
        ingestor = wide.ingestor(2)
        await ingestor.ingest([KeyValueEntry(b"k", b"7")])
        await ingestor.close()

        with pytest.raises(Invalid, match="3 shards"):
            await open_queue().collector().next_batch()
        assert [7] == await drained(open_queue(shards=2))

    async def test_letters_and_sweeps_reach_every_shard(self, open_queue: Open) -> None:
        """A dead letter is found by its id, whichever shard it is of."""
        queue = open_queue(shards=2, rejections_max=1)
        ingestor = queue.ingestor(1)
        await ingestor.ingest([KeyValueEntry(b"k", b"bad")])
        await ingestor.close()
        async with queue.collector() as collector:
            batch = await collector.next_batch()
            assert batch is not None and await collector.reject(batch, "no")
        (letter,) = [letter async for letter in queue.letters()]

        await (await queue.letters_of(letter.id)).replay(letter.id, "fixed")

        assert [1, 0] == [(await queue.status()).pending, (await queue.status()).dead]


async def test_a_feed_reads_a_long_queue_from_a_sequence_on(open_queue: Open) -> None:
    """Segments before it are not read."""
    queue = open_queue(segment_batches=4)
    await append(queue, 30)
    from lakebed.core.feed import FeedFilter

    found = await QueueFeed(queue).slices({"sequence": 13}, {"sequence": 20}, FeedFilter())

    assert list(range(14, 21)) == [msgspec.json.decode(one.locator)["sequence"] for one in found]


async def test_a_segment_that_is_gone_is_reported_and_not_waited_for(open_queue: Open, memory: MemoryStore) -> None:
    """Nobody deletes a segment above the floor: readers say so instead of reading for ever."""
    queue = open_queue(segment_batches=2)
    await append(queue, 6)
    head = await queue.producer.read()
    await memory.delete(paths.segment("ingest/manifest.json", head.segments, 1))

    with pytest.raises(Corrupt, match="a segment is missing"):
        _ = [row async for row in open_queue().producer.pending()]
    with pytest.raises(Unavailable, match="cannot be read"):
        await open_queue().producer.view(10)


async def test_a_segment_that_does_not_decode_is_corrupt_and_named(open_queue: Open, memory: MemoryStore) -> None:
    """Nothing is passed over in silence; a segment of a later version is not read."""
    queue = open_queue(segment_batches=2)
    await append(queue, 3)
    head = await queue.producer.read()
    key = paths.segment("ingest/manifest.json", head.segments, 1)
    for data in (b"[]", msgspec.json.encode(Segment(1, {}, 1)).replace(b'"version":1', b'"version":2')):
        memory.bucket.overwrite(paths.segment("ingest/manifest.json", head.segments, 0), data)
        memory.bucket.overwrite(key, data)
        with pytest.raises(Corrupt, match="segments"):
            await open_queue().producer.view(10)


async def test_a_sweep_leaves_segments_whose_batches_wait(open_queue: Open, memory: MemoryStore) -> None:
    """Those below the first batch that waits go; what waits is delivered, by a process that has read nothing before."""
    queue = open_queue(segment_batches=4)
    await append(queue, 23)
    done = await drained(queue, most=9)
    folder = paths.segments_folder(queue.settings.manifest_path)
    before = len([info.key async for info in memory.list(folder)])

    await open_queue(segment_batches=4).sweeper.sweep_done()

    left = len([info.key async for info in memory.list(folder)])
    assert (list(range(1, 10)), True) == (done, 0 < left < before)
    assert list(range(10, 24)) == await drained(open_queue(segment_batches=4))
